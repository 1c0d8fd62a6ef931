// SPDX-License-Identifier: Apache-2.0
#include "call.h"

#include <algorithm>
#include <climits>
#include <string>
#include <utility>

#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::python {

namespace {

// What one array says of keys: how many there are and under how many heads; pages say the heads alone.
struct Keys {
  int64_t num_keys = 0, num_heads = 0;
  bool paged = false;
};

constexpr int64_t kFlatBlockSize = 128;  // where nothing says another

constexpr const char* kQueries = "[total_q, num_q_heads, head_dim]";
constexpr const char* kKeys =
    "[total_kv, num_kv_heads, head_dim], or with a block_table [num_pages, kv_block_size, num_kv_heads, head_dim]";

[[noreturn]] void wrong_shape(const char* argument, const BorrowedArray& array, const char* expected) {
  throw Error(std::string(argument) + ": got " + (array.is_absent() ? "None" : array.view().describe()) +
              ", expected " + expected);
}

Keys keys_of(const BorrowedArray& k) {
  const TensorView& view = k.view();
  if (view.num_dims == 3) return {view.sizes[0], view.sizes[1], false};
  if (view.num_dims == 4) return {0, view.sizes[2], true};
  wrong_shape("k", k, kKeys);
}

// Lengths of sequences from where they begin: [num_sequences + 1], from 0, never falling.
std::vector<int64_t> lengths_of(const char* argument, nb::handle cu_seqlens) {
  const std::vector<int64_t> begins = whole_numbers(argument, cu_seqlens);
  if (begins.empty() || begins[0] != 0) {
    throw Error(std::string(argument) + ": got " + (begins.empty() ? "nothing" : std::to_string(begins[0])) +
                " at its beginning, expected 0 and then the end of each sequence");
  }
  std::vector<int64_t> lengths;
  for (size_t i = 1; i < begins.size(); ++i) {
    if (begins[i] < begins[i - 1]) {
      throw Error(std::string(argument) + ": falls from " + std::to_string(begins[i - 1]) + " to " +
                  std::to_string(begins[i]) + ", expected the ends of sequences one after the other");
    }
    lengths.push_back(begins[i] - begins[i - 1]);
  }
  return lengths;
}

}  // namespace

Execution execution_of(nb::handle num_threads, nb::handle isa, Progress* progress) {
  Execution execution;
  execution.num_threads = static_cast<int>(std::min<int64_t>(count_or("num_threads", num_threads, 0), INT_MAX));
  execution.isa = parse_isa(text("isa", isa));
  execution.progress = progress;
  return execution;
}

Outputs::Outputs(const Problem& problem, nb::handle out, nb::handle lse)
    : o_("out", out, Access::write), lse_("lse", lse, Access::write) {
  if (lse_.is_absent()) own_lse_ = Tensor(DType::f32, {problem.total_q(), problem.num_q_heads});
}

Call::Call(nb::handle q, nb::handle k, nb::handle v, nb::handle index_q, nb::handle index_k, nb::handle block_table,
           nb::handle q_scale, nb::handle k_scale, nb::handle v_scale, nb::handle cu_seqlens_q,
           nb::handle cu_seqlens_kv, nb::handle kv_lens, nb::handle kv_block_size, nb::handle top_k, nb::handle causal,
           nb::handle softmax_scale)
    : q_("q", q),
      k_("k", k),
      v_("v", v),
      index_q_("index_q", index_q),
      index_k_("index_k", index_k),
      block_table_("block_table", block_table),
      q_scale_("q_scale", q_scale),
      k_scale_("k_scale", k_scale),
      v_scale_("v_scale", v_scale) {
  problem_.kv_block_size = block_size_of(kv_block_size);
  problem_.top_k = whole_number("top_k", top_k);
  problem_.causal = flag("causal", causal);
  problem_.softmax_scale = softmax_scale_of(softmax_scale);
  set_heads();
  set_lengths(cu_seqlens_q, cu_seqlens_kv, kv_lens);
}

Call::Call(const Problem& problem, nb::handle q, nb::handle k, nb::handle v, nb::handle block_table, nb::handle q_scale,
           nb::handle k_scale, nb::handle v_scale)
    : q_("q", q),
      k_("k", k),
      v_("v", v),
      block_table_("block_table", block_table),
      q_scale_("q_scale", q_scale),
      k_scale_("k_scale", k_scale),
      v_scale_("v_scale", v_scale),
      problem_(problem) {
  require("q", q_, kQueries);
  require("k", k_, kKeys);
}

