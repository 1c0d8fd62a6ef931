// SPDX-License-Identifier: Apache-2.0
// The loop of SageAttention 2's kernels for one row of queries at a time, every rounding where they have it. A row is
// shared by 4 threads: thread t holds keys 2t and 2t+1 of each 8, on sm89 (mma m16n8k32) as on sm90 (wgmma m64n128k32),
// and adds up its own weights, 16 keys at a time. docs/sage.md has the formulas.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <span>

#include "attend/sage_bound.h"
#include "base/fail.h"
#include "base/number_formats.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "tensor/checks.h"
#include "tilesieve/sage.h"

namespace tilesieve {

namespace {

constexpr int64_t kThreads = 4;   // of a row
constexpr size_t kMaxStep = 128;  // keys
constexpr size_t kMaxBlocks = 2;  // of a step
constexpr int64_t kMmaKeys = 32;  // of one product of weights with values
constexpr float kLog2E = 1.44269504088896f, kLn2 = 0.693147181f;
constexpr float kOffset = 8.807f;  // log2 of the largest weight: 2^8.807 is just below 448
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// As the chip's .ftz instructions leave a result.
float ftz(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }
float fma_ftz(float a, float b, float c) { return ftz(std::fma(a, b, c)); }

// To the nearest, ties to even, without passing through f32, whose rounding could make a tie.
double rounded_to_f16(double x) {
  if (!(std::abs(x) < 65520)) return std::isnan(x) ? x : std::copysign(static_cast<double>(kInfinity), x);
  // The sum with 2^(e + 42) has its last place at 2^(e - 10). Products of E4M3 are multiples of 2^-18, so f16's
  // subnormals, of 2^-24, are never rounded to.
  const int exponent = x == 0 ? 0 : std::ilogb(x);
  const double shift = std::copysign(std::ldexp(1.0, exponent + 42), x);
  return (x + shift) - shift;
}

// Queries that attend to one list of blocks.
struct Item {
  int64_t q_begin, q_end;  // packed tokens
  int64_t sequence;
  int64_t list;  // row of the block index; -1 = dense
};

// Blocks of keys under a head that are taken together, widened for products on the CPU.
struct Step {
  struct Block {
    int64_t first = 0, num_keys = 0;  // position in the sequence, and how many keys there are
    const float* scale = nullptr;     // [kv_groups]
  };
  std::vector<Block> blocks;
  bool is_prescaled = false;
  std::vector<int16_t> keys;   // [step_keys, dim]
  std::vector<double> values;  // [step_keys, dim], tokens in order; 0 where there is no block
};

// What a row has of the softmax and of the output.
struct Row {
  std::vector<int16_t> q;  // [dim]
  float q_scale = 0;
  int64_t num_visible = 0;                       // keys of the sequence
  float m = -kInfinity;                          // the source starts at -5e6: the same for logits above that
  std::array<float, kThreads> d = {1, 1, 1, 1};  // of each thread; the first alpha, 0, wipes the 1
  std::vector<float> o;                          // [dim]
  std::optional<SageBound> bound;
  bool is_empty() const { return m == -kInfinity && d[0] == 1; }
};

class Model {
 public:
  Model(const Problem& problem, const TensorView& q, const SageTensors& tensors, const BlockIndex* block_index,
        const SageOutputs& outputs, const SageOptions& options, const SageMath& math, const Execution& execution)
      : problem_(problem),
        q_(q),
        tensors_(tensors),
        outputs_(outputs),
        options_(options),
        math_(math),
        execution_(execution),
        table_(problem),
        blocks_(sage_kv_blocks(problem, options)),
        dim_(sage_dim(problem)) {
    first_block_.resize(static_cast<size_t>(problem.num_sequences() + 1));
    for (const SageTile& block : blocks_) first_block_[static_cast<size_t>(block.sequence + 1)] += 1;
    std::partial_sum(first_block_.begin(), first_block_.end(), first_block_.begin());

    const std::vector<SageTile> tiles = sage_q_tiles(problem, options);
    for (size_t t = 0; t < tiles.size(); ++t) {
      for (int64_t q_index = tiles[t].begin; q_index < tiles[t].end; ++q_index) {
        slot_of_q_.push_back(static_cast<int64_t>(t) * options.q_tile() + q_index - tiles[t].begin);
      }
    }
    if (block_index == nullptr) {
      for (const SageTile& tile : tiles) items_.push_back({tile.begin, tile.end, tile.sequence, -1});
      return;
    }
    selection_ = select_blocks(problem, *block_index, execution.num_threads);
    for (int64_t r = 0; r < problem.num_q_rows(); ++r) {
      const auto begin = [&](int64_t row) {
        return problem.q_block_size == 1 ? row : table_.q_row_begin[static_cast<size_t>(row)];
      };
      items_.push_back({begin(r), begin(r + 1), table_.token(begin(r)).sequence, r});
    }
  }

