# SPDX-License-Identifier: Apache-2.0
# Turns TILESIEVE_CUDA on where nobody has chosen and there is an nvcc of version 13 or newer.

if(NOT DEFINED TILESIEVE_CUDA)
  set(TILESIEVE_CUDA OFF)
  find_program(TILESIEVE_NVCC nvcc PATHS $ENV{CUDACXX} /usr/local/cuda/bin)
  if(TILESIEVE_NVCC)
    execute_process(COMMAND ${TILESIEVE_NVCC} --version OUTPUT_VARIABLE version)
    if(version MATCHES "release ([0-9]+)" AND CMAKE_MATCH_1 GREATER_EQUAL 13)
      set(TILESIEVE_CUDA ON)
      set(CMAKE_CUDA_COMPILER ${TILESIEVE_NVCC})
    endif()
  endif()
  message(STATUS "tilesieve: TILESIEVE_CUDA=${TILESIEVE_CUDA}, nvcc: ${TILESIEVE_NVCC}")
endif()
