// SPDX-License-Identifier: Apache-2.0
// Attention over lists of tiles of 128 queries and 64 keys on a Hopper GPU: the Sage form against the CPU's model
// within its bound, given the same codes; the bf16 form against float64. Skipped where there is no such GPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "attend/sm90/sage_sparse.h"
#include "base/number_formats.h"
#include "base/rounding.h"
#include "cuda/device.h"
#include "sm90/dense_case.h"

namespace tilesieve::testing {
namespace {

constexpr SageOptions kOptions = {.kernel = SageKernel::sm90_sparse};

enum class Lists { none, some };

// How many tiles a row of lists has, of `all`.
using CountOf = int64_t (*)(int64_t row, int64_t all);

// Lists of a problem of one sequence, ascending, on the host and on the device; and the spans of tiles.
class TileLists {
 public:
  // `every`: only every so many-th tile is in any list.
  TileLists(const Problem& problem, CountOf count_of, uint32_t seed, int32_t every = 1)
      : q_tiles_(sage_q_tiles(problem, kOptions)), kv_tiles_(sage_kv_blocks(problem, kOptions)) {
    const int64_t all = ceil_div(std::ssize(kv_tiles_), every), rows = std::ssize(q_tiles_);
    capacity_ = all + 1;
    std::mt19937 random(seed);
    for (int64_t i = 0; i < problem.num_kv_heads * rows; ++i) {
      const int64_t count = count_of(i, all);
      counts_.push_back(static_cast<int32_t>(count));
      std::vector<int32_t> ids(static_cast<size_t>(all)), picked;
      for (size_t t = 0; t < ids.size(); ++t) ids[t] = static_cast<int32_t>(t) * every;
      std::sample(ids.begin(), ids.end(), std::back_inserter(picked), count, random);
      picked.resize(static_cast<size_t>(capacity_), -1);
      ids_.insert(ids_.end(), picked.begin(), picked.end());
    }
    index_ = {.kv_block = ids_.data(),
              .num_heads = problem.num_kv_heads,
              .num_q_rows = rows,
              .capacity = capacity_,
              .head_stride = rows * capacity_,
              .row_stride = capacity_};
    device_ids_ = DeviceMemory(ids_);
    device_counts_ = DeviceMemory(counts_);
    device_q_ = DeviceMemory(spans(q_tiles_));
    device_kv_ = DeviceMemory(spans(kv_tiles_));
    next_ = DeviceMemory(int64_t{4});
  }

  const BlockIndex& index() const { return index_; }
  const std::vector<SageTile>& q_tiles() const { return q_tiles_; }
  const std::vector<SageTile>& kv_tiles() const { return kv_tiles_; }

  sm90::SparseLists lists(Lists kind, const Problem& problem, bool has_spans) const {
    sm90::SparseLists lists;
    if (kind != Lists::none) {
      lists.kv_tile = static_cast<const int32_t*>(device_ids_.data());
      lists.head_stride = index_.head_stride;
      lists.row_stride = index_.row_stride;
      lists.capacity = static_cast<int32_t>(capacity_);
    }
    if (kind == Lists::some) lists.count = static_cast<const int32_t*>(device_counts_.data());
    if (has_spans) {
      lists.q.span = static_cast<const sm90::TileSpan*>(device_q_.data());
      lists.kv.span = static_cast<const sm90::TileSpan*>(device_kv_.data());
    }
    lists.q.num_tiles = static_cast<int32_t>(q_tiles_.size());
    lists.kv.num_tiles = static_cast<int32_t>(kv_tiles_.size());
    lists.q.num_tokens = static_cast<int32_t>(problem.total_q());
    lists.kv.num_tokens = static_cast<int32_t>(problem.total_kv());
    lists.next_tile = static_cast<int32_t*>(next_.data());
    return lists;
  }

 private:
  static std::vector<sm90::TileSpan> spans(const std::vector<SageTile>& tiles) {
    std::vector<sm90::TileSpan> spans;
    for (const SageTile& t : tiles) {
      spans.push_back({static_cast<int32_t>(t.begin), static_cast<int32_t>(t.end - t.begin)});
    }
    return spans;
  }

