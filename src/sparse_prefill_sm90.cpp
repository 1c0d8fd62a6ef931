// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill on one screen: check, size, then (quantise q) -> q-outer, or map -> schedule -> kv-outer ->
// combine, or both after a choice on the device.
#include "sparse_prefill_sm90.h"

#include <algorithm>
#include <cmath>
#include <string_view>

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

constexpr int64_t kRangeStep = 256;  // query tokens of one CTA of the map
// Rounds of slices of the tiles of a KV head, see PrefillSizes::slice_begin: of fourteen the last slice is a hundredth
// of a multiprocessor's share, and below 16 tiles for each round there would be slices of two or three.
constexpr int64_t kMaxRounds = 14, kTilesPerRound = 16;
constexpr int64_t kRunsPerSm = 2;  // of q-outer, where there are tokens enough

PrefillScale check_scale(std::string_view argument, const TensorView& view, int64_t num_kv_heads) {
  if (view.data == nullptr) return {};
  const bool one = view.num_dims == 1 && view.sizes[0] == 1;
  check_tensor(argument, view, {DType::f32}, {one ? 1 : num_kv_heads}, "1 or num_kv_heads");
  return {view.as<const float>(), one ? 0 : view.strides[0]};
}

}  // namespace

PrefillCall::PrefillCall(const PrefillInputs& inputs, const PrefillOutputs& outputs, const PrefillOptions& options,
                         int num_sms)
    : inputs_(inputs), outputs_(outputs) {
  sizes_.num_sms = num_sms;
  check(options);
  choose_by_shape(options);
  size_passes(options.workspace_limit);
  lay_out();
}

void PrefillCall::check(const PrefillOptions& options) {
  const auto& [q, k, v, block_index, index_q, index_k, cu_q, cu_kv, kv_lens, block_table, q_scale, k_scale, v_scale] =
      inputs_;
  const int64_t block = options.kv_block_size;
  const HeadSizes heads = check_heads(q, k, block);
  const auto& [total_q, num_q_heads, num_kv_heads, head_dim, paged] = heads;
  if (paged) {
    check_tensor("v", v, {k.dtype}, {k.sizes[0], block, num_kv_heads, head_dim},
                 "num_pages, page_size, num_kv_heads, head_dim");
  } else {
    check_tensor("v", v, {k.dtype}, {k.sizes[0], num_kv_heads, head_dim}, "total_kv, num_kv_heads, head_dim");
  }
  if (q.dtype == DType::f8_e4m3 && k.dtype != DType::f8_e4m3) {
    fail("q: got {} for k and v of {}, expected {}", name_of(q.dtype), name_of(k.dtype), name_of(k.dtype));
  }
  check_rows("v", v);
  const SequenceCapacity capacity = check_sequences({cu_q, cu_kv, kv_lens, block_table}, "k", k, paged, block);
  sizes_.max_pages = static_cast<int32_t>(capacity.max_pages);
  sizes_.max_kv_len = static_cast<int32_t>(capacity.max_kv_len);
  int64_t rows = capacity.num_kv_blocks;
  if (paged) {
    batch_.kv_lens = kv_lens.as<const int32_t>();
    batch_.block_table = block_table.as<const int32_t>();
    batch_.block_table_stride = block_table.strides[0];
  } else {
    batch_.cu_seqlens_kv = cu_kv.as<const int32_t>();
  }
  if (options.max_kv_blocks < 0) fail("max_kv_blocks: got {}, expected 0 or more", options.max_kv_blocks);
  if (options.max_kv_blocks > 0) rows = std::min(rows, options.max_kv_blocks);
  rows = round_up(std::max<int64_t>(rows, 1), 8);
  check_tensor("o", outputs_.o, {DType::bf16, DType::f16}, {total_q, num_q_heads, head_dim},
               "total_q, num_q_heads, head_dim");
  check_rows("o", outputs_.o);
  if (outputs_.lse.data != nullptr) {
    check_tensor("lse", outputs_.lse, {DType::f32}, {total_q, num_q_heads}, "total_q, num_q_heads");
  }
  if (!(options.softmax_scale >= 0) || !std::isfinite(options.softmax_scale)) {
    fail("softmax_scale: got {}, expected a positive number, or 0 for 1 / sqrt(head_dim)", options.softmax_scale);
  }

  static_cast<void>(check_scale("q_scale", q_scale, num_kv_heads));
  static_cast<void>(check_scale("k_scale", k_scale, num_kv_heads));
  static_cast<void>(check_scale("v_scale", v_scale, num_kv_heads));
  quantizes_q_ = q.dtype == DType::bf16 && k.dtype == DType::f8_e4m3;
  softmax_scale_ = options.softmax_scale != 0 ? options.softmax_scale : 1 / std::sqrt(static_cast<double>(head_dim));
  sizes_.num_sequences = static_cast<int32_t>(capacity.num_sequences);
  sizes_.num_q_heads = static_cast<int32_t>(num_q_heads);
  sizes_.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  sizes_.group_size = static_cast<int32_t>(heads.group_size());
  sizes_.head_dim = static_cast<int32_t>(head_dim);
  sizes_.kv_block_size = static_cast<int32_t>(block);
  sizes_.total_q = static_cast<int32_t>(total_q);
  sizes_.num_rows = static_cast<int32_t>(std::min<int64_t>(rows, INT32_MAX / 8 * 8));  // q-outer does not count them
  sizes_.causal = options.causal;
  batch_.cu_seqlens_q = cu_q.as<const int32_t>();
  check_block_index(options);
}

