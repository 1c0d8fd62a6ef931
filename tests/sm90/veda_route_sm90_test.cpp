// SPDX-License-Identifier: Apache-2.0
// Veda's routing on a Hopper GPU against the CPU's where all is exact, else against float64. Skipped where there is no
// such GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "base/number_formats.h"
#include "base/rounding.h"
#include "cuda/device.h"
#include "layout/video_tiling_sm90.h"
#include "sm90/prefill_case.h"
#include "tilesieve/error.h"
#include "tilesieve/veda_route.h"
#include "tilesieve/veda_sm90.h"
#include "tilesieve/veda_tiling.h"

namespace tilesieve::testing {
namespace {

using sm90::DenseLayout;

struct VedaCase {
  const char* sequence;
  std::vector<Box> boxes;  // of heads
  int64_t num_sequences = 1, dim = 128;
  DType dtype = DType::bf16, proj_dtype = DType::f32;
  bool has_scale = false;
  DenseLayout layout = DenseLayout::nhd;
  VedaBudget budget = {};
  int64_t head_begin = 0;

  TokenSequence tokens() const { return TokenSequence::parse(sequence); }
  int64_t num_tokens() const { return tokens().num_tokens(); }
  int64_t num_heads() const { return std::ssize(boxes); }
};

void store(void* data, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[i] = x;
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[i] = f16_from_f32(x);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[i] = bf16_from_f32(x);
      break;
    default:
      static_cast<uint8_t*>(data)[i] = e4m3_from_f32(x);
  }
}

float stored(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f16:
      return f32_from_f16(static_cast<const uint16_t*>(data)[i]);
    case DType::bf16:
      return f32_from_bf16(static_cast<const uint16_t*>(data)[i]);
    default:
      return f32_from_e4m3(static_cast<const uint8_t*>(data)[i]);
  }
}

// The tensors of a case, and what the CPU makes of a head of them.
struct VedaTensors {
  explicit VedaTensors(const VedaCase& veda) : c(veda) {
    for (Tensor* tensor : {&q, &k})
      *tensor = Tensor(c.dtype, {c.num_sequences * c.num_heads() * c.num_tokens() * c.dim});
    const int64_t heads = c.head_begin + c.num_heads() + 1;
    for (Tensor* tensor : {&proj_q, &proj_k}) *tensor = Tensor(c.proj_dtype, {heads, 3 * c.dim, c.dim});
    if (!c.has_scale) return;
    for (Tensor* tensor : {&q_scale, &k_scale}) *tensor = Tensor(DType::f32, {heads});
  }

  int64_t place(int64_t sequence, int64_t head, int64_t token) const {
    const int64_t heads = c.num_heads(), tokens = c.num_tokens();
    const int64_t row = c.layout == DenseLayout::nhd ? token * heads + head : head * tokens + token;
    return (sequence * heads * tokens + row) * c.dim;
  }

  std::vector<int64_t> sizes() const {
    std::vector<int64_t> sizes = {c.num_tokens(), c.num_heads(), c.dim};
    if (c.layout == DenseLayout::hnd) std::swap(sizes[0], sizes[1]);
    if (c.num_sequences > 1) sizes.insert(sizes.begin(), c.num_sequences);
    return sizes;
  }

  VedaProjections projections() const { return {proj_q.view(), proj_k.view(), q_scale.view(), k_scale.view()}; }

  VedaCase c;
  Tensor q, k, proj_q, proj_k, q_scale, k_scale;
};

// Tiles of a head: its tokens, tile after tile.
std::vector<std::vector<int32_t>> tiles_of(const VedaCase& c, int64_t head) {
  const Box& box = c.boxes[static_cast<size_t>(head)];
  const TokenLayout layout = veda_layout(c.tokens(), std::span(&box, 1));
  std::vector<std::vector<int32_t>> tiles;
  const int32_t* token = layout.order(0).data();
  for (const Segment& segment : veda_sequence(c.tokens(), box).segments) {
    for (int64_t left = segment.num_tokens; left > 0; left -= 128) {
      tiles.emplace_back(token, token + std::min<int64_t>(left, 128));
      token += tiles.back().size();
    }
  }
  return tiles;
}

