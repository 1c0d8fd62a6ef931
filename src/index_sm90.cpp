// SPDX-License-Identifier: Apache-2.0
// Routing on Hopper: check, size, then schedule -> (make means) -> score -> merge.
#include "index_sm90.h"

#include <algorithm>

#include "base/fail.h"
#include "base/rounding.h"
#include "tensor/checks_sm90.h"
#include "tensor/workspace_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

namespace {

int32_t check_forced(std::string_view argument, int64_t blocks) {
  if (blocks < 0) fail("{}: got {}, expected 0 or more", argument, blocks);
  return static_cast<int32_t>(std::min<int64_t>(blocks, kMaxIndexTopK));  // more never fit
}

}  // namespace

IndexCall::IndexCall(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options, int num_sms) {
  sizes_.num_slices = num_sms;
  check(inputs, outputs, options);
  lay_out();
}

void IndexCall::check(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options) {
  const bool by_index = options.router == Router::index;
  if (!by_index && options.router != Router::qk_max && options.router != Router::mean_pool) {
    fail("router: got {}, expected index, qk_max or mean_pool on a CUDA device", name_of(options.router));
  }
  const TensorView &k = by_index ? inputs.index_k : inputs.k, &block_table = inputs.block_table;
  const bool paged = k.num_dims == (by_index ? 3 : 4);
  if (by_index) {
    take_index_tensors(inputs.index_q, k, options.kv_block_size);
  } else {
    take_heads(inputs.q, k, options);
  }
  const SequenceCapacity capacity =
      check_sequences({inputs.cu_seqlens_q, inputs.cu_seqlens_kv, inputs.kv_lens, block_table},
                      by_index ? "index_k" : "k", k, paged, options.kv_block_size);
  sizes_.num_sequences = static_cast<int32_t>(capacity.num_sequences);
  sizes_.kv_block_size = static_cast<int32_t>(options.kv_block_size);
  sizes_.init_blocks = check_forced("init_blocks", options.init_blocks);
  sizes_.local_blocks = check_forced("local_blocks", options.local_blocks);
  sizes_.max_kv_len = static_cast<int32_t>(capacity.max_kv_len);
  sizes_.max_pages = static_cast<int32_t>(capacity.max_pages);
  const int64_t groups = sizes_.total_q / sizes_.group_tokens() +
                         std::min(capacity.num_sequences, int64_t{sizes_.total_q});  // of one key head
  sizes_.num_groups = static_cast<int32_t>(groups * (sizes_.num_heads / sizes_.group_heads));
  sizes_.causal = options.causal;
  check_outputs(outputs);

  batch_.cu_seqlens_q = inputs.cu_seqlens_q.as<const int32_t>();
  if (paged) {
    batch_.kv_lens = inputs.kv_lens.as<const int32_t>();
    batch_.block_table = block_table.as<const int32_t>();
    batch_.block_table_stride = block_table.strides[0];
  } else {
    batch_.cu_seqlens_kv = inputs.cu_seqlens_kv.as<const int32_t>();
  }
  tensors_.kv_tokens = k.sizes[paged ? 1 : 0];
  tensors_.num_pages = paged ? k.sizes[0] : 1;
  tensors_.k_token_stride = k.strides[paged ? 1 : 0];
  tensors_.k_page_stride = paged ? k.strides[0] : 0;
  if (by_index) return;
  tensors_.k_head_stride = k.strides[paged ? 2 : 1];
  // A block that causality cuts is that of the query: where that is forced, nobody asks for its score.
  scores_cuts_ = sizes_.means && sizes_.causal && (sizes_.local_blocks == 0 || sizes_.keeps_scores);
  if (options.max_kv_blocks < 0) fail("max_kv_blocks: got {}, expected 0 or more", options.max_kv_blocks);
  if (!sizes_.means && tensors_.dtype == DType::bf16) return;  // its keys are scored where they lie
  int64_t blocks = std::max<int64_t>(capacity.num_kv_blocks, 1);
  if (options.max_kv_blocks > 0) blocks = std::min(blocks, options.max_kv_blocks);
  check_limit("max_kv_blocks, or the key blocks that the shapes allow, times the keys of each,",
              blocks * sizes_.made_keys_of_block(), INT32_MAX / 2);
  sizes_.num_made_blocks = static_cast<int32_t>(blocks);
}

