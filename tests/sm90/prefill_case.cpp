// SPDX-License-Identifier: Apache-2.0
#include "sm90/prefill_case.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "base/number_formats.h"

namespace tilesieve::testing {

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kGuard = 256;  // bytes behind outputs and workspace

void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

float stored(double value, DType dtype) {
  return dtype == DType::bf16 ? f32_from_bf16(bf16_from(value)) : f32_from_e4m3(e4m3_from(value));
}

void put(std::vector<uint8_t>& bytes, int64_t element, float value, DType dtype) {
  if (dtype == DType::bf16) {
    const uint16_t bits = bf16_from(value);
    std::memcpy(bytes.data() + element * 2, &bits, 2);
  } else {
    bytes[static_cast<size_t>(element)] = e4m3_from(value);
  }
}

float scale_of(const std::vector<float>& scales, int64_t head) {
  return scales.empty() ? 1.0f : scales[scales.size() == 1 ? 0 : static_cast<size_t>(head)];
}

int64_t slots_of(const PrefillCase& c) {
  size_t most = static_cast<size_t>(c.problem.top_k);
  for (const auto& row : c.rows) most = std::max(most, row.size());
  return static_cast<int64_t>(most);
}

std::vector<int32_t> cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> sums = {0};
  for (int64_t length : lengths) sums.push_back(sums.back() + static_cast<int32_t>(length));
  return sums;
}

}  // namespace

