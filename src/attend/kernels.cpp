// SPDX-License-Identifier: Apache-2.0
// The kernel table: every kernel that exists, best first within a loop order.
#include <fmt/format.h>

#include <algorithm>

#include "attend/cpu/attend_ops.h"
#include "attend/kernels_sm90.h"
#include "base/fail.h"
#include "cpu/isa.h"
#include "tilesieve/attend.h"

namespace tilesieve {

TILESIEVE_VECTOR_TABLE(AttendOps, kAttendOps)
TILESIEVE_IF_X86(TILESIEVE_DECLARE_IN(avx512_bf16, AttendOps, kAttendOps)
                     TILESIEVE_DECLARE_IN(amx, AttendOps, kAttendOps))
TILESIEVE_INT8_TABLE(AttendOps, kInt8AttendOps)

const AttendOps& attend_ops(Isa isa, Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::int8) return TILESIEVE_INT8_PICK(isa, kInt8AttendOps);
  check_available(isa);
  switch (isa) {
#if defined(TILESIEVE_HAS_avx512_bf16)
    case Isa::avx512_bf16:
      return avx512_bf16::kAttendOps;
#endif
#if defined(TILESIEVE_HAS_amx)
    case Isa::amx:
      return amx::kAttendOps;
#endif
    default:
      return TILESIEVE_VECTOR_PICK(isa, kAttendOps);
  }
}

namespace {

// What an instruction set computes in, and which storage its kernels take. Best first.
struct IsaKernels {
  Isa isa;
  DType arithmetic;
  std::vector<DType> dtypes;  // of keys and values, and of queries
  LoopCosts costs;

  Arithmetic kind() const { return arithmetic == DType::i8 ? Arithmetic::int8 : Arithmetic::storage; }
};

const std::vector<IsaKernels>& isa_kernels() {
  static const std::vector<DType> all = {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3};
  static const std::vector<DType> exact_in_bf16 = {DType::bf16, DType::f8_e4m3};
  // Chosen to rank the loops as they were measured on one and on 16 cores (docs/perf-log.md).
  static const LoopCosts vectors;
  [[maybe_unused]] static const LoopCosts pairs = {1.25, 1.05, 6.0, 12.0, 8.0, 12.0};
  [[maybe_unused]] static const LoopCosts tiles = {1.6, 1.2, 3.0, 3.0, 24.0, 24.0};
  static const std::vector<IsaKernels> rows = {
#if defined(TILESIEVE_HAS_amx)
      {Isa::amx, DType::bf16, exact_in_bf16, tiles},
#endif
#if defined(TILESIEVE_HAS_avx512_bf16)
      {Isa::avx512_bf16, DType::bf16, exact_in_bf16, pairs},
#endif
#if defined(TILESIEVE_HAS_avx512)
      {Isa::avx512, DType::f32, all, vectors},
#endif
#if defined(TILESIEVE_HAS_avx2)
      {Isa::avx2, DType::f32, all, vectors},
#endif
      {Isa::portable, DType::f32, all, vectors},
#if defined(TILESIEVE_HAS_amx)
      {Isa::amx, DType::i8, all, tiles},
#endif
#if defined(TILESIEVE_HAS_avx512_vnni)
      {Isa::avx512_vnni, DType::i8, all, vectors},
#endif
#if defined(TILESIEVE_HAS_avx2)
      {Isa::avx2, DType::i8, all, vectors},
#endif
      {Isa::portable, DType::i8, all, vectors},
  };
  return rows;
}

std::vector<Kernel> make_cpu_kernels() {
  std::vector<Kernel> table;
  for (LoopOrder loop_order : {LoopOrder::q_outer, LoopOrder::kv_outer}) {
    for (const IsaKernels& row : isa_kernels()) {
      const bool int8 = row.kind() == Arithmetic::int8;
      if (int8 && loop_order != LoopOrder::q_outer) continue;
      for (DType dtype : row.dtypes) {
        Kernel kernel;
        kernel.name =
            fmt::format("{}.{}.{}{}", name_of(row.isa), name_of(loop_order), name_of(dtype), int8 ? ".int8" : "");
        kernel.tiles_alone = int8;
        kernel.isa = row.isa;
        kernel.loop_order = loop_order;
        kernel.dtype = dtype;
        kernel.arithmetic = row.arithmetic;
        kernel.costs = row.costs;
        kernel.q_dtypes = row.dtypes;
        if (!is_available(row.isa)) {
          kernel.unavailable = fmt::format("this machine has no {}", name_of(row.isa));
        } else {
          const AttendOps& ops = attend_ops(row.isa, row.kind());
          kernel.tile_rows = ops.tile_rows;
          kernel.tile_row_step = ops.tile_row_step;
        }
        table.push_back(kernel);
      }
    }
  }
  return table;
}

// Made once: wording the names of all rows takes longer than the smallest call.
const std::vector<Kernel>& cpu_kernels() {
  static const std::vector<Kernel> table = make_cpu_kernels();
  return table;
}

}  // namespace

std::vector<Kernel> kernels() {
  std::vector<Kernel> table = cpu_kernels();
  const std::vector<Kernel> gpu = sm90_kernels();
  table.insert(table.end(), gpu.begin(), gpu.end());
  return table;
}

std::string why_not(const Kernel& kernel, const Problem& problem) {
  if (!kernel.unavailable.empty()) return kernel.unavailable;
  if ((problem.arithmetic == Arithmetic::int8) != (kernel.arithmetic == DType::i8)) {
    return fmt::format("its arithmetic is {}, not {}", name_of(kernel.arithmetic), name_of(problem.arithmetic));
  }
  if (problem.kv_dtype != kernel.dtype) {
    return fmt::format("kv_dtype {} is not {}", name_of(problem.kv_dtype), name_of(kernel.dtype));
  }
  const std::vector<DType>& q = kernel.q_dtypes;
  if (std::find(q.begin(), q.end(), problem.q_dtype) == q.end()) {
    std::string taken;
    for (DType dtype : q) taken += (taken.empty() ? "" : " or ") + std::string(name_of(dtype));
    return fmt::format("q_dtype {} is not {}", name_of(problem.q_dtype), taken);
  }
  if (problem.head_dim > kernel.max_head_dim) {
    return fmt::format("head_dim {} is above {}", problem.head_dim, kernel.max_head_dim);
  }
  if (problem.head_dim < kernel.min_head_dim) {
    return fmt::format("head_dim {} is below {}", problem.head_dim, kernel.min_head_dim);
  }
  return kernel.device == DeviceKind::cuda ? why_not_sm90(kernel, problem) : "";
}

Kernel find_kernel(const Problem& problem, LoopOrder loop_order, const Execution& execution) {
  problem.validate();
  check_available(execution.isa);
  const auto is_asked_for = [&](const Kernel& kernel) {
    return kernel.loop_order == loop_order && (execution.isa == Isa::best || kernel.isa == execution.isa);
  };
  for (const Kernel& kernel : cpu_kernels()) {  // the type first, so that no reason is worded for most rows
    if (is_asked_for(kernel) && kernel.dtype == problem.kv_dtype && why_not(kernel, problem).empty()) return kernel;
  }
  std::string reasons;
  for (const Kernel& kernel : cpu_kernels()) {
    if (is_asked_for(kernel)) reasons += fmt::format("\n  {}: {}", kernel.name, why_not(kernel, problem));
  }
  fail("execution.isa: no {} kernel of {} runs the problem '{}'{}", name_of(loop_order), name_of(execution.isa),
       problem.to_line(), reasons);
}

}  // namespace tilesieve
