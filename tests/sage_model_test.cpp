// SPDX-License-Identifier: Apache-2.0
// The model of Sage's kernels against a rendition of their loop, bit for bit, and against float64 attention.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "real_tensors.h"
#include "reference.h"
#include "stored_numbers.h"
#include "test_inputs.h"

namespace tilesieve::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string text_of(const SageOptions& o) {
  return fmt::format("{} {} {} {}", name_of(o.kernel), name_of(o.groups), name_of(o.accumulator),
                     o.smooth_k ? "smooth" : "plain");
}

std::vector<SageOptions> all_options() {
  std::vector<SageOptions> all;
  for (SageGroups groups : {SageGroups::per_thread, SageGroups::per_warp}) {
    for (bool smooth : {true, false}) {
      all.push_back({SageKernel::sm89, groups, SageAccumulator::f32, smooth});
      all.push_back({SageKernel::sm89, groups, SageAccumulator::f16, smooth});
      all.push_back({SageKernel::sm90, groups, SageAccumulator::f32, smooth});
    }
  }
  return all;
}

int64_t block_of(const SageOptions& o) { return o.kernel == SageKernel::sm89 ? 64 : 128; }
int64_t tile_of(const SageOptions& o) { return o.kernel == SageKernel::sm89 ? 128 : 64; }

// What a chip does otherwise than the model.
struct Chip {
  float (*exp2)(float) = [](float x) { return static_cast<float>(std::exp2(static_cast<double>(x))); };
  float (*reciprocal)(float) = [](float x) { return 1.0f / x; };
  bool cuts_products = false;  // the tensor core aligns 33 numbers to the largest and keeps 13 bits of fraction
};

const std::array<double, 256>& e4m3_numbers() {
  static const std::array<double, 256> numbers = [] {
    std::array<double, 256> all;
    for (uint32_t code = 0; code < 256; ++code) all[code] = decode(DType::f8_e4m3, code);
    return all;
  }();
  return numbers;
}

float flush(float x) { return std::abs(x) < 0x1p-126f ? 0.0f * x : x; }

// The loop as the sources have it: over the blocks of a tile of queries, masked logits -5e6, m from -5e6, d from 1.
class Rendition {
 public:
  Rendition(const Problem& problem, const TensorView& q, const SageTensors& tensors, const SageOptions& options,
            const Chip& chip = {})
      : p_(problem), q_(q), t_(tensors), o_(options), chip_(chip) {}

  std::vector<float> o, lse;  // [total_q, heads, head_dim], [total_q, heads]

  void run(const BlockIndex* lists) {
    o.assign(static_cast<size_t>(p_.total_q() * p_.num_q_heads * p_.head_dim), -1);
    lse.assign(static_cast<size_t>(p_.total_q() * p_.num_q_heads), -1);
    int64_t q_first = 0, kv_first_block = 0, q_first_tile = 0, list = 0;
    for (size_t s = 0; s < p_.q_lens.size(); ++s) {
      const std::vector<int64_t> blocks = block_bounds(p_, p_.kv_lens[s], block_of(o_));
      const std::vector<int64_t> tiles = block_bounds(p_, p_.q_lens[s], tile_of(o_));
      const std::vector<int64_t> rows = lists == nullptr ? tiles : block_bounds(p_, p_.q_lens[s], p_.q_block_size);
      for (size_t r = 0; r + 1 < rows.size(); ++r, ++list) {
        for (int64_t h = 0; h < p_.num_q_heads; ++h) {
          std::set<int32_t> picks;
          const int32_t all = static_cast<int32_t>(blocks.size()) - 1;
          if (lists == nullptr) {
            for (int32_t b = 0; b < all; ++b) picks.insert(b);
          } else {
            for (int64_t slot = 0; slot < lists->capacity; ++slot) {
              const int32_t id = lists->at(h / p_.group_size(), list, slot);
              if (id >= 0 && id < all) picks.insert(id);
            }
          }
          const int64_t offset = p_.causal ? p_.kv_lens[s] - p_.q_lens[s] : p_.kv_lens[s];
          tile({s, h, q_first, rows[r], rows[r + 1], q_first_tile, kv_first_block, offset, tiles, blocks, picks});
        }
      }
      q_first += p_.q_lens[s];
      q_first_tile += std::ssize(tiles) - 1;
      kv_first_block += std::ssize(blocks) - 1;
    }
  }

 private:
  struct Tile {
    size_t sequence;
    int64_t head, q_first, row_begin, row_end, first_tile, first_block, offset;
    const std::vector<int64_t>&tiles, &blocks;
    std::set<int32_t> picks;
  };

