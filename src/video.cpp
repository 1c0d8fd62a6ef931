// SPDX-License-Identifier: Apache-2.0
// Video calls on one screen: some heads at a time are laid out, routed, and attended to or measured.
#include "tilesieve/video.h"

#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "route/veda_projections.h"
#include "tensor/checks.h"
#include "tensor/query_rows.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve {

namespace {

// Of the reordered tensors of some heads. Many threads want several heads at a time to share; few do not.
constexpr int64_t kBytesAtATime = int64_t{256} << 20;
constexpr int64_t kBlocksPerThread = 8;

// Heads first, first + step, ... of a tensor [tokens, heads(, channels)], and tokens [begin, end) of it.
TensorView heads_of(TensorView view, int64_t first, int64_t count, int64_t step = 1) {
  view.data = view.as<uint8_t>() + first * view.strides[1] * size_in_bytes(view.dtype);
  view.sizes[1] = count;
  view.strides[1] *= step;
  return view;
}
TensorView tokens_of(TensorView view, int64_t begin, int64_t count) {
  view.data = view.as<uint8_t>() + begin * view.strides[0] * size_in_bytes(view.dtype);
  view.sizes[0] = count;
  return view;
}

// Some KV heads of a call, and the same call in the order of a layout.
class Heads {
 public:
  Heads(const Problem& problem, const TokenLayout& layout, int64_t begin, int64_t count, const Execution& execution)
      : layout_(layout), begin_(begin), count_(count), execution_(execution), problem_(problem) {
    problem_.num_kv_heads = count;
    problem_.num_q_heads = count * problem.group_size();
    for (int64_t head = begin; head < begin + count; ++head) reorders_ = reorders_ || !layout.is_identity(head);
  }

  const Problem& problem() const { return problem_; }
  // A random route of these heads is the same whoever else is worked on with them.
  VideoRouteOptions route(VideoRouteOptions options) const {
    options.head_begin += begin_;
    return options;
  }

  // The tensors of these heads in slots: where they lie when nothing is to be reordered, else in memory of their own,
  // head after head.
  TensorView queries(const TensorView& q) { return gathered(q, problem_.group_size(), own_q_); }
  TensorView keys(const TensorView& k) { return gathered(k, 1, own_k_); }
  TensorView values(const TensorView& v) { return gathered(v, 1, own_v_); }

  // Where outputs of these heads are to be written in slots, and their way back.
  TensorView outputs(const TensorView& o) { return slots_for(o, problem_.group_size(), own_o_); }
  TensorView lse(const TensorView& lse) { return slots_for(lse, problem_.group_size(), own_lse_); }
  void give_back(const TensorView& o, const TensorView& lse) const {
    if (!reorders_) return;
    move(own_o_.view(), o, problem_.group_size(), false);
    move(own_lse_.view(), lse, problem_.group_size(), false);
  }

 private:
  // As [tokens, heads(, channels)] over memory [heads][tokens](, channels).
  TensorView slots_for(const TensorView& view, int64_t group, Tensor& own) {
    if (!reorders_) return heads_of(view, begin_ * group, count_ * group);
    std::vector<int64_t> sizes(view.sizes.begin(), view.sizes.begin() + view.num_dims);
    sizes[1] = count_ * group;
    std::swap(sizes[0], sizes[1]);
    if (own.view().data == nullptr) own = Tensor(view.dtype, sizes);
    return by_token(own.view());
  }
  static TensorView by_token(TensorView view) {
    std::swap(view.sizes[0], view.sizes[1]);
    std::swap(view.strides[0], view.strides[1]);
    return view;
  }

  TensorView gathered(const TensorView& view, int64_t group, Tensor& own) {
    const TensorView slots = slots_for(view, group, own);
    if (reorders_) move(own.view(), view, group, true);
    return slots;
  }

  // Between `own` and the call's tensor, sequence by sequence, and query head by query head of the groups: a layout is
  // of KV heads.
  void move(const TensorView& own, const TensorView& view, int64_t group, bool gather) const {
    const int64_t len = layout_.num_tokens();
    for (int64_t s = 0; s < problem_.num_sequences(); ++s) {
      for (int64_t g = 0; g < group; ++g) {
        const TensorView slots = tokens_of(heads_of(by_token(own), g, count_, group), s * len, len);
        const TensorView tokens = tokens_of(heads_of(view, begin_ * group + g, count_, group), s * len, len);
        if (gather) {
          gather_tokens(layout_, tokens, slots, begin_, execution_);
        } else {
          scatter_tokens(layout_, slots, tokens, begin_, execution_);
        }
      }
    }
  }