void IndexCall::take_index_tensors(const TensorView& q, const TensorView& k, int64_t block) {
  const bool paged = k.num_dims == 3;
  if (q.num_dims != 3) fail("index_q: got {} dimensions, expected [total_q, num_heads, 128]", q.num_dims);
  if (k.num_dims != 2 && !paged) {
    fail("index_k: got {} dimensions, expected [total_kv, 128] or [num_pages, page_size, 128]", k.num_dims);
  }
  const int64_t total_q = q.sizes[0], num_heads = q.sizes[1];
  if (!is_index_heads(num_heads)) fail("index_q: got {} heads, expected 1, 2 or 4", num_heads);
  if (q.sizes[2] != kIndexDim) fail("index_q: got {} channels, expected {}", q.sizes[2], kIndexDim);
  if (block != 64 && block != 128) fail("kv_block_size: got {}, expected 64 or 128", block);
  check_tensor("index_q", q, {DType::bf16, DType::f8_e4m3}, {total_q, num_heads, kIndexDim},
               "total_q, num_heads, index_dim");
  check_limit("index_q: total_q", total_q, int64_t{1} << 29);
  if (paged) {
    if (k.sizes[1] != block) fail("index_k: got pages of {} tokens, expected kv_block_size = {}", k.sizes[1], block);
    check_tensor("index_k", k, {q.dtype}, {k.sizes[0], block, kIndexDim}, "num_pages, page_size, index_dim");
    check_limit("index_k: num_pages", k.sizes[0], INT32_MAX);
  } else {
    check_tensor("index_k", k, {q.dtype}, {k.sizes[0], kIndexDim}, "total_kv, index_dim");
  }
  check_rows("index_q", q);
  check_rows("index_k", k);
  sizes_.total_q = static_cast<int32_t>(total_q);
  sizes_.num_heads = sizes_.group_heads = static_cast<int32_t>(num_heads);
  take_tensors(q, k);
}

void IndexCall::take_heads(const TensorView& q, const TensorView& k, const IndexOptions& options) {
  const HeadSizes heads = check_heads(q, k, options.kv_block_size);
  sizes_.total_q = static_cast<int32_t>(heads.total_q);
  sizes_.num_heads = static_cast<int32_t>(heads.num_kv_heads);
  sizes_.group_heads = 1;
  sizes_.head_dim = static_cast<int32_t>(heads.head_dim);
  sizes_.means = options.router == Router::mean_pool;
  if (sizes_.means) sizes_.step_keys = kMeanStepKeys * static_cast<int32_t>(options.kv_block_size);
  group_size_ = static_cast<int32_t>(heads.group_size());
  q_dtype_ = q.dtype;
  tensors_.k_argument = "k";
  take_tensors(q, k);
}

void IndexCall::take_tensors(const TensorView& q, const TensorView& k) {
  tensors_.dtype = k.dtype;
  tensors_.q = q.data;
  tensors_.q_token_stride = q.strides[0];
  tensors_.q_head_stride = q.strides[1];
  tensors_.k = k.data;
}