  void tile(Tile t) {
    const auto visible = [&](int64_t row) {
      const int64_t kv_len = p_.kv_lens[t.sequence];
      return p_.causal ? std::clamp<int64_t>(t.offset + row + 1, 0, kv_len) : kv_len;
    };
    // Iterations end where the last row of the tile sees nothing more.
    std::erase_if(t.picks, [&](int32_t b) { return t.blocks[static_cast<size_t>(b)] >= visible(t.row_end - 1); });
    for (int64_t row = t.row_begin; row < t.row_end; ++row) {
      const size_t in_tile =
          static_cast<size_t>(std::upper_bound(t.tiles.begin(), t.tiles.end(), row) - t.tiles.begin() - 1);
      const int64_t tile_id = t.first_tile + static_cast<int64_t>(in_tile), place = row - t.tiles[in_tile];
      float m = -5000000.0f, d[4] = {1, 1, 1, 1};
      std::vector<float> acc(static_cast<size_t>(dim()), 0.0f);
      int64_t position = 0, seen = 0;
      for (int32_t b : t.picks) {
        const int64_t begin = t.blocks[static_cast<size_t>(b)], end = t.blocks[static_cast<size_t>(b) + 1];
        bool pre = position++ >= std::ssize(t.picks) - (o_.kernel == SageKernel::sm89 ? 2 : 1);
        for (int64_t i = 0; i < block_of(o_); ++i) pre |= begin + i >= end || begin + i >= visible(t.row_begin);
        const int64_t limit = std::min(end, visible(row)) - begin;
        seen += std::max<int64_t>(0, limit);
        step(t.head, tile_id, place, t.first_block + b, limit, pre, m, d, acc);
      }
      write(t, row, seen, m, d, acc);
    }
  }

  void step(int64_t h, int64_t tile_id, int64_t place, int64_t block, int64_t limit, bool pre, float& m, float* d,
            std::vector<float>& acc) const {
    const int64_t kv = h / p_.group_size(), size = block_of(o_);
    const bool per_thread = o_.groups == SageGroups::per_thread;
    const int64_t rows_of_slab = tile_of(o_) / 4, slab = tile_id * 4 + place / rows_of_slab;
    const float q_scale =
        t_.q.scale.as<float>()[h * t_.q.scale.view().sizes[1] + (per_thread ? slab * 8 + place % 8 : slab)];
    const float sigma = static_cast<float>(p_.scale()) * 1.44269504088896f;
    std::vector<float> y(static_cast<size_t>(size)), p(y.size()), by(y.size());
    float most[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity}, factor[4] = {};
    for (int64_t n = 0; n < size; ++n) {
      const int64_t t = n % 8 / 2;
      const float k_scale =
          t_.k.scale.as<float>()[kv * t_.k.scale.view().sizes[1] + (per_thread ? block * 4 + t : block)];
      const float delta = flush(q_scale * k_scale);
      int64_t s = 0;
      for (int64_t c = 0; c < dim(); ++c) {
        s += t_.q.codes.as<int8_t>()[h * t_.q.codes.view().strides[0] + (tile_id * tile_of(o_) + place) * dim() + c] *
             t_.k.codes.as<int8_t>()[kv * t_.k.codes.view().strides[0] + (block * size + n) * dim() + c];
      }
      factor[t] = pre ? sigma : flush(sigma * delta);
      float x = static_cast<float>(s);
      if (pre) x = flush(x * delta);
      if (n >= limit) x = -5000000.0f;
      y[static_cast<size_t>(n)] = x;
      most[t] = std::fmax(most[t], x);
    }
    float next = m;
    for (int t = 0; t < 4; ++t) next = std::fmax(next, flush(std::fma(most[t], factor[t], -8.807f)));
    const float alpha = flush(chip_.exp2(m - next));
    m = next;
    for (int64_t n = 0; n < size; ++n) {
      const size_t i = static_cast<size_t>(n);
      p[i] = flush(chip_.exp2(flush(std::fma(y[i], factor[n % 8 / 2], -m))));
    }
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t f = 0; f < size / 16; ++f) {
        const float* w = p.data() + 16 * f + 2 * t;
        const float s = ((w[0] + w[1]) + w[8]) + w[9];
        d[t] = f == 0 ? flush(std::fma(d[t], alpha, s)) : d[t] + s;
      }
    }
    std::vector<double> weights;
    for (float x : p) weights.push_back(e4m3_numbers()[encode(DType::f8_e4m3, static_cast<double>(x))]);
    for (int64_t c = 0; c < dim(); ++c) {
      acc[static_cast<size_t>(c)] = flush(std::fma(acc[static_cast<size_t>(c)], alpha, product(kv, block, c, weights)));
    }
  }

  // Of the weights of a block and a channel of its values.
  float product(int64_t kv, int64_t block, int64_t c, const std::vector<double>& weights) const {
    static constexpr int kSlots[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
    const TensorView& v = t_.v.codes.view();
    const uint8_t* codes = v.as<uint8_t>() + kv * v.strides[0] + c * v.strides[1] + block * block_of(o_);
    const bool half = o_.accumulator == SageAccumulator::f16;
    double sum = 0;
    int64_t exact = 0;  // in units of 2^-18
    for (size_t first = 0; first < weights.size(); first += 32) {
      std::vector<double> terms = {sum};
      bool is_number = true;
      for (size_t n = first; n < first + 32; ++n) {
        const uint8_t v_code = codes[n / 16 * 16 + static_cast<size_t>(kSlots[n % 16])];
        const double x = weights[n] * e4m3_numbers()[v_code];
        is_number &= !std::isnan(x);
        terms.push_back(x);
        if (is_number) exact += static_cast<int64_t>(x * 0x1p18);
      }
      if (!is_number) return std::numeric_limits<float>::quiet_NaN();
      if (chip_.cuts_products) {
        double most = 0;
        for (double x : terms) most = std::max(most, std::abs(x));
        const double unit = most == 0 ? 1 : std::ldexp(1.0, std::ilogb(most) - 13);
        sum = 0;
        for (double x : terms) sum += std::trunc(x / unit) * unit;
        const double last = sum == 0 ? 1 : std::ldexp(1.0, std::ilogb(sum) - 13);
        sum = std::trunc(sum / last) * last;
      } else if (half) {
        sum += std::ldexp(static_cast<double>(exact), -18);
        exact = 0;
      }
      if (half) sum = rounded_to(DType::f16, sum);
    }
    return half || chip_.cuts_products ? static_cast<float>(sum) : std::ldexp(static_cast<float>(exact), -18);
  }

  void write(const Tile& t, int64_t row, int64_t seen, float m, const float* d, const std::vector<float>& acc) {
    const int64_t kv = t.head / p_.group_size(), place = (t.q_first + row) * p_.num_q_heads + t.head;
    const float sum = (d[0] + d[1]) + (d[2] + d[3]), inverse = flush(chip_.reciprocal(sum));
    const int64_t of_sequence = static_cast<int64_t>(t.sequence) * p_.num_kv_heads + kv;
    double dot = 0;
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      const float scaled =
          flush(flush(acc[static_cast<size_t>(c)] * inverse) * t_.v.scale.as<float>()[of_sequence * dim() + c]);
      o[static_cast<size_t>(place * p_.head_dim + c)] = seen == 0 ? 0 : scaled;
      if (!o_.smooth_k) continue;
      const int64_t q_place = (t.q_first + row) * q_.strides[0] + t.head * q_.strides[1] + c;
      dot += decode(p_.q_dtype, q_.as<uint16_t>()[q_place]) *
             decode(p_.q_dtype, t_.k_mean.as<uint16_t>()[of_sequence * p_.head_dim + c]);
    }
    const double log = std::log(static_cast<double>(sum)) + static_cast<double>(m) * std::log(2.0);
    lse[static_cast<size_t>(place)] = seen == 0 ? -kInfinity : static_cast<float>(log + dot * p_.scale());
  }

  int64_t dim() const { return p_.head_dim <= 64 ? 64 : 128; }

  const Problem& p_;
  const TensorView& q_;
  const SageTensors& t_;
  const SageOptions& o_;
  const Chip chip_;
};

