// SPDX-License-Identifier: Apache-2.0
#include "sm90/index_case.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/number_formats.h"
#include "base/parallel.h"
#include "index_sm90.h"

namespace tilesieve::testing {

namespace {

constexpr int64_t kGuardBytes = 256;  // behind outputs and workspace
constexpr uint8_t kNanByte = 0x7f;    // NaN in e4m3, and twice in bf16

void put(std::vector<uint8_t>& bytes, int64_t element, double value, DType dtype) {
  if (dtype == DType::bf16) {
    const uint16_t bits = bf16_from(value);
    std::memcpy(bytes.data() + element * 2, &bits, 2);
  } else {
    bytes[static_cast<size_t>(element)] = e4m3_from(value);
  }
}

double get(const std::vector<uint8_t>& bytes, int64_t element, DType dtype) {
  if (dtype == DType::bf16) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + element * 2, 2);
    return static_cast<double>(f32_from_bf16(bits));
  }
  return static_cast<double>(f32_from_e4m3(bytes[static_cast<size_t>(element)]));
}

std::vector<int32_t> cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> sums = {0};
  for (int64_t length : lengths) sums.push_back(sums.back() + static_cast<int32_t>(length));
  return sums;
}

// How far a score may be off, `terms` being the sum of the magnitudes that it is the sum of. The index branch sums e4m3
// with about 13 bits; a mean is rounded to bf16.
double rounding_of(const IndexCase& c, double score, double terms) {
  if (!std::isfinite(score)) return 0;
  const double sum = 1e-5 * (1 + std::abs(score));
  if (c.options.router == Router::index) {
    return c.problem.kv_dtype == DType::bf16 ? sum : 0.02 + 2e-3 * std::abs(score);
  }
  const double num_means = c.exact ? 0 : c.options.router == Router::mean_pool ? 2 : 1;
  return sum + num_means * 0x1.02p-9 * terms;
}

int64_t most_blocks(const Problem& p) {
  int64_t most = 0;
  for (int64_t s = 0; s < p.num_sequences(); ++s) most = std::max(most, p.num_kv_blocks(s));
  return most;
}

}  // namespace

void IndexCase::set_q(int64_t element, double value) { put(q, element, value, problem.q_dtype); }
void IndexCase::set_k(int64_t element, double value) { put(k, element, value, problem.kv_dtype); }
void IndexCase::set_key(int64_t key, double value) {
  const int64_t row = key_heads() * channels();
  for (int64_t i = 0; i < row; ++i) set_k(key * row + i, value);
}

IndexCase make_index_case(const std::string& line, DType dtype, Values values, uint32_t seed) {
  const size_t space = line.find(' ');
  const std::string heads = line.substr(line.find('=') + 1, space - line.find('=') - 1);
  return make_route_case("hq=" + heads + " hkv=" + heads + " d=128" + line.substr(space), Router::index, dtype, dtype,
                         values, seed);
}

IndexCase make_route_case(const std::string& line, Router router, DType q_dtype, DType k_dtype, Values values,
                          uint32_t seed) {
  IndexCase c;
  c.problem = Problem::parse(line);
  c.problem.q_dtype = q_dtype;
  c.problem.kv_dtype = k_dtype;
  c.options.router = router;
  c.exact = values != Values::normal && values != Values::negative;
  const Problem& p = c.problem;
  const int64_t num_q = p.total_q() * p.num_q_heads * c.channels(), row = c.key_heads() * c.channels();
  c.q.assign(static_cast<size_t>(num_q * size_in_bytes(q_dtype)), 0);
  c.k.assign(static_cast<size_t>(p.total_kv() * row * size_in_bytes(k_dtype)), kNanByte);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](double sign) {
    if (values == Values::integers || values == Values::blocks) return static_cast<double>(random() % 5) - 2;
    if (values == Values::units) return static_cast<double>(random() % 3) - 1;
    return values == Values::negative ? sign * std::abs(normal(random)) : normal(random);
  };
  for (int64_t i = 0; i < num_q; ++i) c.set_q(i, draw(-1));
  const std::vector<int32_t> cu_kv = cumulative(p.kv_lens);
  for (size_t s = 0; s < p.q_lens.size(); ++s) {
    if (p.q_lens[s] == 0) continue;
    for (int64_t j = 0; j < p.kv_lens[s]; ++j) {
      // Of blocks that are equal inside some are equal to each other, too.
      if (values == Values::blocks) random.seed(seed + static_cast<uint32_t>(j / p.kv_block_size * 7 % 11));
      for (int64_t i = 0; i < row; ++i) c.set_k((cu_kv[s] + j) * row + i, draw(1));
    }
  }
  return c;
}

