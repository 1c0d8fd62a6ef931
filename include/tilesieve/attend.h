// SPDX-License-Identifier: Apache-2.0
// Attending: softmax(scale * q k^T) v over the planned blocks, q-outer to outputs or kv-outer to partials.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/plan.h"
#include "tilesieve/problem.h"
#include "tilesieve/quant.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// Inner strides are 1, other strides any. Keys and values lie in one piece, or in pages of one block each, in any
// order, which the block table names: K and V may be two tensors or two views of one packed cache.
struct AttentionInputs {
  TensorView q;  // [total_q, num_q_heads, head_dim] of problem.q_dtype
  TensorView k;  // [total_kv, num_kv_heads, head_dim] of problem.kv_dtype, or paged
                 // [num_pages, kv_block_size, num_kv_heads, head_dim]
  TensorView v;  // as k, with its own strides

  // [num_sequences, at least the blocks of the longest sequence] i32: the page of each block; no data = not paged.
  // Entries past a sequence's last block are not read.
  TensorView block_table = {};

  // Factors of the stored numbers, f32: [1] for the whole tensor or [num_kv_heads]; no data = 1.
  TensorView q_scale = {}, k_scale = {}, v_scale = {};

  bool is_paged() const { return block_table.data != nullptr; }
};

// Outputs overlap neither inputs nor themselves, nor the workspace.
struct AttentionOutputs {
  TensorView o;    // [total_q, num_q_heads, head_dim] f32, bf16 or f16, inner stride 1
  TensorView lse;  // [total_q, num_q_heads] f32, natural log of the sum over exp(scaled logits); -inf for an empty row
};

// What kv-outer leaves behind for combine, of one pass. Row r = entry * group_size + head in group.
struct Partials {
  float* o_partial = nullptr;  // [num_entries * group_size, head_dim] sum of exp2(s - m) v, not normalised
  float* m = nullptr;          // [num_entries * group_size] largest logit of the row in the block, in log2 units
  float* l = nullptr;          // [num_entries * group_size] sum of exp2(s - m)
  static Partials in(void* workspace, int64_t num_entries, const Problem& problem);
};

// One row of the kernel table: a kernel that exists.
struct Kernel {
  std::string name;  // "avx512.q_outer.bf16", "amx.q_outer.bf16.int8", "sm90.kv_outer.e4m3.d128.b128"
  DeviceKind device = DeviceKind::cpu;  // on CUDA devices, sm90::sparse_prefill runs them
  Isa isa = Isa::portable;              // of a CPU kernel
  LoopOrder loop_order = LoopOrder::q_outer;
  DType dtype = DType::f32;       // of stored keys and values
  DType arithmetic = DType::f32;  // of the factors of both products; sums are f32. bf16 rounds the weights of a
                                  // softmax, i8 is Arithmetic::int8
  std::vector<DType> q_dtypes;    // of queries, as they are stored
  int64_t min_head_dim = 8, max_head_dim = 256;  // in steps of 8
  int64_t kv_block_size = 0;                     // the one that it is for; 0 = any
  int64_t tile_rows = 0;                         // query rows of one tile
  int64_t tile_row_step = 0;                     // rows are padded to a multiple of this
  bool tiles_alone = false;                      // of the forms of q_outer it has union tiles, not gathering
  LoopCosts costs;
  std::string unavailable;  // empty when this machine can run it, else why not
};

// The kernel table: first the kernels for CPUs, best first within a loop order, then those for GPUs, which a build
// without CUDA has none of.
std::vector<Kernel> kernels();

// Empty when the kernel can run the problem, else the reason why not.
std::string why_not(const Kernel& kernel, const Problem& problem);

// The CPU kernel that `execution` asks for. Throws Error when no row of the table runs the problem.
Kernel find_kernel(const Problem& problem, LoopOrder loop_order, const Execution& execution = {});

// Throws Error naming the tensor whose dtype, device, shape or stride does not fit the problem, or to which is written
// where another one lies. `workspace`: any memory; no data = none.
void check_inputs(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                  const TensorView& workspace = {});
void check_tensors(const Problem& problem, const AttentionInputs& inputs);

// Throws Error unless the plan was made for the problem and for that loop order.
void check_plan(const Problem& problem, const Plan& plan, LoopOrder loop_order);

// Writes every row of o and lse (0 and -inf where nothing is attended). Where the problem's arithmetic is int8,
// `operands` are those that quantize_int8 made of the inputs for the same instruction set, and rows of their heads
// alone are written: one call follows another, from the first head to the last.
void attend_q_outer(const Problem& problem, const AttentionInputs& inputs, const Plan& plan,
                    const AttentionOutputs& outputs, const Execution& execution = {},
                    const Int8Operands* operands = nullptr);

// Writes every partial of the pass. Counts its items in execution.progress, whose total the caller sets.
void attend_kv_outer(const Problem& problem, const AttentionInputs& inputs, const Pass& pass, const Partials& partials,
                     const Execution& execution = {});

}  // namespace tilesieve
