# SPDX-License-Identifier: Apache-2.0
# The CUDA half of the library for Hopper (sm_90a): src/cuda/*.cu, and of the steps the files *_sm90.cu and
# src/attend/sm90/*.cu, as one object target.

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

find_package(CUDAToolkit 13 REQUIRED)
set(TILESIEVE_HAS_CUDA ON)
file(GLOB TILESIEVE_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu
     ${PROJECT_SOURCE_DIR}/src/*/*_sm90.cu ${PROJECT_SOURCE_DIR}/src/attend/sm90/*.cu)
tilesieve_step(cuda SOURCES ${TILESIEVE_CUDA_SOURCES})
# constexpr functions of the host serve the device too; -gencode names the one target whose PTX wgmma exists in.
target_compile_options(tilesieve_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
target_include_directories(tilesieve_cuda PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_compile_definitions(tilesieve_attend PRIVATE TILESIEVE_HAS_CUDA)  # its table of kernels names them
target_compile_definitions(tilesieve_metrics PRIVATE TILESIEVE_HAS_CUDA)  # measures a device
target_compile_definitions(tilesieve_layout PRIVATE TILESIEVE_HAS_CUDA)  # uploads tables
