# SPDX-License-Identifier: Apache-2.0
# The CUDA half of the library: src/cuda/*.cu, one object target for Hopper (sm_90a).

set(CMAKE_CUDA_ARCHITECTURES 90a)
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 knows nvcc's flags up to C++17
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
  message(FATAL_ERROR "TILESIEVE_CUDA: got nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}), need 13 or "
                      "newer; CMAKE_CUDA_COMPILER chooses another, TILESIEVE_CUDA=OFF builds for CPUs alone")
endif()

file(GLOB TILESIEVE_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
if(TILESIEVE_CUDA_SOURCES)
  find_package(CUDAToolkit 13 REQUIRED)
  set(TILESIEVE_HAS_CUDA ON)
  tilesieve_step(cuda SOURCES ${TILESIEVE_CUDA_SOURCES})
else()
  message(NOTICE "TILESIEVE_CUDA is ON, but no CUDA kernel exists yet: this builds the same library as without it")
endif()
