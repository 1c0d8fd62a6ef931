// SPDX-License-Identifier: Apache-2.0
// The video call on a Hopper GPU: codes and outputs against the CPU's quantisers and model, orders, lists, budgets.
// Skipped where there is no such GPU.
#include "tilesieve/video_sm90.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "base/number_formats.h"
#include "base/rounding.h"
#include "cuda/device.h"
#include "sm90/dense_case.h"
#include "tilesieve/error.h"
#include "tilesieve/layout.h"
#include "video_attention_sm90.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

constexpr SageOptions kSparse = {.kernel = SageKernel::sm90_sparse};

class Video : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

struct VideoCase {
  DenseCase dense;
  TokenLayout layout;
  sm90::VideoCallOptions options;

  // Heads have the boxes in turn.
  VideoCase(const std::string& line, const std::vector<std::string>& boxes, uint32_t seed)
      : dense(make_dense_case(line, seed)), layout(make_layout(dense.problem, boxes)) {
    dense.o_dtype = DType::bf16;
  }

  TokenSequence sequence() const { return {dense.problem.segments}; }
  int64_t num_tokens() const { return dense.problem.total_q() / dense.num_sequences(); }

  static TokenLayout make_layout(const Problem& problem, const std::vector<std::string>& boxes) {
    std::vector<Box> of_heads;
    for (int64_t h = 0; h < problem.num_kv_heads; ++h) {
      of_heads.push_back(Box::parse(boxes[static_cast<size_t>(h) % boxes.size()]));
    }
    return TokenLayout({problem.segments}, of_heads);
  }
};

// Rows of `row` bytes of [tokens, heads] put into slots, or back.
Tensor moved(const VideoCase& c, const Tensor& from, bool to_slots) {
  const TensorView& view = from.view();
  const int64_t tokens = c.num_tokens(), heads = view.sizes[1], group = heads / c.dense.problem.num_kv_heads;
  const int64_t row = (view.num_dims == 3 ? view.sizes[2] : 1) * size_in_bytes(view.dtype);
  const Tensor to(view.dtype, std::vector<int64_t>(view.sizes.begin(), view.sizes.begin() + view.num_dims));
  for (int64_t s = 0; s < c.dense.num_sequences(); ++s) {
    for (int64_t h = 0; h < heads; ++h) {
      const std::span<const int32_t> order = c.layout.order(group > 0 ? h / group : h);
      for (int64_t slot = 0; slot < tokens; ++slot) {
        const int64_t a = ((s * tokens + slot) * heads + h) * row;
        const int64_t b = ((s * tokens + order[static_cast<size_t>(slot)]) * heads + h) * row;
        std::memcpy(to.as<uint8_t>() + (to_slots ? a : b), from.as<uint8_t>() + (to_slots ? b : a),
                    static_cast<size_t>(row));
      }
    }
  }
  return to;
}

// The same case with its tokens in slots and every head in raster order.
VideoCase in_slots(const VideoCase& c) {
  VideoCase slots = c;
  slots.dense.q = moved(c, c.dense.q, true);
  slots.dense.k = moved(c, c.dense.k, true);
  slots.dense.v = moved(c, c.dense.v, true);
  slots.layout = VideoCase::make_layout(c.dense.problem, {"raster"});
  return slots;
}

// A case on the device.
class VideoDevice {
 public:
  explicit VideoDevice(const VideoCase& c)
      : case_(c),
        dense_(c.dense, DenseForm::bf16),
        tables_(c.sequence(), c.layout),
        table_memory_(tables_.bytes()),
        options_(c.options) {
    tables_.upload(table_memory_.data(), table_memory_.bytes());
    static_cast<sm90::DenseInputs&>(inputs_) = dense_.inputs();
    options_.layout = dense_.options().layout;
    options_.softmax_scale = c.dense.problem.scale();
  }

  void set_lists(const DeviceMemory& ids, int64_t capacity) {
    workspace_ = {};  // of another size
    inputs_.block_index =
        device_view(const_cast<void*>(static_cast<const void*>(ids.data())), DType::i32,
                    {case_.dense.num_sequences(), tables_.num_kv_heads(), tables_.num_q_tiles(), capacity});
  }

