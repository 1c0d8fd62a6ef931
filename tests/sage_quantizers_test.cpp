// SPDX-License-Identifier: Apache-2.0
// Sage's quantisers against a rendition of section by section of their sources' formulas: for each number the group is
// gone through anew, nothing is shared with the library.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <functional>

#include "base/number_formats.h"
#include "sage_cases.h"
#include "stored_numbers.h"

namespace tilesieve::testing {
namespace {

constexpr int kSlotOfToken[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
constexpr int kTokenOfSlot[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

// Where the tokens of a problem stand: tiles of `size`, anew with each sequence and segment.
struct Stand {
  size_t sequence;
  int64_t tile, offset;
};
std::vector<Stand> stands(const Problem& problem, const std::vector<int64_t>& lens, int64_t size) {
  std::vector<Stand> all;
  int64_t tile = -1;
  for (size_t s = 0; s < lens.size(); ++s) {
    std::vector<int64_t> parts;
    for (const Segment& segment : problem.segments) parts.push_back(segment.num_tokens);
    if (parts.empty()) parts = {lens[s]};
    for (int64_t part : parts) {
      for (int64_t i = 0; i < part; ++i) {
        if (i % size == 0) ++tile;
        all.push_back({s, tile, i % size});
      }
    }
  }
  return all;
}

int64_t num_tiles(const std::vector<Stand>& all) { return all.empty() ? 0 : all.back().tile + 1; }

// The number of a token's group inside its tile, from the tables of both kernels.
int64_t q_group(const SageOptions& o, int64_t row) {
  const int64_t rows_of_slab = slab_of(o);
  return o.groups == SageGroups::per_warp ? row / rows_of_slab : row / rows_of_slab * 8 + row % 8;
}
int64_t k_group(const SageOptions& o, int64_t key) {
  if (o.groups == SageGroups::per_warp) return 0;
  for (int64_t t = 0; t < 4; ++t) {
    if (key % 8 == 2 * t || key % 8 == 2 * t + 1) return t;
  }
  return -1;
}

using Number = std::function<float(int64_t token, int64_t head, int64_t d)>;

// Checks codes and scales of queries or keys; `number` is what is quantised.
void expect_int8(const Problem& problem, const SageOptions& o, const SageCodes& got, int64_t heads,
                 const std::vector<Stand>& all, int64_t size, int64_t groups,
                 const std::function<int64_t(const SageOptions&, int64_t)>& group_of, const Number& number) {
  const int64_t dim = problem.head_dim <= 64 ? 64 : 128, tiles = num_tiles(all);
  ASSERT_EQ(got.codes.view().describe(), fmt::format("i8[{}, {}, {}]", heads, tiles * size, dim));
  ASSERT_EQ(got.scale.view().describe(), fmt::format("f32[{}, {}]", heads, tiles * groups));
  std::vector<int> codes(static_cast<size_t>(heads * tiles * size * dim), 0);
  for (int64_t h = 0; h < heads; ++h) {
    std::vector<float> largest(static_cast<size_t>(tiles * groups), 0.0f);
    const auto of = [&](size_t token) {
      return static_cast<size_t>(all[token].tile * groups + group_of(o, all[token].offset));
    };
    for (size_t t = 0; t < all.size(); ++t) {
      for (int64_t d = 0; d < problem.head_dim; ++d) {
        float& most = largest[of(t)];
        most = std::max(most, std::abs(number(static_cast<int64_t>(t), h, d)));
      }
    }
    for (int64_t g = 0; g < tiles * groups; ++g) {
      const float most = largest[static_cast<size_t>(g)];
      const float want =
          o.groups == SageGroups::per_thread ? most / 127.0f + 0.0000001f : std::max(most, 0.0000001f) / 127.0f;
      ASSERT_EQ(got.scale.as<float>()[h * tiles * groups + g], want) << "scale " << g;
    }
    for (size_t t = 0; t < all.size(); ++t) {
      for (int64_t d = 0; d < problem.head_dim; ++d) {
        const float x = number(static_cast<int64_t>(t), h, d), most = largest[of(t)];
        int code;
        if (o.groups == SageGroups::per_thread) {
          float steps = x / (most / 127.0f + 0.0000001f);
          steps += steps < 0 ? -0.5f : 0.5f;
          code = static_cast<int>(std::trunc(steps));
        } else {
          code = static_cast<int>(std::lrint(x * (127.0f / std::max(most, 0.0000001f))));
        }
        codes[static_cast<size_t>(((h * tiles + all[t].tile) * size + all[t].offset) * dim + d)] = code;
      }
    }
  }
  for (size_t i = 0; i < codes.size(); ++i) ASSERT_EQ(got.codes.as<int8_t>()[i], codes[i]) << "code " << i;
}

float round_f32(DType dtype, float x) { return static_cast<float>(rounded_to(dtype, static_cast<double>(x))); }

void expect_quantised(const Case& c, const SageOptions& o, const SageTensors& got) {
  SCOPED_TRACE(text_of(o) + " | " + c.problem.to_line());
  const Problem& p = c.problem;
  const int64_t q_tile = tile_of(o), block = block_of(o);
  const std::vector<Stand> q_stands = stands(p, p.q_lens, q_tile), k_stands = stands(p, p.kv_lens, block);
  const Number q_number = [&](int64_t t, int64_t h, int64_t d) -> float { return c.q.at(t, h, d); };
  const bool per_thread = o.groups == SageGroups::per_thread;
  const int64_t q_groups = q_tile / slab_of(o) * (per_thread ? 8 : 1), k_groups = per_thread ? 4 : 1;
  expect_int8(p, o, got.q, p.num_q_heads, q_stands, q_tile, q_groups, q_group, q_number);

  ASSERT_EQ(got.k_mean.view().data != nullptr, o.smooth_k);
  const Number k_number = [&](int64_t t, int64_t h, int64_t d) -> float {
    const float x = c.k.at(t, h, d);
    if (!o.smooth_k) return x;
    const int64_t s = static_cast<int64_t>(k_stands[static_cast<size_t>(t)].sequence);
    const uint16_t bits = got.k_mean.as<uint16_t>()[(s * p.num_kv_heads + h) * p.head_dim + d];
    const float shifted = x - static_cast<float>(decode(p.kv_dtype, bits));
    return o.groups == SageGroups::per_thread ? round_f32(p.kv_dtype, shifted) : shifted;
  };
  expect_int8(p, o, got.k, p.num_kv_heads, k_stands, block, k_groups, k_group, k_number);

  const int64_t dim = p.head_dim <= 64 ? 64 : 128, slots = num_tiles(k_stands) * block;
  ASSERT_EQ(got.v.codes.view().describe(), fmt::format("e4m3[{}, {}, {}]", p.num_kv_heads, dim, slots));
  std::vector<int> codes(static_cast<size_t>(p.num_kv_heads * dim * slots), 0);
  const float top = o.accumulator == SageAccumulator::f16 ? 2.25f : 448.0f;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t s = 0; s < p.num_sequences(); ++s) {
        float most = 0;
        for (size_t t = 0; t < k_stands.size() && d < p.head_dim; ++t) {
          if (k_stands[t].sequence != static_cast<size_t>(s)) continue;
          most = std::max(most, std::abs(static_cast<float>(c.v.at(static_cast<int64_t>(t), h, d))));
        }
        ASSERT_EQ(got.v.scale.as<float>()[(s * p.num_kv_heads + h) * dim + d], most / top);
        for (size_t t = 0; t < k_stands.size() && d < p.head_dim && most > 0; ++t) {
          if (k_stands[t].sequence != static_cast<size_t>(s)) continue;
          const int64_t token = k_stands[t].offset;
          const int64_t slot = k_stands[t].tile * block + token / 16 * 16 + kSlotOfToken[token % 16];
          const float x = static_cast<float>(c.v.at(static_cast<int64_t>(t), h, d)) * (top / most);
          codes[static_cast<size_t>((h * dim + d) * slots + slot)] =
              static_cast<int>(encode(DType::f8_e4m3, static_cast<double>(x)));
        }
      }
    }
  }
  for (size_t i = 0; i < codes.size(); ++i) ASSERT_EQ(got.v.codes.as<uint8_t>()[i], codes[i]) << "v code " << i;
}

TEST(SageQuantizers, EveryLengthOfEveryKind) {
  const std::vector<SageOptions> all = all_options();
  for (int len = 1; len <= 130; ++len) {
    const SageOptions& options = all[static_cast<size_t>(len) % all.size()];
    const std::string line = fmt::format("hq=2 hkv=1 d={} q={} kv={} causal=0 dtype={}", len % 2 == 0 ? 8 : 72, len,
                                         131 - len, len % 4 < 2 ? "bf16" : "f16");
    const Case c = make_case(Problem::parse(line), static_cast<uint32_t>(len),
                             len % 5 == 0 ? Values::outliers : Values::normal, kLayouts[len % 4]);
    expect_quantised(c, options, sage_quantize(c.problem, c.inputs(), options));
  }
}

TEST(SageQuantizers, SequencesSegmentsHeadsAndThreads) {
  for (const SageOptions& options : all_options()) {
    for (const char* line : {"hq=4 hkv=2 d=64 q=5,0,300,131 kv=200,7,0,129 causal=1 dtype=bf16",
                             "hq=2 hkv=2 d=128 q=291 causal=0 dtype=f16 segments=text:70,audio:1,video:220",
                             "hq=1 hkv=1 d=16 q=90,90 causal=0 dtype=bf16 segments=text:13,video:3x5x5,text:2",
                             "q= d=8 dtype=f16", "q=0 kv=0 d=8 dtype=bf16"}) {
      const Case c = make_case(Problem::parse(line), 3, Values::normal, Layout::reversed);
      for (int threads : {1, 3}) {
        expect_quantised(c, options, sage_quantize(c.problem, c.inputs(), options, {}, {threads}));
      }
    }
  }
}

Case constant_case(const std::string& line, const std::function<float(int64_t token, int64_t d)>& value) {
  Case c = make_case(Problem::parse(line), 1);
  for (int64_t t = 0; t < c.problem.total_kv(); ++t) {
    for (int64_t d = 0; d < c.problem.head_dim; ++d) {
      c.q.at(t, 0, d) = value(t, d);
      c.k.at(t, 0, d) = value(t, d);
      c.v.at(t, 0, d) = value(t, d);
    }
  }
  return c;
}

// With 127 * 1024 in every group the scale is 1024 exactly: 1e-7 is far below its last place.
TEST(SageQuantizers, TiesGoAwayFromZeroPerThreadAndToEvenPerWarp) {
  const float values[] = {130048, 512, -512, 1536, -1536, 2560, -2560, 510};
  const Case c = constant_case("d=8 q=128 causal=0 dtype=bf16", [&](int64_t, int64_t d) { return values[d]; });
  const auto codes = [&](SageGroups groups) {
    const SageCodes got = sage_quantize_q(c.problem, c.q.view(), {SageKernel::sm89, groups});
    EXPECT_EQ(got.scale.as<float>()[0], 1024.0f);
    return std::vector<int>(got.codes.as<int8_t>() + 64, got.codes.as<int8_t>() + 72);
  };
  EXPECT_THAT(codes(SageGroups::per_thread), ::testing::ElementsAre(127, 1, -1, 2, -2, 3, -3, 0));
  EXPECT_THAT(codes(SageGroups::per_warp), ::testing::ElementsAre(127, 0, 0, 2, -2, 2, -2, 0));
}

// Both ways of taking the mean off: 1 + 2^-7 less 2^-8 needs 9 bits, which bf16 has not.
TEST(SageQuantizers, SmoothKeysAreRoundedToTheInputsTypePerThreadAlone) {
  const Case c = constant_case("d=8 q=64 causal=0 dtype=bf16", [](int64_t, int64_t) { return 1.0f + 0x1p-7f; });
  Tensor mean(DType::bf16, {1, 1, 8});
  for (int64_t d = 0; d < 8; ++d) mean.as<uint16_t>()[d] = static_cast<uint16_t>(encode(DType::bf16, 0x1p-8));
  for (SageGroups groups : {SageGroups::per_thread, SageGroups::per_warp}) {
    const SageOptions options = {SageKernel::sm90, groups};
    const float got = sage_quantize_k(c.problem, c.k.view(), mean.view(), options).scale.as<float>()[0];
    const float smooth = 1.0f + 0x1p-8f, rounded = 1.0f;  // half way between 1 and 1 + 2^-7: to even
    EXPECT_EQ(got, groups == SageGroups::per_thread ? rounded / 127.0f + 1e-7f : smooth / 127.0f);
  }
}

TEST(SageQuantizers, ZeroAndConstantChannels) {
  for (float constant : {0.0f, -0.0f, 3.0f, -7.5f}) {
    const Case c = constant_case("d=8 q=70 causal=0 dtype=bf16", [&](int64_t, int64_t) { return constant; });
    for (const SageOptions& options : all_options()) {
      const SageTensors got = sage_quantize(c.problem, c.inputs(), options);
      for (int64_t slot = 0; slot < 64; ++slot) {
        const double v =
            decode(DType::f8_e4m3, got.v.codes.as<uint8_t>()[slot]) * static_cast<double>(got.v.scale.as<float>()[0]);
        EXPECT_NEAR(v, static_cast<double>(constant), 1e-6);
      }
      for (int64_t d = 0; d < 8; ++d) {
        const float k = static_cast<float>(got.k.codes.as<int8_t>()[d]) * got.k.scale.as<float>()[0];
        EXPECT_NEAR(k, options.smooth_k ? 0.0f : constant, 2e-5f);  // 127 * 1e-7, and roundings
      }
    }
  }
}

// A channel is 0 where its scale would be subnormal; at the limit it is not, and subnormal inputs count.
TEST(SageQuantizers, SmallChannels) {
  const float limit = 448 * 0x1p-126f;
  const Case c = constant_case("d=8 q=64 causal=0 dtype=bf16", [&](int64_t t, int64_t d) {
    const float most[] = {limit, limit / 2, 0x1p-130f, 0, limit, 1, 1, 1};
    return t == 5 ? most[d] : d == 4 ? 0x1p-127f : 0.0f;
  });
  const SageCodes got = sage_quantize_v(c.problem, c.v.view(), {});
  const float* scale = got.scale.as<float>();
  const uint8_t* codes = got.codes.as<uint8_t>();
  const int64_t slot = kSlotOfToken[5];
  EXPECT_EQ(scale[0], 0x1p-126f);
  EXPECT_EQ(codes[slot], 0x7e);
  for (int64_t d : {1, 2, 3}) {
    EXPECT_EQ(scale[d], 0.0f);
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(codes[d * 64 + i], 0);
  }
  EXPECT_EQ(decode(DType::f8_e4m3, codes[4 * 64]), 0.5);
  EXPECT_EQ(codes[4 * 64 + slot], 0x7e);
}

TEST(SageQuantizers, NonFiniteNumbersMakeTheirGroupNaNAndNothingElse) {
  for (float bad : {kInfinity, -kInfinity, kNaN}) {
    for (const SageOptions& options : all_options()) {
      Case c = make_case("d=8 q=300 kv=300 causal=0 dtype=bf16", 4);
      const SageTensors before = sage_quantize(c.problem, c.inputs(), options);
      c.q.at(140, 0, 3) = bad;
      c.v.at(7, 0, 2) = bad;
      SageTensors got = before;
      got.q = sage_quantize_q(c.problem, c.q.view(), options);
      got.v = sage_quantize_v(c.problem, c.v.view(), options);
      c.k.at(133, 0, 1) = bad;
      const Tensor mean = before.k_mean;
      got.k = sage_quantize_k(c.problem, c.k.view(), mean.view(), options);
      const auto expect_group = [](const SageCodes& is, const SageCodes& was, int64_t size, int64_t groups,
                                   int64_t token, const std::function<int64_t(int64_t)>& group_of) {
        const int64_t bad_group = token / size * groups + group_of(token % size);
        for (int64_t g = 0; g < is.scale.view().num_elements(); ++g) {
          EXPECT_EQ(std::isnan(is.scale.as<float>()[g]), g == bad_group);
        }
        for (int64_t t = 0; t < 300; ++t) {
          const bool inside = t / size * groups + group_of(t % size) == bad_group;
          for (int64_t d = 0; d < 64; ++d) {
            EXPECT_EQ(is.codes.as<int8_t>()[t * 64 + d], inside ? 0 : was.codes.as<int8_t>()[t * 64 + d]);
          }
        }
      };
      expect_group(got.q, before.q, options.q_tile(), options.q_groups(), 140,
                   [&](int64_t i) { return q_group(options, i); });
      expect_group(got.k, before.k, options.kv_block(), options.kv_groups(), 133,
                   [&](int64_t i) { return k_group(options, i); });
      const int64_t slots = got.v.codes.view().sizes[2];
      for (int64_t d = 0; d < 64; ++d) {
        EXPECT_EQ(std::isnan(got.v.scale.as<float>()[d]), d == 2);
        for (int64_t i = 0; i < slots; ++i) {
          EXPECT_EQ(got.v.codes.as<uint8_t>()[d * slots + i], d == 2 ? 0 : before.v.codes.as<uint8_t>()[d * slots + i]);
        }
      }
      // A mean over such a key is not finite either, and takes all groups along.
      if (!options.smooth_k) continue;
      const SageTensors all = sage_quantize(c.problem, c.inputs(), options);
      for (int64_t g = 0; g < all.k.scale.view().num_elements(); ++g)
        EXPECT_TRUE(std::isnan(all.k.scale.as<float>()[g]));
    }
  }
}

TEST(SageQuantizers, TheMeanIsAddedInItsOrder) {
  for (const char* dtype : {"bf16", "f16"}) {
    Case c = make_case(Problem::parse(std::string("d=8 hkv=2 hq=2 q=1,1,1 kv=777,0,256 dtype=") + dtype), 5,
                       Values::outliers);
    // Numbers of many magnitudes that cancel: what is left is what their order has lost.
    std::mt19937 random(9);
    for (int64_t t = 0; t < 388; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 8; ++d) {
          const float x = std::ldexp(c.k.at(t, h, d), static_cast<int>(random() % 19) - 10);
          c.k.at(t, h, d) = x;
          c.k.at(388 + t * 5 % 388, h, d) = -static_cast<float>(c.k.at(t, h, d));
        }
      }
    }
    const Tensor got = sage_k_mean(c.problem, c.k.view(), {2});
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t d = 0; d < 8; ++d) {
        int64_t first = 0;
        for (size_t s = 0; s < 3; ++s) {
          const int64_t len = c.problem.kv_lens[s];
          float sum = 0;
          for (int64_t chunk = 0; chunk < len; chunk += 256) {
            float lane[8] = {};
            for (int64_t i = chunk; i < std::min(chunk + 256, len); ++i) {
              lane[(i - chunk) % 8] += static_cast<float>(c.k.at(first + i, h, d));
            }
            for (int step : {1, 2, 4}) {
              for (int i = 0; i < 8; i += 2 * step) lane[i] += lane[i + step];
            }
            sum += lane[0];
          }
          const double mean = len == 0 ? 0 : static_cast<double>(sum / static_cast<float>(len));
          EXPECT_EQ(got.as<uint16_t>()[(static_cast<int64_t>(s) * 2 + h) * 8 + d], encode(c.problem.kv_dtype, mean));
          first += len;
        }
      }
    }
  }
}