// Given, chosen by the call, or none: then all blocks that a token sees.
void PrefillCall::check_block_index(const PrefillOptions& options) {
  const TensorView &block_index = inputs_.block_index, &index_q = inputs_.index_q;
  const bool given = block_index.num_dims != 0, chooses = asks_for_choice(options);
  const int64_t top_k = given ? block_index.sizes[2] : options.top_k;
  if (given && (block_index.num_dims != 3 || top_k < 1 || top_k > kMaxPrefillTopK)) {
    fail("block_index: got {}, expected i32 [num_kv_heads, total_q, top_k] with top_k 1 to {}", block_index.describe(),
         kMaxPrefillTopK);
  }
  if (given) {
    check_tensor("block_index", block_index, {DType::i32}, {sizes_.num_kv_heads, sizes_.total_q, top_k},
                 "num_kv_heads, total_q, top_k");
  }
  if (!given && chooses && (top_k < 1 || top_k > kMaxPrefillTopK)) {
    fail("top_k: got {}, expected 1 to {}", top_k, kMaxPrefillTopK);
  }
  const int64_t limit = options.dense_up_to >= 0 ? options.dense_up_to : kDenseUpTo;
  dense_ = !given && (!chooses || (options.loop_order == LoopOrder::automatic && sizes_.max_kv_len <= limit));
  if (dense_ && options.loop_order == LoopOrder::kv_outer) {
    fail("block_index: got nothing, expected one with loop_order kv_outer; without it attention is dense, in q_outer");
  }
  sizes_.top_k = static_cast<int32_t>(dense_ ? 1 : top_k);
  batch_.block_index = block_index.as<const int32_t>();
  batch_.index_head_stride = given ? block_index.strides[0] : int64_t{sizes_.total_q} * sizes_.top_k;
  batch_.index_token_stride = given ? block_index.strides[1] : sizes_.top_k;
  batch_.index_slot_stride = given ? block_index.strides[2] : 1;
  if (!chooses) return;
  for (const auto& [name, view] : {std::pair("index_q", index_q), std::pair("index_k", inputs_.index_k)}) {
    if (options.router == Router::index || view.num_dims == 0) continue;
    fail("{}: got {}, which the router {} does not read; expected nothing, or the router index", name, view.describe(),
         name_of(options.router));
  }
  if (index_q.num_dims == 3 && index_q.sizes[1] != sizes_.num_kv_heads) {
    fail("index_q: got {} heads, expected one for each of {} KV heads", index_q.sizes[1], sizes_.num_kv_heads);
  }
  if (index_q.num_dims == 3 && index_q.sizes[0] != sizes_.total_q) {
    fail("index_q: got {} tokens, expected {} as q", index_q.sizes[0], sizes_.total_q);
  }
  index_ = IndexOptions{options.router,       options.kv_block_size, options.causal,
                        options.local_blocks, options.init_blocks,   options.max_kv_blocks};
  layout_.index = index_call(reinterpret_cast<void*>(kWorkspaceAlignment)).layout().bytes;  // and checks the tensors
  if (dense_) index_.reset();
}