  void launch(cudaStream_t stream = nullptr) {
    if (workspace_.bytes() == 0) {
      workspace_ = DeviceMemory(sm90::video_attention_workspace(inputs_, dense_.outputs(), tables_, options_));
      workspace_.fill(0xff);
    }
    sm90::video_attention(inputs_, dense_.outputs(), tables_, options_, workspace_.data(), workspace_.bytes(), stream);
  }
  DenseResult result() const { return dense_.result(); }

  // Lists by the call of its own.
  std::vector<int32_t> route() const {
    const int64_t capacity = sm90::video_list_capacity(tables_, options_.routing);
    DeviceMemory ids(4 * case_.dense.num_sequences() * tables_.num_kv_heads() * tables_.num_q_tiles() * capacity);
    const TensorView view = device_view(
        ids.data(), DType::i32, {case_.dense.num_sequences(), tables_.num_kv_heads(), tables_.num_q_tiles(), capacity});
    DeviceMemory workspace(sm90::route_video_workspace(inputs_.q, inputs_.k, options_.layout, tables_));
    workspace.fill(0xff);
    sm90::route_video(inputs_.q, inputs_.k, options_.layout, tables_, options_.routing, view, workspace.data(),
                      workspace.bytes(), nullptr);
    std::vector<int32_t> host(static_cast<size_t>(ids.bytes() / 4));
    ids.download(host.data(), ids.bytes());
    return host;
  }
  int64_t capacity() const { return sm90::video_list_capacity(tables_, options_.routing); }

  SageTensors codes() {
    const sm90::VideoAttentionCall call(inputs_, dense_.outputs(), tables_, options_);
    DeviceMemory workspace(call.workspace_bytes());
    workspace.fill(0xff);
    call.prepare(workspace.data(), nullptr);
    const int64_t k_slots = tables_.num_kv_tiles() * 64;
    SageOptions options = kSparse;
    options.groups = options_.groups;
    return sage_tensors_at(workspace.data(), workspace.bytes(), call.places(), case_.dense.problem, options,
                           {tables_.num_q_tiles() * 128, k_slots, k_slots});
  }

  const sm90::VideoTables& tables() const { return tables_; }
  sm90::VideoInputs& inputs() { return inputs_; }
  const sm90::DenseOutputs& outputs() const { return dense_.outputs(); }
  sm90::VideoCallOptions& options() { return options_; }

 private:
  const VideoCase& case_;
  DenseDevice dense_;
  sm90::VideoTables tables_;
  DeviceMemory table_memory_, workspace_;
  sm90::VideoInputs inputs_;
  sm90::VideoCallOptions options_;
};

DenseResult run_video(const VideoCase& c) {
  VideoDevice device(c);
  device.launch();
  return device.result();
}

// Lists of a batch of sequences as the CPU takes them: [num_kv_heads, sequences' tiles, capacity].
class HostLists {
 public:
  HostLists(const VideoCase& c, const std::vector<int32_t>& ids, int64_t num_q_tiles, int64_t capacity)
      : ids_(ids.size()) {
    const int64_t n = c.dense.num_sequences(), heads = c.dense.problem.num_kv_heads, room = num_q_tiles * capacity;
    for (int64_t i = 0; i < n * heads; ++i) {
      std::copy_n(ids.begin() + i * room, room, ids_.begin() + (i % heads * n + i / heads) * room);
    }
    index = {.kv_block = ids_.data(),
             .num_heads = heads,
             .num_q_rows = n * num_q_tiles,
             .capacity = capacity,
             .head_stride = n * room,
             .row_stride = capacity};
  }
  BlockIndex index;

 private:
  std::vector<int32_t> ids_;
};

std::string line_of(const std::string& sizes, const std::string& segments, int64_t tokens, const std::string& dtype,
                    int64_t n = 1) {
  std::string q = std::to_string(tokens);
  for (int64_t i = 1; i < n; ++i) q += "," + std::to_string(tokens);
  return fmt::format("{} q={} causal=0 dtype={} qblock=128 block=64 segments={}", sizes, q, dtype, segments);
}

