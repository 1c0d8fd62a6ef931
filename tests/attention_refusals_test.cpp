// SPDX-License-Identifier: Apache-2.0
// What attention refuses: each error begins with the argument's name and says what was got.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "io_files.h"
#include "test_inputs.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class AttentionRefusals : public ::testing::Test {
 protected:
  Case c_ = make_case("hq=4 hkv=2 d=16 q=5,2 kv=9,2 block=8 topk=2", 14);
  Output output_ = make_output(c_.problem);

  std::string refusal(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
    const std::string sparse = error_of([&] { sparse_attention(c_.problem, inputs, c_.block_index.view(), outputs); });
    EXPECT_EQ(error_of([&] { dense_attention(c_.problem, inputs, outputs); }), sparse);
    return sparse;
  }
  std::string refusal_of(TensorView AttentionInputs::*tensor, const TensorView& view) {
    AttentionInputs inputs = c_.inputs();
    inputs.*tensor = view;
    return refusal(inputs, output_.views());
  }
  std::string refusal_of_o(const TensorView& o) {
    AttentionOutputs outputs = output_.views();
    outputs.o = o;
    return refusal(c_.inputs(), outputs);
  }
};

const std::pair<std::string, TensorView AttentionInputs::*> kTensors[] = {
    {"q: ", &AttentionInputs::q}, {"k: ", &AttentionInputs::k}, {"v: ", &AttentionInputs::v}};

TEST_F(AttentionRefusals, NamesTheTensor) {
  for (const auto& [name, tensor] : kTensors) {
    const TensorView good = c_.inputs().*tensor;
    TensorView bad = good;
    bad.dtype = DType::bf16;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("bf16["), HasSubstr("f32[")));
    bad = good;
    bad.device = {DeviceKind::cuda, 1};
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("cuda:1")));
    bad = good;
    bad.sizes[0] += 1;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr(std::to_string(good.sizes[0] + 1))));
    bad = good;
    bad.sizes[1] = 3;
    EXPECT_THAT(refusal_of(tensor, bad), StartsWith(name));
    bad = good;
    bad.num_dims = 2;
    EXPECT_THAT(refusal_of(tensor, bad), StartsWith(name));
    bad = good;
    bad.strides[2] = 2;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("stride of the last dimension is 2")));
    bad = good;
    bad.data = nullptr;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("null")));
  }
  TensorView o = output_.o.view();
  o.strides[2] = -1;
  EXPECT_THAT(refusal_of_o(o), AllOf(StartsWith("o: "), HasSubstr("stride")));
  AttentionOutputs outputs = output_.views();
  outputs.lse.sizes[1] = 2;
  EXPECT_THAT(refusal(c_.inputs(), outputs), StartsWith("lse: "));
  outputs = output_.views();
  outputs.lse.data = nullptr;
  EXPECT_THAT(refusal(c_.inputs(), outputs), StartsWith("lse: "));
}

TEST_F(AttentionRefusals, FormatsThatAreNotStorage) {
  for (DType dtype : {DType::f8_e5m2, DType::f8_e4m3fnuz, DType::f8_e5m2fnuz, DType::f64, DType::i8, DType::u16}) {
    const std::string text(name_of(dtype));
    for (const auto& [name, tensor] : kTensors) {
      TensorView bad = c_.inputs().*tensor;
      bad.dtype = dtype;
      EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name + text), HasSubstr("e4m3 are"))) << text;
    }
    TensorView o = output_.o.view();
    o.dtype = dtype;
    EXPECT_THAT(refusal_of_o(o), StartsWith("o: " + text));
  }
  TensorView o = output_.o.view();
  o.dtype = DType::f8_e4m3;
  EXPECT_THAT(refusal_of_o(o), AllOf(StartsWith("o: e4m3"), HasSubstr("bf16")));
}

TEST_F(AttentionRefusals, FormatsOtherThanTheProblemSays) {
  c_ = make_case("hq=4 hkv=2 d=16 q=5 kv=9 block=8 topk=2 dtype=e4m3 qdtype=bf16", 14);
  output_ = make_output(c_.problem);
  for (const auto& [name, tensor] : kTensors) {  // so K and V of different formats too
    TensorView bad = c_.inputs().*tensor;
    const std::string want(name_of(bad.dtype));
    bad.dtype = DType::f16;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("f16["), HasSubstr(want + "[")));
  }
}

TEST_F(AttentionRefusals, PagesThatDoNotFit) {
  const AttentionInputs flat = c_.inputs();
  page(c_, Paging::pairs);
  const AttentionInputs good = c_.inputs();
  for (const auto& [name, tensor] : std::span(kTensors).subspan(1)) {
    TensorView bad = good.*tensor;
    bad.sizes[1] = 16;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("kv_block_size"), HasSubstr("16")));
    bad = good.*tensor;
    bad.sizes[2] = 4;
    EXPECT_THAT(refusal_of(tensor, bad), StartsWith(name));
    bad = good.*tensor;
    bad.strides[3] = 2;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith(name), HasSubstr("stride")));
    EXPECT_THAT(refusal_of(tensor, flat.*tensor), AllOf(StartsWith(name), HasSubstr("num_pages")));
    bad = good.*tensor;
    bad.sizes[0] = 1;  // the table names pages that this one of the two does not have
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(StartsWith("block_table: "), HasSubstr("page")));
  }
  AttentionInputs no_table = good;
  no_table.block_table = {};
  EXPECT_THAT(refusal(no_table, output_.views()), AllOf(StartsWith("k: "), HasSubstr("total_kv")));
}