  void run() const {
    const int64_t num_items = std::ssize(items_), count = num_items * problem_.num_q_heads;
    parallel_for(execution_.num_threads, count, Progress::begin(execution_.progress, count),
                 [&](int, int64_t i) { attend(items_[static_cast<size_t>(i % num_items)], i / num_items); });
  }

 private:
  void attend(const Item& item, int64_t head) const {
    const int64_t kv_head = head / problem_.group_size();
    std::vector<Row> rows;
    for (int64_t q_index = item.q_begin; q_index < item.q_end; ++q_index) rows.push_back(begin_row(q_index, head));
    const std::vector<int32_t> ids = list_of(item, kv_head, rows.back().num_visible);
    const size_t together = static_cast<size_t>(options_.step_blocks());
    const size_t num_steps = (ids.size() + together - 1) / together;
    Step step;
    for (size_t i = 0; i < num_steps; ++i) {
      const size_t begin = i * together, end = std::min(begin + together, ids.size());
      load_step(first_block_[static_cast<size_t>(item.sequence)], std::span(ids).subspan(begin, end - begin), kv_head,
                step);
      step.is_prescaled = static_cast<int64_t>(num_steps - i) <= options_.num_prescaled() || end - begin < together;
      for (const Step::Block& block : step.blocks) {
        step.is_prescaled = step.is_prescaled || block.num_keys < options_.kv_block() ||
                            block.first + block.num_keys > rows.front().num_visible;
      }
      for (Row& row : rows) add_step(row, step);
    }
    for (size_t r = 0; r < rows.size(); ++r) {
      finish(rows[r], item.sequence, item.q_begin + static_cast<int64_t>(r), head);
    }
  }

