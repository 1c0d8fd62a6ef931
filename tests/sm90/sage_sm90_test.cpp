// SPDX-License-Identifier: Apache-2.0
// Sage and bf16 attention on a Hopper GPU: codes against the CPU's quantisers, outputs against the CPU's model within
// its bound and against float64. Skipped where there is no such GPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/number_formats.h"
#include "cuda/device.h"
#include "sm90/dense_case.h"
#include "tilesieve/metrics.h"

namespace tilesieve::testing {
namespace {

constexpr SageOptions kSm90 = {.kernel = SageKernel::sm90};

class Sage : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

float number(const TensorView& view, int64_t i) {
  if (view.dtype == DType::f32) return view.as<float>()[i];
  const uint16_t bits = view.as<uint16_t>()[i];
  return view.dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits);
}

// Layouts in turn: packed, heads first with gaps, gaps.
void lay_out(DenseCase& c, int turn) {
  c.hnd = turn % 3 == 1;
  c.gap = turn % 3 == 0 ? 0 : 8 * (turn % 5 + 1);
}

// How often two codes may differ: the chip divides with an error of 2 ulp, the CPU with none.
void expect_codes(const SageCodes& got, const SageCodes& want, int64_t step_limit, double share) {
  const int64_t n = want.codes.view().num_elements();
  int64_t other = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int a = got.codes.as<int8_t>()[i], b = want.codes.as<int8_t>()[i];
    ASSERT_LE(std::abs(a - b), step_limit) << "code " << i;
    other += a != b;
  }
  EXPECT_LE(static_cast<double>(other), share * static_cast<double>(n));
  for (int64_t i = 0; i < want.scale.view().num_elements(); ++i) {
    const float a = got.scale.as<float>()[i], b = want.scale.as<float>()[i];
    ASSERT_NEAR(a, b, 3e-7f * b) << "scale " << i;
  }
}

TEST_F(Sage, CodesAreTheCpus) {
  int turn = 0;
  for (const char* line :
       {"hq=2 hkv=2 d=128 q=200 kv=300 causal=0 dtype=bf16",
        "hq=4 hkv=2 d=64 q=130,130 kv=1000,1000 causal=0 dtype=bf16", "hq=2 hkv=1 d=96 q=77 kv=513 causal=1 dtype=f16",
        "hq=1 hkv=1 d=40 q=64 kv=2049 dtype=bf16 causal=0"}) {
    SCOPED_TRACE(line);
    DenseCase c = make_dense_case(line, 3);
    lay_out(c, turn++);
    const SageTensors got = quantized_by_device(c), want = sage_quantize(c.problem, c.inputs(), kSm90);
    const int64_t means = want.k_mean.view().num_elements();
    for (int64_t i = 0; i < means; ++i) ASSERT_EQ(got.k_mean.as<uint16_t>()[i], want.k_mean.as<uint16_t>()[i]) << i;
    expect_codes(got.q, want.q, 1, 1e-4);
    expect_codes(got.k, want.k, 1, 1e-4);
    expect_codes(got.v, want.v, 1, 3e-3);  // codes of e4m3: neighbours
  }
}

// Given the same codes, the kernel stays within the bound of the model. Returns the largest share of it.
double expect_model(const DenseCase& c) {
  const Problem& p = c.problem;
  const SageTensors tensors = quantized_by_device(c);
  const DenseResult got = run(c, DenseForm::exact);
  const Tensor o(c.o_dtype, {p.total_q(), p.num_q_heads, p.head_dim}), lse(DType::f32, {p.total_q(), p.num_q_heads});
  const Tensor bound(DType::f32, {p.total_q(), p.num_q_heads, p.head_dim});
  sage_attend_model(p, c.q.view(), tensors, nullptr, {o.view(), lse.view(), bound.view()}, kSm90);
  double largest = 0, squares = 0, norm = 0;
  for (int64_t i = 0; i < o.view().num_elements(); ++i) {
    const double error = std::abs(static_cast<double>(number(got.o.view(), i)) - number(o.view(), i));
    const double limit = bound.as<float>()[i];
    if (!(error <= limit)) {
      ADD_FAILURE() << p.to_line() << ": o " << i << " is " << number(got.o.view(), i) << ", the model's "
                    << number(o.view(), i) << " +- " << limit;
      return 1;
    }
    if (limit > 0) largest = std::max(largest, error / limit);
    squares += error * error;
    norm += std::pow(number(o.view(), i), 2);
  }
  // Nearly all of it a last bit of bf16; with outputs in f16 what the chip does otherwise shows.
  EXPECT_LE(std::sqrt(squares), (c.o_dtype == DType::bf16 ? 2.5e-3 : 1e-3) * std::sqrt(norm)) << p.to_line();
  for (int64_t i = 0; i < lse.view().num_elements(); ++i) {
    const float a = got.lse.as<float>()[i], b = lse.as<float>()[i];
    if (a == b) continue;  // infinities
    EXPECT_NEAR(a, b, 4e-6f * std::max(10.0f, std::abs(b))) << p.to_line() << ": lse " << i;
  }
  return largest;
}