TEST_F(AttentionRefusals, BlockTable) {
  page(c_, Paging::halves);
  const TensorView good = c_.inputs().block_table;
  const auto refused = [&](const std::string& says, auto change) {
    TensorView bad = good;
    change(bad);
    EXPECT_THAT(refusal_of(&AttentionInputs::block_table, bad), AllOf(StartsWith("block_table: "), HasSubstr(says)));
  };
  refused("i64[", [](TensorView& x) { x.dtype = DType::i64; });
  refused("cuda", [](TensorView& x) { x.device.kind = DeviceKind::cuda; });
  refused("i32[3, ", [](TensorView& x) { x.sizes[0] = 3; });
  refused("i32[2, 1]", [](TensorView& x) { x.sizes[1] = 1; });
  refused("i32[2]", [](TensorView& x) { x.num_dims = 1; });
  refused("stride of the last dimension is 2", [](TensorView& x) { x.strides[1] = 2; });
  int32_t& entry = good.as<int32_t>()[1];  // block 1 of sequence 0
  const int32_t num_pages = static_cast<int32_t>(c_.inputs().k.sizes[0]);
  for (int32_t id : {-1, num_pages, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    entry = id;
    refused("block 1 of sequence 0 is page " + std::to_string(id), [](TensorView&) {});
  }
}

TEST_F(AttentionRefusals, Scales) {
  const std::pair<std::string, TensorView AttentionInputs::*> scales[] = {{"q_scale: ", &AttentionInputs::q_scale},
                                                                          {"k_scale: ", &AttentionInputs::k_scale},
                                                                          {"v_scale: ", &AttentionInputs::v_scale}};
  for (const auto& [name, scale] : scales) {
    for (float bad : {0.0f, -0.0f, -1.0f, kNan, kInfinity}) {
      Tensor factors(DType::f32, {2});
      factors.as<float>()[0] = 1;
      factors.as<float>()[1] = bad;
      EXPECT_THAT(refusal_of(scale, factors.view()), AllOf(StartsWith(name), HasSubstr("head 1 is"))) << bad;
    }
    EXPECT_THAT(refusal_of(scale, Tensor(DType::f32, {3}).view()), AllOf(StartsWith(name), HasSubstr("f32[3]")));
    EXPECT_THAT(refusal_of(scale, Tensor(DType::f32, {0}).view()), AllOf(StartsWith(name), HasSubstr("f32[0]")));
    EXPECT_THAT(refusal_of(scale, Tensor(DType::f32, {2, 1}).view()), AllOf(StartsWith(name), HasSubstr("[2, 1]")));
    EXPECT_THAT(refusal_of(scale, Tensor(DType::bf16, {1}).view()), AllOf(StartsWith(name), HasSubstr("bf16[1]")));
  }
}

TEST_F(AttentionRefusals, OutputsThatOverlap) {
  for (const auto& [name, tensor] : kTensors) {
    TensorView o = output_.o.view();
    o.data = (c_.inputs().*tensor).data;
    EXPECT_EQ(refusal_of_o(o), "o: overlaps " + name.substr(0, 1));
  }
  AttentionOutputs outputs = output_.views();
  outputs.lse.data = output_.o.view().as<float>() + output_.o.view().num_elements() - 1;
  EXPECT_EQ(refusal(c_.inputs(), outputs), "lse: overlaps o");

  AttentionOptions options;
  options.loop_order = LoopOrder::kv_outer;
  const Plan plan = plan_attention(c_.problem, c_.block_index.view(), options);
  const Tensor memory(DType::u8, {plan.workspace_bytes});
  outputs = output_.views();
  outputs.o.data = memory.as<uint8_t>() + plan.workspace_bytes - 4;
  EXPECT_EQ(error_of([&] { run_plan(c_.problem, c_.inputs(), plan, outputs, memory.view().data); }),
            "workspace: overlaps o");
  AttentionInputs inputs = c_.inputs();
  inputs.v.data = memory.as<uint8_t>();
  EXPECT_EQ(error_of([&] { run_plan(c_.problem, inputs, plan, output_.views(), memory.view().data); }),
            "workspace: overlaps v");
}

TEST_F(AttentionRefusals, BlockIndexOfAnotherShape) {
  BlockIndex bad = c_.block_index.view();
  bad.num_heads = 4;
  EXPECT_THAT(error_of([&] { sparse_attention(c_.problem, c_.inputs(), bad, output_.views()); }),
              AllOf(StartsWith("block_index: "), HasSubstr("[4, 7, ")));
  bad = c_.block_index.view();
  bad.num_q_rows = 6;
  EXPECT_THAT(error_of([&] { select_blocks(c_.problem, bad); }), StartsWith("block_index: "));
  bad = c_.block_index.view();
  bad.kv_block = nullptr;
  EXPECT_THAT(error_of([&] { select_blocks(c_.problem, bad); }), AllOf(StartsWith("block_index: "), HasSubstr("null")));
  Tensor wrong(DType::i64, {2, 5, 2});
  EXPECT_THAT(error_of([&] { BlockIndex::from(wrong.view()); }), AllOf(StartsWith("block_index: "), HasSubstr("i64[")));
  Tensor flat(DType::i32, {2, 10});
  EXPECT_THAT(error_of([&] { BlockIndex::from(flat.view()); }), StartsWith("block_index: "));
}

TEST_F(AttentionRefusals, NumberOfThreadsThatCannotBe) {
  for (int threads : {-1, 1 << 20}) {
    const Execution execution = {threads, Isa::best};
    EXPECT_THAT(error_of([&] { dense_attention(c_.problem, c_.inputs(), output_.views(), execution); }),
                AllOf(HasSubstr("num_threads"), HasSubstr(std::to_string(threads))));
  }
}

TEST_F(AttentionRefusals, InstructionSetThatIsNotHere) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx}) {
    if (is_available(isa)) continue;
    EXPECT_THAT(error_of([&] { find_kernel(c_.problem, LoopOrder::q_outer, {1, isa}); }),
                AllOf(StartsWith("execution.isa: "), HasSubstr(std::string(name_of(isa)))));
  }
  // A number that names no set must not run as another.
  EXPECT_THAT(error_of([&] { find_kernel(c_.problem, LoopOrder::q_outer, {1, static_cast<Isa>(77)}); }),
              StartsWith("execution.isa: "));
  for (Kernel kernel : kernels()) {
    if (kernel.device != DeviceKind::cpu) continue;
    Problem problem = c_.problem;
    problem.q_dtype = problem.kv_dtype = kernel.dtype;
    if (kernel.arithmetic == DType::i8) problem.arithmetic = Arithmetic::int8;
    EXPECT_EQ(why_not(kernel, problem), kernel.unavailable) << kernel.name;
    EXPECT_EQ(kernel.unavailable.empty(), is_available(kernel.isa)) << kernel.name;
    kernel.unavailable = "not today";
    EXPECT_EQ(why_not(kernel, problem), "not today");
    kernel.unavailable.clear();
    kernel.max_head_dim = 8;
    EXPECT_THAT(why_not(kernel, problem), AllOf(HasSubstr("head_dim"), HasSubstr("16")));
  }
  EXPECT_THAT(error_of([] { parse_isa("sse9"); }), AllOf(HasSubstr("sse9"), HasSubstr("avx512")));
  for (Isa isa : available_isas()) EXPECT_EQ(parse_isa(name_of(isa)), isa);
  EXPECT_EQ(parse_isa("best"), Isa::best);
  EXPECT_EQ(parse_isa("avx512-bf16"), Isa::avx512_bf16);
}

