// SPDX-License-Identifier: Apache-2.0
// Attention mass of a video's routes: masses of tiles on Hopper, then on the host the routes against them.
#include "tilesieve/video_mass_sm90.h"

#include <algorithm>
#include <string>

#include "base/fail.h"
#include "base/parallel.h"
#include "dense_args_sm90.h"
#include "metrics/video_judge.h"
#include "video_args_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#include "metrics/tile_masses_sm90.h"
#endif

namespace tilesieve::sm90 {

namespace {

// Whether the rows of a table [num_orders, size] are all alike.
template <class T, class Same>
bool is_repeated(const std::vector<T>& table, int64_t size, const Same& same) {
  return std::equal(table.begin() + size, table.end(), table.begin(), same);
}

// The tiles that all orders of a layout are cut into.
class CommonTiles {
 public:
  explicit CommonTiles(const VideoTables& tables) : tiling_(tables.tiling()) {
    const auto same_span = [](const TileSpan& a, const TileSpan& b) {
      return a.first == b.first && a.length == b.length;
    };
    if (!is_repeated(tiling_.q_span, tiling_.num_q_tiles, same_span) ||
        !is_repeated(tiling_.kv_span, tiling_.num_kv_tiles, same_span) ||
        !is_repeated(tiling_.is_video, tiling_.num_kv_tiles, std::equal_to<>())) {
      fail("tables: got orders that are cut into tiles of their own, expected the same tiles for all heads");
    }
    for (int64_t tile = 0; tile < tiling_.num_q_tiles; ++tile) {
      if (is_of_video(tile)) video_queries_.push_back(tile);
    }
  }

  std::vector<int64_t> sample(int64_t num_sampled) const {
    if (num_sampled < 0) fail("num_sampled: got {}, expected 0 (all) or more", num_sampled);
    return sample_evenly(video_queries_, num_sampled);
  }

  // Of a tile of the video's queries.
  bool is_forced(int64_t q_tile, int64_t kv_tile) const {
    const TileSpan& own = tiling_.own[static_cast<size_t>(q_tile)];
    return !is_video(kv_tile) || (kv_tile >= own.first && kv_tile < own.first + own.length);
  }

 private:
  bool is_video(int64_t kv_tile) const { return tiling_.is_video[static_cast<size_t>(kv_tile)] != 0; }

  // Other queries own all tiles of keys, some of which are theirs.
  bool is_of_video(int64_t q_tile) const {
    const TileSpan& own = tiling_.own[static_cast<size_t>(q_tile)];
    bool all = own.length > 0;
    for (int64_t i = 0; i < own.length; ++i) all = all && is_video(own.first + i);
    return all;
  }

