// SPDX-License-Identifier: Apache-2.0
// The true attention mass of tiles on a Hopper GPU against float64, and routes judged by it against the CPU's measure
// of the same tensors in slots' order. Skipped where there is no such GPU.
#include "tilesieve/video_mass_sm90.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/number_formats.h"
#include "cuda/device.h"
#include "sm90/dense_case.h"
#include "tilesieve/video_mass.h"
#include "tilesieve/video_route.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kQueries = 128, kKeys = 64;

std::vector<Box> boxes_of(const std::vector<const char*>& texts) {
  std::vector<Box> boxes;
  for (const char* text : texts) boxes.push_back(Box::parse(text));
  return boxes;
}

// A call on the device, of sequences that lie among NaN; and its tensors in slots' order, for the CPU.
struct MassCase {
  DenseCase dense;
  TokenSequence sequence;
  TokenLayout layout;
  sm90::VideoTables tables;
  DeviceMemory table_memory;
  std::unique_ptr<DenseDevice> device;
  Tensor slots_q, slots_k;

  // `shape`: a problem's line without lengths and segments.
  MassCase(const std::string& shape, const std::string& segments, int num_sequences, const std::vector<Box>& boxes,
           uint32_t seed, bool hnd = false)
      : sequence(TokenSequence::parse(segments)), layout(sequence, boxes), tables(sequence, layout) {
    std::string lengths = std::to_string(sequence.num_tokens());
    if (num_sequences == 2) lengths += "," + lengths;
    dense = make_dense_case(shape + " causal=0 qblock=128 block=64 q=" + lengths + " segments=" + segments, seed);
    dense.hnd = hnd;
    dense.gap = 8;
    device = std::make_unique<DenseDevice>(dense, DenseForm::bf16);
    table_memory = DeviceMemory(tables.bytes());
    tables.upload(table_memory.data(), table_memory.bytes());
    slots_q = in_slots(dense.q);
    slots_k = in_slots(dense.k);
  }

  const Problem& problem() const { return dense.problem; }

  Tensor in_slots(const Tensor& tokens) const {
    const TensorView& view = tokens.view();
    const int64_t heads = view.sizes[1], dim = view.sizes[2], len = sequence.num_tokens();
    Tensor slots(view.dtype, {view.sizes[0], heads, dim});
    for (int64_t s = 0; s < view.sizes[0]; ++s) {
      for (int64_t h = 0; h < heads; ++h) {
        const auto order = layout.order(h / (heads / layout.num_heads()));
        const int64_t token = s / len * len + order[static_cast<size_t>(s % len)];
        std::copy_n(tokens.as<uint16_t>() + (token * heads + h) * dim, dim,
                    slots.as<uint16_t>() + (s * heads + h) * dim);
      }
    }
    return slots;
  }

  // [num_sequences, num_kv_heads, tiles, num_kv_tiles]
  Tensor masses(int64_t num_sampled) const {
    const int64_t samples = sm90::num_sampled_tiles(tables, num_sampled);
    const Tensor result(DType::f32, {dense.num_sequences(), problem().num_kv_heads, samples, tables.num_kv_tiles()});
    const int64_t bytes = result.view().num_elements() * 4;
    const DeviceMemory memory(bytes);
    memory.fill(0xff);
    TensorView view = result.view();
    sm90::tile_masses(device->inputs().q, device->inputs().k, device->options().layout, tables, problem().scale(),
                      num_sampled, device_view(memory.data(), DType::f32, {view.sizes.begin(), view.sizes.begin() + 4}),
                      nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    memory.download(view.data, bytes);
    return result;
  }
};

double number(const Tensor& tensor, int64_t i) {
  const uint16_t bits = tensor.as<uint16_t>()[i];
  return static_cast<double>(tensor.view().dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits));
}

struct Span {
  int64_t begin, end;
  bool is_video;
};

