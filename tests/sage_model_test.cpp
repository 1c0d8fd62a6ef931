// SPDX-License-Identifier: Apache-2.0
// The model of Sage's kernels against a rendition of their loop, bit for bit.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "sage_rendition.h"

namespace tilesieve::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// One kernel for each way of grouping and smoothing, another one for the next seed.
std::vector<SageOptions> some_options(uint32_t seed) {
  std::vector<SageOptions> some;
  const std::vector<SageOptions> all = all_options();  // four kernels follow each other
  for (size_t i = 0; i < all.size(); ++i) {
    if ((i / 4 + i + seed) % 4 == 0) some.push_back(all[i]);
  }
  return some;
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
    for (const SageOptions& options : some_options(seed)) {
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
  for (const char* line : {"hq=2 hkv=1 d=64 q=500 kv=700 causal=0 dtype=bf16 qblock=128",
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
      if (!options.smooth_k) continue;  // nothing to the bound
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

}  // namespace
}  // namespace tilesieve::testing