Output run_model(const Case& c, const SageOptions& options, const BlockIndex* lists, DType o_dtype = DType::f32,
                 const Execution& execution = {}) {
  Output out = make_output(c.problem, Layout::head_major, o_dtype);
  sage_attention_model(c.problem, c.inputs(), lists, {out.o.view(), out.lse.view()}, options, {}, execution);
  EXPECT_EQ(out.o.fault() + out.lse.fault(), "");
  return out;
}

// Keys with an offset of their own in each channel, as models have them.
Case offset_case(const std::string& line, uint32_t seed, float offset) {
  Case c = make_case(line, seed);
  std::mt19937 random(seed + 1);
  std::normal_distribution<float> normal;
  for (int64_t h = 0; h < c.problem.num_kv_heads; ++h) {
    for (int64_t d = 0; d < c.problem.head_dim; ++d) {
      const float of_channel = offset * normal(random);
      for (int64_t t = 0; t < c.problem.total_kv(); ++t) c.k.at(t, h, d) = c.k.at(t, h, d) + of_channel;
    }
  }
  return c;
}

void expect_rendition(const Case& c, const SageOptions& options, const BlockIndex* lists) {
  SCOPED_TRACE(text_of(options) + (lists == nullptr ? " dense | " : " lists | ") + c.problem.to_line());
  const Problem& p = c.problem;
  const Output got = run_model(c, options, lists);
  const SageTensors tensors = sage_quantize(p, c.inputs(), options);
  Rendition want(p, c.q.view(), tensors, options);
  want.run(lists);
  for (int64_t t = 0; t < p.total_q(); ++t) {
    for (int64_t h = 0; h < p.num_q_heads; ++h) {
      const int64_t place = t * p.num_q_heads + h;
      const float lse = want.lse[static_cast<size_t>(place)];
      if (std::isinf(lse)) {
        ASSERT_EQ(got.lse.at(t, h), lse);
      } else {
        ASSERT_NEAR(got.lse.at(t, h), lse, 2e-6f * std::max(10.0f, std::abs(lse)));
      }
      for (int64_t d = 0; d < p.head_dim; ++d) {
        ASSERT_EQ(static_cast<float>(got.o.at(t, h, d)), want.o[static_cast<size_t>(place * p.head_dim + d)])
            << t << " " << h << " " << d;
      }
    }
  }
}