bool PrefillCall::asks_for_choice(const PrefillOptions& options) const {
  return options.router != Router::index || inputs_.index_q.num_dims != 0 || inputs_.index_k.num_dims != 0;
}

// `workspace` is addressed only.
IndexCall PrefillCall::index_call(void* workspace) const {
  const IndexInputs inputs = {.q = inputs_.q,
                              .k = inputs_.k,
                              .index_q = inputs_.index_q,
                              .index_k = inputs_.index_k,
                              .cu_seqlens_q = inputs_.cu_seqlens_q,
                              .cu_seqlens_kv = inputs_.cu_seqlens_kv,
                              .kv_lens = inputs_.kv_lens,
                              .block_table = inputs_.block_table};
  IndexOutputs outputs;
  outputs.block_index = inputs_.block_index;
  if (inputs_.block_index.num_dims == 0) {
    outputs.block_index = contiguous_view(static_cast<uint8_t*>(workspace) + layout_.block_index, DType::i32,
                                          {sizes_.num_kv_heads, sizes_.total_q, sizes_.top_k});
    outputs.block_index.device.kind = DeviceKind::cuda;
  }
  return IndexCall(inputs, outputs, *index_, sizes_.num_sms);
}

void PrefillCall::choose_by_shape(const PrefillOptions& options) {
  const int64_t most = max_tile_tokens(sizes_);
  if (options.tile_tokens < 0 || options.tile_tokens > most) {
    fail("tile_tokens: got {}, expected 0 to {} with {} query heads a KV head and top_k {}", options.tile_tokens, most,
         sizes_.group_size, sizes_.top_k);
  }
  tile_tokens_ = static_cast<int32_t>(options.tile_tokens != 0 ? options.tile_tokens : most);
  // Few tokens are spread over the multiprocessors, at the price of tiles that are not full.
  const auto num_runs = [&] {
    return sizes_.num_kv_heads * ceil_div(int64_t{sizes_.total_q}, int64_t{kQOuterTiles} * tile_tokens_);
  };
  while (options.tile_tokens == 0 && tile_tokens_ > 1 && num_runs() < kRunsPerSm * sizes_.num_sms) {
    tile_tokens_ = (tile_tokens_ + 1) / 2;
  }
  model_ = loop_model(sizes_, inputs_.k.dtype);
  if (dense_) {
    loop_ = PrefillLoop::q_outer;
    why_ = asks_for_choice(options) ? "dense: too few keys for choosing to pay" : "dense: no block index";
  } else if (options.loop_order == LoopOrder::automatic) {
    loop_ = loop_by_shape(sizes_, model_, tile_tokens_);
    why_ = "by its shapes";
    // kv-outer has no place for more key blocks than that, and only the device knows how many there are.
    if (loop_ == PrefillLoop::kv_outer && options.max_kv_blocks > 0) loop_.reset();
  } else {
    loop_ = options.loop_order == LoopOrder::q_outer ? PrefillLoop::q_outer : PrefillLoop::kv_outer;
    why_ = "as asked";
  }
}