DeviceMemory::DeviceMemory(int64_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  must(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
  memory_ = std::shared_ptr<void>(data, [](void* p) { cudaFree(p); });
}

void DeviceMemory::upload(const void* source, int64_t bytes, int64_t offset) const {
  must(cudaMemcpy(static_cast<uint8_t*>(data()) + offset, source, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
}

void DeviceMemory::download(void* target, int64_t bytes, int64_t offset) const {
  must(cudaMemcpy(target, static_cast<uint8_t*>(data()) + offset, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost));
}

void DeviceMemory::fill(int byte) const {
  must(cudaMemset(data(), byte, static_cast<size_t>(bytes_)));
  must(cudaDeviceSynchronize());
}

TensorView device_view(const void* data, DType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  TensorView view = contiguous_view(const_cast<void*>(data), dtype, sizes);
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  view.device.kind = DeviceKind::cuda;
  return view;
}

uint16_t bf16_from(double value) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint8_t e4m3_from(double value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::min(std::abs(value), 448.0);
  const int exponent = std::max(magnitude == 0 ? -6 : std::ilogb(magnitude), -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // in units of the last bit
  // Carries of the rounding run from the fraction into the exponent by themselves; 480 does not exist.
  return static_cast<uint8_t>(sign | std::min(((exponent + 6) << 3) + steps, 0x7e));
}

namespace {

void poison(PrefillCase& c) {
  c.k = c.clean_k;
  c.v = c.clean_v;
  const Problem& p = c.problem;
  const SequenceTable table(p);
  const int64_t heads = p.num_kv_heads, block = p.kv_block_size;
  std::vector<bool> seen(static_cast<size_t>(p.total_kv() * heads)), picked(seen.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < p.total_q(); ++t) {
      const auto token = table.token(t);
      const int64_t first = table.cu_seqlens_kv[static_cast<size_t>(token.sequence)];
      const int64_t end = table.cu_seqlens_kv[static_cast<size_t>(token.sequence) + 1];
      for (int64_t id : c.rows[static_cast<size_t>(h * p.total_q() + t)]) {
        if (id < 0 || id * block >= token.visible) continue;
        for (int64_t j = id * block; j < (id + 1) * block && first + j < end; ++j) {
          picked[static_cast<size_t>((first + j) * heads + h)] = true;
          if (j < token.visible) seen[static_cast<size_t>((first + j) * heads + h)] = true;
        }
      }
    }
  }
  for (size_t row = 0; row < seen.size(); ++row) {
    if (seen[row]) continue;
    for (size_t d = 0; d < static_cast<size_t>(p.head_dim); ++d) {
      c.k[row * static_cast<size_t>(p.head_dim) + d] = kNan;
      // In a block that others look at, only finite values are sure not to leak past the diagonal.
      c.v[row * static_cast<size_t>(p.head_dim) + d] = picked[row] ? 384.0f : kNan;
    }
  }
}

}  // namespace

void set_rows(PrefillCase& c, const std::vector<int32_t>& ids) {
  for (auto& row : c.rows) row = ids;
  poison(c);
}

PrefillCase make_prefill_case(const std::string& line, const Kind& kind, uint32_t seed, Fill fill) {
  PrefillCase c;
  c.problem = Problem::parse(line);
  c.q_dtype = kind.q;
  c.kv_dtype = kind.kv;
  c.loop_order = kind.loop_order;
  const Problem& p = c.problem;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  // Outliers among e4m3 queries and keys make logits of hundreds, which their products round by whole units.
  const auto draw = [&](size_t count, DType dtype, float factor, bool outliers) {
    std::vector<float> values(count);
    for (float& x : values) {
      x = normal(random) * factor;
      if (outliers && random() % 50 == 0) x *= 20.0f;
      x = stored(x, dtype);
    }
    return values;
  };
  const auto count = [&](int64_t tokens, int64_t heads) { return static_cast<size_t>(tokens * heads * p.head_dim); };
  const bool everywhere = fill == Fill::outliers && kind.kv == DType::bf16;
  c.q = draw(count(p.total_q(), p.num_q_heads), kind.q, fill == Fill::large_logits ? 1000.0f : 1.0f, everywhere);
  c.clean_k = draw(count(p.total_kv(), p.num_kv_heads), kind.kv, 1.0f, everywhere);
  c.clean_v = draw(count(p.total_kv(), p.num_kv_heads), kind.kv, 1.0f, fill == Fill::outliers);
  if (fill == Fill::equal) {
    std::fill(c.q.begin(), c.q.end(), 1.0f);
    std::fill(c.clean_k.begin(), c.clean_k.end(), 1.0f);
  }
  const SequenceTable table(p);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t t = 0; t < p.total_q(); ++t) {
      const auto token = table.token(t);
      const int64_t visible = (token.visible + p.kv_block_size - 1) / p.kv_block_size;
      std::vector<int32_t> ids(static_cast<size_t>(visible));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      int64_t picks = std::min(visible, p.top_k);
      if (below(8) == 0) picks = 0;
      if (below(4) == 0) picks = std::min<int64_t>(picks, 1);
      ids.resize(static_cast<size_t>(picks));
      const int32_t traps[] = {-1,
                               -2,
                               static_cast<int32_t>(p.num_kv_blocks(token.sequence)),
                               std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max(),
                               static_cast<int32_t>(visible)};
      for (int32_t trap : traps) {
        if (below(2) == 0) ids.push_back(trap);
      }
      if (picks > 0 && below(2) == 0) ids.push_back(ids[static_cast<size_t>(below(picks))]);
      std::shuffle(ids.begin(), ids.end(), random);
      c.rows.push_back(ids);
    }
  }
  poison(c);
  return c;
}

bool PrefillOutput::operator==(const PrefillOutput& other) const {
  return o == other.o && lse.size() == other.lse.size() && fault == other.fault &&
         (lse.empty() || std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0);
}

DeviceCase::DeviceCase(const PrefillCase& c) : shape_(c) {
  const Problem& p = c.problem;
  const int64_t d = p.head_dim, heads = p.num_kv_heads, block = p.kv_block_size;
  const int64_t tokens = p.total_q() + c.padding_tokens, sequences = p.num_sequences();
  capacity_ = slots_of(c);
  q_head_step_ = c.padded_q ? d + 16 : d;
  q_ = DeviceMemory(tokens * p.num_q_heads * q_head_step_ * size_in_bytes(c.q_dtype));
  inputs.q =
      device_view(q_.data(), c.q_dtype, {tokens, p.num_q_heads, d}, {p.num_q_heads * q_head_step_, q_head_step_, 1});
  const int64_t bytes = size_in_bytes(c.kv_dtype);
  if (c.paged) {
    max_pages_ = 1;
    for (int64_t length : p.kv_lens) max_pages_ = std::max(max_pages_, (length + block - 1) / block + 1);
    num_pages_ = sequences * max_pages_ + 3;
    if (c.packed_kv) {
      k_ = DeviceMemory(num_pages_ * heads * block * 2 * d * bytes);
      const std::vector<int64_t> strides = {heads * block * 2 * d, 2 * d, block * 2 * d, 1};
      inputs.k = device_view(k_.data(), c.kv_dtype, {num_pages_, block, heads, d}, strides);
      inputs.v =
          device_view(static_cast<uint8_t*>(k_.data()) + d * bytes, c.kv_dtype, {num_pages_, block, heads, d}, strides);
    } else {
      k_ = DeviceMemory(num_pages_ * heads * block * d * bytes);
      v_ = DeviceMemory(num_pages_ * heads * block * d * bytes);
      inputs.k = device_view(k_.data(), c.kv_dtype, {num_pages_, block, heads, d});
      inputs.v = device_view(v_.data(), c.kv_dtype, {num_pages_, block, heads, d});
    }
    table_ = DeviceMemory(sequences * (max_pages_ + 1) * 4);
    kv_lens_ = DeviceMemory(sequences * 4);
    inputs.block_table = device_view(table_.data(), DType::i32, {sequences, max_pages_}, {max_pages_ + 1, 1});
    inputs.kv_lens = device_view(kv_lens_.data(), DType::i32, {sequences});
  } else {
    k_ = DeviceMemory(p.total_kv() * heads * d * bytes);
    v_ = DeviceMemory(p.total_kv() * heads * d * bytes);
    inputs.k = device_view(k_.data(), c.kv_dtype, {p.total_kv(), heads, d});
    inputs.v = device_view(v_.data(), c.kv_dtype, {p.total_kv(), heads, d});
    cu_kv_ = DeviceMemory((sequences + 1) * 4);
    inputs.cu_seqlens_kv = device_view(cu_kv_.data(), DType::i32, {sequences + 1});
  }
  cu_q_ = DeviceMemory((sequences + 1) * 4);
  inputs.cu_seqlens_q = device_view(cu_q_.data(), DType::i32, {sequences + 1});
  const int64_t row = capacity_ + (c.padded_q ? 1 : 0);
  index_ = DeviceMemory(heads * tokens * row * 4);
  // Padded: token-major, as some callers keep it.
  inputs.block_index = c.padded_q
                           ? device_view(index_.data(), DType::i32, {heads, tokens, capacity_}, {row, heads * row, 1})
                           : device_view(index_.data(), DType::i32, {heads, tokens, capacity_});
  scales_ = DeviceMemory(3 * heads * 4 + 12);
  const std::vector<float>* scales[] = {&c.q_scale, &c.k_scale, &c.v_scale};
  TensorView* views[] = {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale};
  for (int i = 0; i < 3; ++i) {
    if (scales[i]->empty()) continue;
    scales_.upload(scales[i]->data(), static_cast<int64_t>(scales[i]->size() * 4), i * heads * 4);
    *views[i] = device_view(static_cast<uint8_t*>(scales_.data()) + i * heads * 4, DType::f32,
                            {static_cast<int64_t>(scales[i]->size())});
  }
  o_bytes_ = tokens * p.num_q_heads * d * 2;
  lse_bytes_ = tokens * p.num_q_heads * 4;
  o_ = DeviceMemory(o_bytes_ + kGuard);
  lse_ = DeviceMemory(lse_bytes_ + kGuard);
  outputs.o = device_view(o_.data(), c.o_dtype, {tokens, p.num_q_heads, d});
  outputs.lse = device_view(lse_.data(), DType::f32, {tokens, p.num_q_heads});
  options.kv_block_size = block;
  options.causal = p.causal;
  options.softmax_scale = p.softmax_scale;
  if (c.workspace_limit != 0) options.workspace_limit = c.workspace_limit;
  options.max_kv_blocks = c.max_kv_blocks;
  options.loop_order = c.loop_order;
  options.tile_tokens = c.tile_tokens;
  workspace_ = DeviceMemory(sm90::sparse_prefill_workspace(inputs, outputs, options) + kGuard);
  workspace_.fill(0xff);  // whatever it holds must not matter: NaN in every format, -1 in every index
  upload(c);
}

void DeviceCase::upload(const PrefillCase& c) {
  const Problem& p = c.problem;
  const int64_t d = p.head_dim, heads = p.num_kv_heads, block = p.kv_block_size;
  const int64_t tokens = inputs.q.sizes[0];
  std::vector<uint8_t> bytes(static_cast<size_t>(q_.bytes()), 0x7f);  // NaN in the gaps
  for (int64_t r = 0; r < p.total_q() * p.num_q_heads; ++r) {
    for (int64_t i = 0; i < d; ++i) put(bytes, r * q_head_step_ + i, c.q[static_cast<size_t>(r * d + i)], c.q_dtype);
  }
  q_.upload(bytes.data(), q_.bytes());

  const std::vector<int32_t> cu_q = cumulative(p.q_lens), cu_kv = cumulative(p.kv_lens);
  cu_q_.upload(cu_q.data(), cu_q_.bytes());
  std::mt19937 random(99);
  for (int which = 0; which < 2; ++which) {
    const std::vector<float>& values = which == 0 ? c.k : c.v;
    const TensorView& view = which == 0 ? inputs.k : inputs.v;
    const DeviceMemory& memory = c.packed_kv || which == 0 ? k_ : v_;
    if (!c.packed_kv || which == 0) bytes.assign(static_cast<size_t>(memory.bytes()), 0x7f);
    if (!c.paged) {
      for (size_t i = 0; i < values.size(); ++i) put(bytes, static_cast<int64_t>(i), values[i], c.kv_dtype);
    } else {
      std::vector<int32_t> pages(static_cast<size_t>(num_pages_));
      std::iota(pages.begin(), pages.end(), 0);
      std::mt19937 same(7);
      std::shuffle(pages.begin(), pages.end(), same);
      std::vector<int32_t> table(static_cast<size_t>(p.num_sequences() * (max_pages_ + 1)), 1 << 30), lens;
      size_t next = 0;
      for (size_t s = 0; s < p.kv_lens.size(); ++s) {
        lens.push_back(static_cast<int32_t>(p.kv_lens[s]));
        for (int64_t b = 0; b * block < p.kv_lens[s]; ++b) {
          const int64_t page = pages[next++];
          table[s * static_cast<size_t>(max_pages_ + 1) + static_cast<size_t>(b)] = static_cast<int32_t>(page);
          for (int64_t j = b * block; j < std::min((b + 1) * block, p.kv_lens[s]); ++j) {
            for (int64_t h = 0; h < heads; ++h) {
              const int64_t at = page * view.strides[0] + (j - b * block) * view.strides[1] + h * view.strides[2];
              for (int64_t i = 0; i < d; ++i) {
                const size_t from = static_cast<size_t>(((cu_kv[s] + j) * heads + h) * d + i);
                put(bytes, at + i + (c.packed_kv && which == 1 ? d : 0), values[from], c.kv_dtype);
              }
            }
          }
        }
      }
      table_.upload(table.data(), table_.bytes());
      kv_lens_.upload(lens.data(), kv_lens_.bytes());
    }
    memory.upload(bytes.data(), memory.bytes());
  }
  if (!c.paged) cu_kv_.upload(cu_kv.data(), cu_kv_.bytes());

  std::vector<int32_t> index(static_cast<size_t>(index_.bytes() / 4), 0);  // the gaps are valid ids
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t slot = 0; slot < capacity_; ++slot) {
        int32_t id = 0;  // padding tokens pick block 0: it must not count
        if (t < p.total_q()) {
          const auto& row = c.rows[static_cast<size_t>(h * p.total_q() + t)];
          id = slot < static_cast<int64_t>(row.size()) ? row[static_cast<size_t>(slot)] : -1;
        }
        index[static_cast<size_t>(h * inputs.block_index.strides[0] + t * inputs.block_index.strides[1] + slot)] = id;
      }
    }
  }
  index_.upload(index.data(), index_.bytes());
}