void IndexCall::check_outputs(const IndexOutputs& outputs) {
  const auto& [block_index, scores] = outputs;
  const int64_t num_heads = sizes_.num_heads, total_q = sizes_.total_q;
  if (block_index.num_dims != 3 || block_index.sizes[2] < 1 || block_index.sizes[2] > kMaxIndexTopK) {
    fail("block_index: got {}, expected i32 [num_heads, total_q, top_k] with top_k 1 to {}",
         block_index.num_dims == 0 ? "nothing" : block_index.describe(), kMaxIndexTopK);
  }
  check_tensor("block_index", block_index, {DType::i32}, {num_heads, total_q, block_index.sizes[2]},
               "num_heads, total_q, top_k");
  if (scores.data != nullptr) {
    const int64_t blocks = ceil_div(int64_t{sizes_.max_kv_len}, int64_t{sizes_.kv_block_size});
    check_tensor("scores", scores, {DType::f32}, {num_heads, total_q, std::max(scores.sizes[2], blocks)},
                 "num_heads, total_q, at least the blocks of the longest sequence");
    check_limit("scores: max_blocks", scores.sizes[2], INT32_MAX);
    if (scores.strides[2] != 1 && scores.sizes[2] > 1) {
      fail("scores: got a stride of {} between blocks, expected 1", scores.strides[2]);
    }
  }
  sizes_.top_k = static_cast<int32_t>(block_index.sizes[2]);
  sizes_.keeps_scores = scores.data != nullptr;
  output_.ids = block_index.as<int32_t>();
  output_.head_stride = block_index.strides[0];
  output_.token_stride = block_index.strides[1];
  output_.slot_stride = block_index.strides[2];
  output_.scores = scores.as<float>();
  output_.scores_head_stride = scores.strides[0];
  output_.scores_token_stride = scores.strides[1];
  output_.max_blocks = static_cast<int32_t>(scores.sizes[2]);
}

void IndexCall::lay_out() {
  const auto take = [this](int64_t bytes) { return take_workspace(layout_.bytes, bytes); };
  layout_.cu_groups = take(int64_t{4} * (sizes_.num_sequences + 1));
  layout_.groups = take(static_cast<int64_t>(sizeof(IndexGroup)) * sizes_.num_groups);
  layout_.work_before = take(int64_t{8} * (sizes_.num_groups + 1));
  layout_.totals = take(sizeof(IndexTotals));
  layout_.lists = take(sizes_.num_lists() * kIndexGroupRows * sizes_.list_size() * 8);
  const int64_t rows = int64_t{sizes_.num_heads} * sizes_.total_q, made = sizes_.num_made_blocks;
  if (group_size_ != 0) layout_.mean_queries = take(2 * rows * sizes_.head_dim);
  if (sizes_.means) layout_.cut_scores = take(4 * rows);  // also where nobody asks: only shapes decide
  if (!makes_keys()) return;
  layout_.made_begins = take(int64_t{4} * (sizes_.num_sequences + 1));
  layout_.made_keys = take(2 * made * sizes_.made_keys_of_block() * sizes_.num_heads * sizes_.head_dim);
}

#ifdef TILESIEVE_HAS_CUDA

IndexPlan IndexCall::plan_in(void* workspace) const {
  IndexPlan plan;
  plan.cu_groups = at<int32_t>(workspace, layout_.cu_groups);
  plan.groups = at<IndexGroup>(workspace, layout_.groups);
  plan.work_before = at<int64_t>(workspace, layout_.work_before);
  plan.totals = at<IndexTotals>(workspace, layout_.totals);
  plan.lists = at<int64_t>(workspace, layout_.lists);
  if (makes_keys()) plan.made_begins = at<int32_t>(workspace, layout_.made_begins);
  return plan;
}

MadeKeys IndexCall::made_keys_in(void* workspace) const {
  const int64_t bytes = size_in_bytes(tensors_.dtype);
  MadeKeys keys;
  keys.dtype = tensors_.dtype;
  keys.k = static_cast<const uint8_t*>(tensors_.k);
  keys.kv_tokens = tensors_.kv_tokens;
  keys.num_pages = static_cast<int32_t>(tensors_.num_pages);
  keys.token_stride = tensors_.k_token_stride * bytes;
  keys.head_stride = tensors_.k_head_stride * bytes;
  keys.page_stride = tensors_.k_page_stride * bytes;
  keys.begins = at<int32_t>(workspace, layout_.made_begins);
  keys.out = at<uint16_t>(workspace, layout_.made_keys);
  return keys;
}