bool IndexResult::operator==(const IndexResult& other) const {
  return ids == other.ids && fault == other.fault && scores.size() == other.scores.size() &&
         (scores.empty() || std::memcmp(scores.data(), other.scores.data(), scores.size() * 4) == 0);
}

IndexDevice::IndexDevice(const IndexCase& c) : shape_(c) {
  const Problem& p = c.problem;
  const int64_t heads = p.num_kv_heads, tokens = p.total_q() + c.padding_tokens, sequences = p.num_sequences();
  const int64_t channels = c.channels(), gap = c.strided ? 16 : 0, row = channels + gap;
  const bool by_index = c.options.router == Router::index;
  TensorView &q = by_index ? inputs.index_q : inputs.q, &k = by_index ? inputs.index_k : inputs.k;
  q_ = DeviceMemory(tokens * p.num_q_heads * row * size_in_bytes(p.q_dtype));
  q = device_view(q_.data(), p.q_dtype, {tokens, p.num_q_heads, channels}, {p.num_q_heads * row, row, 1});
  // Keys of all heads together, and between them no dimension where there is one for all.
  std::vector<int64_t> sizes = {c.key_heads(), channels}, strides = {row, 1};
  if (by_index) {
    sizes.erase(sizes.begin());
    strides.erase(strides.begin());
  }
  token_stride_ = c.key_heads() * row;
  page_stride_ = p.kv_block_size * token_stride_;
  if (c.paged) {
    max_pages_ = most_blocks(p) + 1;
    num_pages_ = sequences * max_pages_ + 3;
    k_ = DeviceMemory(num_pages_ * page_stride_ * size_in_bytes(p.kv_dtype));
    sizes.insert(sizes.begin(), {num_pages_, p.kv_block_size});
    strides.insert(strides.begin(), {page_stride_, token_stride_});
    table_ = DeviceMemory(sequences * (max_pages_ + 1) * 4);
    kv_lens_ = DeviceMemory(sequences * 4);
    inputs.block_table = device_view(table_.data(), DType::i32, {sequences, max_pages_}, {max_pages_ + 1, 1});
    inputs.kv_lens = device_view(kv_lens_.data(), DType::i32, {sequences});
  } else {
    k_ = DeviceMemory(p.total_kv() * token_stride_ * size_in_bytes(p.kv_dtype));
    sizes.insert(sizes.begin(), p.total_kv());
    strides.insert(strides.begin(), token_stride_);
    cu_kv_ = DeviceMemory((sequences + 1) * 4);
    inputs.cu_seqlens_kv = device_view(cu_kv_.data(), DType::i32, {sequences + 1});
  }
  k = device_view(k_.data(), p.kv_dtype, sizes, strides);
  cu_q_ = DeviceMemory((sequences + 1) * 4);
  inputs.cu_seqlens_q = device_view(cu_q_.data(), DType::i32, {sequences + 1});
  const int64_t ids = heads * tokens * p.top_k;
  ids_ = DeviceMemory(ids * 4 + kGuardBytes);
  outputs.block_index =
      c.strided ? device_view(ids_.data(), DType::i32, {heads, tokens, p.top_k}, {p.top_k, heads * p.top_k, 1})
                : device_view(ids_.data(), DType::i32, {heads, tokens, p.top_k});
  if (c.wants_scores) {
    const int64_t blocks = c.paged ? max_pages_ : (p.total_kv() + p.kv_block_size - 1) / p.kv_block_size;
    scores_ = DeviceMemory(heads * tokens * blocks * 4 + kGuardBytes);
    outputs.scores = device_view(scores_.data(), DType::f32, {heads, tokens, blocks});
  }
  options.router = c.options.router;
  options.kv_block_size = p.kv_block_size;
  options.causal = p.causal;
  options.local_blocks = c.options.local_blocks;
  options.init_blocks = c.options.init_blocks;
  workspace_ = DeviceMemory(sm90::choose_blocks_workspace(inputs, outputs, options) + kGuardBytes);
  workspace_.fill(0xff);  // whatever it holds must not matter
  upload(c);
}