std::vector<Span> spans_of(const TokenSequence& sequence, int64_t size) {
  std::vector<Span> spans;
  int64_t first = 0;
  for (const Segment& segment : sequence.segments) {
    for (int64_t i = 0; i < segment.num_tokens; i += size) {
      spans.push_back({first + i, first + std::min(i + size, segment.num_tokens), segment.kind == SegmentKind::video});
    }
    first += segment.num_tokens;
  }
  return spans;
}

// All tiles of the video's queries, in float64.
std::vector<double> plain_masses(const MassCase& c) {
  const Problem& p = c.problem();
  const int64_t len = c.sequence.num_tokens(), group = p.group_size();
  const std::vector<Span> keys = spans_of(c.sequence, kKeys);
  std::vector<double> all, weights(static_cast<size_t>(len));
  for (int64_t s = 0; s < c.dense.num_sequences(); ++s) {
    for (int64_t h = 0; h < p.num_kv_heads; ++h) {
      for (const Span& tile : spans_of(c.sequence, kQueries)) {
        if (!tile.is_video) continue;
        std::vector<double> masses(keys.size());
        for (int64_t row = 0; row < (tile.end - tile.begin) * group; ++row) {
          const int64_t q = ((s * len + tile.begin + row / group) * p.num_q_heads + h * group + row % group);
          double total = 0;
          for (int64_t k = 0; k < len; ++k) {
            double logit = 0;
            for (int64_t d = 0; d < p.head_dim; ++d) {
              logit += number(c.slots_q, q * p.head_dim + d) *
                       number(c.slots_k, ((s * len + k) * p.num_kv_heads + h) * p.head_dim + d);
            }
            total += weights[static_cast<size_t>(k)] = std::exp(logit * p.scale());  // logits are small
          }
          for (size_t b = 0; b < keys.size(); ++b) {
            for (int64_t k = keys[b].begin; k < keys[b].end; ++k) {
              masses[b] +=
                  weights[static_cast<size_t>(k)] / total / static_cast<double>((tile.end - tile.begin) * group);
            }
          }
        }
        all.insert(all.end(), masses.begin(), masses.end());
      }
    }
  }
  return all;
}

// A route of the CPU as a call on the device writes it, sequences first.
Tensor by_sequence(const Tensor& route, int64_t num_sequences) {
  const int64_t heads = route.view().sizes[0], rows = route.view().sizes[1] / num_sequences;
  const int64_t capacity = route.view().sizes[2];
  Tensor result(DType::i32, {num_sequences, heads, rows, capacity});
  for (int64_t i = 0; i < num_sequences * heads; ++i) {
    std::copy_n(route.as<int32_t>() + (i % heads * num_sequences + i / heads) * rows * capacity, rows * capacity,
                result.as<int32_t>() + i * rows * capacity);
  }
  return result;
}

class VideoMassSm90 : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

struct Shape {
  const char* shape;
  const char* segments;
  int num_sequences;
  std::vector<const char*> boxes;
  bool hnd;
};

const Shape kShapes[] = {
    {"hq=3 hkv=3 d=128 dtype=bf16", "text:70,audio:130,video:9x10x11", 1, {"raster", "4x4x4", "2x4x8"}, false},
    {"hq=4 hkv=2 d=64 dtype=bf16", "video:5x7x9,text:1,audio:63,video:3x4x5", 2, {"2x2x4", "raster"}, true},
    {"hq=6 hkv=2 d=40 dtype=f16", "text:65,video:400", 2, {"raster", "raster"}, false},
    {"hq=1 hkv=1 d=8 dtype=bf16", "video:1x1x1", 1, {"raster"}, false},
    {"hq=2 hkv=2 d=104 dtype=f16", "video:4x8x8,reference:3", 1, {"4x4x4", "1x8x8"}, true},
};

MassCase make_case(const Shape& shape, uint32_t seed) {
  return MassCase(shape.shape, shape.segments, shape.num_sequences, boxes_of(shape.boxes), seed, shape.hnd);
}

