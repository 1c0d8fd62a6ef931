// SPDX-License-Identifier: Apache-2.0
// The kernel table: every kernel that exists, best first within a loop order.
#include <fmt/format.h>

#include "attend/cpu/attend_ops.h"
#include "base/fail.h"
#include "cpu/isa.h"
#include "tilesieve/attend.h"

namespace tilesieve {

TILESIEVE_ISA_TABLE(AttendOps, kAttendOps)

const AttendOps& attend_ops(Isa isa) { return TILESIEVE_ISA_PICK(isa, kAttendOps); }

namespace {

struct KernelRow {
  Isa isa;
  LoopOrder loop_order;
  DType dtype;
  int64_t max_head_dim;
};

constexpr KernelRow kKernels[] = {
#if defined(TILESIEVE_HAS_avx512)
    {Isa::avx512, LoopOrder::q_outer, DType::f32, 256},
#endif
#if defined(TILESIEVE_HAS_avx2)
    {Isa::avx2, LoopOrder::q_outer, DType::f32, 256},
#endif
    {Isa::portable, LoopOrder::q_outer, DType::f32, 256},
#if defined(TILESIEVE_HAS_avx512)
    {Isa::avx512, LoopOrder::kv_outer, DType::f32, 256},
#endif
#if defined(TILESIEVE_HAS_avx2)
    {Isa::avx2, LoopOrder::kv_outer, DType::f32, 256},
#endif
    {Isa::portable, LoopOrder::kv_outer, DType::f32, 256},
};

}  // namespace

std::vector<Kernel> kernels() {
  std::vector<Kernel> table;
  for (const KernelRow& row : kKernels) {
    Kernel kernel;
    kernel.name = fmt::format("{}.{}.{}", name_of(row.isa), name_of(row.loop_order), name_of(row.dtype));
    kernel.isa = row.isa;
    kernel.loop_order = row.loop_order;
    kernel.dtype = row.dtype;
    kernel.max_head_dim = row.max_head_dim;
    kernel.available = is_available(row.isa);
    if (kernel.available) {
      kernel.tile_rows = attend_ops(row.isa).tile_rows;
      kernel.tile_row_step = attend_ops(row.isa).tile_row_step;
    }
    table.push_back(kernel);
  }
  return table;
}

std::string why_not(const Kernel& kernel, const Problem& problem) {
  if (!kernel.available) return fmt::format("this machine has no {}", name_of(kernel.isa));
  if (problem.head_dim > kernel.max_head_dim) {
    return fmt::format("head_dim {} is above {}", problem.head_dim, kernel.max_head_dim);
  }
  return "";
}

Kernel find_kernel(const Problem& problem, LoopOrder loop_order, const Execution& execution) {
  problem.validate();
  const Isa isa = resolve_isa(execution.isa);
  std::string reasons;
  for (const Kernel& kernel : kernels()) {
    if (kernel.isa != isa || kernel.loop_order != loop_order) continue;
    const std::string reason = why_not(kernel, problem);
    if (reason.empty()) return kernel;
    reasons += fmt::format("\n  {}: {}", kernel.name, reason);
  }
  fail("no {} kernel runs the problem '{}'{}", name_of(loop_order), problem.to_line(), reasons);
}

}  // namespace tilesieve
