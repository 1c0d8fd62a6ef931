// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels of an instruction set whose vectors do the products, compiled once for each.
#include "attend/cpu/lane_engine.h"

#if defined(TILESIEVE_ISA_IS_avx512_bf16)
#include "attend/cpu/lane_pairs.h"
#endif

namespace tilesieve::TILESIEVE_ISA {

#if defined(TILESIEVE_ISA_IS_avx512_bf16)
using Engine = LaneEngine<Pair>;
#else
using Engine = LaneEngine<float>;
#endif

extern const AttendOps kAttendOps;
const AttendOps kAttendOps = attend_ops_of<Engine>();

}  // namespace tilesieve::TILESIEVE_ISA
