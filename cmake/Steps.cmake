# SPDX-License-Identifier: Apache-2.0
# Steps of the library as object targets, and the library made of them.

# Instruction sets that this target can compile for, and their flags. "portable" adds none.
set(TILESIEVE_ISAS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND TILESIEVE_ISAS avx2 avx512 avx512_vnni avx512_bf16 amx)
endif()
set(TILESIEVE_FLAGS_portable "")
set(TILESIEVE_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(TILESIEVE_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
# g++ 12's own AVX-512 header starts from undefined registers and then warns about them.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND TILESIEVE_FLAGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(TILESIEVE_FLAGS_avx512_vnni ${TILESIEVE_FLAGS_avx512} -mavx512vnni)
set(TILESIEVE_FLAGS_avx512_bf16 ${TILESIEVE_FLAGS_avx512} -mavx512bf16)
set(TILESIEVE_FLAGS_amx ${TILESIEVE_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16 -mamx-int8)
# No contraction: what the kernels fuse they fuse by name, and where they do not, a rounding is relied on.
set(TILESIEVE_ISA_OPTIONS -fno-math-errno -fno-trapping-math -ffp-contract=off)

# tilesieve_step(name SOURCES ... [VECTOR_SOURCES ...] [INT8_SOURCES ...] [AVX512_BF16_SOURCES ...] [AMX_SOURCES ...])
# VECTOR_SOURCES are compiled once for each of portable, avx2 and avx512, INT8_SOURCES for portable, avx2 and
# avx512_vnni, the others for the one set that they name; TILESIEVE_ISA is defined to the set's name.
function(tilesieve_step name)
  cmake_parse_arguments(STEP "" "" "SOURCES;VECTOR_SOURCES;INT8_SOURCES;AVX512_BF16_SOURCES;AMX_SOURCES" ${ARGN})
  set(STEP_portable ${STEP_VECTOR_SOURCES} ${STEP_INT8_SOURCES})
  set(STEP_avx2 ${STEP_VECTOR_SOURCES} ${STEP_INT8_SOURCES})
  set(STEP_avx512 ${STEP_VECTOR_SOURCES})
  set(STEP_avx512_vnni ${STEP_INT8_SOURCES})
  set(STEP_avx512_bf16 ${STEP_AVX512_BF16_SOURCES})
  set(STEP_amx ${STEP_AMX_SOURCES})
  set(objects)
  add_library(tilesieve_${name} OBJECT ${STEP_SOURCES})
  target_link_libraries(tilesieve_${name} PRIVATE tilesieve_flags OpenMP::OpenMP_CXX
                                                  $<BUILD_INTERFACE:fmt::fmt-header-only>
                                                  $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
  list(APPEND objects $<TARGET_OBJECTS:tilesieve_${name}>)
  foreach(isa IN LISTS TILESIEVE_ISAS)
    target_compile_definitions(tilesieve_${name} PRIVATE TILESIEVE_HAS_${isa})
    if(STEP_${isa})
      add_library(tilesieve_${name}_${isa} OBJECT ${STEP_${isa}})
      target_link_libraries(tilesieve_${name}_${isa} PRIVATE tilesieve_flags)
      target_compile_definitions(tilesieve_${name}_${isa} PRIVATE TILESIEVE_ISA=${isa} TILESIEVE_ISA_IS_${isa})
      target_compile_options(tilesieve_${name}_${isa} PRIVATE ${TILESIEVE_FLAGS_${isa}} ${TILESIEVE_ISA_OPTIONS})
      list(APPEND objects $<TARGET_OBJECTS:tilesieve_${name}_${isa}>)
    endif()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY TILESIEVE_OBJECTS ${objects})
endfunction()

# The library tilesieve::tilesieve from all steps, with its install rules and CMake package.
function(tilesieve_library)
  get_property(objects GLOBAL PROPERTY TILESIEVE_OBJECTS)
  add_library(tilesieve ${ARGN} ${objects})
  add_library(tilesieve::tilesieve ALIAS tilesieve)
  # fmt and JSON are used header-only and never reach the installed package, so that who links it needs neither.
  target_link_libraries(tilesieve PRIVATE $<BUILD_INTERFACE:tilesieve_flags> $<BUILD_INTERFACE:fmt::fmt-header-only>
                                          OpenMP::OpenMP_CXX)
  if(TARGET tilesieve_cuda)
    target_compile_definitions(tilesieve PRIVATE TILESIEVE_HAS_CUDA)
    target_link_libraries(tilesieve PRIVATE CUDA::cudart_static)
  endif()
  target_include_directories(tilesieve PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                              $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(tilesieve PUBLIC cxx_std_20)
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  set_target_properties(tilesieve PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
                                             LINK_DEPENDS ${exports})
  if(BUILD_SHARED_LIBS)
    target_link_options(tilesieve PRIVATE LINKER:--version-script=${exports})
  endif()

  include(CMakePackageConfigHelpers)
  set(package ${CMAKE_INSTALL_LIBDIR}/cmake/tilesieve)
  install(TARGETS tilesieve EXPORT tilesieve-targets)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tilesieve DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT tilesieve-targets NAMESPACE tilesieve:: DESTINATION ${package})
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tilesieve-config.cmake.in
                                ${PROJECT_BINARY_DIR}/tilesieve-config.cmake INSTALL_DESTINATION ${package})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/tilesieve-config-version.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/tilesieve-config.cmake ${PROJECT_BINARY_DIR}/tilesieve-config-version.cmake
          DESTINATION ${package})
  include(PkgConfig)
endfunction()
