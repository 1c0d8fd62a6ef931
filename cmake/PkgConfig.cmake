# SPDX-License-Identifier: Apache-2.0
# Installs tilesieve.pc, which finds its prefix from where it lies. A static library leaves its own to the final link.

set(TILESIEVE_PC_LIBS "")
if(NOT BUILD_SHARED_LIBS)
  string(REPLACE ";" " " openmp "${OpenMP_CXX_FLAGS}")
  set(TILESIEVE_PC_LIBS " ${openmp}")
  if(TARGET tilesieve_cuda)
    string(APPEND TILESIEVE_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
  endif()
endif()
set(folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH TILESIEVE_PC_PREFIX /${folder} /)
string(REGEX REPLACE "/$" "" TILESIEVE_PC_PREFIX "${TILESIEVE_PC_PREFIX}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/tilesieve.pc.in ${PROJECT_BINARY_DIR}/tilesieve.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tilesieve.pc DESTINATION ${folder})