void DeviceCase::replace(const PrefillCase& c) { upload(c); }

void DeviceCase::clear_output() {
  o_.fill(0xff);  // a NaN that no arithmetic makes
  lse_.fill(0xff);
}

void DeviceCase::launch(void* stream) {
  clear_output();
  sm90::sparse_prefill(inputs, outputs, options, workspace_.data(), workspace_.bytes() - kGuard, stream);
}

PrefillOutput DeviceCase::output() const {
  must(cudaDeviceSynchronize());
  PrefillOutput out;
  out.o.resize(static_cast<size_t>(o_bytes_ / 2));
  out.lse.resize(static_cast<size_t>(lse_bytes_ / 4));
  o_.download(out.o.data(), o_bytes_);
  lse_.download(out.lse.data(), lse_bytes_);
  uint8_t guards[3][kGuard];
  o_.download(guards[0], kGuard, o_bytes_);
  lse_.download(guards[1], kGuard, lse_bytes_);
  workspace_.download(guards[2], kGuard, workspace_.bytes() - kGuard);
  for (int64_t i = 0; i < kGuard; ++i) {
    if (guards[0][i] != 0xff) out.fault = "bytes behind o were written";
    if (guards[1][i] != 0xff) out.fault = "bytes behind lse were written";
    if (guards[2][i] != 0xff) out.fault = "bytes behind the workspace were written";
  }
  if (std::count(out.o.begin(), out.o.end(), 0xffff) > 0) out.fault = "elements of o were not written";
  for (float x : out.lse) {
    if (std::bit_cast<uint32_t>(x) == 0xffffffffu) out.fault = "elements of lse were not written";
  }
  return out;
}