TEST(SageModel, IsTheLoopOfItsSourcesBitForBit) {
  uint32_t seed = 0;
  for (const char* line :
       {"hq=4 hkv=2 d=64 q=130 kv=200 causal=0 dtype=bf16",
        "hq=2 hkv=1 d=72 q=1,0,65,33 kv=64,5,0,257 causal=0 dtype=f16", "hq=1 hkv=1 d=128 q=200 causal=1 dtype=bf16",
        "hq=2 hkv=2 d=8 q=70 kv=333 causal=1 dtype=f16",
        "hq=1 hkv=1 d=128 q=128 kv=160 causal=1 dtype=bf16",  // the diagonal crosses three blocks
        "hq=3 hkv=1 d=16 q=200,3 kv=77,300 causal=1 dtype=bf16 scale=0.7",
        "hq=1 hkv=1 d=64 q=291 causal=0 dtype=bf16 segments=text:70,audio:1,video:220",
        "hq=1 hkv=1 d=64 q=5 kv=512 causal=0 dtype=f16"}) {
    for (const SageOptions& options : all_options()) {
      expect_rendition(offset_case(line, ++seed, 2.0f), options, nullptr);
    }
  }
}

TEST(SageModel, IsTheLoopOverListsBitForBit) {
  uint32_t seed = 100;
  for (const char* line :
       {"hq=4 hkv=2 d=64 q=300 kv=700 causal=0 dtype=bf16 topk=3 qblock=128",
        "hq=1 hkv=1 d=128 q=90,0,200 kv=129,40,600 causal=0 dtype=f16 topk=2 qblock=64",
        "hq=2 hkv=2 d=32 q=291 causal=0 dtype=bf16 topk=3 qblock=32 segments=text:70,audio:1,video:220",
        "hq=2 hkv=1 d=16 q=40,20 kv=300,600 causal=1 dtype=bf16 topk=3"}) {
    for (const SageOptions& options : all_options()) {
      const Case c = offset_case(fmt::format("{} block={}", line, block_of(options)), ++seed, 1.0f);
      expect_rendition(c, options, &c.block_index.view());
    }
  }
}

TEST(SageModel, AFullListIsDenseBitForBit) {
  for (const char* line : {"hq=2 hkv=1 d=64 q=1000 kv=1000 causal=0 dtype=bf16 qblock=128",
                           "hq=1 hkv=1 d=128 q=77,0,300 kv=1,0,513 causal=0 dtype=f16 qblock=128",
                           "hq=2 hkv=2 d=40 q=391 causal=0 dtype=bf16 qblock=64 segments=text:70,audio:1,video:320"}) {
    for (const SageOptions& options : all_options()) {
      Case c = offset_case(fmt::format("{} block={}", line, block_of(options)), 9, 1.0f);
      set_rows(c, full_rows(c.problem));
      const Output dense = run_model(c, options, nullptr), listed = run_model(c, options, &c.block_index.view());
      EXPECT_EQ(dense.bits(), listed.bits()) << text_of(options);
      const Output threads = run_model(c, options, nullptr, DType::f32, {3});
      EXPECT_EQ(dense.bits(), threads.bits());
    }
  }
}

// Error of the model's o against float64.
Difference error_of(const Case& c, const SageOptions& options, const BlockIndex* lists, const Reference& exact) {
  const Output got = run_model(c, options, lists);
  Tensor want(DType::f32, {c.problem.total_q(), c.problem.num_q_heads, c.problem.head_dim});
  std::copy(exact.o.begin(), exact.o.end(), want.as<float>());
  return compare(got.o.view(), want.view());
}

void record(const std::string& what, const Difference& error) {
  ::testing::Test::RecordProperty(what, fmt::format("rel-L2 {:.4f} cosine {:.6f}", error.rel_l2, error.cosine));
}

// Published: 3.9e-2 (Miowtion, RTX PRO 6000), 3.6e-2 and 0.9994 (Nox), on captures of a video model.
TEST(SageModel, IsAsFarFromFloat64AsSageIs) {
  for (const char* line :
       {"hq=2 hkv=2 d=128 q=256 kv=2048 causal=0 dtype=bf16", "hq=4 hkv=2 d=64 q=300 kv=1111 causal=1 dtype=f16",
        "hq=2 hkv=1 d=72 q=257 causal=0 dtype=bf16", "hq=1 hkv=1 d=8 q=64 kv=500 causal=0 dtype=bf16"}) {
    const Case c = offset_case(line, 11, 4.0f);
    const Reference exact = reference_attention(c.problem, c.inputs(), nullptr);
    for (const SageOptions& options : all_options()) {
      const Difference error = error_of(c, options, nullptr, exact);
      record(text_of(options) + " | " + line, error);
      if (!options.smooth_k) continue;
      EXPECT_GT(error.rel_l2, 0.02) << text_of(options) << " | " << line;
      EXPECT_LT(error.rel_l2, 0.05) << text_of(options) << " | " << line;
      EXPECT_GT(error.cosine, 0.9988) << text_of(options) << " | " << line;
    }
  }
}