TEST_F(Sage, StaysWithinTheBoundOfTheModel) {
  int turn = 0;
  double largest = 0;
  for (const char* line :
       {"hq=2 hkv=2 d=128 q=200 kv=300 causal=0 dtype=bf16", "hq=4 hkv=1 d=64 q=130,130 kv=500,500 causal=0 dtype=bf16",
        "hq=2 hkv=1 d=96 q=77 kv=513 causal=1 dtype=f16", "hq=1 hkv=1 d=40 q=65 kv=1000 causal=0 dtype=bf16",
        "hq=1 hkv=1 d=128 q=400 kv=400 causal=1 dtype=bf16", "hq=2 hkv=2 d=128 q=400 kv=290 causal=1 dtype=bf16",
        "hq=8 hkv=2 d=64 q=193,193,193 kv=777,777,777 causal=1 dtype=f16",
        "hq=1 hkv=1 d=128 q=1 kv=1 causal=0 dtype=bf16", "hq=3 hkv=3 d=8 q=191 kv=129 causal=0 dtype=f16 scale=0.7"}) {
    DenseCase c = make_dense_case(line, 10 + static_cast<uint32_t>(turn));
    lay_out(c, turn++);
    c.o_dtype = turn % 2 == 0 ? DType::bf16 : DType::f16;
    largest = std::max(largest, expect_model(c));
  }
  RecordProperty("largest_share_of_bound", fmt::format("{:.3f}", largest));
}

TEST_F(Sage, EveryTailOfABlockOfKeys) {
  for (int64_t kv_len = 1; kv_len <= 256; kv_len += kv_len == 1 ? 127 : 1) {
    expect_model(make_dense_case(fmt::format("hq=1 hkv=1 d=64 q=5 kv={} causal=0 dtype=bf16", kv_len), 5));
  }
  for (int64_t kv_len = 1; kv_len < 128; kv_len += 9) {
    expect_model(make_dense_case(fmt::format("hq=1 hkv=1 d=128 q=5 kv={} causal=0 dtype=bf16", kv_len), 6));
  }
}

TEST_F(Sage, EveryTailOfATileOfQueries) {
  for (int64_t q_len = 1; q_len <= 400; q_len += q_len < 200 ? 9 : 31) {
    expect_model(make_dense_case(fmt::format("hq=1 hkv=1 d=64 q={} kv=150 causal=0 dtype=bf16", q_len), 7));
  }
}

// Tokens so far apart that offsets leave 32 bits, in bytes and in elements.
TEST_F(Sage, StridesPast31Bits) {
  DenseCase c = make_dense_case("hq=1 hkv=1 d=64 q=150 kv=290 causal=0 dtype=bf16", 8);
  const DenseResult exact = run(c, DenseForm::exact), bf16 = run(c, DenseForm::bf16);
  c.q_token_stride = (int64_t{1} << 24) + 64;
  c.kv_token_stride = (int64_t{1} << 23) + 64;
  EXPECT_TRUE(run(c, DenseForm::exact) == exact);
  EXPECT_TRUE(run(c, DenseForm::bf16) == bf16);
}