// Of a tile, each channel is a small integer, one more in half of the rows and one less in as many: so is its mean.
void fill_exactly(const VedaTensors& t, uint32_t seed) {
  std::mt19937 random(seed);
  const auto integer = [&] { return static_cast<float>(static_cast<int32_t>(random() % 3) - 1); };
  for (const Tensor* tensor : {&t.q, &t.k}) {
    for (int64_t sequence = 0; sequence < t.c.num_sequences; ++sequence) {
      for (int64_t head = 0; head < t.c.num_heads(); ++head) {
        for (std::vector<int32_t> tile : tiles_of(t.c, head)) {
          for (int64_t channel = 0; channel < t.c.dim; ++channel) {
            const float mean = random() % 8 == 0 ? integer() : 0.0f;
            std::shuffle(tile.begin(), tile.end(), random);
            for (size_t i = 0; i < tile.size(); ++i) {
              const float more = i + 1 == tile.size() && i % 2 == 0 ? 0.0f : i % 2 == 0 ? 1.0f : -1.0f;
              store(tensor->view().data, t.c.dtype, t.place(sequence, head, tile[i]) + channel, mean + more);
            }
          }
        }
      }
    }
  }
  for (const Tensor* tensor : {&t.proj_q, &t.proj_k}) {
    for (int64_t i = 0; i < tensor->view().num_elements(); ++i) {
      store(tensor->view().data, t.c.proj_dtype, i, random() % 32 == 0 ? integer() : 0.0f);
    }
  }
  for (int64_t i = 0; t.c.has_scale && i < t.q_scale.view().sizes[0]; ++i) {
    t.q_scale.as<float>()[i] = static_cast<float>(1 + i % 3);
    t.k_scale.as<float>()[i] = static_cast<float>(2 - i % 2);
  }
}

void fill_normally(const VedaTensors& t, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const Tensor* tensor : {&t.q, &t.k}) {
    for (int64_t i = 0; i < tensor->view().num_elements(); ++i) {
      store(tensor->view().data, t.c.dtype, i, normal(random));
    }
  }
  for (const Tensor* tensor : {&t.proj_q, &t.proj_k}) {
    for (int64_t i = 0; i < tensor->view().num_elements(); ++i) {
      store(tensor->view().data, t.c.proj_dtype, i, 0.1f * normal(random));
    }
  }
  for (int64_t i = 0; t.c.has_scale && i < t.q_scale.view().sizes[0]; ++i) {
    t.q_scale.as<float>()[i] = t.k_scale.as<float>()[i] = 0.3f + static_cast<float>(i) / 7.0f;
  }
}

using Rows = std::vector<std::vector<int32_t>>;  // [sequences, heads, tiles of queries]