// Sets that compute products in bf16 never round what is not bf16: they refuse it, and Isa::best does not choose them.
TEST_F(AttentionRefusals, InstructionSetThatWouldRoundTheInputs) {
  for (const char* storage : {"", " dtype=f16", " dtype=f32 qdtype=bf16", " dtype=bf16 qdtype=f32",
                              " dtype=e4m3 qdtype=f32", " dtype=bf16 qdtype=f16", " dtype=f16 qdtype=bf16"}) {
    const Case c = make_case(std::string("hq=2 hkv=1 d=16 q=3 kv=9 block=8 topk=2") + storage, 1);
    const Output output = make_output(c.problem);
    for (Isa isa : {Isa::avx512_bf16, Isa::amx}) {
      AttentionOptions options;
      options.execution = {1, isa};
      const auto names_it = AllOf(StartsWith("execution.isa: "), HasSubstr(std::string(name_of(isa))));
      for (LoopOrder order : {LoopOrder::q_outer, LoopOrder::kv_outer, LoopOrder::automatic}) {
        options.loop_order = order;
        EXPECT_THAT(
            error_of([&] { sparse_attention(c.problem, c.inputs(), c.block_index.view(), output.views(), options); }),
            names_it);
      }
      EXPECT_THAT(error_of([&] { dense_attention(c.problem, c.inputs(), output.views(), options.execution); }),
                  names_it);
    }
    EXPECT_EQ(find_kernel(c.problem, LoopOrder::q_outer).arithmetic, DType::f32) << c.problem.to_line();
    EXPECT_EQ(find_kernel(c.problem, LoopOrder::kv_outer).arithmetic, DType::f32) << c.problem.to_line();
  }
}

}  // namespace
}  // namespace tilesieve::testing