std::vector<VideoCase> cases() {
  std::vector<VideoCase> all;
  const auto add = [&](const std::string& line, const std::vector<std::string>& boxes) {
    all.emplace_back(line, boxes, static_cast<uint32_t>(all.size() + 1));
    VideoCase& c = all.back();
    c.dense.hnd = all.size() % 2 == 0;
    c.dense.gap = all.size() % 3 == 0 ? 8 : 0;
    c.options.routing.budget = 0.3;
    c.options.groups = all.size() % 4 < 2 ? SageGroups::per_thread : SageGroups::per_warp;
    c.dense.groups = c.options.groups;
  };
  add(line_of("hq=3 hkv=3 d=128", "video:5x12x16", 960, "bf16"), {"4x4x4", "raster", "1x8x8"});
  add(line_of("hq=4 hkv=2 d=64", "text:70,audio:1,video:7x9x11", 764, "bf16"), {"2x4x8", "4x4x4"});
  add(line_of("hq=2 hkv=2 d=96", "text:130,video:3x8x8,video:5x6x9,reference:64", 656, "f16"), {"2x2x16", "raster"});
  add(line_of("hq=2 hkv=1 d=40", "video:6x8x12,text:3", 579, "bf16", 2), {"4x4x4"});
  add(line_of("hq=1 hkv=1 d=128", "video:1x1x1", 1, "bf16"), {"raster"});
  add(line_of("hq=2 hkv=2 d=128", "text:200,video:8x8x9", 776, "bf16"), {"raster"});
  return all;
}

void expect_codes(const SageCodes& got, const SageCodes& want, double share) {
  const int64_t n = want.codes.view().num_elements();
  int64_t other = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int a = got.codes.as<int8_t>()[i], b = want.codes.as<int8_t>()[i];
    ASSERT_LE(std::abs(a - b), 1) << "code " << i;
    other += a != b;
  }
  EXPECT_LE(static_cast<double>(other), share * static_cast<double>(n) + 1);
  for (int64_t i = 0; i < want.scale.view().num_elements(); ++i) {
    const float a = got.scale.as<float>()[i], b = want.scale.as<float>()[i];
    ASSERT_NEAR(a, b, 3e-7f * b) << "scale " << i;
  }
}

// The quantisers take tokens through the layout, tiles have whole slots, and the mean key is that of raster order.
TEST_F(Video, CodesAreTheCpusOfReorderedTensors) {
  for (const VideoCase& c : cases()) {
    const Problem& p = c.dense.problem;
    SCOPED_TRACE(p.to_line());
    const SageTensors got = VideoDevice(c).codes();
    const Tensor k_mean = sage_k_mean(p, c.dense.k.view());
    for (int64_t i = 0; i < k_mean.view().num_elements(); ++i) {
      ASSERT_EQ(got.k_mean.as<uint16_t>()[i], k_mean.as<uint16_t>()[i]) << i;
    }
    const VideoCase slots = in_slots(c);
    SageOptions options = kSparse;
    options.groups = c.options.groups;
    expect_codes(got.q, sage_quantize_q(p, slots.dense.q.view(), options), 2e-3);
    expect_codes(got.k, sage_quantize_k(p, slots.dense.k.view(), k_mean.view(), options), 2e-3);
    expect_codes(got.v, sage_quantize_v(p, slots.dense.v.view(), options), 3e-3);
  }
}

TEST_F(Video, StaysWithinTheBoundOfTheModel) {
  for (const VideoCase& c : cases()) {
    const Problem& p = c.dense.problem;
    SCOPED_TRACE(p.to_line());
    VideoDevice device(c);
    const SageTensors codes = device.codes();
    const HostLists lists(c, device.route(), device.tables().num_q_tiles(), device.capacity());
    device.launch();
    const DenseResult got = device.result();
    const VideoCase slots = in_slots(c);
    const Tensor o(DType::bf16, {p.total_q(), p.num_q_heads, p.head_dim});
    const Tensor lse(DType::f32, {p.total_q(), p.num_q_heads});
    const Tensor bound(DType::f32, {p.total_q(), p.num_q_heads, p.head_dim});
    SageOptions options = kSparse;
    options.groups = c.options.groups;
    sage_attend_model(p, slots.dense.q.view(), codes, &lists.index, {o.view(), lse.view(), bound.view()}, options);
    const Tensor want = moved(c, o, false), limit = moved(c, bound, false), want_lse = moved(c, lse, false);
    for (int64_t i = 0; i < want.view().num_elements(); ++i) {
      const float a = f32_from_bf16(got.o.as<uint16_t>()[i]), b = f32_from_bf16(want.as<uint16_t>()[i]);
      ASSERT_LE(std::abs(static_cast<double>(a) - b), limit.as<float>()[i]) << "o " << i;
    }
    for (int64_t i = 0; i < want_lse.view().num_elements(); ++i) {
      const float a = got.lse.as<float>()[i], b = want_lse.as<float>()[i];
      if (a == b) continue;  // infinities
      ASSERT_NEAR(a, b, 4e-6f * std::max(10.0f, std::abs(b))) << "lse " << i;
    }
  }
}

