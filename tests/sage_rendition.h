// SPDX-License-Identifier: Apache-2.0
// The loop of Sage's kernels written down a second time, as their sources have it, and what a chip may do otherwise.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <vector>

#include "reference.h"
#include "sage_cases.h"
#include "stored_numbers.h"

namespace tilesieve::testing {

// What a chip does otherwise than the model.
struct Chip {
  float (*exp2)(float) = [](float x) { return static_cast<float>(std::exp2(static_cast<double>(x))); };
  float (*reciprocal)(float) = [](float x) { return 1.0f / x; };
  bool cuts_products = false;  // the tensor core aligns 33 numbers to the largest and keeps 13 bits of fraction
};

inline const std::array<double, 256>& e4m3_numbers() {
  static const std::array<double, 256> numbers = [] {
    std::array<double, 256> all;
    for (uint32_t code = 0; code < 256; ++code) all[code] = decode(DType::f8_e4m3, code);
    return all;
  }();
  return numbers;
}

inline float flush(float x) { return std::abs(x) < 0x1p-126f ? 0.0f * x : x; }

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
      std::vector<Part> parts;
      bool pre = false;
      for (int32_t b : t.picks) {
        const int64_t begin = t.blocks[static_cast<size_t>(b)], end = t.blocks[static_cast<size_t>(b) + 1];
        const int64_t left = std::ssize(t.picks) - ++position;
        if (o_.kernel != SageKernel::sm90_sparse) pre |= left < (o_.kernel == SageKernel::sm89 ? 2 : 1);
        for (int64_t i = 0; i < block_of(o_); ++i) pre |= begin + i >= end || begin + i >= visible(t.row_begin);
        const int64_t limit = std::min(end, visible(row)) - begin;
        seen += std::max<int64_t>(0, limit);
        parts.push_back({t.first_block + b, limit});
        if (o_.kernel == SageKernel::sm90_sparse && parts.size() == 1) {  // waits for the next
          if (left > 0) continue;
          parts.push_back({t.first_block + b, 0});
          pre = true;
        }
        step(t.head, tile_id, place, parts, pre, m, d, acc);
        parts.clear();
        pre = false;
      }
      write(t, row, seen, m, d, acc);
    }
  }

  // A block of a step, and how many of its keys the row sees.
  struct Part {
    int64_t block, limit;
  };

  void step(int64_t h, int64_t tile_id, int64_t place, const std::vector<Part>& parts, bool pre, float& m, float* d,
            std::vector<float>& acc) const {
    const int64_t kv = h / p_.group_size(), size = block_of(o_) * std::ssize(parts);
    const bool per_thread = o_.groups == SageGroups::per_thread;
    const int64_t slab = (tile_id * tile_of(o_) + place) / slab_of(o_);
    const float q_scale =
        t_.q.scale.as<float>()[h * t_.q.scale.view().sizes[1] + (per_thread ? slab * 8 + place % 8 : slab)];
    const float sigma = static_cast<float>(p_.scale()) * 1.44269504088896f;
    std::vector<float> y(static_cast<size_t>(size)), p(y.size()), by(y.size());
    std::vector<float> most(static_cast<size_t>(4 * parts.size()), -std::numeric_limits<float>::infinity()),
        factor(most.size());
    const auto of = [&](int64_t n) { return static_cast<size_t>(n / block_of(o_) * 4 + n % 8 / 2); };
    for (int64_t n = 0; n < size; ++n) {
      const int64_t t = n % 8 / 2, block = parts[static_cast<size_t>(n / block_of(o_))].block, u = n % block_of(o_);
      const float k_scale =
          t_.k.scale.as<float>()[kv * t_.k.scale.view().sizes[1] + (per_thread ? block * 4 + t : block)];
      const float delta = flush(q_scale * k_scale);
      int64_t s = 0;
      for (int64_t c = 0; c < dim(); ++c) {
        s += t_.q.codes.as<int8_t>()[h * t_.q.codes.view().strides[0] + (tile_id * tile_of(o_) + place) * dim() + c] *
             t_.k.codes.as<int8_t>()[kv * t_.k.codes.view().strides[0] + (block * block_of(o_) + u) * dim() + c];
      }
      factor[of(n)] = pre ? sigma : flush(sigma * delta);
      float x = static_cast<float>(s);
      if (pre) x = flush(x * delta);
      if (u >= parts[static_cast<size_t>(n / block_of(o_))].limit) x = -5000000.0f;
      y[static_cast<size_t>(n)] = x;
      most[of(n)] = std::fmax(most[of(n)], x);
    }
    float next = m;
    for (size_t i = 0; i < most.size(); ++i) next = std::fmax(next, flush(std::fma(most[i], factor[i], -8.807f)));
    const float alpha = flush(chip_.exp2(m - next));
    m = next;
    for (int64_t n = 0; n < size; ++n) {
      const size_t i = static_cast<size_t>(n);
      p[i] = flush(chip_.exp2(flush(std::fma(y[i], factor[of(n)], -m))));
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
      acc[static_cast<size_t>(c)] = flush(std::fma(acc[static_cast<size_t>(c)], alpha, product(kv, parts, c, weights)));
    }
  }

  // Of the weights of a step and a channel of its values.
  float product(int64_t kv, const std::vector<Part>& parts, int64_t c, const std::vector<double>& weights) const {
    static constexpr int kSlots[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
    const TensorView& v = t_.v.codes.view();
    const uint8_t* codes = v.as<uint8_t>() + kv * v.strides[0] + c * v.strides[1];
    const bool half = o_.accumulator == SageAccumulator::f16;
    double sum = 0;
    int64_t exact = 0;  // in units of 2^-18
    for (size_t first = 0; first < weights.size(); first += 32) {
      std::vector<double> terms = {sum};
      bool is_number = true;
      for (size_t n = first; n < first + 32; ++n) {
        const size_t size = static_cast<size_t>(block_of(o_));
        const Part& part = parts[n / size];
        if (part.limit <= 0) continue;  // nothing there, or weights of 0
        const uint8_t v_code =
            codes[static_cast<size_t>(part.block) * size + n % size / 16 * 16 + static_cast<size_t>(kSlots[n % 16])];
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
    lse[static_cast<size_t>(place)] =
        seen == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(log + dot * p_.scale());
  }

  int64_t dim() const { return p_.head_dim <= 64 ? 64 : 128; }

  const Problem& p_;
  const TensorView& q_;
  const SageTensors& t_;
  const SageOptions& o_;
  const Chip chip_;
};

}  // namespace tilesieve::testing