void IndexDevice::upload(const IndexCase& c) {
  const Problem& p = c.problem;
  const int64_t block = p.kv_block_size, heads = c.key_heads(), stride = token_stride_ / heads;
  // Rows of either tensor, counted in rows.
  const auto rows_to = [&](std::vector<uint8_t>& target, int64_t at, const std::vector<uint8_t>& source, int64_t from,
                           int64_t count, DType dtype) {
    const int64_t bytes = size_in_bytes(dtype), row = c.channels() * bytes;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(target.data() + (at + i) * stride * bytes, source.data() + (from + i) * row,
                  static_cast<size_t>(row));
    }
  };
  std::vector<uint8_t> memory(static_cast<size_t>(q_.bytes()), kNanByte);
  rows_to(memory, 0, c.q, 0, p.total_q() * p.num_q_heads, p.q_dtype);
  q_.upload(memory.data(), q_.bytes());

  const std::vector<int32_t> cu_q = cumulative(p.q_lens), cu_kv = cumulative(p.kv_lens);
  cu_q_.upload(cu_q.data(), cu_q_.bytes());
  memory.assign(static_cast<size_t>(k_.bytes()), kNanByte);
  if (!c.paged) {
    rows_to(memory, 0, c.k, 0, p.total_kv() * heads, p.kv_dtype);
    cu_kv_.upload(cu_kv.data(), cu_kv_.bytes());
  } else {
    std::vector<int32_t> pages(static_cast<size_t>(num_pages_));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
    std::vector<int32_t> table(static_cast<size_t>(p.num_sequences() * (max_pages_ + 1)), 1 << 30), lens;
    size_t next = 0;
    for (size_t s = 0; s < p.kv_lens.size(); ++s) {
      lens.push_back(static_cast<int32_t>(p.kv_lens[s]));
      for (int64_t b = 0; b * block < p.kv_lens[s]; ++b) {
        const int32_t page = pages[next++];
        table[s * static_cast<size_t>(max_pages_ + 1) + static_cast<size_t>(b)] = page;
        rows_to(memory, page * block * heads, c.k, (cu_kv[s] + b * block) * heads,
                std::min(block, p.kv_lens[s] - b * block) * heads, p.kv_dtype);
      }
    }
    table_.upload(table.data(), table_.bytes());
    kv_lens_.upload(lens.data(), kv_lens_.bytes());
  }
  k_.upload(memory.data(), k_.bytes());
  ids_.fill(0xa5);
  if (c.wants_scores) scores_.fill(0xa5);
}

void IndexDevice::replace(const IndexCase& c) {
  shape_ = c;
  upload(c);
}

void IndexDevice::launch(void* stream) {
  sm90::choose_blocks(inputs, outputs, options, workspace_.data(), workspace_.bytes(), stream);
}

