// SPDX-License-Identifier: Apache-2.0
#include "attend/kernels_sm90.h"

#include <fmt/format.h>

#include "tensor/prefill_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "attend/sm90/kv_outer.h"
#include "attend/sm90/q_outer.h"
#include "cuda/device.h"
#endif

namespace tilesieve {

std::vector<Kernel> sm90_kernels() {
  std::vector<Kernel> table;
#ifdef TILESIEVE_HAS_CUDA
  const std::string unavailable = cuda::why_no_device();
  PrefillSizes one_head;
  one_head.group_size = 1;
  const auto add = [&](const PrefillKernel& row, LoopOrder loop_order) {
    Kernel kernel;
    kernel.name = row.name;
    kernel.device = DeviceKind::cuda;
    kernel.loop_order = loop_order;
    kernel.dtype = kernel.arithmetic = row.dtype;
    kernel.q_dtypes = {DType::bf16};
    if (row.dtype == DType::f8_e4m3) kernel.q_dtypes.push_back(DType::f8_e4m3);  // bf16 ones are quantised
    kernel.min_head_dim = kernel.max_head_dim = row.head_dim;
    kernel.kv_block_size = row.kv_block_size;
    kernel.tile_rows = kernel.tile_row_step = one_head.tile_tokens();
    kernel.unavailable = unavailable;
    table.push_back(kernel);
  };
  for (const PrefillKernel& row : kv_outer_kernels()) add(row, LoopOrder::kv_outer);
  for (const PrefillKernel& row : q_outer_kernels()) add(row, LoopOrder::q_outer);
#endif
  return table;
}

std::string why_not_sm90(const Kernel& kernel, const Problem& problem) {
  if (problem.kv_block_size != kernel.kv_block_size) {
    return fmt::format("kv_block_size {} is not {}", problem.kv_block_size, kernel.kv_block_size);
  }
  if (!is_prefill_group(problem.group_size())) {
    return fmt::format("{} query heads a KV head are not 1, 2, 4, 8 or 16", problem.group_size());
  }
  if (problem.top_k > kMaxPrefillTopK) return fmt::format("top_k {} is above {}", problem.top_k, kMaxPrefillTopK);
  return "";
}

}  // namespace tilesieve