  std::vector<SageTile> q_tiles_, kv_tiles_;
  int64_t capacity_ = 0;
  std::vector<int32_t> ids_, counts_;
  BlockIndex index_;
  DeviceMemory device_ids_, device_counts_, device_q_, device_kv_, next_;
};

DeviceMemory on_device(const TensorView& tensor) {
  DeviceMemory memory(tensor.num_elements() * size_in_bytes(tensor.dtype));
  memory.upload(tensor.data, memory.bytes());
  return memory;
}

// o and LSE of a kernel, poisoned before it.
struct Outputs {
  explicit Outputs(const Problem& p)
      : o(DType::bf16, {p.total_q(), p.num_q_heads, p.head_dim}),
        lse(DType::f32, {p.total_q(), p.num_q_heads}),
        device_o(o.view().num_elements() * 2),
        device_lse(lse.view().num_elements() * 4) {
    device_o.fill(0xff);
    device_lse.fill(0xff);
  }

  void fill(sm90::DenseArgs& args, const Problem& p) const {
    args.num_sequences = 1;
    args.q_len = static_cast<int32_t>(p.total_q());
    args.kv_len = static_cast<int32_t>(p.total_kv());
    args.num_q_heads = static_cast<int32_t>(p.num_q_heads);
    args.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
    args.group_size = static_cast<int32_t>(p.group_size());
    args.head_dim = static_cast<int32_t>(p.head_dim);
    args.logit_scale = static_cast<float>(p.scale()) * 1.44269504088896f;
    args.o = {device_o.data(), 0, p.head_dim, p.num_q_heads * p.head_dim};
    args.lse = {device_lse.data(), 0, 1, p.num_q_heads};
  }

  void take() const {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    device_o.download(o.view().data, device_o.bytes());
    device_lse.download(lse.view().data, device_lse.bytes());
  }

  bool operator==(const Outputs& other) const {
    return std::memcmp(o.view().data, other.o.view().data, static_cast<size_t>(device_o.bytes())) == 0 &&
           std::memcmp(lse.view().data, other.lse.view().data, static_cast<size_t>(device_lse.bytes())) == 0;
  }