void IndexDevice::launch_slices(int num_slices) {
  const sm90::IndexCall call(inputs, outputs, options, num_slices);
  const DeviceMemory workspace(call.layout().bytes);
  workspace.fill(0xff);
  call.run(workspace.data(), nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

IndexResult IndexDevice::result() const {
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  IndexResult result;
  const auto intact = [&](const DeviceMemory& memory, const char* name) {
    std::vector<uint8_t> guard(kGuardBytes);
    memory.download(guard.data(), kGuardBytes, memory.bytes() - kGuardBytes);
    for (uint8_t byte : guard) {
      if (byte != guard[0]) result.fault = std::string("written behind ") + name;
    }
  };
  intact(ids_, "block_index");
  intact(workspace_, "workspace");
  const TensorView& view = outputs.block_index;
  std::vector<int32_t> stored(static_cast<size_t>(view.num_elements()));
  ids_.download(stored.data(), view.num_elements() * 4);
  for (int64_t h = 0; h < view.sizes[0]; ++h) {
    for (int64_t t = 0; t < view.sizes[1]; ++t) {
      const auto row = stored.begin() + h * view.strides[0] + t * view.strides[1];
      result.ids.insert(result.ids.end(), row, row + view.sizes[2]);
    }
  }
  if (shape_.wants_scores) {
    intact(scores_, "scores");
    result.scores.resize(static_cast<size_t>(outputs.scores.num_elements()));
    scores_.download(result.scores.data(), outputs.scores.num_elements() * 4);
  }
  return result;
}

IndexResult run(const IndexCase& c) {
  IndexDevice device(c);
  device.launch();
  return device.result();
}

IndexResult on_cpu(const IndexCase& c) {
  const Problem& p = c.problem;
  RouteInputs inputs;
  const bool by_index = c.options.router == Router::index;
  uint8_t *const q = const_cast<uint8_t*>(c.q.data()), *const k = const_cast<uint8_t*>(c.k.data());
  (by_index ? inputs.index_q : inputs.q) = contiguous_view(q, p.q_dtype, {p.total_q(), p.num_q_heads, c.channels()});
  if (by_index) {
    inputs.index_k = contiguous_view(k, p.kv_dtype, {p.total_kv(), c.channels()});
  } else {
    inputs.k = contiguous_view(k, p.kv_dtype, {p.total_kv(), p.num_kv_heads, c.channels()});
  }
  const int64_t tokens = p.total_q() + c.padding_tokens;
  IndexResult result;
  result.ids.assign(static_cast<size_t>(p.num_kv_heads * tokens * p.top_k), -1);
  const Tensor ids = route(p, inputs, c.options);
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    std::copy_n(ids.as<int32_t>() + h * p.total_q() * p.top_k, p.total_q() * p.top_k,
                result.ids.begin() + h * tokens * p.top_k);
  }
  return result;
}

ExactScores exact_scores(const IndexCase& c) {
  const Problem& p = c.problem;
  const SequenceTable table(p);
  const auto widened = [&](const std::vector<uint8_t>& stored, DType dtype) {
    std::vector<double> values(stored.size() / static_cast<size_t>(size_in_bytes(dtype)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = get(stored, static_cast<int64_t>(i), dtype);
    return values;
  };
  const std::vector<double> q = widened(c.q, p.q_dtype), k = widened(c.k, p.kv_dtype);
  const int64_t dim = c.channels(), key_stride = c.key_heads() * dim, group = p.group_size();
  ExactScores exact(static_cast<size_t>(p.num_kv_heads * p.total_q()));
  parallel_for(0, static_cast<int64_t>(exact.size()), [&](int, int64_t row) {
    const int64_t head = row / p.total_q(), token = row % p.total_q();
    const SequenceTable::Token place = table.token(token);
    std::vector<double> query(static_cast<size_t>(dim)), mean(static_cast<size_t>(dim));
    for (int64_t i = 0; i < group * dim; ++i) {
      query[static_cast<size_t>(i % dim)] += q[static_cast<size_t>((token * p.num_q_heads + head * group) * dim + i)];
    }
    for (double& x : query) x /= static_cast<double>(group);
    const double* key = k.data() + table.cu_seqlens_kv[static_cast<size_t>(place.sequence)] * key_stride;
    if (c.key_heads() > 1) key += head * dim;
    std::vector<ExactScore>& scores = exact[static_cast<size_t>(row)];
    const auto score_of = [&](const double* x) {
      double dot = 0, terms = 0;
      for (int64_t i = 0; i < dim; ++i) {
        dot += query[static_cast<size_t>(i)] * x[i];
        terms += std::abs(query[static_cast<size_t>(i)] * x[i]);
      }
      return ExactScore{dot, rounding_of(c, dot, terms)};
    };
    for (int64_t first = 0; first < place.visible; first += p.kv_block_size) {
      const int64_t count = std::min(p.kv_block_size, place.visible - first);
      std::fill(mean.begin(), mean.end(), 0.0);
      ExactScore best = {-INFINITY, 0};
      for (int64_t j = 0; j < count; ++j, key += key_stride) {
        if (c.options.router == Router::mean_pool) {
          for (int64_t i = 0; i < dim; ++i) mean[static_cast<size_t>(i)] += key[i] / static_cast<double>(count);
          continue;
        }
        const ExactScore one = score_of(key);
        if (!std::isnan(best.score)) best.score = std::isnan(one.score) ? one.score : std::max(best.score, one.score);
        best.rounding = std::max(best.rounding, one.rounding);
      }
      scores.push_back(c.options.router == Router::mean_pool ? score_of(mean.data()) : best);
    }
  });
  return exact;
}

void expect_right(const IndexCase& c, const ExactScores& exact, const IndexResult& result) {
  SCOPED_TRACE(c.problem.to_line() + " " + std::string(name_of(c.options.router)) + " local " +
               std::to_string(c.options.local_blocks) + " init " + std::to_string(c.options.init_blocks));
  EXPECT_EQ(result.fault, "");
  const Problem& p = c.problem;
  const SequenceTable table(p);
  const int64_t tokens = p.total_q() + c.padding_tokens;
  ASSERT_EQ(static_cast<int64_t>(result.ids.size()), p.num_kv_heads * tokens * p.top_k);
  const int64_t max_blocks = static_cast<int64_t>(result.scores.size()) / std::max<int64_t>(1, p.num_kv_heads * tokens);
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* ids = result.ids.data() + (h * tokens + t) * p.top_k;
      const std::vector<ExactScore> scores =
          t < p.total_q() ? exact[static_cast<size_t>(h * p.total_q() + t)] : std::vector<ExactScore>();
      const auto visible = static_cast<int64_t>(scores.size());
      SCOPED_TRACE("head " + std::to_string(h) + " token " + std::to_string(t) + " of " + std::to_string(visible) +
                   " visible blocks");
      const int64_t count = std::min(visible, p.top_k);
      std::vector<bool> chosen(scores.size());
      for (int64_t i = 0; i < p.top_k; ++i) {
        if (i >= count) {
          ASSERT_EQ(ids[i], -1) << "slot " << i;
          continue;
        }
        ASSERT_TRUE(ids[i] >= 0 && ids[i] < visible && (i == 0 || ids[i] > ids[i - 1]))
            << "slot " << i << ": " << ids[i];
        chosen[static_cast<size_t>(ids[i])] = true;
      }
      if (max_blocks > 0) {
        const float* own = result.scores.data() + (h * tokens + t) * max_blocks;
        for (int64_t b = 0; b < max_blocks; ++b) {
          const ExactScore exactly = b < visible ? scores[static_cast<size_t>(b)] : ExactScore{-INFINITY, 0};
          const double want = exactly.score;
          if (!std::isfinite(want)) {
            ASSERT_TRUE(std::isnan(want) ? std::isnan(own[b]) : static_cast<double>(own[b]) == want) << "block " << b;
          } else {
            ASSERT_NEAR(static_cast<double>(own[b]), want, exactly.rounding) << "block " << b;
          }
        }
      }
      if (count == visible) continue;
      const int64_t local = std::max<int64_t>(0, table.token(t).position) / p.kv_block_size;
      const int64_t num_init = std::min(c.options.init_blocks, p.top_k);
      int64_t room = p.top_k - num_init;
      std::vector<bool> forced(scores.size());
      for (int64_t b = 0; b < num_init; ++b) forced[static_cast<size_t>(b)] = true;
      for (int64_t i = 0; i < c.options.local_blocks && local - i >= num_init && room > 0; ++i, --room) {
        forced[static_cast<size_t>(local - i)] = true;
      }
      // Scores as they are ranked: NaN behind -inf.
      ExactScore worst_chosen = {INFINITY, 0}, best_left = {-INFINITY, 0};
      bool nan_chosen = false, other_left = false;
      for (size_t b = 0; b < scores.size(); ++b) {
        if (forced[b]) {
          ASSERT_TRUE(chosen[b]) << "forced block " << b;
        } else if (chosen[b]) {
          nan_chosen |= std::isnan(scores[b].score);
          if (scores[b].score < worst_chosen.score) worst_chosen = scores[b];
        } else if (!std::isnan(scores[b].score)) {
          other_left = true;
          if (scores[b].score > best_left.score) best_left = scores[b];
        }
      }
      ASSERT_FALSE(nan_chosen && other_left);
      ASSERT_GE(worst_chosen.score, best_left.score - worst_chosen.rounding - best_left.rounding);
    }
  }
}

void expect_exact(const IndexCase& c, const ExactScores& exact, const IndexResult& result) {
  expect_right(c, exact, result);
  const IndexResult cpu = on_cpu(c);
  if (result.ids == cpu.ids) return;
  const int64_t tokens = c.problem.total_q() + c.padding_tokens, k = c.problem.top_k;
  for (int64_t row = 0; row < c.problem.num_kv_heads * tokens; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const size_t at = static_cast<size_t>(row * k + i);
      ASSERT_EQ(result.ids[at], cpu.ids[at])
          << c.problem.to_line() << ", head " << row / tokens << " token " << row % tokens << " slot " << i;
    }
  }
}

}  // namespace tilesieve::testing