// Sums that cancel: 2^24 swallows a 1 that is added to it, so what is left of 64 ones says where they were added.
TEST(SageQuantizers, TheMeanOfNumbersThatCancel) {
  const Case c = constant_case("d=8 q=512 causal=0 dtype=bf16", [](int64_t t, int64_t) {
    return t == 0 ? 0x1p24f : t == 256 + 8 ? -0x1p24f : 1.0f;
  });
  // Sum 0 of the first 256: 2^24 + 31 ones, all lost; the other seven, 32 each, are added as pairs: 224 - 0.
  // Of the second 256: sum 0 is 1 - 2^24 + 30 ones = -2^24 + 31, exact below 2^24.
  const float first = 0x1p24f + 32 + 64 + 128, second = (-0x1p24f + 31) + 32 + 64 + 128;
  EXPECT_EQ(sage_k_mean(c.problem, c.k.view()).as<uint16_t>()[0],
            encode(DType::bf16, static_cast<double>((first + second) / 512)));
}

TEST(SageQuantizers, E4M3RoundsToTheNearestAndSaturates) {
  std::mt19937 random(6);
  const auto check = [](float x) {
    const uint32_t want = std::isnan(x) ? 0x7f : encode(DType::f8_e4m3, static_cast<double>(x));
    ASSERT_EQ(e4m3_from_f32(x), want) << x;
  };
  for (uint32_t high = 0; high < 1u << 16; ++high) {
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) check(std::bit_cast<float>(high << 16 | low));
  }
  for (int i = 0; i < 1000000; ++i) check(std::bit_cast<float>(static_cast<uint32_t>(random())));
}