  Tensor o, lse;
  DeviceMemory device_o, device_lse;
};

class SparseTiles : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

Outputs run_sage(const Problem& p, const SageTensors& codes, const TileLists& tiles, Lists kind) {
  Outputs out(p);
  const DeviceMemory q = on_device(codes.q.codes.view()), k = on_device(codes.k.codes.view()),
                     v = on_device(codes.v.codes.view()), q_scale = on_device(codes.q.scale.view()),
                     k_scale = on_device(codes.k.scale.view()), v_scale = on_device(codes.v.scale.view());
  sm90::SageSparseArgs args;
  out.fill(args, p);
  args.q = q.data(), args.k = k.data(), args.v = v.data();
  args.q_scale = static_cast<const float*>(q_scale.data());
  args.k_scale = static_cast<const float*>(k_scale.data());
  args.v_scale = static_cast<const float*>(v_scale.data());
  args.lists = tiles.lists(kind, p, true);
  args.num_q_slots = static_cast<int32_t>(codes.q.codes.view().sizes[1]);
  args.num_k_slots = static_cast<int32_t>(codes.k.codes.view().sizes[1]);
  sm90::launch_sage_sparse(args, static_cast<int>(sage_dim(p)), cuda::hopper_device().num_sms, nullptr);
  out.take();
  return out;
}

Outputs run_bf16(const DenseCase& c, const TileLists& tiles, Lists kind) {
  const Problem& p = c.problem;
  Outputs out(p);
  const DeviceMemory q = on_device(c.q.view()), k = on_device(c.k.view()), v = on_device(c.v.view());
  sm90::SparseArgs args;
  out.fill(args, p);
  args.lists = tiles.lists(kind, p, !p.segments.empty());
  const int64_t q_row = p.num_q_heads * p.head_dim, kv_row = p.num_kv_heads * p.head_dim;
  const sm90::DenseTensors tensors = {{q.data(), p.total_q() * q_row, p.head_dim, q_row},
                                      {k.data(), p.total_kv() * kv_row, p.head_dim, kv_row},
                                      {v.data(), p.total_kv() * kv_row, p.head_dim, kv_row}};
  sm90::launch_sparse(tensors, args, static_cast<int>(sage_dim(p)), cuda::hopper_device().num_sms, nullptr);
  out.take();
  return out;
}

void expect_model(const DenseCase& c, const SageTensors& codes, const TileLists& tiles, Lists kind) {
  const Problem& p = c.problem;
  const Outputs got = run_sage(p, codes, tiles, kind);
  const Tensor o(DType::bf16, {p.total_q(), p.num_q_heads, p.head_dim}), lse(DType::f32, {p.total_q(), p.num_q_heads});
  const Tensor bound(DType::f32, {p.total_q(), p.num_q_heads, p.head_dim});
  SageOptions options = kOptions;
  options.smooth_k = false;
  sage_attend_model(p, c.q.view(), codes, kind == Lists::none ? nullptr : &tiles.index(),
                    {o.view(), lse.view(), bound.view()}, options);
  for (int64_t i = 0; i < o.view().num_elements(); ++i) {
    const float a = f32_from_bf16(got.o.as<uint16_t>()[i]), b = f32_from_bf16(o.as<uint16_t>()[i]);
    ASSERT_LE(std::abs(static_cast<double>(a) - b), bound.as<float>()[i]) << p.to_line() << ": o " << i;
  }
  for (int64_t i = 0; i < lse.view().num_elements(); ++i) {
    const float a = got.lse.as<float>()[i], b = lse.as<float>()[i];
    if (a == b) continue;  // infinities
    ASSERT_NEAR(a, b, 4e-6f * std::max(10.0f, std::abs(b))) << p.to_line() << ": lse " << i;
  }
}

void expect_float64(const DenseCase& c, const TileLists& tiles, Lists kind) {
  const Problem& p = c.problem;
  const Outputs got = run_bf16(c, tiles, kind);
  const auto number = [](const Tensor& t, int64_t i) {
    return static_cast<double>(f32_from_bf16(t.as<uint16_t>()[i]));
  };
  double largest = 0, scale = 0;
  for (int64_t row = 0; row < std::ssize(tiles.q_tiles()); ++row) {
    const SageTile& tile = tiles.q_tiles()[static_cast<size_t>(row)];
    for (int64_t q = tile.begin; q < tile.end; ++q) {
      for (int64_t h = 0; h < p.num_q_heads; ++h) {
        const int64_t kv_head = h / p.group_size();
        std::vector<double> acc(static_cast<size_t>(p.head_dim));
        double sum = 0;  // logits are small: no maximum needed
        for (int64_t slot = 0; slot < tiles.index().capacity; ++slot) {
          const int64_t id = kind == Lists::none ? slot : tiles.index().at(kv_head, row, slot);
          if (id < 0 || id >= std::ssize(tiles.kv_tiles())) continue;
          const SageTile& keys = tiles.kv_tiles()[static_cast<size_t>(id)];
          for (int64_t key = keys.begin; key < keys.end; ++key) {
            double logit = 0;
            for (int64_t d = 0; d < p.head_dim; ++d) {
              logit += number(c.q, (q * p.num_q_heads + h) * p.head_dim + d) *
                       number(c.k, (key * p.num_kv_heads + kv_head) * p.head_dim + d);
            }
            const double weight = std::exp(logit * p.scale());
            sum += weight;
            for (int64_t d = 0; d < p.head_dim; ++d) {
              acc[static_cast<size_t>(d)] += weight * number(c.v, (key * p.num_kv_heads + kv_head) * p.head_dim + d);
            }
          }
        }
        const int64_t place = q * p.num_q_heads + h;
        const float lse = got.lse.as<float>()[place];
        if (sum == 0) {
          ASSERT_EQ(lse, -std::numeric_limits<float>::infinity());
        } else {
          ASSERT_NEAR(lse, std::log(sum), 1e-4);
        }
        for (int64_t d = 0; d < p.head_dim; ++d) {
          const double want = sum == 0 ? 0 : acc[static_cast<size_t>(d)] / sum;
          largest = std::max(largest, std::abs(number(got.o, place * p.head_dim + d) - want));
          scale = std::max(scale, std::abs(want));
        }
      }
    }
  }
  EXPECT_LE(largest, 0x1p-7 * scale) << p.to_line();  // an ulp of the largest output: P and o are rounded to bf16
}

constexpr const char* kProblems[] = {
    "hq=2 hkv=2 d=128 q=300 kv=700 causal=0 dtype=bf16 qblock=128 block=64",
    "hq=4 hkv=2 d=64 q=257 kv=513 causal=0 dtype=bf16 qblock=128 block=64",
    "hq=1 hkv=1 d=96 q=130 kv=1 causal=0 dtype=bf16 qblock=128 block=64",
    "hq=2 hkv=1 d=40 q=128 kv=2304 causal=0 dtype=bf16 qblock=128 block=64",
    "hq=2 hkv=2 d=128 q=802 causal=0 dtype=bf16 qblock=128 block=64 "
    "segments=text:1,conditioning:70,reference:5,audio:200,video:526",
};

int64_t uneven(int64_t row, int64_t all) {
  return row % 4 == 0 ? std::min<int64_t>(row / 4, all) : row * 7 % (all + 1);
}
int64_t everything(int64_t, int64_t all) { return all; }

TEST_F(SparseTiles, SageStaysWithinTheBoundOfTheModel) {
  uint32_t seed = 0;
  for (const char* line : kProblems) {
    const DenseCase c = make_dense_case(line, ++seed);
    SageOptions options = kOptions;
    options.smooth_k = false;
    const SageTensors codes = sage_quantize(c.problem, c.inputs(), options);
    const TileLists tiles(c.problem, uneven, seed);
    for (Lists kind : {Lists::none, Lists::some}) expect_model(c, codes, tiles, kind);
  }
}

TEST_F(SparseTiles, Bf16IsNearFloat64) {
  uint32_t seed = 0;
  for (const char* line : kProblems) {
    const DenseCase c = make_dense_case(line, ++seed, 0.5f);
    const TileLists tiles(c.problem, uneven, seed);
    for (Lists kind : {Lists::none, Lists::some}) expect_float64(c, tiles, kind);
  }
}

TEST_F(SparseTiles, AFullListIsNoListBitForBit) {
  for (const char* line : kProblems) {
    const DenseCase c = make_dense_case(line, 3);
    const SageTensors codes = sage_quantize(c.problem, c.inputs(), kOptions);
    const TileLists tiles(c.problem, everything, 1);
    const Outputs sage = run_sage(c.problem, codes, tiles, Lists::none), bf16 = run_bf16(c, tiles, Lists::none);
    EXPECT_TRUE(run_sage(c.problem, codes, tiles, Lists::some) == sage) << line;
    EXPECT_TRUE(run_bf16(c, tiles, Lists::some) == bf16) << line;
  }
}

// Tiles of keys that no list has are NaN; some lie right behind a short tile that lists have.
TEST_F(SparseTiles, WhatNoListHasDoesNotMatter) {
  DenseCase c = make_dense_case(kProblems[4], 4);
  const TileLists tiles(c.problem, uneven, 2, 2);
  const Outputs before = run_bf16(c, tiles, Lists::some);
  for (size_t t = 1; t < tiles.kv_tiles().size(); t += 2) {
    const SageTile& tile = tiles.kv_tiles()[t];
    for (const Tensor* tensor : {&c.k, &c.v}) {
      std::fill_n(tensor->as<uint16_t>() + tile.begin * 2 * 128, (tile.end - tile.begin) * 2 * 128, uint16_t{0x7fff});
    }
  }
  EXPECT_TRUE(run_bf16(c, tiles, Lists::some) == before);
}

}  // namespace
}  // namespace tilesieve::testing