TEST(SageModel, SmoothingHelpsKeysWithAnOffset) {
  const Case c = offset_case("hq=2 hkv=2 d=128 q=256 kv=1024 causal=0 dtype=bf16", 12, 8.0f);
  const Reference exact = reference_attention(c.problem, c.inputs(), nullptr);
  for (SageOptions options : all_options()) {
    if (!options.smooth_k) continue;
    const Difference smooth = error_of(c, options, nullptr, exact);
    options.smooth_k = false;
    const Difference plain = error_of(c, options, nullptr, exact);
    record(text_of(options), plain);
    options.smooth_k = true;
    record(text_of(options), smooth);
    EXPECT_LT(1.3 * smooth.rel_l2, plain.rel_l2) << text_of(options);
  }
}

TEST(SageModel, ListsAreAsFarFromFloat64OverTheSameBlocks) {
  for (SageOptions options : all_options()) {
    if (!options.smooth_k) continue;
    const Case c = offset_case(
        fmt::format("hq=2 hkv=1 d=64 q=500 kv=1500 causal=0 dtype=bf16 topk=4 qblock=128 block={}", block_of(options)),
        13, 2.0f);
    const Reference exact = reference_attention(c.problem, c.inputs(), &c.block_index.view());
    const Difference error = error_of(c, options, &c.block_index.view(), exact);
    EXPECT_LT(error.rel_l2, 0.05) << text_of(options);
    EXPECT_GT(error.rel_l2, 0.02) << text_of(options);
  }
}

// The mean of the keys is in it: |q . mean| is up to some hundred here.
TEST(SageModel, TheLseIsThatOfTheTrueLogits) {
  for (const SageOptions& options : all_options()) {
    const Case c = offset_case("hq=2 hkv=1 d=64 q=100 kv=700 causal=1 dtype=bf16", 14, options.smooth_k ? 30.0f : 1.0f);
    const Reference exact = reference_attention(c.problem, c.inputs(), nullptr);
    const Output got = run_model(c, options, nullptr);
    double largest = 0;
    for (int64_t t = 0; t < 100; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        const double want = exact.lse[static_cast<size_t>(t * 2 + h)];
        largest = std::max(largest, std::abs(want));
        EXPECT_NEAR(got.lse.at(t, h), want, 0.03) << text_of(options);
      }
    }
    if (options.smooth_k) {
      EXPECT_GT(largest, 50);
    }
  }
}

struct Merged {
  double lse;
  double of_first, of_second;  // shares
};
Merged merge(float a, float b) {
  const double x = static_cast<double>(a), y = static_cast<double>(b), most = std::max(x, y);
  const double lse = most + std::log(std::exp(x - most) + std::exp(y - most));
  return {lse, std::exp(x - lse), std::exp(y - lse)};
}

// ROCm/aiter#3334: parts of the keys, each with a mean of its own, merge by their LSE.
TEST(SageModel, TwoHalvesOfTheKeysMergeToTheWhole) {
  const std::string line = "hq=2 hkv=1 d=64 q=150 causal=0 dtype=bf16 kv=";
  const Case c = offset_case(line + "500", 15, 4.0f);
  for (const SageOptions& options : all_options()) {
    const Output whole = run_model(c, options, nullptr);
    Output part[2];
    for (int i : {0, 1}) {
      Problem p = Problem::parse(line + (i == 0 ? "231" : "269"));
      AttentionInputs inputs = c.inputs();
      for (TensorView* view : {&inputs.k, &inputs.v}) {
        view->data = view->as<uint16_t>() + (i == 0 ? 0 : 231 * view->strides[0]);
        view->sizes[0] = p.total_kv();
      }
      part[i] = make_output(p);
      sage_attention_model(p, inputs, nullptr, {part[i].o.view(), part[i].lse.view()}, options);
    }
    double error = 0, norm = 0;
    for (int64_t t = 0; t < 150; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        const Merged merged = merge(part[0].lse.at(t, h), part[1].lse.at(t, h));
        // K is quantised anew in each part: logits differ by some hundredths, their LSE by less.
        EXPECT_NEAR(whole.lse.at(t, h), merged.lse, options.smooth_k ? 0.02 : 0.2) << text_of(options);
        for (int64_t d = 0; d < 64; ++d) {
          const double o = static_cast<double>(static_cast<float>(whole.o.at(t, h, d)));
          const double both = merged.of_first * static_cast<double>(static_cast<float>(part[0].o.at(t, h, d))) +
                              merged.of_second * static_cast<double>(static_cast<float>(part[1].o.at(t, h, d)));
          error += (o - both) * (o - both);
          norm += o * o;
        }
      }
    }
    EXPECT_LT(std::sqrt(error / norm), options.smooth_k ? 0.06 : 0.2) << text_of(options);
  }
}