PrefillOutput run(const PrefillCase& c) {
  DeviceCase device(c);
  device.launch();
  return device.output();
}

namespace {

struct Row {
  std::vector<double> o;
  double lse = 0;
};

// Blocks by themselves, P and partials rounded, then merged: where the kernel rounds.
void plain_row(const PrefillCase& c, const float* q, double logit_scale, double v_scale, int64_t kv_head,
               int64_t first_key, int64_t visible, const std::vector<int32_t>& ids, std::vector<double>& o) {
  const Problem& p = c.problem;
  const size_t d = static_cast<size_t>(p.head_dim);
  const bool e4m3 = c.kv_dtype == DType::f8_e4m3;
  std::vector<int32_t> sorted(ids);
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  std::vector<std::vector<double>> partials;
  std::vector<double> ms, ls;
  for (int64_t id : sorted) {
    if (id < 0 || id * p.kv_block_size >= visible) continue;
    const int64_t begin = id * p.kv_block_size, end = std::min(visible, begin + p.kv_block_size);
    std::vector<double> s;
    double m = -INFINITY, l = 0;
    for (int64_t j = begin; j < end; ++j) {
      const float* k = &c.k[static_cast<size_t>((first_key + j) * p.num_kv_heads + kv_head) * d];
      double dot = 0;
      for (size_t i = 0; i < d; ++i) dot += static_cast<double>(q[i]) * static_cast<double>(k[i]);
      s.push_back(dot * logit_scale);
      m = std::max(m, s.back());
    }
    std::vector<double> partial(d, 0.0);
    for (int64_t j = begin; j < end; ++j) {
      const double logit = s[static_cast<size_t>(j - begin)];
      const double exact = logit == -INFINITY ? 0.0 : std::exp(logit - m);
      l += exact;
      const double rounded = e4m3 ? static_cast<double>(f32_from_e4m3(e4m3_from(exact * 448))) / 448
                                  : static_cast<double>(f32_from_bf16(bf16_from(exact)));
      const float* v = &c.v[static_cast<size_t>((first_key + j) * p.num_kv_heads + kv_head) * d];
      for (size_t i = 0; i < d; ++i) partial[i] += rounded * static_cast<double>(v[i]);
    }
    for (double& x : partial) x = static_cast<double>(f32_from_bf16(bf16_from(x)));
    partials.push_back(partial);
    ms.push_back(m);
    ls.push_back(l);
  }
  double largest = -INFINITY, total = 0;
  for (double m : ms) largest = std::max(largest, m);
  std::fill(o.begin(), o.end(), 0.0);
  for (size_t b = 0; b < ms.size(); ++b) {
    const double w = ms[b] == -INFINITY ? 0.0 : std::exp(ms[b] - largest);
    total += w * ls[b];
    for (size_t i = 0; i < d; ++i) o[i] += w * partials[b][i];
  }
  for (double& x : o) x = total == 0 ? 0.0 : x / total * v_scale;
}

}  // namespace