TEST(SageQuantizers, ValuesLieInTheOrderOfAThreadsWeights) {
  // Token t of 16 holds 2^t: 448 * 2^(t - 15) in E4M3, all of which it has.
  const Case c = constant_case("d=8 q=48 causal=0 dtype=f16",
                               [](int64_t t, int64_t) { return std::ldexp(1.0f, static_cast<int>(t % 16)); });
  const SageCodes got = sage_quantize_v(c.problem, c.v.view(), {});
  for (int64_t slot = 0; slot < 64; ++slot) {
    const double want = slot < 48 ? std::ldexp(448.0, kTokenOfSlot[slot % 16] - 15) : 0;
    EXPECT_EQ(decode(DType::f8_e4m3, got.codes.as<uint8_t>()[slot]), want) << slot;
  }
  for (int64_t u = 0; u < 16; ++u) EXPECT_EQ(kTokenOfSlot[sage_v_slot(u)], u);
}

int g_ulps = 0;
float divide_off(float a, float b) {
  float x = a / b;
  for (int i = 0; i < std::abs(g_ulps); ++i) x = std::nextafter(x, g_ulps > 0 ? kInfinity : -kInfinity);
  return x;
}

// A division that is off by up to 2 ulp, as div.full.f32 may be, moves codes by one step at most, and few: those next
// to a tie, which bf16's numbers of 8 bits, divided by one of them, often are.
TEST(SageQuantizers, AnApproximateDivisionMovesFewCodesByOneStep) {
  const Case c = make_case("hq=4 hkv=4 d=128 q=700 causal=0 dtype=bf16", 7);
  constexpr int64_t kNumbers = 4 * 128 * 700;  // of each tensor
  SageMath approximate;
  approximate.divide = divide_off;
  for (const SageOptions& options : all_options()) {
    const SageTensors exact = sage_quantize(c.problem, c.inputs(), options);
    for (int ulps : {-2, -1, 1, 2}) {
      g_ulps = ulps;
      const SageTensors got = sage_quantize(c.problem, c.inputs(), options, approximate);
      int64_t moved = 0, moved_v = 0;
      for (const auto& [a, b] : {std::pair(&exact.q, &got.q), std::pair(&exact.k, &got.k)}) {
        for (int64_t i = 0; i < a->codes.view().num_elements(); ++i) {
          const int step = a->codes.as<int8_t>()[i] - b->codes.as<int8_t>()[i];
          ASSERT_LE(std::abs(step), 1);
          moved += step != 0;
        }
      }
      for (int64_t i = 0; i < exact.v.codes.view().num_elements(); ++i) {
        const int step = (exact.v.codes.as<uint8_t>()[i] & 0x7f) - (got.v.codes.as<uint8_t>()[i] & 0x7f);
        ASSERT_LE(std::abs(step), 1);
        moved_v += step != 0;
      }
      EXPECT_LT(moved, 2 * kNumbers / 250) << text_of(options);
      EXPECT_LT(moved_v, kNumbers / 250) << text_of(options);
      EXPECT_GT(moved_v, 0);  // the plug is used
      RecordProperty(fmt::format("{} {} ulp", text_of(options), ulps),
                     fmt::format("{} of {} int8, {} of {} e4m3", moved, 2 * kNumbers, moved_v, kNumbers));
    }
  }
}

