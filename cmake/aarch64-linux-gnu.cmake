# SPDX-License-Identifier: Apache-2.0
# A toolchain file: compiles for aarch64 on another machine with Debian's cross compiler, and runs what it has built
# in QEMU. By Debian's names: g++-aarch64-linux-gnu, qemu-user, and googletest for the tests.

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)  # GoogleTest's sources ask for one
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CXX_FLAGS_INIT -Wno-psabi)  # g++ would note where its versions before 10 passed arguments otherwise
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Debian keeps fmt's CMake package in a folder of the host's architecture; only its headers are used.
set(fmt_DIR /usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu/cmake/fmt CACHE PATH "The CMake package of fmt")