constexpr DenseForm kForms[] = {DenseForm::bf16, DenseForm::exact, DenseForm::relaxed};

TEST_F(Sage, RowsThatSeeNothing) {
  for (DenseForm form : kForms) {
    for (const char* line :
         {"hq=2 hkv=1 d=128 q=100,100 kv=0,0 causal=0 dtype=bf16", "hq=1 hkv=1 d=64 q=300 kv=40 causal=1 dtype=bf16"}) {
      const DenseCase c = make_dense_case(line, 9);
      const DenseResult got = run(c, form);
      const int64_t unseen = c.problem.num_sequences() == 2 ? 200 : 260, heads = c.problem.num_q_heads;
      for (int64_t i = 0; i < unseen * heads; ++i) ASSERT_EQ(got.lse.as<float>()[i], -INFINITY) << line << " " << i;
      for (int64_t i = 0; i < unseen * heads * c.problem.head_dim; ++i) {
        ASSERT_EQ(got.o.as<uint16_t>()[i], 0) << line << " " << i;
      }
      for (int64_t i = unseen * heads; i < got.lse.view().num_elements(); ++i) {
        ASSERT_TRUE(std::isfinite(got.lse.as<float>()[i])) << line << " " << i;
      }
    }
  }
}

// A channel of V that is 0 gives 0, one that holds an infinity NaN; the others do not mind.
TEST_F(Sage, ChannelsOfZeroAndOfInfinity) {
  DenseCase c = make_dense_case("hq=1 hkv=1 d=64 q=70 kv=200 causal=0 dtype=bf16", 11);
  for (DenseForm form : {DenseForm::exact, DenseForm::relaxed}) {
    const DenseResult plain = run(c, form);
    DenseCase odd = make_dense_case("hq=1 hkv=1 d=64 q=70 kv=200 causal=0 dtype=bf16", 11);
    for (int64_t t = 0; t < 200; ++t) odd.v.as<uint16_t>()[t * 64 + 5] = 0;
    odd.v.as<uint16_t>()[100 * 64 + 9] = 0x7f80;
    const DenseResult got = run(odd, form);
    for (int64_t i = 0; i < got.o.view().num_elements(); ++i) {
      const float x = number(got.o.view(), i);
      if (i % 64 == 5) {
        ASSERT_EQ(x, 0.0f);
      } else if (i % 64 == 9) {
        ASSERT_TRUE(std::isnan(x));
      } else {
        ASSERT_EQ(x, number(plain.o.view(), i));
      }
    }
  }
}

// A row of NaN queries spoils itself and its group of two, and nothing that comes later in the same CTA.
TEST_F(Sage, NanQueriesStayAtHome) {
  const std::string line = "hq=1 hkv=1 d=64 q=60000 kv=300 causal=0 dtype=bf16";
  const DenseCase c = make_dense_case(line, 12);
  const DenseCase odd = make_dense_case(line, 12);
  for (int64_t d = 0; d < 64; ++d) odd.q.as<uint16_t>()[100 * 64 + d] = 0x7fc0;
  for (DenseForm form : kForms) {
    const DenseResult plain = run(c, form), got = run(odd, form);
    for (int64_t t = 0; t < 60000; ++t) {
      if (t == 100 || t == 108) continue;  // 16 w + r and + 8 share a scale
      for (int64_t d = 0; d < 64; ++d) {
        ASSERT_EQ(got.o.as<uint16_t>()[t * 64 + d], plain.o.as<uint16_t>()[t * 64 + d]) << t;
      }
    }
    EXPECT_TRUE(std::isnan(number(got.o.view(), 100 * 64)));
  }
}

TEST_F(Sage, TenRunsAreOneToTheBit) {
  const DenseCase c = make_dense_case("hq=8 hkv=4 d=128 q=2000 kv=3000 causal=1 dtype=bf16", 13);
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  const DeviceMemory noise(int64_t{1} << 29);
  for (DenseForm form : kForms) {
    const DenseDevice device(c, form);
    device.launch();
    const DenseResult want = device.result();
    for (int i = 0; i < 10; ++i) {
      for (int j = 0; j < 4; ++j) cudaMemsetAsync(noise.data(), i, static_cast<size_t>(noise.bytes()), other);
      device.launch();
      EXPECT_TRUE(device.result() == want) << "repeat " << i;
    }
  }
  cudaStreamDestroy(other);
}

