// SPDX-License-Identifier: Apache-2.0
// No kernel touches a byte outside its buffers: each of them ends, or begins, at a page that may not be touched.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>

#include "test_inputs.h"

namespace tilesieve::testing {
namespace {

enum class Side { before, behind };

// Memory with forbidden pages on both sides, against one of them.
class FencedBytes {
 public:
  FencedBytes(int64_t bytes, Side side, int64_t alignment) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t inside = (bytes + page - 1) / page * page;
    mapped_ = static_cast<size_t>(inside + 2 * page);
    begin_ = static_cast<uint8_t*>(mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (begin_ == MAP_FAILED || mprotect(begin_ + page, static_cast<size_t>(inside), PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("no fenced memory");
    }
    const int64_t padded = (bytes + alignment - 1) / alignment * alignment;
    data = begin_ + page + (side == Side::behind ? inside - padded : 0);
  }
  ~FencedBytes() { munmap(begin_, mapped_); }
  FencedBytes(const FencedBytes&) = delete;
  FencedBytes& operator=(const FencedBytes&) = delete;

  uint8_t* data;

 private:
  uint8_t* begin_;
  size_t mapped_;
};

// Moves views behind fences, with the gaps of their strides but not a byte more.
class Fences {
 public:
  explicit Fences(Side side) : side_(side) {}

  TensorView move_in(const TensorView& view) {
    if (view.data == nullptr) return view;
    const Span span = span_of(view);
    FencedBytes& memory = memory_.emplace_back(span.bytes, side_, 1);
    std::memcpy(memory.data, view.as<uint8_t>() + span.first, static_cast<size_t>(span.bytes));
    TensorView moved = view;
    moved.data = memory.data - span.first;
    return moved;
  }
  static void copy_back(const TensorView& from, const TensorView& to) {
    const Span span = span_of(to);
    std::memcpy(to.as<uint8_t>() + span.first, from.as<uint8_t>() + span.first, static_cast<size_t>(span.bytes));
  }
  void* workspace(int64_t bytes) { return memory_.emplace_back(bytes, side_, 64).data; }

 private:
  // The bytes of a view's elements, around its data.
  struct Span {
    int64_t first, bytes;
  };
  static Span span_of(const TensorView& view) {
    int64_t first = 0, last = 0;
    for (int d = 0; d < view.num_dims; ++d) {
      if (view.sizes[d] == 0) return {0, 0};
      const int64_t step = view.strides[d] * (view.sizes[d] - 1);
      (step < 0 ? first : last) += step;
    }
    const int64_t bytes = size_in_bytes(view.dtype);
    return {first * bytes, (last - first + 1) * bytes};
  }

  Side side_;
  std::deque<FencedBytes> memory_;
};

class GuardPages : public ::testing::TestWithParam<const char*> {
 protected:
  void run_fenced(const Runner& runner, const Case& c, Layout out, DType o_dtype, Side side,
                  const std::vector<uint32_t>& want) {
    SCOPED_TRACE(trace(runner, c.problem) + (side == Side::before ? ", fence before" : ", fence behind"));
    Fences fences(side);
    AttentionInputs inputs = c.inputs();
    for (TensorView* view :
         {&inputs.q, &inputs.k, &inputs.v, &inputs.block_table, &inputs.q_scale, &inputs.k_scale, &inputs.v_scale}) {
      *view = fences.move_in(*view);
    }
    const BlockIndex& given = c.block_index.view();
    TensorView ids = contiguous_view(const_cast<int32_t*>(given.kv_block), DType::i32,
                                     {given.num_heads, given.num_q_rows, given.capacity});
    ids.strides = {given.head_stride, given.row_stride, given.slot_stride};
    const BlockIndex block_index = BlockIndex::from(fences.move_in(ids));
    const Output output = make_output(c.problem, out, o_dtype);
    const AttentionOutputs outputs = {fences.move_in(output.o.view()), fences.move_in(output.lse.view())};
    void* workspace = nullptr;
    if (runner.loop_order == LoopOrder::kv_outer) {
      workspace = fences.workspace(plan_of(runner, c.problem, block_index).workspace_bytes);
    }
    run_into(runner, c.problem, inputs, block_index, outputs, workspace);
    Fences::copy_back(outputs.o, output.o.view());
    Fences::copy_back(outputs.lse, output.lse.view());
    EXPECT_EQ(output.o.fault() + output.lse.fault(), "");
    EXPECT_EQ(output.bits(), want);
  }
};

TEST_P(GuardPages, AroundEveryBuffer) {
  const DType o_dtypes[] = {DType::f32, DType::bf16, DType::f16};
  uint32_t turn = 0;
  for (const char* line :
       {"hq=3 hkv=1 d=8 q=5 kv=13 block=8 topk=2", "hq=6 hkv=2 d=24 q=7,0,9 kv=30,3,41 block=16 topk=2",
        "hq=10 hkv=2 d=72 q=17 kv=131 block=64 topk=2", "hq=1 hkv=1 d=40 q=1,1 kv=1,25 block=24 topk=2 causal=0",
        "hq=17 hkv=1 d=136 q=3 kv=67 block=40 topk=1"}) {
    for (bool paged : {false, true}) {
      ++turn;
      const Problem problem = Problem::parse(std::string(line) + GetParam());
      const Layout out = kLayouts[turn % 4];
      const DType o_dtype = o_dtypes[turn % 3];
      Case c = make_case(problem, turn, Values::normal, kLayouts[(turn + 1) % 4], kIndexLayouts[turn % 3]);
      c.q_scale = c.v_scale = Tensor(DType::f32, {problem.num_kv_heads});
      c.k_scale = Tensor(DType::f32, {1});
      for (const Tensor* scale : {&c.q_scale, &c.k_scale, &c.v_scale}) {
        std::fill_n(scale->as<float>(), scale->view().num_elements(), 0.75f);
      }
      if (paged) page(c, kPagings[turn / 2 % 4]);
      for (Runner runner : all_runners(problem)) {
        runner.execution.num_threads = 1;
        const std::vector<uint32_t> want = run(runner, c, out, o_dtype).bits();
        for (Side side : {Side::before, Side::behind}) run_fenced(runner, c, out, o_dtype, side, want);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GuardPages, ::testing::ValuesIn(kStorages));

}  // namespace
}  // namespace tilesieve::testing