TEST_F(VideoMassSm90, MassesAreThoseOfFloat64) {
  uint32_t seed = 0;
  for (const Shape& shape : kShapes) {
    const MassCase c = make_case(shape, ++seed);
    const Tensor got = c.masses(0);
    const std::vector<double> want = plain_masses(c);
    ASSERT_EQ(got.view().num_elements(), std::ssize(want)) << shape.segments;
    for (size_t i = 0; i < want.size(); ++i) {
      const double error = std::abs(static_cast<double>(got.as<float>()[i]) - want[i]);
      ASSERT_LE(error, 1e-5) << shape.shape << " " << shape.segments << ": " << i << " of " << want.size();
    }
  }
}

TEST_F(VideoMassSm90, RoutesAreJudgedAsByTheCpu) {
  uint32_t seed = 10;
  for (const Shape& shape : kShapes) {
    const MassCase c = make_case(shape, ++seed);
    const Problem& p = c.problem();
    const TensorView q = c.slots_q.view(), k = c.slots_k.view();
    const Tensor narrow = route_video(p, q, k, {.budget = 0.2}), wide = route_video(p, q, k, {.budget = 0.6});
    const BlockIndex routes[] = {BlockIndex::from(narrow.view()), BlockIndex::from(wide.view())};
    const int64_t n = c.dense.num_sequences();
    const Tensor narrow_by_sequence = by_sequence(narrow, n), wide_by_sequence = by_sequence(wide, n);
    const TensorView device_routes[] = {narrow_by_sequence.view(), wide_by_sequence.view()};
    for (int64_t num_sampled : {0, 1, 3}) {
      const auto want = measure_video_mass(p, q, k, routes, num_sampled);
      const auto got = sm90::judge_tile_masses(c.tables, c.masses(num_sampled).view(), device_routes);
      ASSERT_EQ(got.size(), 2u);
      for (size_t r = 0; r < 2; ++r) {
        EXPECT_EQ(got[r].num_measured, want[r].num_measured);
        EXPECT_EQ(got[r].kept_share, want[r].kept_share);
        for (size_t h = 0; h < want[r].mass.size(); ++h) {
          EXPECT_NEAR(got[r].mass[h], want[r].mass[h], 1e-5) << shape.segments;
          EXPECT_NEAR(got[r].floor[h], want[r].floor[h], 1e-5) << shape.segments;
          EXPECT_NEAR(got[r].ceiling[h], want[r].ceiling[h], 1e-5) << shape.segments;
          EXPECT_NEAR(got[r].recall[h], want[r].recall[h], 1e-5) << shape.segments;
        }
      }
    }
  }
}

TEST_F(VideoMassSm90, ATilesMassesAreTheSameBitsHoweverManyAreSampled) {
  // 520 tiles of queries: more than one launch takes.
  const MassCase c("hq=1 hkv=1 d=16 dtype=bf16", "text:33,video:8x80x104", 1, boxes_of({"4x4x4"}), 5);
  const Tensor all = c.masses(0), again = c.masses(0), some = c.masses(52);
  const int64_t nk = c.tables.num_kv_tiles();
  ASSERT_EQ(all.view().sizes[2], 520);
  EXPECT_EQ(std::memcmp(all.view().data, again.view().data, static_cast<size_t>(520 * nk * 4)), 0);
  for (int64_t i = 0; i < 52; ++i) {
    EXPECT_EQ(std::memcmp(some.as<float>() + i * nk, all.as<float>() + (10 * i + 5) * nk, static_cast<size_t>(nk * 4)),
              0)
        << i;
  }
  for (int64_t i = 0; i < 520; ++i) {
    double total = 0;
    for (int64_t b = 0; b < nk; ++b) total += static_cast<double>(all.as<float>()[i * nk + b]);
    ASSERT_NEAR(total, 1, 1e-5) << i;
  }
}