// Over lists the quantised keys are the same: what is left is f32, as the weights in the LSE are not rounded to E4M3.
TEST(SageModel, TwoListsMergeToTheirUnion) {
  for (const SageOptions& options : all_options()) {
    Case c = offset_case(
        fmt::format("hq=1 hkv=1 d=64 q=128 kv=1000 causal=0 dtype=bf16 qblock=128 block={}", block_of(options)), 16,
        2.0f);
    const auto lse_of = [&](std::vector<int32_t> ids) {
      set_rows(c, {std::move(ids)});
      return run_model(c, options, &c.block_index.view());
    };
    const Output first = lse_of({0, 3, 7}), second = lse_of({1, 2, 5}), both = lse_of({0, 1, 2, 3, 5, 7});
    for (int64_t t = 0; t < 128; ++t) {
      EXPECT_NEAR(both.lse.at(t, 0), merge(first.lse.at(t, 0), second.lse.at(t, 0)).lse, 1e-5);
    }
  }
}

TEST(SageModel, RowsThatSeeNothing) {
  for (const SageOptions& options : all_options()) {
    const Case c = offset_case("hq=2 hkv=1 d=8 q=200,5,0 kv=77,0,9 causal=1 dtype=f16", 17, 1.0f);
    const Output got = make_output(c.problem);
    const GuardedTensor limits({205, 2, 8}, Layout::packed);
    sage_attention_model(c.problem, c.inputs(), nullptr, {got.o.view(), got.lse.view(), limits.view()}, options);
    for (int64_t t = 0; t < 205; ++t) {
      const bool empty = t < 123 || t >= 200;
      EXPECT_EQ(got.lse.at(t, 1) == -kInfinity, empty) << t;
      for (int64_t d = 0; d < 8 && empty; ++d) {
        EXPECT_EQ(got.o.at(t, 1, d), 0.0f);
        EXPECT_EQ(limits.at(t, 1, d), 0.0f);
      }
    }
    Case none =
        offset_case(fmt::format("d=8 q=100 kv=300 causal=0 dtype=f16 qblock=64 block={}", block_of(options)), 18, 1.0f);
    set_rows(none, {{-1, 99}, {0}});
    const Output listed = run_model(none, options, &none.block_index.view());
    for (int64_t t = 0; t < 100; ++t) EXPECT_EQ(listed.lse.at(t, 0) == -kInfinity, t < 64);
    run_model(make_case("q= d=8 dtype=f16", 1), options, nullptr);
  }
}

// A NaN reaches the rows that use what it is in, and no other.
TEST(SageModel, WhereANaNGoes) {
  for (const SageOptions& options : all_options()) {
    if (options.smooth_k) continue;  // the mean would take it everywhere
    Case c = make_case(fmt::format("d=16 q=128 kv=512 causal=0 dtype=bf16 qblock=64 block={}", block_of(options)), 19);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    c.k.at(10, 0, 3) = nan;   // block 0
    c.v.at(300, 0, 5) = nan;  // channel 5 of the sequence
    set_rows(c, {{0, 1}, {1, 2}});
    const Output got = run_model(c, options, &c.block_index.view());
    for (int64_t t = 0; t < 128; ++t) {
      for (int64_t d = 0; d < 16; ++d) {
        EXPECT_EQ(std::isnan(static_cast<float>(got.o.at(t, 0, d))), t < 64 || d == 5) << text_of(options);
      }
      EXPECT_EQ(std::isnan(static_cast<float>(got.lse.at(t, 0))), t < 64);
    }
  }
}

TEST(SageModel, SubnormalNumbersAreFlushed) {
  Case c = make_case("hq=1 hkv=1 d=16 q=100 kv=150 causal=0 dtype=bf16", 24);
  c.v.for_each([](const Element& x) { x = static_cast<float>(x) * 0x1p-117f; });
  int64_t flushed = 0;
  for (const SageOptions& options : all_options()) {
    expect_rendition(c, options, nullptr);
    const Output got = run_model(c, options, nullptr);
    got.o.for_each([&](const Element& x) {
      EXPECT_TRUE(x == 0.0f || std::abs(static_cast<float>(x)) >= 0x1p-126f);
      flushed += x == 0.0f;
    });
  }
  EXPECT_GT(flushed, 0);
}

