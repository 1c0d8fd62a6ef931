// SPDX-License-Identifier: Apache-2.0
// The roof: a product of square matrices by oneDNN on the same threads. Weights lie in the layout oneDNN asks for,
// packed ahead, and sums are stored as f32: of the ways to call it, its fastest (bf16 with AMX: 10 to 40 % above plain
// rows).
#pragma once

#include <string>

#include "tilesieve/tensor.h"

namespace tilesieve::bench {

inline constexpr int64_t kRoofSize = 4096;
inline constexpr double kRoofFlop = 2.0 * kRoofSize * kRoofSize * kRoofSize;

bool has_roof();  // whether the build has oneDNN

// Seconds of one product of f32 or bf16 factors.
double roof_seconds(DType factors, int num_threads);

// What oneDNN takes for it here: "oneDNN 2.6.3 brg:avx512_core_amx_bf16".
std::string roof_implementation(DType factors, int num_threads);

}  // namespace tilesieve::bench