// As many query tokens as one KV head's partials leave room for, then as many KV heads; both in equal shares.
void PrefillCall::size_passes(int64_t workspace_limit) {
  if (loop_ == PrefillLoop::q_outer) {  // no partials
    sizes_.range_tokens = std::max(sizes_.total_q, 1);
    sizes_.heads_per_pass = sizes_.num_kv_heads;
    return;
  }
  check_limit("max_kv_blocks, or the key blocks that the shapes allow,", sizes_.num_rows, int64_t{1} << 24);
  const int64_t rows_per_token = int64_t{sizes_.top_k} * sizes_.group_size;
  const int64_t token_bytes = rows_per_token * (sizes_.head_dim * 2 + 8);
  const int64_t limit = std::min(workspace_limit / token_bytes, INT32_MAX / rows_per_token);  // tokens x KV heads
  if (workspace_limit < token_bytes * kRangeStep) {
    fail("workspace_limit: got {} bytes, expected at least {}: the partials of {} query tokens under one KV head",
         workspace_limit, token_bytes * kRangeStep, kRangeStep);
  }
  const int64_t total = std::max<int64_t>(sizes_.total_q, 1);
  const int64_t largest = total <= limit ? total : limit / kRangeStep * kRangeStep;
  const int64_t ranges = ceil_div(total, largest);
  sizes_.range_tokens = static_cast<int32_t>(ranges == 1 ? total : round_up(ceil_div(total, ranges), kRangeStep));
  const int64_t heads = std::clamp<int64_t>(limit / sizes_.range_tokens, 1, sizes_.num_kv_heads);
  const int64_t passes = ceil_div(sizes_.num_kv_heads, heads);
  sizes_.heads_per_pass = static_cast<int32_t>(ceil_div(sizes_.num_kv_heads, passes));
}

void PrefillCall::lay_out() {
  const int64_t tiles = sizes_.entries_per_head() / sizes_.tile_tokens();  // at most, but for parts of tiles
  sizes_.num_slices = static_cast<int32_t>(sizes_.num_sms *
                                           std::clamp<int64_t>(tiles / sizes_.num_sms / kTilesPerRound, 1, kMaxRounds));
  const auto take = [this](int64_t bytes) { return take_workspace(layout_.bytes, bytes); };
  const int64_t heads = sizes_.num_kv_heads, rows = sizes_.num_rows, entries = sizes_.entries_per_head();
  if (index_) {
    layout_.index = take(layout_.index);
    const bool given = inputs_.block_index.num_dims != 0;
    layout_.block_index = given ? 0 : take(int64_t{4} * sizes_.num_kv_heads * sizes_.total_q * sizes_.top_k);
  }
  layout_.kv_lens = take(int64_t{4} * sizes_.num_sequences);
  layout_.cu_rows = take(int64_t{4} * (sizes_.num_sequences + 1));
  layout_.run_claims = take(8);
  layout_.choice = take(sizeof(PrefillChoice));
  if (quantizes_q_) {
    const int64_t q_rows = int64_t{sizes_.range_tokens} * sizes_.num_q_heads;
    layout_.q_data = take(q_rows * sizes_.head_dim);
    layout_.q_row_scale = take(4 * q_rows);
  }
  if (loop_ == PrefillLoop::q_outer) return;
  layout_.offsets = take(4 * heads * rows * sizes_.num_chunks());
  layout_.q_index = take(4 * heads * entries);
  layout_.place = take(4 * heads * entries);
  layout_.blocks = take(static_cast<int64_t>(sizeof(BlockWork)) * heads * rows);
  layout_.num_tiles = take(4 * heads);
  layout_.claims = take(8 * heads);
  layout_.slice_block = take(4 * heads * sizes_.num_slices);
  const int64_t partial_rows = sizes_.heads_per_pass * entries * sizes_.group_size;
  layout_.partials = take(ceil_div(partial_rows, 8) * octet_bytes(sizes_.head_dim));
}