  const TokenLayout& layout_;
  int64_t begin_, count_;
  const Execution& execution_;
  Problem problem_;
  bool reorders_ = false;
  Tensor own_q_, own_k_, own_v_, own_o_, own_lse_;
};

void check_layout(const Problem& problem, const TokenLayout& layout) {
  if (problem.segments.empty()) fail("problem.segments: got none, expected those of a video sequence");
  const int64_t len = TokenSequence{problem.segments}.num_tokens();
  if (layout.num_heads() != problem.num_kv_heads || layout.num_tokens() != len) {
    fail("layout: got one of {} heads and {} tokens, expected num_kv_heads = {} and {}", layout.num_heads(),
         layout.num_tokens(), problem.num_kv_heads, len);
  }
}

void check_attention(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  check_inputs(problem, inputs, outputs);
  check_no_place_twice("o", outputs.o);
  check_no_place_twice("lse", outputs.lse);
  for (const TensorView* scale : {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale}) {
    if (scale->data != nullptr) fail("q_scale, k_scale, v_scale: a video call takes none");
  }
}

// Attends by what choose(problem, q, k) gives for the heads in slots.
template <class Choose>
std::string attend_heads(Heads& heads, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                         const Execution& execution, const Choose& choose) {
  const AttentionInputs in = {heads.queries(inputs.q), heads.keys(inputs.k), heads.values(inputs.v)};
  const AttentionOutputs out = {heads.outputs(outputs.o), heads.lse(outputs.lse)};
  const Tensor block_index = choose(heads.problem(), in.q, in.k);
  AttentionOptions options;
  options.execution = execution;
  const std::string explanation =
      sparse_attention(heads.problem(), in, BlockIndex::from(block_index.view()), out, options);
  heads.give_back(outputs.o, outputs.lse);
  return explanation;
}

// Adds the masses of `share` of all heads to those before them.
void append(VideoMass& all, const VideoMass& some, double share) {
  const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  add(all.mass, some.mass);
  add(all.floor, some.floor);
  add(all.ceiling, some.ceiling);
  add(all.recall, some.recall);
  all.kept_share += some.kept_share * share;
  all.num_measured = some.num_measured;
}

// KV heads that are worked on together: blocks of queries for all threads, in as little memory as that takes.
// `row_bytes`: of a token's reordered numbers under a head, a channel.
int64_t heads_at_a_time(const Problem& problem, int64_t blocks_per_head, int64_t row_bytes,
                        const Execution& execution) {
  const int64_t bytes_per_head = row_bytes * problem.head_dim * problem.total_q();
  const int64_t wanted =
      ceil_div(kBlocksPerThread * resolve_num_threads(execution.num_threads), std::max<int64_t>(1, blocks_per_head));
  return std::clamp<int64_t>(std::min(wanted, kBytesAtATime / std::max<int64_t>(1, bytes_per_head)), 1,
                             problem.num_kv_heads);
}

int64_t heads_to_attend(const Problem& problem, const AttentionOutputs& outputs, const Execution& execution) {
  const int64_t row_bytes = problem.group_size() * size_in_bytes(problem.q_dtype) +
                            2 * size_in_bytes(problem.kv_dtype) + problem.group_size() * size_in_bytes(outputs.o.dtype);
  return heads_at_a_time(problem, problem.num_q_rows(), row_bytes, execution);
}

int64_t heads_to_measure(const Problem& problem, int64_t num_sampled, const Execution& execution) {
  const int64_t row_bytes = problem.group_size() * size_in_bytes(problem.q_dtype) + size_in_bytes(problem.kv_dtype);
  const int64_t blocks = num_sampled > 0 ? num_sampled * problem.num_sequences() : problem.num_q_rows();
  return heads_at_a_time(problem, blocks, row_bytes, execution);
}

// For the steps of a call that counts heads itself.
Execution without_progress(Execution execution) {
  execution.progress = nullptr;
  return execution;
}

template <class Body>
void for_each_heads(const Problem& problem, int64_t at_a_time, const Body& body) {
  for (int64_t begin = 0; begin < problem.num_kv_heads; begin += at_a_time) {
    body(begin, std::min(at_a_time, problem.num_kv_heads - begin));
  }
}

// body(the problem with the tiles of their box, begin, count) of heads that follow each other and have one box.
template <class Body>
void for_each_box(const Problem& problem, std::span<const Box> box_of_head, int64_t at_a_time, const Body& body) {
  Problem tiled = problem;
  for (int64_t begin = 0, count = 0; begin < problem.num_kv_heads; begin += count) {
    const std::span<const Box> rest = box_of_head.subspan(static_cast<size_t>(begin));
    count = std::find_if(rest.begin(), rest.end(), [&](const Box& box) { return box != rest[0]; }) - rest.begin();
    count = std::min(count, at_a_time);
    tiled.segments = veda_sequence({problem.segments}, rest[0]).segments;
    body(tiled, begin, count);
  }
}

}  // namespace

std::string video_attention(const Problem& problem, const AttentionInputs& inputs, const TokenLayout& layout,
                            const VideoRouteOptions& route, const AttentionOutputs& outputs,
                            const Execution& execution) {
  check_attention(problem, inputs, outputs);
  check_layout(problem, layout);
  const int64_t at_a_time = heads_to_attend(problem, outputs, execution);
  const Execution inner = without_progress(execution);
  std::atomic<int64_t>* done = Progress::begin(execution.progress, problem.num_kv_heads);
  std::string explanation;
  for_each_heads(problem, at_a_time, [&](int64_t begin, int64_t count) {
    Heads heads(problem, layout, begin, count, inner);
    explanation =
        attend_heads(heads, inputs, outputs, inner, [&](const Problem& some, const TensorView& q, const TensorView& k) {
          return route_video(some, q, k, heads.route(route), inner);
        });
    if (done != nullptr) *done += count;
  });
  return explanation;
}