// thu-ml/SageAttention#386, #387, #390: 32-bit offsets into a fused QKV buffer.
TEST(SageQuantizers, StridesBeyond32Bits) {
  constexpr int64_t kStride = (int64_t{1} << 26) + 24, kTokens = 70;  // 2^32 elements from the first token to the last
  const size_t bytes = static_cast<size_t>(kTokens * kStride * 2);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for a tensor of 9 GiB";
  Case c = make_case("hq=2 hkv=1 d=8 q=70 causal=0 dtype=f16", 8);
  const auto far_view = [&](const GuardedTensor& near, int64_t place) {
    TensorView view = near.view();
    view.data = static_cast<uint16_t*>(memory) + place;
    view.strides = {kStride, view.sizes[2], 1};
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < view.sizes[1]; ++h) {
        for (int64_t d = 0; d < 8; ++d) {
          view.as<uint16_t>()[t * kStride + h * 8 + d] = static_cast<uint16_t>(near.at(t, h, d).bits());
        }
      }
    }
    return view;
  };
  const AttentionInputs far = {far_view(c.q, 0), far_view(c.k, 16), far_view(c.v, 24)};
  for (const SageOptions& options : all_options()) expect_quantised(c, options, sage_quantize(c.problem, far, options));
  munmap(memory, bytes);
}