int32_t PrefillCall::num_ranges() const { return static_cast<int32_t>(ceil_div(sizes_.total_q, sizes_.range_tokens)); }

#ifdef TILESIEVE_HAS_CUDA

PrefillMap PrefillCall::map_in(void* workspace) const {
  PrefillMap map;
  map.kv_lens = at<int32_t>(workspace, layout_.kv_lens);
  map.cu_rows = at<int32_t>(workspace, layout_.cu_rows);
  map.offsets = at<int32_t>(workspace, layout_.offsets);
  map.q_index = at<int32_t>(workspace, layout_.q_index);
  map.place = at<int32_t>(workspace, layout_.place);
  map.blocks = at<BlockWork>(workspace, layout_.blocks);
  map.num_tiles = at<int32_t>(workspace, layout_.num_tiles);
  map.claims = at<int32_t>(workspace, layout_.claims);
  map.slice_block = at<int32_t>(workspace, layout_.slice_block);
  map.run_claims = at<int32_t>(workspace, layout_.run_claims);
  if (!loop_) map.choice = at<PrefillChoice>(workspace, layout_.choice);
  return map;
}

PrefillPartials PrefillCall::partials_in(void* workspace) const { return {at<uint8_t>(workspace, layout_.partials)}; }

PrefillBatch PrefillCall::batch_in(void* workspace) const {
  PrefillBatch batch = batch_;
  if (index_ && batch.block_index == nullptr) batch.block_index = at<const int32_t>(workspace, layout_.block_index);
  return batch;
}

void PrefillCall::choose_blocks(void* workspace, Stream stream) const {
  index_call(workspace).run(at<void>(workspace, layout_.index), stream);
}

int32_t PrefillCall::heads_from(int32_t head_begin) const {
  return std::min(sizes_.heads_per_pass, sizes_.num_kv_heads - head_begin);
}

void PrefillCall::sequence_rows(void* workspace, Stream stream) const {
  const cuda::NvtxRange nvtx("sequence rows");
  launch_sequence_rows(sizes_, batch_in(workspace), map_in(workspace), stream);
}

void PrefillCall::map(void* workspace, int32_t range, Stream stream) const {
  const cuda::NvtxRange nvtx("map and schedule");
  launch_map(sizes_, batch_in(workspace), map_in(workspace), range * sizes_.range_tokens, stream);
}

void PrefillCall::quantize(void* workspace, int32_t range, Stream stream) const {
  const cuda::NvtxRange nvtx("quantize q");
  const QuantizedQ out = {at<void>(workspace, layout_.q_data), at<float>(workspace, layout_.q_row_scale)};
  launch_quantize_q(sizes_, inputs_.q.data, inputs_.q.strides[0], inputs_.q.strides[1], range * sizes_.range_tokens,
                    out, stream);
}

AttendTensors PrefillCall::attend_tensors(void* workspace, int32_t range) const {
  const bool paged = sizes_.max_pages != 0;
  const TensorView &q = inputs_.q, &k = inputs_.k, &v = inputs_.v;
  AttendTensors attend;
  attend.dtype = k.dtype;
  if (quantizes_q_) {
    attend.q = at<void>(workspace, layout_.q_data);
    attend.q_tokens = sizes_.range_tokens;
    attend.q_origin = int64_t{range} * sizes_.range_tokens;
    attend.q_token_stride = int64_t{sizes_.num_q_heads} * sizes_.head_dim;
    attend.q_head_stride = sizes_.head_dim;
    attend.q_row_scale = at<float>(workspace, layout_.q_row_scale);
  } else {
    attend.q = q.data;
    attend.q_tokens = q.sizes[0];
    attend.q_token_stride = q.strides[0];
    attend.q_head_stride = q.strides[1];
  }
  attend.k = k.data != nullptr ? k.data : workspace;  // without keys nothing is read, but a map wants an address
  attend.v = v.data != nullptr ? v.data : workspace;
  attend.kv_tokens = k.sizes[paged ? 1 : 0];
  attend.num_pages = paged ? k.sizes[0] : 1;
  attend.k_token_stride = k.strides[paged ? 1 : 0];
  attend.k_head_stride = k.strides[paged ? 2 : 1];
  attend.k_page_stride = paged ? k.strides[0] : 0;
  attend.v_token_stride = v.strides[paged ? 1 : 0];
  attend.v_head_stride = v.strides[paged ? 2 : 1];
  attend.v_page_stride = paged ? v.strides[0] : 0;
  attend.q_scale = check_scale("q_scale", inputs_.q_scale, sizes_.num_kv_heads);
  attend.k_scale = check_scale("k_scale", inputs_.k_scale, sizes_.num_kv_heads);
  attend.softmax_scale = softmax_scale_;
  return attend;
}