// Tokens in the order of a layout beforehand, or in the call: the same bits.
TEST_F(Video, ALayoutIsTheRasterOfReorderedTensors) {
  for (Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::storage}) {
    for (VideoCase& c : cases()) {
      if (arithmetic == Arithmetic::storage && c.dense.problem.q_dtype != DType::bf16) continue;
      SCOPED_TRACE(c.dense.problem.to_line());
      c.options.arithmetic = arithmetic;
      c.options.smooth_k = false;  // its mean is summed in the order of tokens
      const DenseResult got = run_video(c), want = run_video(in_slots(c));
      const DenseResult back = {moved(c, want.o, false), moved(c, want.lse, false)};
      EXPECT_TRUE(got == back);
    }
  }
}

// Against float64 scores: the forced ones, the right number, and of the others the best.
TEST_F(Video, ListsHoldTheBest) {
  for (VideoCase& c : cases()) {
    for (const bool inside : {false, true}) {
      const Problem& p = c.dense.problem;
      SCOPED_TRACE(p.to_line());
      c.options.routing.forced_inside_budget = inside;
      c.options.routing.budget = inside ? 0.6 : 0.3;
      const VideoDevice device(c);
      const std::vector<int32_t> ids = device.route();
      const VideoCase slots = in_slots(c);
      const auto q_tiles = sage_q_tiles(p, kSparse), kv_tiles = sage_kv_blocks(p, kSparse);
      const int64_t n = c.dense.num_sequences(), group = p.group_size();
      const auto num_q = static_cast<int64_t>(q_tiles.size()) / n, num_kv = static_cast<int64_t>(kv_tiles.size()) / n;
      ASSERT_EQ(num_q, device.tables().num_q_tiles());
      ASSERT_EQ(num_kv, device.tables().num_kv_tiles());
      const auto is_video = [&](int64_t token) {
        for (const Segment& s : p.segments) {
          if (token < s.num_tokens) return s.kind == SegmentKind::video;
          token -= s.num_tokens;
        }
        return false;
      };
      int64_t video_tiles = 0;
      for (int64_t j = 0; j < num_kv; ++j) video_tiles += is_video(kv_tiles[static_cast<size_t>(j)].begin);
      const auto number = [&](const Tensor& t, int64_t token, int64_t heads, int64_t h, int64_t d) {
        const uint16_t bits = t.as<uint16_t>()[(token * heads + h) * p.head_dim + d];
        return static_cast<double>(p.q_dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits));
      };
      const auto mean = [&](const Tensor& t, const SageTile& tile, int64_t heads, int64_t h, int64_t count) {
        std::vector<double> m(static_cast<size_t>(p.head_dim));
        for (int64_t token = tile.begin; token < tile.end; ++token) {
          for (int64_t g = 0; g < count; ++g) {
            for (int64_t d = 0; d < p.head_dim; ++d) m[static_cast<size_t>(d)] += number(t, token, heads, h + g, d);
          }
        }
        for (double& x : m) x /= static_cast<double>((tile.end - tile.begin) * count);
        return m;
      };
      for (int64_t row = 0; row < n * p.num_kv_heads * num_q; ++row) {
        const int64_t s = row / num_q / p.num_kv_heads, h = row / num_q % p.num_kv_heads, i = row % num_q;
        const SageTile& query = q_tiles[static_cast<size_t>(s * num_q + i)];
        const int64_t base = s * c.num_tokens();
        const bool routed = is_video(query.begin - base);
        const std::vector<double> q_mean = mean(slots.dense.q, query, p.num_q_heads, h * group, group);
        std::vector<double> chosen, left;
        int64_t forced = 0, last = -1;
        std::vector<bool> has(static_cast<size_t>(num_kv));
        for (int64_t slot = 0; slot < device.capacity(); ++slot) {
          const int32_t id = ids[static_cast<size_t>(row * device.capacity() + slot)];
          if (id < 0) continue;
          ASSERT_GT(id, last) << "row " << row;
          ASSERT_LT(id, num_kv);
          last = id;
          has[static_cast<size_t>(id)] = true;
        }
        double size = 0;
        for (int64_t j = 0; j < num_kv; ++j) {
          const SageTile& key = kv_tiles[static_cast<size_t>(s * num_kv + j)];
          const std::vector<double> k_mean = mean(slots.dense.k, key, p.num_kv_heads, h, 1);
          double score = 0;
          for (size_t d = 0; d < q_mean.size(); ++d) score += q_mean[d] * k_mean[d];
          size = std::max(size, std::abs(score));
          if (!routed || !is_video(key.begin - base) || (key.begin < query.end && query.begin < key.end)) {
            ASSERT_TRUE(has[static_cast<size_t>(j)]) << "row " << row << " tile " << j;
            ++forced;
          } else {
            (has[static_cast<size_t>(j)] ? chosen : left).push_back(score);
          }
        }
        const int64_t budget = static_cast<int64_t>(
            std::ceil(c.options.routing.budget * static_cast<double>(inside ? num_kv : video_tiles) - 1e-6));
        const int64_t want = std::min(num_kv - forced, inside ? std::max<int64_t>(0, budget - forced) : budget);
        if (routed) {
          ASSERT_EQ(std::ssize(chosen), want) << "row " << row;
        }
        if (!chosen.empty() && !left.empty()) {
          ASSERT_GE(*std::min_element(chosen.begin(), chosen.end()),
                    *std::max_element(left.begin(), left.end()) - 1e-5 * size);
        }
      }
    }
  }
}

