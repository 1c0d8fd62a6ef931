# SPDX-License-Identifier: Apache-2.0
# Installs the build tree BUILD into WORK/prefix, then configures, builds and runs the consumer against that alone.
# Also given: CONFIG, GENERATOR, CXX, and TOOL, which is not empty when the command-line tool is installed too.

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/prefix)

# The package must not ask its users for what the library uses inside, nor point into the tree that built it.
file(GLOB_RECURSE package ${WORK}/prefix/*.cmake)
if(NOT package)
  message(FATAL_ERROR "no CMake package was installed into ${WORK}/prefix")
endif()
foreach(file IN LISTS package)
  file(READ ${file} text)
  foreach(unwanted fmt nlohmann CLI11 tilesieve_flags ${BUILD})
    string(FIND "${text}" "${unwanted}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} mentions ${unwanted}")
    endif()
  endforeach()
endforeach()

run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/build -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_BUILD_TYPE=${CONFIG} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/build --config ${CONFIG})
run(${WORK}/build/consumer)
# The same by pkg-config, as a Makefile would.
find_program(pkg_config pkg-config)
if(pkg_config)
  file(GLOB_RECURSE description ${WORK}/prefix/*/tilesieve.pc)
  get_filename_component(folder ${description} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${folder})
  execute_process(COMMAND ${pkg_config} --cflags --libs tilesieve OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${pkg_config} --variable=libdir tilesieve OUTPUT_VARIABLE libdir OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${CXX} ${CMAKE_CURRENT_LIST_DIR}/main.cpp -o ${WORK}/consumer ${flags} -Wl,-rpath,${libdir})
  run(${WORK}/consumer)
else()
  message(NOTICE "pkg-config: not found, tilesieve.pc was not tried")
endif()
if(TOOL)
  run(${WORK}/prefix/bin/tilesieve --help)
endif()