void PrefillCall::kv_outer(void* workspace, const AttendTensors& tensors, const AttendMaps& maps, int32_t head_begin,
                           Stream stream) const {
  const cuda::NvtxRange nvtx("attend");
  launch_kv_outer(sizes_, map_in(workspace), tensors, maps, partials_in(workspace), head_begin, heads_from(head_begin),
                  stream);
}

void PrefillCall::choose(void* workspace, Stream stream) const {
  const cuda::NvtxRange nvtx("choose loop");
  launch_choose_loop(sizes_, batch_in(workspace), map_in(workspace), model_, tile_tokens_, stream);
}

void PrefillCall::q_outer(void* workspace, const AttendTensors& tensors, const AttendMaps& maps, int32_t range,
                          Stream stream) const {
  const cuda::NvtxRange nvtx("attend q-outer");
  launch_q_outer(sizes_, batch_in(workspace), map_in(workspace), tensors, maps,
                 check_scale("v_scale", inputs_.v_scale, sizes_.num_kv_heads), output(), range * sizes_.range_tokens,
                 tile_tokens_, stream);
}

PrefillOutput PrefillCall::output() const {
  PrefillOutput output;
  output.o = outputs_.o.data;
  output.f16 = outputs_.o.dtype == DType::f16;
  output.o_token_stride = outputs_.o.strides[0];
  output.o_head_stride = outputs_.o.strides[1];
  output.lse = outputs_.lse.as<float>();
  output.lse_token_stride = outputs_.lse.strides[0];
  output.lse_head_stride = outputs_.lse.strides[1];
  return output;
}

void PrefillCall::combine(void* workspace, int32_t range, int32_t head_begin, Stream stream) const {
  const cuda::NvtxRange nvtx("combine");
  launch_combine(sizes_, map_in(workspace), partials_in(workspace),
                 check_scale("v_scale", inputs_.v_scale, sizes_.num_kv_heads), output(), range * sizes_.range_tokens,
                 head_begin, heads_from(head_begin), stream);
}

void PrefillCall::run(void* workspace, Stream stream) const {
  if (sizes_.total_q == 0) return;
  if (index_) choose_blocks(workspace, stream);
  if (loop_) {
    sequence_rows(workspace, stream);
  } else {
    choose(workspace, stream);
  }
  for (int32_t range = 0; range < num_ranges(); ++range) {
    if (quantizes_q_) quantize(workspace, range, stream);
    const AttendTensors tensors = attend_tensors(workspace, range);
    const AttendMaps maps(sizes_, tensors);
    if (loop_ != PrefillLoop::kv_outer) q_outer(workspace, tensors, maps, range, stream);
    if (loop_ == PrefillLoop::q_outer) continue;
    map(workspace, range, stream);
    for (int32_t head = 0; head < sizes_.num_kv_heads; head += sizes_.heads_per_pass) {
      kv_outer(workspace, tensors, maps, head, stream);
      combine(workspace, range, head, stream);
    }
  }
}

