# SPDX-License-Identifier: Apache-2.0
# GTest::gtest_main and GTest::gmock: as installed, or for a cross compiler that has none, built from their sources.

if(NOT CMAKE_CROSSCOMPILING)
  find_package(GTest REQUIRED)
  return()
endif()

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  set(TILESIEVE_GOOGLETEST_SOURCES /usr/src/googletest CACHE PATH "Where Debian's package googletest puts the sources")
  if(NOT EXISTS ${TILESIEVE_GOOGLETEST_SOURCES}/CMakeLists.txt)
    message(FATAL_ERROR "TILESIEVE_GOOGLETEST_SOURCES: got ${TILESIEVE_GOOGLETEST_SOURCES}, which has no CMakeLists.txt; "
                        "expected the sources of GoogleTest (Debian's package googletest), since none is built for "
                        "${CMAKE_SYSTEM_PROCESSOR}")
  endif()
  set(INSTALL_GTEST OFF)
  add_subdirectory(${TILESIEVE_GOOGLETEST_SOURCES} ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL SYSTEM)
endif()