void PrefillErrors::add(const PrefillCase& c, const PrefillOutput& output, bool check_lse) {
  SCOPED_TRACE(c.problem.to_line() + " q " + std::string(name_of(c.q_dtype)) + " kv " +
               std::string(name_of(c.kv_dtype)) + (c.paged ? " paged" : ""));
  EXPECT_EQ(output.fault, "");
  const Problem& p = c.problem;
  const int64_t d = p.head_dim, group = p.group_size();
  // float64 of the values that the scales give.
  const auto scaled = [&](std::vector<float> values, int64_t heads, int64_t per, const std::vector<float>& scales) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] *= scale_of(scales, static_cast<int64_t>(i) / d % heads / per);
    }
    return values;
  };
  std::vector<float> q = scaled(c.q, p.num_q_heads, group, c.q_scale), k = scaled(c.k, p.num_kv_heads, 1, c.k_scale),
                     v = scaled(c.v, p.num_kv_heads, 1, c.v_scale);
  const auto view = [&](std::vector<float>& x, int64_t tokens, int64_t heads) {
    return contiguous_view(x.data(), DType::f32, {tokens, heads, d});
  };
  std::vector<int32_t> ids;
  const int64_t slots = slots_of(c);
  for (const auto& row : c.rows) {
    ids.insert(ids.end(), row.begin(), row.end());
    ids.resize(ids.size() + static_cast<size_t>(slots) - row.size(), -1);
  }
  BlockIndex index{ids.data(), p.num_kv_heads, p.total_q(), slots, p.total_q() * slots, slots, 1};
  const Reference exact =
      reference_attention(p,
                          AttentionInputs{view(q, p.total_q(), p.num_q_heads), view(k, p.total_kv(), p.num_kv_heads),
                                          view(v, p.total_kv(), p.num_kv_heads)},
                          &index);
  mantissa_bits_ = c.o_dtype == DType::bf16 ? 8 : 11;
  const SequenceTable table(p);
  const bool e4m3 = c.kv_dtype == DType::f8_e4m3, quantised = e4m3 && c.q_dtype == DType::bf16;
  double lse_largest = 0, lse_sum = 0, lse_magnitude = 0, lse_count = 0;
  std::vector<double> plain(static_cast<size_t>(d));
  for (int64_t t = 0; t < p.total_q(); ++t) {
    const auto token = table.token(t);
    for (int64_t h = 0; h < p.num_q_heads; ++h) {
      const size_t row = static_cast<size_t>(t * p.num_q_heads + h);
      const int64_t kv_head = h / group;
      std::vector<float> mine(c.q.begin() + static_cast<int64_t>(row) * d,
                              c.q.begin() + static_cast<int64_t>(row + 1) * d);
      double factor = p.scale() * static_cast<double>(scale_of(c.q_scale, kv_head)) *
                      static_cast<double>(scale_of(c.k_scale, kv_head));
      if (quantised) {
        float peak = 0;
        for (float x : mine) peak = std::max(peak, std::abs(x));
        const float scale = peak == 0 ? 1.0f : peak / 448.0f;
        for (float& x : mine) x = f32_from_e4m3(e4m3_from(static_cast<double>(x / scale)));
        factor *= static_cast<double>(scale);
      }
      plain_row(c, mine.data(), factor, static_cast<double>(scale_of(c.v_scale, kv_head)), kv_head,
                table.cu_seqlens_kv[static_cast<size_t>(token.sequence)], token.visible,
                c.rows[static_cast<size_t>(kv_head * p.total_q() + t)], plain);
      const double want_lse = exact.lse[row], got_lse = static_cast<double>(output.lse[row]);
      if (std::isfinite(want_lse)) {
        lse_largest = std::max(lse_largest, std::isfinite(got_lse) ? std::abs(got_lse - want_lse) : INFINITY);
        lse_sum += std::abs(got_lse - want_lse);
        lse_magnitude = std::max(lse_magnitude, std::abs(want_lse));
        ++lse_count;
      } else if (std::isnan(want_lse)) {
        EXPECT_TRUE(std::isnan(got_lse)) << "lse of token " << t << " head " << h << ": " << got_lse;
      } else {
        EXPECT_EQ(got_lse, want_lse) << "lse of token " << t << " head " << h;
      }
      for (int64_t i = 0; i < d; ++i) {
        const double want = exact.o[row * static_cast<size_t>(d) + static_cast<size_t>(i)];
        const uint16_t bits = output.o[row * static_cast<size_t>(d) + static_cast<size_t>(i)];
        const double got = static_cast<double>(c.o_dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits));
        if (!std::isfinite(want) || !std::isfinite(got)) {
          ASSERT_TRUE(std::isnan(want) && std::isnan(got))
              << "token " << t << " head " << h << " channel " << i << ": " << got << ", expected " << want;
          continue;
        }
        if (want_lse == -INFINITY) {
          ASSERT_EQ(bits, 0) << "token " << t << " head " << h << " channel " << i;
        }
        const double off = got - want, plain_off = plain[static_cast<size_t>(i)] - want;
        largest_ = std::max(largest_, std::abs(off));
        squares_ += off * off;
        plain_largest_ = std::max(plain_largest_, std::abs(plain_off));
        plain_squares_ += plain_off * plain_off;
        magnitude_ = std::max(magnitude_, std::abs(want));
        ++count_;
      }
    }
  }
  for (size_t i = static_cast<size_t>(p.total_q() * p.num_q_heads); i < output.lse.size(); ++i) {
    EXPECT_EQ(output.lse[i], -INFINITY) << "lse of padding";
  }
  for (size_t i = static_cast<size_t>(p.total_q() * p.num_q_heads * d); i < output.o.size(); ++i) {
    ASSERT_EQ(output.o[i], 0) << "o of padding";
  }
  if (!check_lse || lse_count == 0) return;
  // bf16 queries lose bits when they are quantised: what is left is the rounding of e4m3 in the logits.
  const double logits = std::max(1.0, p.scale() * std::sqrt(static_cast<double>(d)));  // about how large they are
  const double slack = (quantised ? 0.3 * logits : e4m3 ? 1e-2 * logits : 1e-4) + 1e-6 * lse_magnitude;
  EXPECT_LE(lse_largest, slack) << "largest error of lse, of " << lse_magnitude;
  if (e4m3 && !quantised) {
    EXPECT_LE(lse_sum / lse_count, 1e-3 * logits + 1e-7 * lse_magnitude) << "mean error of lse";
  }
}

void PrefillErrors::judge() const {
  if (count_ == 0) return;
  const double half_ulp = std::ldexp(1.0, std::ilogb(std::max(magnitude_, 1e-30)) - mantissa_bits_);
  EXPECT_LE(largest_, 1.25 * plain_largest_ + half_ulp) << "largest error of o; plain " << plain_largest_;
  EXPECT_LE(std::sqrt(squares_ / count_), 1.25 * std::sqrt(plain_squares_ / count_) + half_ulp / 2)
      << "root mean square error of o; plain " << std::sqrt(plain_squares_ / count_);
}

void expect_right(const PrefillCase& c, const PrefillOutput& output, bool check_lse) {
  PrefillErrors errors;
  errors.add(c, output, check_lse);
  errors.judge();
}

}  // namespace tilesieve::testing