// One key's logits are 300 above or below all others, in base 2 far outside of f32's range; and a call of 3 dimensions.
TEST_F(VideoMassSm90, LargeLogitsNeitherOverflowNorVanish) {
  const std::string shape = "hq=1 hkv=1 d=64 dtype=bf16", segments = "text:10,video:2x8x13";
  const Shape plain = {shape.c_str(), segments.c_str(), 1, {"raster"}, false};
  for (float sign : {1.0f, -1.0f}) {
    MassCase c = make_case(plain, 7);
    for (int64_t i = 0; i < c.dense.q.view().num_elements(); ++i) c.dense.q.as<uint16_t>()[i] = bf16_from_f32(2.0f);
    for (int64_t d = 0; d < 64; ++d) c.dense.k.as<uint16_t>()[100 * 64 + d] = bf16_from_f32(sign * 2400.0f / 128.0f);
    c.device = std::make_unique<DenseDevice>(c.dense, DenseForm::bf16);
    c.slots_q = c.in_slots(c.dense.q), c.slots_k = c.in_slots(c.dense.k);
    const Tensor got = c.masses(0);
    const std::vector<double> want = plain_masses(c);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(got.as<float>()[i]), want[i], 1e-5) << sign << ": " << i;
    }
    const auto first = [](TensorView view) {
      --view.num_dims;
      std::copy_n(view.sizes.begin() + 1, 3, view.sizes.begin());
      std::copy_n(view.strides.begin() + 1, 3, view.strides.begin());
      return view;
    };
    const DeviceMemory memory(got.view().num_elements() * 4);
    sm90::tile_masses(first(c.device->inputs().q), first(c.device->inputs().k), sm90::DenseLayout::nhd, c.tables, 0, 0,
                      first(device_view(memory.data(), DType::f32, {1, 1, 2, c.tables.num_kv_tiles()})), nullptr);
    std::vector<float> flat(want.size());
    memory.download(flat.data(), memory.bytes());
    EXPECT_EQ(std::memcmp(flat.data(), got.view().data, flat.size() * 4), 0);
  }
}

TEST_F(VideoMassSm90, RefusesByName) {
  const MassCase c = make_case(kShapes[0], 1);
  const TensorView q = c.device->inputs().q, k = c.device->inputs().k;
  const int64_t nk = c.tables.num_kv_tiles();
  const DeviceMemory memory(3 * 8 * nk * 4);
  const auto masses = [&](std::vector<int64_t> sizes) { return device_view(memory.data(), DType::f32, sizes); };
  const auto refuses = [&](const std::string& text, TensorView some_q, TensorView some_k,
                           const sm90::VideoTables& tables, double scale, int64_t num_sampled, const TensorView& out) {
    try {
      sm90::tile_masses(some_q, some_k, sm90::DenseLayout::nhd, tables, scale, num_sampled, out, nullptr);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  const TensorView fit = masses({1, 3, 8, nk});
  refuses("num_sampled: got -1", q, k, c.tables, 0, -1, fit);
  refuses("softmax_scale: got -1", q, k, c.tables, -1, 0, fit);
  refuses("masses: got f32[1, 3, 7, ", q, k, c.tables, 0, 0, masses({1, 3, 7, nk}));
  refuses("masses: got f32[3, 8, ", q, k, c.tables, 0, 0, masses({3, 8, nk}));
  TensorView shorter = q;
  --shorter.sizes[1];
  refuses("q: got 1189 tokens, expected 1190 as the tables have", shorter, k, c.tables, 0, 0, fit);
  refuses("k: got 1189 tokens", q, shorter, c.tables, 0, 0, fit);
  TensorView fewer = q, one = k;
  fewer.sizes[2] = one.sizes[2] = 1;
  refuses("tables: got some of 3 KV heads, expected the 1 of k", fewer, one, c.tables, 0, 0, fit);
  TensorView f32 = q;
  f32.dtype = DType::f32;
  refuses("q: got f32", f32, k, c.tables, 0, 0, fit);
  TensorView host = k;
  host.device.kind = DeviceKind::cpu;
  refuses("k: lies on the CPU", q, host, c.tables, 0, 0, fit);
  refuses("tables: not on the device", q, k, sm90::VideoTables(c.sequence, c.layout), 0, 0, fit);
}

}  // namespace
}  // namespace tilesieve::testing