// What the device lists, with guard values where nothing is to be written.
Rows run(const VedaTensors& t, const sm90::VideoTables& tables) {
  const auto upload = [](const Tensor& tensor) {
    if (tensor.view().data == nullptr) return DeviceMemory();
    DeviceMemory memory(tensor.view().num_elements() * size_in_bytes(tensor.view().dtype));
    memory.upload(tensor.view().data, memory.bytes());
    return memory;
  };
  const auto place = [](const DeviceMemory& memory, const Tensor& tensor) {
    if (tensor.view().data == nullptr) return TensorView{};
    const TensorView& view = tensor.view();
    return device_view(memory.data(), view.dtype, {view.sizes.begin(), view.sizes.begin() + view.num_dims});
  };
  const DeviceMemory q = upload(t.q), k = upload(t.k), proj_q = upload(t.proj_q), proj_k = upload(t.proj_k),
                     q_scale = upload(t.q_scale), k_scale = upload(t.k_scale);
  sm90::VedaInputs inputs;
  inputs.q = device_view(q.data(), t.c.dtype, t.sizes());
  inputs.k = device_view(k.data(), t.c.dtype, t.sizes());
  inputs.projections = {place(proj_q, t.proj_q), place(proj_k, t.proj_k), place(q_scale, t.q_scale),
                        place(k_scale, t.k_scale)};
  inputs.head_begin = t.c.head_begin;
  const int64_t capacity = sm90::veda_list_capacity(tables), num_rows = tables.num_q_tiles();
  const DeviceMemory workspace(sm90::route_veda_workspace(inputs, t.c.layout, tables));
  workspace.fill(0xff);  // NaN
  const DeviceMemory lists(4 * t.c.num_sequences * t.c.num_heads() * num_rows * (capacity + 1));
  lists.fill(0x5a);
  std::vector<int64_t> sizes = {t.c.num_heads(), num_rows, capacity};
  std::vector<int64_t> strides = {num_rows * (capacity + 1), capacity + 1, 1};
  if (t.c.num_sequences > 1) {
    sizes.insert(sizes.begin(), t.c.num_sequences);
    strides.insert(strides.begin(), t.c.num_heads() * strides[0]);
  }
  sm90::route_veda(inputs, t.c.layout, tables, device_view(lists.data(), DType::i32, sizes, strides), workspace.data(),
                   workspace.bytes(), nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<int32_t> ids(static_cast<size_t>(lists.bytes() / 4));
  lists.download(ids.data(), lists.bytes());
  Rows rows;
  for (auto row = ids.begin(); row != ids.end(); row += static_cast<std::ptrdiff_t>(capacity) + 1) {
    rows.emplace_back(row, row + static_cast<std::ptrdiff_t>(capacity) + 1);
  }
  return rows;
}

sm90::VideoTables uploaded(const VedaCase& c, DeviceMemory& memory) {
  sm90::VideoTables tables = sm90::veda_tables(c.tokens(), c.boxes, c.budget);
  memory = DeviceMemory(tables.bytes());
  tables.upload(memory.data(), memory.bytes());
  return tables;
}

// Tiles of 64 keys of tile `tile` of a head, of which each has one or two.
std::vector<int32_t> keys_of(const std::vector<std::vector<int32_t>>& tiles, int32_t tile) {
  int32_t next = 0;
  for (int32_t i = 0; i < tile; ++i)
    next += static_cast<int32_t>(ceil_div(std::ssize(tiles[static_cast<size_t>(i)]), 64));
  std::vector<int32_t> keys = {next};
  if (tiles[static_cast<size_t>(tile)].size() > 64) keys.push_back(next + 1);
  return keys;
}

std::vector<int32_t> padded(std::vector<int32_t> ids, int64_t capacity) {
  ids.resize(static_cast<size_t>(capacity), -1);
  ids.push_back(0x5a5a5a5a);
  return ids;
}

// Of one head, [sequences * its tiles of queries].
std::vector<std::vector<int32_t>> on_cpu(const VedaTensors& t, int64_t head) {
  const VedaCase& c = t.c;
  const Box& box = c.boxes[static_cast<size_t>(head)];
  Problem problem;
  problem.q_lens = problem.kv_lens = std::vector<int64_t>(static_cast<size_t>(c.num_sequences), c.num_tokens());
  problem.head_dim = c.dim;
  problem.segments = veda_sequence(c.tokens(), box).segments;
  problem.q_block_size = problem.kv_block_size = 128;
  problem.causal = false;
  const std::span<const Box> boxes(&box, 1);
  const TokenLayout layout = veda_layout(c.tokens(), boxes);
  const Tensor q(DType::f32, {c.num_sequences * c.num_tokens(), 1, c.dim});
  const Tensor k(DType::f32, {c.num_sequences * c.num_tokens(), 1, c.dim});
  for (int64_t sequence = 0; sequence < c.num_sequences; ++sequence) {
    for (int64_t slot = 0; slot < c.num_tokens(); ++slot) {
      const int64_t from = t.place(sequence, head, layout.order(0)[static_cast<size_t>(slot)]);
      for (int64_t i = 0; i < c.dim; ++i) {
        const int64_t to = (sequence * c.num_tokens() + slot) * c.dim + i;
        q.as<float>()[to] = stored(t.q.view().data, c.dtype, from + i);
        k.as<float>()[to] = stored(t.k.view().data, c.dtype, from + i);
      }
    }
  }
  const Tensor ids = route_veda(problem, q.view(), k.view(), t.projections(), c.budget, c.head_begin + head);
  std::vector<std::vector<int32_t>> rows;
  const int64_t capacity = ids.view().sizes[2];
  for (int64_t row = 0; row < ids.view().sizes[1]; ++row) {
    rows.emplace_back();
    for (int64_t slot = 0; slot < capacity; ++slot) {
      const int32_t id = ids.as<int32_t>()[row * capacity + slot];
      if (id >= 0) rows.back().push_back(id);
    }
  }
  return rows;
}

void expect_as_cpu(const VedaTensors& t) {
  DeviceMemory memory;
  const sm90::VideoTables tables = uploaded(t.c, memory);
  const int64_t capacity = sm90::veda_list_capacity(tables), num_rows = tables.num_q_tiles();
  const Rows got = run(t, tables);
  for (int64_t head = 0; head < t.c.num_heads(); ++head) {
    const auto tiles = tiles_of(t.c, head);
    const auto cpu = on_cpu(t, head);
    for (int64_t sequence = 0; sequence < t.c.num_sequences; ++sequence) {
      for (int64_t row = 0; row < num_rows; ++row) {
        std::vector<int32_t> expected;
        if (row < std::ssize(tiles)) {
          for (int32_t tile : cpu[static_cast<size_t>(sequence * std::ssize(tiles) + row)]) {
            for (int32_t id : keys_of(tiles, tile)) expected.push_back(id);
          }
        }
        ASSERT_EQ(got[static_cast<size_t>((sequence * t.c.num_heads() + head) * num_rows + row)],
                  padded(expected, capacity))
            << t.c.sequence << ": sequence " << sequence << ", head " << head << ", row " << row;
      }
    }
  }
}

// Vectors of a head's tiles, and of what size is what was added up.
struct Vectors {
  std::vector<std::vector<double>> vector, size;
};

Vectors vectors_of(const VedaTensors& t, const Tensor& tensor, const Tensor& proj, const Tensor& scale, int64_t head,
                   int64_t sequence) {
  const int64_t dim = t.c.dim, model_head = t.c.head_begin + head;
  std::vector<double> weights;
  for (int64_t i = 0; i < 3 * dim * dim; ++i) {
    const float w = stored(proj.view().data, t.c.proj_dtype, model_head * 3 * dim * dim + i);
    weights.push_back(
        static_cast<double>(t.c.has_scale ? f32_from_bf16(bf16_from_f32(scale.as<const float>()[model_head] * w)) : w));
  }
  Vectors vectors;
  for (const std::vector<int32_t>& tile : tiles_of(t.c, head)) {
    std::vector<double> features;
    for (int feature = 0; feature < 3; ++feature) {
      for (int64_t channel = 0; channel < dim; ++channel) {
        std::vector<double> column;
        for (int32_t token : tile) {
          column.push_back(
              static_cast<double>(stored(tensor.view().data, t.c.dtype, t.place(sequence, head, token) + channel)));
        }
        const double sum = std::accumulate(column.begin(), column.end(), 0.0);
        const auto [least, most] = std::minmax_element(column.begin(), column.end());
        features.push_back(feature == 0 ? sum / static_cast<double>(tile.size()) : feature == 1 ? *most : *least);
      }
    }
    auto& vector = vectors.vector.emplace_back(features.begin(), features.begin() + dim);
    auto& size = vectors.size.emplace_back();
    for (double x : vector) size.push_back(std::abs(x));
    for (int64_t i = 0; i < 3 * dim; ++i) {
      for (int64_t channel = 0; channel < dim; ++channel) {
        const double product = features[static_cast<size_t>(i)] * weights[static_cast<size_t>(i * dim + channel)];
        vector[static_cast<size_t>(channel)] += product;
        size[static_cast<size_t>(channel)] += std::abs(product);
      }
    }
  }
  return vectors;
}

double product(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// No tile that is chosen scores less than one left out, but for rounding; of a sequence that is all video.
void expect_the_best(const VedaTensors& t) {
  DeviceMemory memory;
  const sm90::VideoTables tables = uploaded(t.c, memory);
  const Rows got = run(t, tables);
  for (int64_t head = 0; head < t.c.num_heads(); ++head) {
    const auto tiles = tiles_of(t.c, head);
    const std::vector<int32_t> budgets = veda_budgets(t.c.num_tokens(), std::ssize(tiles), t.c.budget);
    for (int64_t sequence = 0; sequence < t.c.num_sequences; ++sequence) {
      const Vectors q = vectors_of(t, t.q, t.proj_q, t.q_scale, head, sequence);
      const Vectors k = vectors_of(t, t.k, t.proj_k, t.k_scale, head, sequence);
      for (size_t row = 0; row < tiles.size(); ++row) {
        const auto& ids = got[static_cast<size_t>((sequence * t.c.num_heads() + head) * tables.num_q_tiles()) + row];
        const std::set<int32_t> listed(ids.begin(), ids.end());
        int64_t num_chosen = 0;
        double worst_chosen = INFINITY, best_left = -INFINITY;
        for (size_t tile = 0; tile < tiles.size(); ++tile) {
          const std::vector<int32_t> keys = keys_of(tiles, static_cast<int32_t>(tile));
          for (int32_t key : keys) ASSERT_EQ(listed.contains(key), listed.contains(keys[0])) << "half a tile";
          num_chosen += listed.contains(keys[0]);
          const double score = product(q.vector[row], k.vector[tile]);
          const double error = product(q.size[row], k.size[tile]) * 0x1p-19;
          if (tile == row) {
            ASSERT_TRUE(listed.contains(keys[0])) << "not its own tile";
          } else if (listed.contains(keys[0])) {
            worst_chosen = std::min(worst_chosen, score + error);
          } else {
            best_left = std::max(best_left, score - error);
          }
        }
        ASSERT_EQ(num_chosen, budgets[row]);
        ASSERT_GE(worst_chosen, best_left) << "head " << head << ", row " << row;
      }
    }
  }
}

class VedaSm90 : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

constexpr Box kFlat = {2, 8, 8}, kDeep = {8, 4, 4}, kWide = {4, 4, 8};

TEST_F(VedaSm90, ChoosesAsTheCpuDoesWhereAllIsExact) {
  const VedaCase cases[] = {
      {.sequence = "video:8x16x16", .boxes = {kDeep}, .budget = {.tiles_per_row = 5.3}},
      {.sequence = "text:70,video:8x16x16,audio:130",
       .boxes = {kDeep, kFlat, kWide, kFlat},
       .dim = 64,
       .proj_dtype = DType::bf16,
       .layout = DenseLayout::hnd,
       .budget = {.keep_ratio = 0.3}},
      {.sequence = "video:5x19x21",
       .boxes = {kWide, kDeep, kFlat},
       .num_sequences = 2,
       .dtype = DType::f16,
       .proj_dtype = DType::f8_e4m3,
       .has_scale = true,
       .budget = {.tiles_per_row = 7.5},
       .head_begin = 2},
      {.sequence = "text:3,video:9x12x10,reference:200",
       .boxes = {kFlat, kDeep},
       .num_sequences = 3,
       .dim = 40,
       .proj_dtype = DType::f16,
       .has_scale = true,
       .layout = DenseLayout::hnd,
       .budget = {.keep_ratio = 0.5},
       .head_begin = 1},
      {.sequence = "video:17x40x44", .boxes = {kDeep, kFlat}, .dim = 96, .budget = {.keep_ratio = 0.1}},
      {.sequence = "video:6x9x11", .boxes = {kDeep, kFlat}, .budget = {.keep_ratio = 1}},
      {.sequence = "video:1x3x5", .boxes = {kDeep}},
  };
  uint32_t seed = 0;
  for (const VedaCase& c : cases) {
    const VedaTensors tensors(c);
    fill_exactly(tensors, ++seed);
    expect_as_cpu(tensors);
    if (HasFatalFailure()) return;
  }
}

TEST_F(VedaSm90, NoChosenTileScoresBelowOneLeftOut) {
  const VedaCase cases[] = {
      {.sequence = "video:8x24x20", .boxes = {kDeep, kFlat}, .budget = {.tiles_per_row = 6.25}},
      {.sequence = "video:7x21x19",
       .boxes = {kWide, kFlat},
       .num_sequences = 2,
       .dim = 64,
       .dtype = DType::f16,
       .proj_dtype = DType::f8_e4m3,
       .has_scale = true,
       .budget = {.keep_ratio = 0.25}},
  };
  uint32_t seed = 20;
  for (const VedaCase& c : cases) {
    const VedaTensors tensors(c);
    fill_normally(tensors, ++seed);
    expect_the_best(tensors);
    if (HasFatalFailure()) return;
  }
}

// The CPU's choice again: a NaN in one tile of keys, and in one of queries.
TEST_F(VedaSm90, NanComesLast) {
  const VedaTensors tensors({.sequence = "video:8x16x16", .boxes = {kDeep, kFlat}, .budget = {.tiles_per_row = 5}});
  fill_exactly(tensors, 30);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t head : {0, 1}) {
    store(tensors.k.view().data, DType::bf16, tensors.place(0, head, 300) + 7, nan);
    store(tensors.q.view().data, DType::bf16, tensors.place(0, head, 1000) + 9, nan);
  }
  expect_as_cpu(tensors);
}

TEST_F(VedaSm90, RefusesByName) {
  const VedaCase c = {.sequence = "text:70,video:8x16x16", .boxes = {kDeep, kDeep}};
  const auto refuses = [](const auto& call, const std::string& text) {
    try {
      call();
      ADD_FAILURE() << "expected: " << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refuses([&] { sm90::veda_tables(c.tokens(), c.boxes, {.keep_ratio = 2}); }, "keep_ratio: got 2");
  const std::vector<Box> small = {{4, 4, 4}};
  refuses([&] { sm90::veda_tables(c.tokens(), small); }, "box: got 4x4x4");
  const sm90::VideoTables plain(c.tokens(), veda_layout(c.tokens(), c.boxes));
  refuses([&] { sm90::veda_list_capacity(plain); }, "tables: got none of Veda's tiles");
  const sm90::VideoTables tables = sm90::veda_tables(c.tokens(), c.boxes);
  const DeviceMemory memory(int64_t{1} << 20);
  sm90::VedaInputs inputs;
  inputs.q = device_view(memory.data(), DType::bf16, {c.num_tokens(), 4, 64});
  inputs.k = device_view(memory.data(), DType::bf16, {c.num_tokens(), 2, 64});
  inputs.projections = {.proj_q = device_view(memory.data(), DType::bf16, {2, 192, 64}),
                        .proj_k = device_view(memory.data(), DType::bf16, {2, 192, 64})};
  const auto size = [&] { sm90::route_veda_workspace(inputs, DenseLayout::nhd, tables); };
  refuses(size, "k: got 2 heads for 4 of q, expected as many");
  inputs.q.sizes[1] = 2;
  size();
  inputs.head_begin = 1;
  refuses(size, "head_begin: got 1 for 2 heads, expected some of the 2 heads of proj_q");
  inputs.head_begin = 0;
  inputs.projections.proj_k.sizes[1] = 191;
  refuses(size, "proj_k: got bf16[2, 191, 64]");
  inputs.projections.proj_k = inputs.projections.proj_q;
  inputs.projections.proj_k_scale = device_view(memory.data(), DType::f32, {3});
  refuses(size, "proj_k_scale: got f32[3]");
  inputs.projections.proj_k_scale = {};
  const TensorView lists = device_view(memory.data(), DType::i32, {2, tables.num_q_tiles(), tables.num_kv_tiles()});
  refuses([&] { sm90::route_veda(inputs, DenseLayout::nhd, tables, lists, memory.data(), memory.bytes(), nullptr); },
          "tables: not on the device");
}

}  // namespace
}  // namespace tilesieve::testing