TEST(SageQuantizers, RefuseByName) {
  const auto refuses = [](const std::string& line, const SageOptions& options, const std::string& text) {
    const Case c = make_case(Problem::parse(line), 1);
    try {
      sage_quantize(c.problem, c.inputs(), options);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  refuses("d=64 q=5", {}, "q_dtype: got f32");
  refuses("d=64 q=5 dtype=e4m3", {}, "q_dtype: got e4m3");
  refuses("d=64 q=5 dtype=f16 qdtype=bf16", {}, "kv_dtype: got f16");
  refuses("d=64 q=5 dtype=bf16 arithmetic=int8", {}, "arithmetic: got int8");
  refuses("d=136 q=5 dtype=bf16", {}, "head_dim: got 136");
  refuses("d=64 q=5 dtype=bf16", {SageKernel::sm90, SageGroups::per_thread, SageAccumulator::f16}, "accumulator");

  Case c = make_case("d=64 q=5 dtype=bf16 block=64", 1);
  Tensor one(DType::f32, {1});
  AttentionInputs inputs = c.inputs();
  inputs.v_scale = one.view();
  EXPECT_THROW(sage_quantize(c.problem, inputs, {}), Error);
  page(c, Paging::apart);
  EXPECT_THROW(sage_quantize(c.problem, c.inputs(), {}), Error);
  EXPECT_THROW(parse_sage_kernel("sm80"), Error);
  EXPECT_EQ(parse_sage_groups("per-warp"), SageGroups::per_warp);
  EXPECT_EQ(parse_sage_accumulator("f16"), SageAccumulator::f16);
  EXPECT_EQ(parse_sage_kernel("sm90"), SageKernel::sm90);
}

}  // namespace
}  // namespace tilesieve::testing
