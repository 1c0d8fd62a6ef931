#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs compute-sanitizer over some small cases of the Hopper kernels: tools/sanitize_sm90.sh TEST-BINARY
# racecheck reports the hand-over of a stage by one lane for its warp: docs/kv-outer.md says why that is no race.
set -euo pipefail
cases='All/PrefillKernels.AgreesWithFloat64/*_d128_b128_g16:*AgreesWithFloat64/*_d64_b64_g4:*NothingToAttend*'
cases+=':Sage.RowsThatSeeNothing:Sage.StaysWithinTheBoundOfTheModel:Sage.ChannelsOfZeroAndOfInfinity:Sage.CanBeCaptured'
cases+=':SparseTiles.*:VideoRoute.*:Video.StaysWithinTheBoundOfTheModel:Video.ALayoutIsTheRasterOfReorderedTensors'
cases+=':VideoMassSm90.RoutesAreJudgedAsByTheCpu'
cases+=':*PrefillHostile.OutOfRangeAndFuture*:*PrefillFamilies*/empty_sequences_*:*PrefillLoops.AgreeWithinRounding*'
for tool in memcheck synccheck initcheck racecheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --print-limit 20 "$1" --gtest_filter="$cases" | tail -n 3
done
