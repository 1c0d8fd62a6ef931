// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels in 8 bits of an instruction set whose vectors do the products, compiled once for each.
#include "attend/cpu/lane_quads.h"

namespace tilesieve::TILESIEVE_ISA {

extern const AttendOps kInt8AttendOps;
const AttendOps kInt8AttendOps = {QuadEngine::kRowsPerTile,
                                  QuadEngine::kRowStep,
                                  scratch_bytes<QuadEngine>,
                                  q_outer_tiles<QuadEngine>,
                                  nullptr,
                                  nullptr,
                                  store_row};

}  // namespace tilesieve::TILESIEVE_ISA