  std::vector<int32_t> list_of(const Item& item, int64_t kv_head, int64_t num_visible) const {
    if (item.list >= 0) {
      const int64_t* row = selection_.row_ptr.data() + kv_head * problem_.num_q_rows() + item.list;
      return {selection_.kv_block.begin() + row[0], selection_.kv_block.begin() + row[1]};
    }
    const size_t s = static_cast<size_t>(item.sequence);
    const int64_t count =
        problem_.causal ? ceil_div(num_visible, options_.kv_block()) : first_block_[s + 1] - first_block_[s];
    std::vector<int32_t> all(static_cast<size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  Row begin_row(int64_t q_index, int64_t head) const {
    const TensorView& codes = tensors_.q.codes.view();
    const int64_t slot = slot_of_q_[static_cast<size_t>(q_index)], tile = slot / options_.q_tile();
    const int64_t group = tile * options_.q_groups() + options_.q_group(slot % options_.q_tile());
    Row row;
    row.num_visible = table_.token(q_index).visible;
    const int8_t* q = codes.as<int8_t>() + head * codes.strides[0] + slot * dim_;
    row.q.assign(q, q + dim_);
    row.q_scale = tensors_.q.scale.as<float>()[head * tensors_.q.scale.view().strides[0] + group];
    row.o.resize(static_cast<size_t>(dim_));
    if (outputs_.bound.data != nullptr) row.bound.emplace(dim_, options_);
    return row;
  }

  void load_step(int64_t first_block, std::span<const int32_t> ids, int64_t kv_head, Step& step) const {
    const size_t size = static_cast<size_t>(options_.step_keys() * dim_);
    step.blocks.clear();
    step.keys.assign(size, 0);
    step.values.assign(size, 0.0);
    for (size_t i = 0; i < ids.size(); ++i) load_block(first_block + ids[i], kv_head, static_cast<int64_t>(i), step);
  }

  void load_block(int64_t id, int64_t kv_head, int64_t place, Step& step) const {
    const SageTile& tile = blocks_[static_cast<size_t>(id)];
    const int64_t size = options_.kv_block(), at = place * size;
    step.blocks.push_back(
        {tile.begin - table_.cu_seqlens_kv[static_cast<size_t>(tile.sequence)], tile.end - tile.begin,
         tensors_.k.scale.as<float>() + kv_head * tensors_.k.scale.view().strides[0] + id * options_.kv_groups()});
    const int8_t* keys =
        tensors_.k.codes.as<int8_t>() + kv_head * tensors_.k.codes.view().strides[0] + id * size * dim_;
    std::copy(keys, keys + size * dim_, step.keys.begin() + at * dim_);
    const TensorView& v = tensors_.v.codes.view();
    for (int64_t d = 0; d < dim_; ++d) {
      const uint8_t* codes = v.as<uint8_t>() + kv_head * v.strides[0] + d * v.strides[1] + id * size;
      for (int64_t key = 0; key < size; ++key) {
        step.values[static_cast<size_t>((at + key) * dim_ + d)] =
            static_cast<double>(f32_from_e4m3(codes[key / 16 * 16 + sage_v_slot(key % 16)]));
      }
    }
  }

  void add_step(Row& row, const Step& step) const {
    // The logits y, and by which factor they enter the exponential.
    std::array<float, kMaxStep> y, p{};
    std::array<std::array<float, kThreads>, kMaxBlocks> factor;
    float m = row.m;
    std::array<int64_t, kMaxBlocks> num_keys{};
    for (size_t b = 0; b < step.blocks.size(); ++b) {
      const Step::Block& block = step.blocks[b];
      num_keys[b] = std::clamp<int64_t>(row.num_visible - block.first, 0, block.num_keys);
      std::array<float, kThreads> largest, delta;
      largest.fill(-kInfinity);
      for (int64_t t = 0; t < kThreads; ++t) {
        const size_t i = static_cast<size_t>(t);
        delta[i] = ftz(row.q_scale * block.scale[options_.kv_group(2 * t)]);
        factor[b][i] = step.is_prescaled ? sigma_ : ftz(sigma_ * delta[i]);
      }
      for (int64_t key = 0; key < num_keys[b]; ++key) {
        const size_t t = thread_of(key), i = place_of(b, key);
        const float x = static_cast<float>(dot(row.q.data(), step.keys.data() + i * dim_));  // below 2^24: exact
        y[i] = step.is_prescaled ? ftz(x * delta[t]) : x;
        largest[t] = std::fmax(largest[t], y[i]);  // as max.f32: of a NaN and a number, the number
      }
      if (num_keys[b] == 0) continue;
      for (size_t t = 0; t < kThreads; ++t) m = std::fmax(m, fma_ftz(largest[t], factor[b][t], -kOffset));
    }
    // With every key masked, alpha is 1 and all weights are 0: nothing changes.
    if (num_keys[0] + num_keys[1] == 0) return;

    const float alpha = exp2(row.m - m);
    row.m = m;
    for (size_t b = 0; b < step.blocks.size(); ++b) {
      for (int64_t key = 0; key < num_keys[b]; ++key) {
        const size_t i = place_of(b, key);
        p[i] = exp2(fma_ftz(y[i], factor[b][thread_of(key)], -m));
      }
    }
    for (int64_t t = 0; t < kThreads; ++t) {
      float& d = row.d[static_cast<size_t>(t)];
      for (int64_t key = 0; key < options_.step_keys(); key += 16) {
        const float* mine = p.data() + key + 2 * t;
        const float s = ((mine[0] + mine[1]) + mine[8]) + mine[9];
        d = key == 0 ? fma_ftz(d, alpha, s) : d + s;
      }
    }

    const std::vector<double> products = weigh(p.data(), step.values.data());
    const std::vector<float> before = row.bound ? row.o : std::vector<float>();
    for (size_t d = 0; d < row.o.size(); ++d) row.o[d] = fma_ftz(row.o[d], alpha, static_cast<float>(products[d]));
    if (row.bound) row.bound->add_step(p.data(), step.values.data(), alpha, before, row.o);
  }

  // Of a key of a block of a step.
  size_t place_of(size_t block, int64_t key) const {
    return block * static_cast<size_t>(options_.kv_block()) + static_cast<size_t>(key);
  }

  // The product of a step's weights, rounded to E4M3, with its values: exact in f64 (42 bits at most), then rounded to
  // the accumulator, f16 after each 32 keys.
  std::vector<double> weigh(const float* p, const double* values) const {
    std::vector<double> sum(static_cast<size_t>(dim_));
    for (int64_t key = 0; key < options_.step_keys(); ++key) {
      const double weight = static_cast<double>(f32_from_e4m3(e4m3_from_f32(p[key])));
      if (weight != 0) {  // a NaN is not
        const double* v = values + key * dim_;
        for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * v[d];
      }
      if (options_.accumulator == SageAccumulator::f16 && key % kMmaKeys == kMmaKeys - 1) {
        for (double& x : sum) x = rounded_to_f16(x);
      }
    }
    return sum;
  }

  void finish(const Row& row, int64_t sequence, int64_t q_index, int64_t head) const {
    const int64_t kv_head = head / problem_.group_size();
    const float d = (row.d[0] + row.d[1]) + (row.d[2] + row.d[3]);  // shuffles by 1, then by 2
    const float reciprocal = row.is_empty() ? 0 : ftz(math_.reciprocal(d));
    const float* v_scale = tensors_.v.scale.as<float>() + (sequence * problem_.num_kv_heads + kv_head) * dim_;
    const TensorView &o = outputs_.o, &bound = outputs_.bound;
    for (int64_t c = 0; c < problem_.head_dim; ++c) {
      const size_t i = static_cast<size_t>(c);
      const float normalised = ftz(row.o[i] * reciprocal);
      const float out = row.is_empty() ? 0 : ftz(normalised * v_scale[c]);
      store(o, q_index * o.strides[0] + head * o.strides[1] + c, out);
      if (row.bound) {
        bound.as<float>()[q_index * bound.strides[0] + head * bound.strides[1] + c] =
            row.is_empty() ? 0
                           : static_cast<float>(row.bound->of_output(i, reciprocal, normalised, v_scale[c],
                                                                     static_cast<double>(out), o.dtype));
      }
    }
    float lse = -kInfinity;
    if (!row.is_empty()) {
      lse = (math_.log2(d) + row.m) * kLn2;
      if (tensors_.k_mean.view().data != nullptr) lse += mean_logit(sequence, q_index, head);
    }
    outputs_.lse.as<float>()[q_index * outputs_.lse.strides[0] + head * outputs_.lse.strides[1]] = lse;
  }

  static void store(const TensorView& o, int64_t place, float x) {
    if (o.dtype == DType::f32) {
      o.as<float>()[place] = x;
    } else {
      o.as<uint16_t>()[place] = o.dtype == DType::bf16 ? bf16_from_f32(x) : f16_from_f32(x);
    }
  }

  // What taking K's mean off has taken off every logit of the row.
  float mean_logit(int64_t sequence, int64_t q_index, int64_t head) const {
    const int64_t kv_head = head / problem_.group_size();
    const uint16_t* q = q_.as<uint16_t>() + q_index * q_.strides[0] + head * q_.strides[1];
    const uint16_t* mean =
        tensors_.k_mean.as<uint16_t>() + (sequence * problem_.num_kv_heads + kv_head) * problem_.head_dim;
    const auto number = [&](uint16_t bits) {
      return static_cast<double>(problem_.q_dtype == DType::bf16 ? f32_from_bf16(bits) : f32_from_f16(bits));
    };
    double sum = 0;
    for (int64_t c = 0; c < problem_.head_dim; ++c) sum += number(q[c]) * number(mean[c]);
    return static_cast<float>(sum) * scale_;
  }

  int32_t dot(const int16_t* a, const int16_t* b) const {
    int32_t sum = 0;
    for (int64_t d = 0; d < dim_; ++d) sum += a[d] * b[d];
    return sum;
  }

  float exp2(float x) const { return ftz(math_.exp2(ftz(x))); }
  static size_t thread_of(int64_t key) { return static_cast<size_t>(key % 8 / 2); }

  const Problem& problem_;
  const TensorView& q_;
  const SageTensors& tensors_;
  const SageOutputs& outputs_;
  const SageOptions& options_;
  const SageMath& math_;
  const Execution& execution_;
  const SequenceTable table_;
  const std::vector<SageTile> blocks_;
  const int64_t dim_;
  const float scale_ = static_cast<float>(problem_.scale()), sigma_ = scale_ * kLog2E;
  std::vector<int64_t> first_block_;  // [num_sequences + 1]
  std::vector<int64_t> slot_of_q_;    // [total_q]
  Selection selection_;
  std::vector<Item> items_;
};

void check_codes(std::string_view argument, const SageCodes& got, DType dtype, std::initializer_list<int64_t> codes,
                 std::initializer_list<int64_t> scale) {
  check_any_stride(fmt::format("{}.codes", argument), got.codes.view(), dtype, std::span(codes.begin(), codes.size()),
                   "as sage_quantize() makes them");
  check_any_stride(fmt::format("{}.scale", argument), got.scale.view(), DType::f32,
                   std::span(scale.begin(), scale.size()), "as sage_quantize() makes them");
}

void check_tensors_of(const Problem& problem, const SageTensors& tensors, const SageOptions& options) {
  const int64_t tiles = std::ssize(sage_q_tiles(problem, options)), dim = sage_dim(problem);
  const int64_t blocks = std::ssize(sage_kv_blocks(problem, options)), heads = problem.num_kv_heads;
  check_codes("tensors.q", tensors.q, DType::i8, {problem.num_q_heads, tiles * options.q_tile(), dim},
              {problem.num_q_heads, tiles * options.q_groups()});
  check_codes("tensors.k", tensors.k, DType::i8, {heads, blocks * options.kv_block(), dim},
              {heads, blocks * options.kv_groups()});
  check_codes("tensors.v", tensors.v, DType::f8_e4m3, {heads, dim, blocks * options.kv_block()},
              {problem.num_sequences(), heads, dim});
  if (!options.smooth_k) return;
  const int64_t sizes[] = {problem.num_sequences(), heads, problem.head_dim};
  check_storage("tensors.k_mean", tensors.k_mean.view(), problem.kv_dtype, sizes,
                "[num_sequences, num_kv_heads, head_dim]");
}

}  // namespace

void sage_attend_model(const Problem& problem, const TensorView& q, const SageTensors& tensors,
                       const BlockIndex* block_index, const SageOutputs& outputs, const SageOptions& options,
                       const SageMath& math, const Execution& execution) {
  check_sage(problem, options, block_index != nullptr);
  const int64_t sizes[] = {problem.total_q(), problem.num_q_heads, problem.head_dim};
  check_storage("q", q, problem.q_dtype, sizes, "[total_q, num_q_heads, head_dim]");
  check_tensors_of(problem, tensors, options);
  check_outputs(problem, outputs.o, outputs.lse);
  if (outputs.bound.data != nullptr) {
    check_storage("bound", outputs.bound, DType::f32, sizes, "[total_q, num_q_heads, head_dim]");
  }
  Model(problem, q, tensors, block_index, outputs, options, math, execution).run();
}

void sage_attention_model(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index,
                          const SageOutputs& outputs, const SageOptions& options, const SageMath& math,
                          const Execution& execution) {
  check_sage(problem, options, block_index != nullptr);
  check_inputs(problem, inputs, {outputs.o, outputs.lse});
  for (const TensorView* other : {&inputs.q, &inputs.k, &inputs.v, &outputs.o, &outputs.lse}) {
    if (overlap(outputs.bound, *other)) fail("bound: overlaps q, k, v, o or lse");
  }
  Execution inner = execution;
  inner.progress = nullptr;
  const SageTensors tensors = sage_quantize(problem, inputs, options, math, inner);
  sage_attend_model(problem, inputs.q, tensors, block_index, outputs, options, math, execution);
}

}  // namespace tilesieve
