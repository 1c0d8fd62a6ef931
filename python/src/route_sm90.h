// SPDX-License-Identifier: Apache-2.0
// Arguments of the index branch on Hopper, of which a call may only choose or attend too.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace tilesieve::python {

inline constexpr const char* kIndexQueries = "[total_q, num_kv_heads, 128] for the router 'index'";
inline constexpr const char* kIndexKeys = "[total_kv, 128], or pages, for the router 'index'";

// Throws Error where it is not what the kernels hold on chip: 1 to 32.
int64_t top_k_on_cuda(nanobind::handle object);

}  // namespace tilesieve::python