// What is scored: the caller's tensors, or what is made of them.
IndexTensors IndexCall::tensors_in(void* workspace) const {
  IndexTensors tensors = tensors_;
  if (tensors.k == nullptr) tensors.k = workspace;  // without keys nothing is read, but a map wants an address
  if (group_size_ == 0) return tensors;
  tensors.dtype = DType::bf16;
  tensors.q = at<void>(workspace, layout_.mean_queries);
  tensors.q_token_stride = int64_t{sizes_.num_heads} * sizes_.head_dim;
  tensors.q_head_stride = sizes_.head_dim;
  if (scores_cuts_) tensors.cut_scores = at<float>(workspace, layout_.cut_scores);
  if (!makes_keys()) return tensors;
  tensors.k = at<void>(workspace, layout_.made_keys);
  tensors.kv_tokens = int64_t{sizes_.num_made_blocks} * sizes_.made_keys_of_block();
  tensors.num_pages = 1;
  tensors.k_token_stride = sizes_.head_dim;
  tensors.k_head_stride = tensors.kv_tokens * sizes_.head_dim;
  tensors.k_page_stride = 0;
  return tensors;
}

void IndexCall::schedule(void* workspace, Stream stream) const {
  const cuda::NvtxRange nvtx("index schedule");
  launch_index_schedule(sizes_, batch_, plan_in(workspace), stream);
}

void IndexCall::make_means(void* workspace, Stream stream) const {
  if (group_size_ == 0) return;
  const cuda::NvtxRange nvtx("route means");
  uint16_t* mean_queries = at<uint16_t>(workspace, layout_.mean_queries);
  launch_mean_queries(
      sizes_, {q_dtype_, tensors_.q, tensors_.q_token_stride, tensors_.q_head_stride, group_size_, mean_queries},
      stream);
  if (!makes_keys()) return;
  const MadeKeys keys = made_keys_in(workspace);
  (sizes_.means ? launch_mean_keys : launch_widened_keys)(sizes_, batch_, keys, stream);
  if (scores_cuts_) {
    launch_cut_scores(sizes_, batch_, keys, mean_queries, at<float>(workspace, layout_.cut_scores), stream);
  }
}

void IndexCall::score(void* workspace, Stream stream) const {
  const cuda::NvtxRange nvtx("index scores");
  launch_index_scores(sizes_, batch_, plan_in(workspace), tensors_in(workspace), output_, stream);
}

void IndexCall::merge(void* workspace, Stream stream) const {
  const cuda::NvtxRange nvtx("index merge");
  launch_index_merge(sizes_, plan_in(workspace), output_, stream);
}

void IndexCall::run(void* workspace, Stream stream) const {
  if (sizes_.total_q == 0) return;
  schedule(workspace, stream);
  make_means(workspace, stream);
  score(workspace, stream);
  merge(workspace, stream);
}

int64_t choose_blocks_workspace(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options) {
  return IndexCall(inputs, outputs, options, cuda::current_device().num_sms).layout().bytes;
}

void choose_blocks(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options, void* workspace,
                   int64_t workspace_bytes, void* stream) {
  const cuda::NvtxRange nvtx("choose_blocks");
  const IndexCall call(inputs, outputs, options, cuda::hopper_device().num_sms);
  check_workspace(workspace, workspace_bytes, call.layout().bytes);
  call.run(workspace, stream);
}

std::string why_no_choose_blocks() { return cuda::why_no_device(); }

#else  // without CUDA the call exists and says why it cannot run

int64_t choose_blocks_workspace(const IndexInputs&, const IndexOutputs&, const IndexOptions&) {
  fail("choose_blocks: {}", why_no_choose_blocks());
}

void choose_blocks(const IndexInputs&, const IndexOutputs&, const IndexOptions&, void*, int64_t, void*) {
  fail("choose_blocks: {}", why_no_choose_blocks());
}

std::string why_no_choose_blocks() { return "this build has no CUDA kernels (TILESIEVE_CUDA=OFF)"; }

#endif

}  // namespace tilesieve::sm90