// No lists, lists of all, and a budget of 1: the same bits.
TEST_F(Video, AllTilesAreDense) {
  for (Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::storage}) {
    for (VideoCase& c : cases()) {
      if (arithmetic == Arithmetic::storage && c.dense.problem.q_dtype != DType::bf16) continue;
      c.options.arithmetic = arithmetic;
      c.options.routing.budget = 1;
      const DenseResult all = run_video(c);
      VideoDevice given(c);
      const int64_t tiles = given.tables().num_kv_tiles();
      std::vector<int32_t> ids;
      for (int64_t i = 0; i < c.dense.num_sequences() * given.tables().num_kv_heads() * given.tables().num_q_tiles();
           ++i) {
        for (int64_t t = 0; t < tiles + 2; ++t) ids.push_back(t < tiles ? static_cast<int32_t>(t) : -1);
      }
      const DeviceMemory memory(ids);
      given.set_lists(memory, tiles + 2);
      given.launch();
      EXPECT_TRUE(given.result() == all) << c.dense.problem.to_line();
    }
  }
}

// Lists of the call's own, given back to it, in order and shuffled with what is nothing among them: the same bits. Then
// no list at all.
TEST_F(Video, GivenListsAreAttendedTo) {
  for (VideoCase& c : cases()) {
    const DenseResult want = run_video(c);
    VideoDevice given(c);
    std::vector<int32_t> ids = given.route();
    DeviceMemory memory(ids);
    given.set_lists(memory, given.capacity());
    given.launch();
    EXPECT_TRUE(given.result() == want) << c.dense.problem.to_line();
    std::mt19937 random(7);
    const int64_t room = 2 * given.capacity() + 3;
    std::vector<int32_t> mixed;
    for (size_t row = 0; row < ids.size() / static_cast<size_t>(given.capacity()); ++row) {
      const auto begin = ids.begin() + static_cast<int64_t>(row) * given.capacity(), end = begin + given.capacity();
      std::vector<int32_t> twice(begin, end);
      twice.insert(twice.end(), begin, end);
      twice.insert(twice.end(), {-1, INT32_MAX, static_cast<int32_t>(given.tables().num_kv_tiles())});
      std::shuffle(twice.begin(), twice.end(), random);
      mixed.insert(mixed.end(), twice.begin(), twice.end());
    }
    memory = DeviceMemory(mixed);
    given.set_lists(memory, room);
    given.launch();
    EXPECT_TRUE(given.result() == want) << c.dense.problem.to_line();
    memory.fill(0xff);
    given.launch();
    const DenseResult empty = given.result();
    for (int64_t i = 0; i < empty.lse.view().num_elements(); ++i) {
      ASSERT_EQ(empty.lse.as<float>()[i], -INFINITY);
    }
    for (int64_t i = 0; i < empty.o.view().num_elements(); ++i) ASSERT_EQ(empty.o.as<uint16_t>()[i], 0);
  }
}