TEST_F(Sage, CanBeCaptured) {
  const DenseCase c = make_dense_case("hq=2 hkv=2 d=128 q=300 kv=1500 causal=0 dtype=bf16", 14);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (DenseForm form : kForms) {
    const DenseResult want = run(c, form);
    const DenseDevice device(c, form);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    device.launch(stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    EXPECT_TRUE(device.result() == want);
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

double rel_l2(const DenseCase& c, const DenseResult& got, const Reference& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.o.size(); ++i) {
    const double x = number(got.o.view(), static_cast<int64_t>(i));
    error += (x - want.o[i]) * (x - want.o[i]);
    norm += want.o[i] * want.o[i];
  }
  EXPECT_TRUE(std::isfinite(error)) << c.problem.to_line();
  return std::sqrt(error / norm);
}

// Values without an offset: the attention of many is small against each.
TEST_F(Sage, RelaxedIsAboutAsGoodAsExact) {
  for (const char* line : {"hq=1 hkv=1 d=128 q=64 kv=20000 causal=0 dtype=bf16",
                           "hq=1 hkv=1 d=64 q=64 kv=5000 causal=0 dtype=bf16 scale=0.4"}) {
    for (float v_offset : {0.0f, 0.5f}) {
      const DenseCase c = make_dense_case(line, 15, 2.0f, v_offset);
      const Reference want = reference_attention(c.problem, c.inputs(), nullptr);
      const double exact = rel_l2(c, run(c, DenseForm::exact), want);
      const double relaxed = rel_l2(c, run(c, DenseForm::relaxed), want);
      RecordProperty("rel_l2", fmt::format("exact {:.4f} relaxed {:.4f}", exact, relaxed));
      EXPECT_LT(exact, 0.05) << line;
      // Sums in the tensor cores lose some 0.1 % a block of keys; where values cancel, that is nothing beside the rest.
      EXPECT_LT(relaxed, std::hypot(1.02 * exact, v_offset == 0.0f ? 0.003 : 0.014)) << line;
    }
  }
}

TEST_F(Sage, Bf16AgainstFloat64) {
  int turn = 0;
  for (const char* line : {"hq=2 hkv=2 d=128 q=200 kv=300 causal=0", "hq=4 hkv=1 d=64 q=130,130 kv=500,500 causal=0",
                           "hq=2 hkv=1 d=96 q=77 kv=513 causal=1", "hq=1 hkv=1 d=40 q=65 kv=1000 causal=0",
                           "hq=1 hkv=1 d=128 q=400 kv=400 causal=1", "hq=2 hkv=2 d=128 q=400 kv=290 causal=1",
                           "hq=1 hkv=1 d=128 q=1 kv=1 causal=0", "hq=1 hkv=1 d=64 q=5 kv=127 causal=0",
                           "hq=1 hkv=1 d=128 q=129 kv=129 causal=0 scale=0.7"}) {
    DenseCase c = make_dense_case(fmt::format("{} dtype=bf16", line), 20 + static_cast<uint32_t>(turn));
    lay_out(c, turn++);
    const Reference want = reference_attention(c.problem, c.inputs(), nullptr);
    const DenseResult got = run(c, DenseForm::bf16);
    EXPECT_LT(rel_l2(c, got, want), 0.004) << line;
    for (size_t i = 0; i < want.lse.size(); ++i) {
      const float lse = got.lse.as<float>()[i];
      if (std::isinf(want.lse[i])) {
        EXPECT_EQ(lse, want.lse[i]);
      } else {
        EXPECT_NEAR(lse, want.lse[i], 1e-5 * std::max(1.0, std::abs(want.lse[i]))) << line << " " << i;
      }
    }
  }
}

// Two halves of the keys, merged by their LSE, are the whole.
TEST_F(Sage, HalvesMergeByTheirLse) {
  const DenseCase whole = make_dense_case("hq=1 hkv=1 d=128 q=70 kv=600 causal=0 dtype=bf16", 30);
  const auto part = [&](int64_t first, int64_t count) {
    DenseCase c = make_dense_case(fmt::format("hq=1 hkv=1 d=128 q=70 kv={} causal=0 dtype=bf16", count), 30);
    std::copy_n(whole.q.as<uint16_t>(), 70 * 128, c.q.as<uint16_t>());
    std::copy_n(whole.k.as<uint16_t>() + first * 128, count * 128, c.k.as<uint16_t>());
    std::copy_n(whole.v.as<uint16_t>() + first * 128, count * 128, c.v.as<uint16_t>());
    return run(c, DenseForm::exact);
  };
  const DenseResult a = part(0, 250), b = part(250, 350);
  const Reference want = reference_attention(whole.problem, whole.inputs(), nullptr);
  double error = 0, norm = 0;
  for (int64_t i = 0; i < 70 * 128; ++i) {
    const double la = a.lse.as<float>()[i / 128], lb = b.lse.as<float>()[i / 128];
    const double share = 1 / (1 + std::exp(lb - la));
    const double x = share * number(a.o.view(), i) + (1 - share) * number(b.o.view(), i);
    error += std::pow(x - want.o[static_cast<size_t>(i)], 2);
    norm += std::pow(want.o[static_cast<size_t>(i)], 2);
  }
  EXPECT_LT(std::sqrt(error / norm), 0.03);
}

TEST_F(Sage, Refusals) {
  const DenseCase c = make_dense_case("hq=4 hkv=2 d=64 q=70 kv=90 causal=0 dtype=bf16", 40);
  const DenseDevice device(c, DenseForm::exact);
  const auto refuses = [&](auto change, const std::string& text) {
    sm90::DenseInputs inputs = device.inputs();
    sm90::DenseOutputs outputs = device.outputs();
    sm90::SageCallOptions options = device.options();
    change(inputs, outputs, options);
    try {
      sm90::sage_attention(inputs, outputs, options, device.workspace(), int64_t{1} << 30, nullptr);
      ADD_FAILURE() << "not refused: " << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  refuses([](auto& in, auto&, auto&) { in.q.num_dims = 2; }, "q: got 2 dimensions");
  refuses([](auto& in, auto&, auto&) { in.k.num_dims = 3; }, "k: got 3 dimensions");
  refuses([](auto& in, auto&, auto&) { in.q.sizes[3] = 60; }, "q: got head_dim 60");
  refuses([](auto& in, auto&, auto&) { in.q.sizes[3] = 136; }, "q: got head_dim 136");
  refuses([](auto& in, auto&, auto&) { in.k.sizes[2] = 3; }, "k: got 3 KV heads for 4 query heads");
  refuses([](auto& in, auto&, auto&) { in.v.sizes[1] = 91; }, "v: got bf16[1, 91, 2, 64]");
  refuses([](auto& in, auto&, auto&) { in.v.dtype = DType::f16; }, "v: got f16");
  refuses([](auto& in, auto&, auto&) { in.q.dtype = DType::f32; }, "q: got f32");
  refuses([](auto& in, auto&, auto&) { in.k.strides[3] = 2; }, "k: got a stride of 2 between channels");
  refuses([](auto& in, auto&, auto&) { in.k.strides[1] = 129; }, "k: got a stride of 129");
  refuses([](auto& in, auto&, auto&) { in.k.device.kind = DeviceKind::cpu; }, "k: lies on the CPU");
  refuses([](auto&, auto& out, auto&) { out.o.dtype = DType::f32; }, "o: got f32");
  refuses([](auto&, auto& out, auto&) { out.lse.sizes[1] = 5; }, "lse: got f32[1, 5, 4]");
  refuses([](auto&, auto&, auto& options) { options.softmax_scale = -1; }, "softmax_scale: got -1");
  const int64_t need = sm90::sage_attention_workspace(device.inputs(), device.outputs(), device.options());
  EXPECT_THROW(
      sm90::sage_attention(device.inputs(), device.outputs(), device.options(), device.workspace(), need - 1, nullptr),
      Error);
}

}  // namespace
}  // namespace tilesieve::testing
