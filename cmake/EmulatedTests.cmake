# SPDX-License-Identifier: Apache-2.0
# The tests in an emulator, which takes 0.14 s to start their binary and is slow at arithmetic (QEMU 7.2). So they run
# in a few processes, not in one each; and without those whose only point is size or repetition. What these cover,
# others of the same suite run on smaller problems; natively, all are run.
set(left_out
    *AttentionAlone.*             # single problems, large enough that no luck is left in the errors
    *AttentionFamily.*/many_tiles*
    *AttentionFamily.*/q_len_long*
    *AttentionBits.TenRepeats/*
    *AttentionBits.NumberOfThreads/*
    Capture.*                     # the tensors of a real model
    MixedFormats.*)
list(JOIN left_out ":" filter)
message(STATUS "Tests left out in the emulator: ${filter}")

set(num_shards 8)
math(EXPR last "${num_shards} - 1")
foreach(shard RANGE ${last})
  add_test(NAME tilesieve_tests.${shard} COMMAND tilesieve_tests)
  set_tests_properties(tilesieve_tests.${shard} PROPERTIES TIMEOUT 900 ENVIRONMENT
                       "GTEST_TOTAL_SHARDS=${num_shards};GTEST_SHARD_INDEX=${shard};GTEST_FILTER=-${filter}")
endforeach()