TEST_F(Video, TenTimesTheSameBits) {
  const VideoCase c = cases()[1];
  const DenseResult first = run_video(c);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(run_video(c) == first);
}

// Captured with one set of data, replayed with another that has other lists.
TEST_F(Video, ReplaysAGraphWithOtherRoutes) {
  for (Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::storage}) {
    VideoCase c = cases()[1], other = c;
    c.options.arithmetic = other.options.arithmetic = arithmetic;
    const DenseCase fresh = make_dense_case(c.dense.problem.to_line(), 77);
    other.dense.q = fresh.q, other.dense.k = fresh.k, other.dense.v = fresh.v;
    const DenseResult want = run_video(other);
    VideoDevice device(c);
    device.launch();
    ASSERT_FALSE(device.result() == want);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    device.launch(stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    const VideoDevice source(other);
    VideoDevice& from = const_cast<VideoDevice&>(source);
    for (auto [to, view] :
         {std::pair(&device.inputs().q, &from.inputs().q), std::pair(&device.inputs().k, &from.inputs().k),
          std::pair(&device.inputs().v, &from.inputs().v)}) {
      ASSERT_EQ(cudaMemcpy(to->data, view->data, static_cast<size_t>(2 * view->num_elements()), cudaMemcpyDefault),
                cudaSuccess);
    }
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(device.result() == want);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

template <class Change>
std::string refusal(const VideoCase& c, const Change& change) {
  VideoDevice device(c);
  change(device);
  try {
    device.launch();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(Video, WhatCannotBeIsRefusedByName) {
  const VideoCase c = cases()[0];
  const auto refused = [&](const auto& change) { return refusal(c, change); };
  EXPECT_THAT(refused([](VideoDevice& d) { d.options().routing.budget = 1.5; }), HasSubstr("budget: got 1.5"));
  EXPECT_THAT(refused([](VideoDevice& d) { d.options().routing.budget = NAN; }), HasSubstr("budget: got nan"));
  EXPECT_THAT(refused([](VideoDevice& d) { d.options().routing.num_routed = -2; }), HasSubstr("num_routed: got -2"));
  EXPECT_THAT(refused([](VideoDevice& d) { d.inputs().k.sizes[1] = d.inputs().v.sizes[1] = 959; }),
              HasSubstr("k: got 959 tokens, expected 960"));
  EXPECT_THAT(refused([](VideoDevice& d) { d.options().softmax_scale = -1; }), HasSubstr("softmax_scale: got -1"));
  EXPECT_THAT(refused([](VideoDevice& d) { d.inputs().q.dtype = DType::f32; }), HasSubstr("q: "));
  const DeviceMemory ids(std::vector<int32_t>(1000));
  EXPECT_THAT(refused([&](VideoDevice& d) {
                d.set_lists(ids, 3);
                d.inputs().block_index.sizes[2] += 1;
              }),
              HasSubstr("block_index: "));
  const VideoCase half = cases()[2];
  EXPECT_THAT(refusal(half, [](VideoDevice& d) { d.options().arithmetic = Arithmetic::storage; }), HasSubstr("q: "));

  VideoDevice device(c);
  sm90::VideoTables bare(c.sequence(), c.layout);
  DeviceMemory workspace(sm90::video_attention_workspace(device.inputs(), device.outputs(), bare, device.options()));
  const auto call = [&](const sm90::VideoTables& tables, int64_t bytes) -> std::string {
    try {
      sm90::video_attention(device.inputs(), device.outputs(), tables, device.options(), workspace.data(), bytes,
                            nullptr);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(call(bare, workspace.bytes()), HasSubstr("tables: not on the device"));
  EXPECT_THAT(call(device.tables(), workspace.bytes() - 1), HasSubstr("workspace: got"));
  EXPECT_THROW(bare.upload(nullptr, bare.bytes()), Error);
  EXPECT_THROW(bare.upload(workspace.data(), bare.bytes() - 1), Error);
  const TokenSequence longer = TokenSequence::parse("video:5x12x17");
  EXPECT_THROW(sm90::VideoTables(longer, c.layout), Error);
}

}  // namespace
}  // namespace tilesieve::testing