TEST(SageModel, TheOutputIsRoundedOnce) {
  const Case c = offset_case("hq=2 hkv=2 d=24 q=100 kv=150 causal=0 dtype=bf16", 20, 1.0f);
  for (const SageOptions& options : all_options()) {
    const Output f32 = run_model(c, options, nullptr);
    for (DType dtype : {DType::bf16, DType::f16}) {
      const Output rounded = run_model(c, options, nullptr, dtype);
      for (int64_t t = 0; t < 100; ++t) {
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t d = 0; d < 24; ++d) {
            ASSERT_EQ(rounded.o.at(t, h, d).bits(),
                      encode(dtype, static_cast<double>(static_cast<float>(f32.o.at(t, h, d)))));
          }
        }
      }
    }
  }
}

// Off by -2 to 2 ulp, as a hash of the number says; nothing is added to what is exact, 1 and 0.
float approximate_exp2(float x) {
  float y = static_cast<float>(std::exp2(static_cast<double>(x)));
  if (x == 0 || y == 0) return y;
  const int ulps = static_cast<int>((std::bit_cast<uint32_t>(x) * 2654435761u >> 13) % 5) - 2;
  for (int i = 0; i < std::abs(ulps); ++i) y = std::nextafter(y, ulps > 0 ? kInfinity : 0.0f);
  return y;
}
float approximate_reciprocal(float x) { return std::nextafter(1 / x, kInfinity); }

// A chip that is as inexact as it may be stays within the bound, and the bound is no wider than it need be.
TEST(SageModel, TheBoundHoldsForAChipAndIsTight) {
  for (const char* line :
       {"hq=2 hkv=1 d=64 q=200 kv=900 causal=0 dtype=bf16", "hq=1 hkv=1 d=128 q=130 causal=1 dtype=f16",
        "hq=1 hkv=1 d=64 q=64 kv=700 causal=0 dtype=bf16 scale=1.0"}) {
    const Case c = offset_case(line, 21, 2.0f);
    const Problem& p = c.problem;
    for (const SageOptions& options : all_options()) {
      const SageTensors tensors = sage_quantize(p, c.inputs(), options);
      const Chip chip = {approximate_exp2, approximate_reciprocal, true};
      Rendition on_chip(p, c.q.view(), tensors, options, chip);
      on_chip.run(nullptr);
      for (DType dtype : {DType::f32, DType::bf16}) {
        const Output model = make_output(p, Layout::packed, dtype);
        const GuardedTensor limits({p.total_q(), p.num_q_heads, p.head_dim}, Layout::padded);
        sage_attention_model(p, c.inputs(), nullptr, {model.o.view(), model.lse.view(), limits.view()}, options);
        EXPECT_EQ(limits.fault(), "");
        EXPECT_EQ(model.bits(), run_model(c, options, nullptr, dtype).bits());
        double most = 0, bounds = 0, squares = 0, differences = 0;
        for (int64_t t = 0; t < p.total_q(); ++t) {
          for (int64_t h = 0; h < p.num_q_heads; ++h) {
            for (int64_t d = 0; d < p.head_dim; ++d) {
              const double chip_o =
                  static_cast<double>(on_chip.o[static_cast<size_t>((t * p.num_q_heads + h) * p.head_dim + d)]);
              const double o = static_cast<double>(static_cast<float>(model.o.at(t, h, d)));
              const double bound = static_cast<double>(static_cast<float>(limits.at(t, h, d)));
              const double difference = std::abs(rounded_to(dtype, chip_o) - o);
              EXPECT_LE(difference, bound) << text_of(options);
              most = std::max(most, bound == 0 ? 0 : difference / bound);
              bounds += bound * bound, squares += o * o, differences += difference * difference;
            }
          }
        }
        RecordProperty(fmt::format("{} {} | {}", text_of(options), name_of(dtype), line),
                       fmt::format("{:.3f} of the bound, difference {:.1e}, bound {:.1e} of |o|", most,
                                   std::sqrt(differences / squares), std::sqrt(bounds / squares)));
        EXPECT_GT(differences, 0);
        EXPECT_LT(std::sqrt(bounds / squares), 0.04) << text_of(options);
      }
    }
  }
}

// thu-ml/SageAttention#386: offsets beyond 32 bits, here of all tensors.
TEST(SageModel, StridesBeyond32Bits) {
  constexpr int64_t kStride = (int64_t{1} << 26) + 32, kTokens = 70;
  const size_t bytes = static_cast<size_t>(kTokens * kStride * 2);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for a tensor of 9 GiB";
  const Case c = offset_case("d=8 q=70 causal=0 dtype=bf16", 22, 1.0f);
  const auto far_view = [&](int64_t place) {
    TensorView view = contiguous_view(static_cast<uint16_t*>(memory) + 8 * place, DType::bf16, {kTokens, 1, 8});
    view.strides[0] = kStride;
    return view;
  };
  const AttentionInputs far = {far_view(0), far_view(1), far_view(2)};
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t d = 0; d < 8; ++d) {
      far.q.as<uint16_t>()[t * kStride + d] = static_cast<uint16_t>(c.q.at(t, 0, d).bits());
      far.k.as<uint16_t>()[t * kStride + d] = static_cast<uint16_t>(c.k.at(t, 0, d).bits());
      far.v.as<uint16_t>()[t * kStride + d] = static_cast<uint16_t>(c.v.at(t, 0, d).bits());
    }
  }
  for (const SageOptions& options : all_options()) {
    const Output near = run_model(c, options, nullptr, DType::bf16);
    const Output lse = make_output(c.problem);
    sage_attention_model(c.problem, far, nullptr, {far_view(3), lse.lse.view()}, options);
    for (int64_t t = 0; t < kTokens; ++t) {
      EXPECT_EQ(lse.lse.at(t, 0).bits(), near.lse.at(t, 0).bits());
      for (int64_t d = 0; d < 8; ++d) {
        ASSERT_EQ(far_view(3).as<uint16_t>()[t * kStride + d], near.o.at(t, 0, d).bits());
      }
    }
  }
  munmap(memory, bytes);
}

