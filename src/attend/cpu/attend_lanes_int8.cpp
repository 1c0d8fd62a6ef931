// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels in 8 bits of an instruction set whose vectors do the products, compiled once for each.
#include "attend/cpu/lane_codes.h"

namespace tilesieve::TILESIEVE_ISA {

extern const AttendOps kInt8AttendOps;
const AttendOps kInt8AttendOps = {CodeEngine::kRowsPerTile,
                                  CodeEngine::kRowStep,
                                  scratch_bytes<CodeEngine>,
                                  q_outer_tiles<CodeEngine>,
                                  nullptr,
                                  nullptr,
                                  store_row};

}  // namespace tilesieve::TILESIEVE_ISA