// Pages say what a block is; in flat keys anything could be one.
int64_t Call::block_size_of(nb::handle kv_block_size) const {
  if (!kv_block_size.is_none()) return whole_number("kv_block_size", kv_block_size);
  const TensorView& keys = k_.is_absent() ? index_k_.view() : k_.view();
  return !block_table_.is_absent() && keys.num_dims > 1 ? keys.sizes[1] : kFlatBlockSize;
}

void Call::set_heads() {
  if (!q_.is_absent() || index_q_.is_absent()) {
    const TensorView& q = q_.view();
    if (q.num_dims != 3) wrong_shape("q", q_, kQueries);
    problem_.num_q_heads = q.sizes[1];
    problem_.head_dim = q.sizes[2];
    problem_.q_dtype = q.dtype;
    problem_.num_kv_heads = keys_of(k_).num_heads;
    problem_.kv_dtype = k_.view().dtype;
  } else {  // the index branch routes without them
    if (index_q_.view().num_dims != 3) wrong_shape("index_q", index_q_, "[total_q, num_kv_heads, index_dim]");
    problem_.num_q_heads = problem_.num_kv_heads = index_q_.view().sizes[1];
  }
}

void Call::set_lengths(nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv, nb::handle kv_lens) {
  const TensorView& queries = q_.is_absent() ? index_q_.view() : q_.view();
  const TensorView& keys = k_.is_absent() ? index_k_.view() : k_.view();
  problem_.q_lens =
      cu_seqlens_q.is_none() ? std::vector<int64_t>{queries.sizes[0]} : lengths_of("cu_seqlens_q", cu_seqlens_q);
  const size_t num_sequences = problem_.q_lens.size();
  const bool paged = !block_table_.is_absent();
  const char* argument = paged ? "kv_lens" : "cu_seqlens_kv";
  if (paged ? !cu_seqlens_kv.is_none() : !kv_lens.is_none()) {
    throw Error(paged ? "cu_seqlens_kv: got one with a block_table, whose sequences kv_lens says"
                      : "kv_lens: got some without a block_table; cu_seqlens_kv says where packed sequences begin");
  }
  if (paged) {
    if (kv_lens.is_none()) throw Error("kv_lens: got None, needed with a block_table: the keys of each sequence");
    problem_.kv_lens = whole_numbers("kv_lens", kv_lens);
  } else if (!cu_seqlens_kv.is_none()) {
    problem_.kv_lens = lengths_of("cu_seqlens_kv", cu_seqlens_kv);
  } else if (num_sequences == 1) {
    problem_.kv_lens = {keys.num_dims > 0 ? keys.sizes[0] : 0};
  } else {
    throw Error("cu_seqlens_kv: got None, needed for the " + std::to_string(num_sequences) +
                " sequences of cu_seqlens_q");
  }
  if (problem_.kv_lens.size() != num_sequences) {
    throw Error(std::string(argument) + ": got " + std::to_string(problem_.kv_lens.size()) +
                " sequences, expected as many as of queries, " + std::to_string(num_sequences));
  }
}

AttentionInputs Call::attention_inputs() const {
  AttentionInputs inputs;
  inputs.q = q_.view();
  inputs.k = k_.view();
  inputs.v = v_.view();
  inputs.block_table = block_table_.view();
  inputs.q_scale = q_scale_.view();
  inputs.k_scale = k_scale_.view();
  inputs.v_scale = v_scale_.view();
  return inputs;
}

RouteInputs Call::route_inputs() const {
  RouteInputs inputs;
  inputs.q = q_.view();
  inputs.k = k_.view();
  inputs.index_q = index_q_.view();
  inputs.index_k = index_k_.view();
  inputs.block_table = block_table_.view();
  inputs.q_scale = q_scale_.view();
  inputs.k_scale = k_scale_.view();
  return inputs;
}

void Call::require_values() const { require("v", v_, "as k"); }

void Call::require_for(Router router) const {
  if (router == Router::index) {
    require("index_q", index_q_, "[total_q, num_kv_heads, index_dim] for the router 'index'");
    require("index_k", index_k_, "[total_kv, index_dim] for the router 'index'");
    return;
  }
  refuse_unread("index_q", index_q_.is_absent(), name_of(router));
  refuse_unread("index_k", index_k_.is_absent(), name_of(router));
  require("q", q_, kQueries);
}

Router Call::default_router() const {
  return index_q_.is_absent() && index_k_.is_absent() ? Router::qk_max : Router::index;
}

void Call::take_top_k(const BlockIndex& block_index) { problem_.top_k = std::max<int64_t>(1, block_index.capacity); }

void Call::take_arithmetic(nb::handle arithmetic) {
  problem_.arithmetic = parse_arithmetic(text("arithmetic", arithmetic));
}

}  // namespace tilesieve::python
