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
if(TOOL)
  run(${WORK}/prefix/bin/tilesieve --help)
endif()