std::vector<std::vector<VideoMass>> measure_layouts(const Problem& problem, const TensorView& q, const TensorView& k,
                                                    std::span<const TokenLayout> layouts,
                                                    std::span<const VideoRouteOptions> routes, int64_t num_sampled,
                                                    const Execution& execution) {
  problem.validate();
  check_queries_and_keys(problem, q, k, {});
  for (const TokenLayout& layout : layouts) check_layout(problem, layout);
  const Execution inner = without_progress(execution);
  std::atomic<int64_t>* done =
      Progress::begin(execution.progress, problem.num_kv_heads * static_cast<int64_t>(layouts.size()));
  const int64_t at_a_time = heads_to_measure(problem, num_sampled, execution);

  std::vector<std::vector<VideoMass>> masses(layouts.size(), std::vector<VideoMass>(routes.size()));
  for_each_heads(problem, at_a_time, [&](int64_t begin, int64_t count) {
    for (size_t l = 0; l < layouts.size(); ++l) {
      Heads heads(problem, layouts[l], begin, count, inner);
      const TensorView slots_q = heads.queries(q), slots_k = heads.keys(k);
      std::vector<Tensor> block_indices;
      std::vector<BlockIndex> views;
      for (const VideoRouteOptions& route : routes) {
        block_indices.push_back(route_video(heads.problem(), slots_q, slots_k, heads.route(route), inner));
        views.push_back(BlockIndex::from(block_indices.back().view()));
      }
      const std::vector<VideoMass> some =
          measure_video_mass(heads.problem(), slots_q, slots_k, views, num_sampled, inner);
      for (size_t r = 0; r < routes.size(); ++r) {
        append(masses[l][r], some[r], static_cast<double>(count) / static_cast<double>(problem.num_kv_heads));
      }
      if (done != nullptr) *done += count;
    }
  });
  return masses;
}

std::string veda_attention(const Problem& problem, const AttentionInputs& inputs, std::span<const Box> box_of_head,
                           const VedaProjections& projections, const VedaBudget& budget,
                           const AttentionOutputs& outputs, int64_t head_begin, const Execution& execution) {
  const TokenLayout layout = veda_layout({problem.segments}, box_of_head);
  check_attention(problem, inputs, outputs);
  check_layout(problem, layout);
  check_veda_projections(problem, projections, head_begin);
  const int64_t at_a_time = heads_to_attend(problem, outputs, execution);
  const Execution inner = without_progress(execution);
  std::atomic<int64_t>* done = Progress::begin(execution.progress, problem.num_kv_heads);
  std::string explanation;
  for_each_box(problem, box_of_head, at_a_time, [&](const Problem& tiled, int64_t begin, int64_t count) {
    Heads heads(tiled, layout, begin, count, inner);
    explanation =
        attend_heads(heads, inputs, outputs, inner, [&](const Problem& some, const TensorView& q, const TensorView& k) {
          return route_veda(some, q, k, projections, budget, head_begin + begin, inner);
        });
    if (done != nullptr) *done += count;
  });
  return explanation;
}

VideoMass measure_veda(const Problem& problem, const TensorView& q, const TensorView& k,
                       std::span<const Box> box_of_head, const VedaProjections& projections, const VedaBudget& budget,
                       int64_t head_begin, int64_t num_sampled, const Execution& execution) {
  const TokenLayout layout = veda_layout({problem.segments}, box_of_head);
  problem.validate();
  check_queries_and_keys(problem, q, k, {});
  check_layout(problem, layout);
  check_veda_projections(problem, projections, head_begin);
  const Execution inner = without_progress(execution);
  std::atomic<int64_t>* done = Progress::begin(execution.progress, problem.num_kv_heads);
  const int64_t at_a_time = heads_to_measure(problem, num_sampled, execution);
  VideoMass mass;
  for_each_box(problem, box_of_head, at_a_time, [&](const Problem& tiled, int64_t begin, int64_t count) {
    Heads heads(tiled, layout, begin, count, inner);
    const TensorView slots_q = heads.queries(q), slots_k = heads.keys(k);
    const Tensor ids = route_veda(heads.problem(), slots_q, slots_k, projections, budget, head_begin + begin, inner);
    const BlockIndex route = BlockIndex::from(ids.view());
    append(mass, measure_video_mass(heads.problem(), slots_q, slots_k, {&route, 1}, num_sampled, inner)[0],
           static_cast<double>(count) / static_cast<double>(problem.num_kv_heads));
    if (done != nullptr) *done += count;
  });
  return mass;
}

}  // namespace tilesieve