TEST(SageModel, RefusesByName) {
  const Case c = make_case("d=8 q=100 kv=300 causal=0 dtype=bf16 qblock=64 block=64", 23);
  const Output out = make_output(c.problem);
  const auto refuses = [&](const SageOutputs& outputs, const SageOptions& options, const std::string& text) {
    try {
      sage_attention_model(c.problem, c.inputs(), &c.block_index.view(), outputs, options);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  const SageOutputs views = {out.o.view(), out.lse.view()};
  refuses(views, {SageKernel::sm90}, "kv_block_size: got 64, a list for sm90 is of blocks of 128");
  refuses({views.o, views.lse, views.lse}, {}, "bound");
  refuses({c.q.view(), views.lse}, {}, "overlaps");
  const Tensor wrong(DType::f32, {100, 1, 7});
  refuses({views.o, views.lse, wrong.view()}, {}, "bound: got f32[100, 1, 7]");
  SageTensors tensors = sage_quantize(c.problem, c.inputs(), {});
  EXPECT_THROW(sage_attend_model(c.problem, c.q.view(), tensors, nullptr, views, {SageKernel::sm90}), Error);
  tensors.k_mean = {};
  EXPECT_THROW(sage_attend_model(c.problem, c.q.view(), tensors, nullptr, views, {}), Error);
}

// Errors of all kinds over views of stored tensors.
void expect_errors(const Problem& problem, const AttentionInputs& inputs, double limit) {
  const Reference exact = reference_attention(problem, inputs, nullptr);
  Tensor want(DType::f32, {problem.total_q(), problem.num_q_heads, problem.head_dim});
  std::copy(exact.o.begin(), exact.o.end(), want.as<float>());
  for (const SageOptions& options : all_options()) {
    const Output out = make_output(problem);
    sage_attention_model(problem, inputs, nullptr, {out.o.view(), out.lse.view()}, options);
    const Difference error = compare(out.o.view(), want.view());
    record(text_of(options), error);
    EXPECT_LT(error.rel_l2, limit) << text_of(options);
    EXPECT_GT(error.cosine, 1 - limit * limit) << text_of(options);
  }
}

TensorView tokens_of(TensorView view, int64_t first, int64_t count) {
  view.data = view.as<uint16_t>() + first * view.strides[0];
  view.sizes[0] = count;
  return view;
}

// A trained language model: causal, grouped heads (examples/data).
TEST(SageModel, OnKeysOfALanguageModel) {
  const TensorFile file = read_tensors(std::string(TILESIEVE_EXAMPLES_DIR) + "/smollm2_layer9_group2.safetensors");
  const TensorView &q = file.at("layer.9.q"), &k = file.at("layer.9.k"), &v = file.at("layer.9.v");
  expect_errors(Problem::parse("hq=3 hkv=1 d=64 q=150 kv=3000 causal=1 dtype=bf16 scale=0.125"),
                {tokens_of(q, 2850, 150), tokens_of(k, 0, 3000), tokens_of(v, 0, 3000)}, 0.05);
}

class SageLatents : public RealTensors {
 protected:
  // Keys and values are the tokens themselves, queries some of the middle.
  static void expect_errors_of(const Latents& latents) {
    const int64_t num_tokens = latents.grid.num_tokens(), dim = latents.dim();
    const Tensor x(DType::bf16, {num_tokens, 1, dim});
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t d = 0; d < dim; ++d) {
        x.as<uint16_t>()[t * dim + d] =
            static_cast<uint16_t>(encode(DType::bf16, static_cast<double>(latents.number(t, d))));
      }
    }
    const TensorView q = tokens_of(x.view(), num_tokens / 2, 128);
    expect_errors(Problem::parse(fmt::format("d={} q=128 kv={} causal=0 dtype=bf16 scale=0.05", dim, num_tokens)),
                  {q, x.view(), x.view()}, 0.02);
  }
};
TEST_F(SageLatents, OfWan) { expect_errors_of(wan_latents(folder_)); }
TEST_F(SageLatents, OfFlower) { expect_errors_of(flower_latents(folder_)); }

}  // namespace
}  // namespace tilesieve::testing