  const VideoTiling& tiling_;
  std::vector<int64_t> video_queries_;
};

// Sizes of [num_kv_heads, rows, columns], with sequences in front where there is a dimension of them.
std::vector<int64_t> sizes_of(bool batched, int64_t num_sequences, int64_t heads, int64_t rows, int64_t columns) {
  if (batched) return {num_sequences, heads, rows, columns};
  return {heads, rows, columns};
}

// One sequence of a tensor that may have a dimension of them.
TensorView of_sequence(const TensorView& view, int64_t sequence) {
  if (view.num_dims == 3) return view;
  TensorView one = view;
  one.data = static_cast<std::byte*>(view.data) + sequence * view.strides[0] * size_in_bytes(view.dtype);
  one.num_dims = 3;
  std::copy_n(view.sizes.begin() + 1, 3, one.sizes.begin());
  std::copy_n(view.strides.begin() + 1, 3, one.strides.begin());
  return one;
}

}  // namespace

int64_t num_sampled_tiles(const VideoTables& tables, int64_t num_sampled) {
  return std::ssize(CommonTiles(tables).sample(num_sampled));
}

std::vector<VideoMass> judge_tile_masses(const VideoTables& tables, const TensorView& masses,
                                         std::span<const TensorView> routes, const Execution& execution) {
  const CommonTiles tiles(tables);
  const bool batched = masses.num_dims == 4;
  const int64_t heads = tables.num_kv_heads(), nq = tables.num_q_tiles(), nk = tables.num_kv_tiles();
  const int64_t sequences = batched ? masses.sizes[0] : 1, num_samples = masses.sizes[batched ? 2 : 1];
  const std::vector<int64_t> samples = tiles.sample(std::max<int64_t>(num_samples, 0));
  const auto has_sizes = [](const TensorView& view, const std::vector<int64_t>& sizes) {
    return view.num_dims == std::ssize(sizes) && std::equal(sizes.begin(), sizes.end(), view.sizes.begin());
  };
  if (masses.dtype != DType::f32 || masses.device.kind != DeviceKind::cpu || !masses.is_contiguous() ||
      !has_sizes(masses, sizes_of(batched, sequences, heads, std::ssize(samples), nk)) ||
      (masses.data == nullptr && masses.num_elements() > 0)) {
    fail(
        "masses: got {}, expected contiguous f32[{}, num_sampled_tiles, {}] on the CPU = num_kv_heads, "
        "num_sampled_tiles, num_kv_tiles, or [num_sequences, ...] of these",
        masses.describe(), heads, nk);
  }
  for (const TensorView& route : routes) {
    const int64_t capacity = route.num_dims > 0 ? route.sizes[route.num_dims - 1] : 0;
    if (route.dtype != DType::i32 || route.device.kind != DeviceKind::cpu ||
        !has_sizes(route, sizes_of(batched, sequences, heads, nq, capacity)) ||
        (route.data == nullptr && route.num_elements() > 0)) {
      fail("routes: got {}, expected i32[{}{}, {}, any] on the CPU = {}num_kv_heads, num_q_tiles, capacity",
           route.describe(), batched ? std::to_string(sequences) + ", " : "", heads, nq,
           batched ? "num_sequences, " : "");
    }
  }

  std::vector<std::vector<BlockIndex>> routes_of(static_cast<size_t>(sequences));
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    for (const TensorView& route : routes) {
      routes_of[static_cast<size_t>(sequence)].push_back(BlockIndex::from(of_sequence(route, sequence)));
    }
  }
  const int64_t per_head = sequences * num_samples, num_items = heads * per_head;
  VideoJudge judge(heads, per_head, routes.size());
  std::atomic<int64_t>* done = Progress::begin(execution.progress, num_items);
  parallel_for(execution.num_threads, num_items, done, [&](int, int64_t item) {
    const int64_t head = item / per_head, sequence = item % per_head / num_samples, sample = item % num_samples;
    const int64_t place = samples[static_cast<size_t>(sample)];
    const float* row = masses.as<const float>() + ((sequence * heads + head) * num_samples + sample) * nk;
    judge.judge(
        head, item % per_head, {row, static_cast<size_t>(nk)},
        [&](int64_t kv_tile) { return tiles.is_forced(place, kv_tile); }, routes_of[static_cast<size_t>(sequence)],
        place);
  });
  return judge.means();
}

#ifdef TILESIEVE_HAS_CUDA

void tile_masses(const TensorView& q, const TensorView& k, DenseLayout layout, const VideoTables& tables,
                 double softmax_scale, int64_t num_sampled, const TensorView& masses, void* stream) {
  const cuda::NvtxRange nvtx("tile masses");
  const cuda::DeviceFacts device = cuda::hopper_device();
  DenseShape shape(q, k, layout, {DType::bf16, DType::f16});
  shape.set_softmax_scale(softmax_scale);
  const VideoTiling& tiling = tables.tiling();
  check_tables(shape, tiling);
  check_uploaded(tiling, device.index);
  const std::vector<int64_t> samples = CommonTiles(tables).sample(num_sampled);
  const int64_t num_samples = std::ssize(samples), nk = tables.num_kv_tiles();
  if (q.num_dims == 4) {
    check_tensor("masses", masses, {DType::f32}, {shape.q.sequences, shape.k.heads, num_samples, nk},
                 "num_sequences, num_kv_heads, num_sampled_tiles, num_kv_tiles");
  } else {
    check_tensor("masses", masses, {DType::f32}, {shape.k.heads, num_samples, nk},
                 "num_kv_heads, num_sampled_tiles, num_kv_tiles");
  }
  if (!masses.is_contiguous()) fail("masses: got {}, expected a contiguous tensor", masses.describe());
  if (masses.num_elements() == 0) return;

  TileMassArgs args;
  args.q = query_rows(q, shape.q, shape, tiling);
  args.k = key_rows(k, shape.k, shape, tiling);
  args.logit_scale = shape.softmax_scale * 1.44269504088896f;
  args.num_sampled = static_cast<int32_t>(num_samples);
  args.masses = masses.as<float>();
  launch_tile_masses(args, samples, stream);
}

#else  // without CUDA the call exists and says why it cannot run

void tile_masses(const TensorView&, const TensorView&, DenseLayout, const VideoTables&, double, int64_t,
                 const TensorView&, void*) {
  fail("tile_masses: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

#endif

}  // namespace tilesieve::sm90