PrefillChoice PrefillCall::counted(void* workspace, Stream stream) const {
  if (index_) choose_blocks(workspace, stream);
  choose(workspace, stream);
  return read_choice(map_in(workspace), stream);
}

std::string PrefillCall::explain(void* workspace, Stream stream) const {
  const auto name = [](PrefillLoop loop) { return loop == PrefillLoop::q_outer ? "q_outer" : "kv_outer"; };
  const std::string tiles =
      fmt::format("tiles of {} query tokens x {} heads, {} tiles a run", tile_tokens_, sizes_.group_size, kQOuterTiles);
  if (loop_) {
    if (dense_) return fmt::format("{} ({}); at most {} keys; {}", name(*loop_), why_, sizes_.max_kv_len, tiles);
    return fmt::format("{} ({}); {} query tokens, top_k {} of at most {} blocks; {}", name(*loop_), why_,
                       sizes_.total_q, sizes_.top_k,
                       ceil_div(int64_t{sizes_.max_kv_len}, int64_t{sizes_.kv_block_size}), tiles);
  }
  const PrefillChoice choice = counted(workspace, stream);
  return fmt::format(
      "{} (least modelled time, decided on the device); {:.0f} picks of {:.0f} blocks; a block is in the union of a "
      "tile {:.0f} times ({:.2f} of the picks), of a run {:.0f} times; kv_outer {:.1f} us, q_outer {:.1f} us; {}",
      name(choice.loop), choice.picks, choice.blocks, choice.tile_blocks,
      choice.tile_blocks / std::max(choice.picks, 1.0f), choice.run_blocks, choice.kv_us, choice.q_us, tiles);
}

namespace {

// A call that is ready to be enqueued.
PrefillCall make_call(const PrefillInputs& inputs, const PrefillOutputs& outputs, const PrefillOptions& options,
                      void* workspace, int64_t workspace_bytes) {
  PrefillCall call(inputs, outputs, options, cuda::hopper_device().num_sms);
  check_workspace(workspace, workspace_bytes, call.layout().bytes);
  return call;
}

}  // namespace

int64_t sparse_prefill_workspace(const PrefillInputs& inputs, const PrefillOutputs& outputs,
                                 const PrefillOptions& options) {
  return PrefillCall(inputs, outputs, options, cuda::current_device().num_sms).layout().bytes;
}

void sparse_prefill(const PrefillInputs& inputs, const PrefillOutputs& outputs, const PrefillOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream) {
  const cuda::NvtxRange nvtx("sparse_prefill");
  make_call(inputs, outputs, options, workspace, workspace_bytes).run(workspace, stream);
}

std::string explain_sparse_prefill(const PrefillInputs& inputs, const PrefillOutputs& outputs,
                                   const PrefillOptions& options, void* workspace, int64_t workspace_bytes,
                                   void* stream) {
  return make_call(inputs, outputs, options, workspace, workspace_bytes).explain(workspace, stream);
}

std::string why_no_prefill() { return cuda::why_no_device(); }

#else  // without CUDA the call exists and says why it cannot run

int64_t sparse_prefill_workspace(const PrefillInputs&, const PrefillOutputs&, const PrefillOptions&) {
  fail("sparse_prefill: {}", why_no_prefill());
}

void sparse_prefill(const PrefillInputs&, const PrefillOutputs&, const PrefillOptions&, void*, int64_t, void*) {
  fail("sparse_prefill: {}", why_no_prefill());
}

std::string explain_sparse_prefill(const PrefillInputs&, const PrefillOutputs&, const PrefillOptions&, void*, int64_t,
                                   void*) {
  fail("sparse_prefill: {}", why_no_prefill());
}

std::string why_no_prefill() { return "this build has no CUDA kernels (TILESIEVE_CUDA=OFF)"; }

#endif

}  // namespace tilesieve::sm90
