// SPDX-License-Identifier: Apache-2.0
#include "test_inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <ostream>

#include "stored_numbers.h"

namespace tilesieve::testing {

namespace {

constexpr int64_t kGuardElements = 64;

// Quiet NaN with marks, as far as the format has room for them.
uint32_t marked_nan(DType dtype, uint32_t mark) {
  const Format f = format_of(dtype);
  if (!f.ieee) return f.sign() - 1;
  const uint32_t quiet = 1u << (f.fraction_bits - 1);
  return f.largest_exponent() | quiet | (mark & (quiet - 1));
}
uint32_t guard(DType dtype) { return marked_nan(dtype, 0xdead); }
uint32_t unwritten(DType dtype) { return marked_nan(dtype, 0xbeef); }

int64_t offset_of(const TensorView& view, int64_t i, int64_t j, int64_t c) {
  return i * view.strides[0] + j * view.strides[1] + (view.num_dims == 3 ? c * view.strides[2] : 0);
}

struct Place {
  size_t sequence;
  int64_t index;  // of the query in its sequence
};

Place place_of(const Problem& problem, int64_t q) {
  size_t s = 0;
  while (q >= problem.q_lens[s]) q -= problem.q_lens[s++];
  return {s, q};
}

}  // namespace

Element::operator float() const { return static_cast<float>(decode(dtype_, bits())); }
const Element& Element::operator=(float x) const {
  set_bits(encode(dtype_, static_cast<double>(x)));
  return *this;
}
uint32_t Element::bits() const { return load_bits(dtype_, place_); }
void Element::set_bits(uint32_t bits) const { store_bits(dtype_, place_, bits); }
std::ostream& operator<<(std::ostream& out, const Element& element) { return out << static_cast<float>(element); }

GuardedTensor::GuardedTensor(std::vector<int64_t> sizes, Layout layout, DType dtype) {
  view_ = contiguous_view(nullptr, dtype, sizes);
  const int64_t tokens = sizes[0], heads = sizes[1], channels = sizes.size() == 3 ? sizes[2] : 1;
  const int64_t gap = layout == Layout::padded ? 3 : 0;
  int64_t head = channels + gap, token = heads * head;
  if (layout == Layout::padded) token = (token + 2 * gap) | 1;  // odd: no vector of pairs can step by it
  if (layout == Layout::head_major) {
    token = channels;
    head = tokens * channels + 5;
  }
  const int64_t extent = std::max<int64_t>(1, std::max(tokens * token, heads * head) + channels);
  const int64_t bytes = size_in_bytes(dtype);
  memory_.resize(static_cast<size_t>((extent + 2 * kGuardElements) * bytes));
  for (size_t at = 0; at < memory_.size(); at += static_cast<size_t>(bytes)) {
    store_bits(dtype, &memory_[at], guard(dtype));
  }
  view_.strides[0] = layout == Layout::reversed ? -token : token;
  view_.strides[1] = head;
  if (sizes.size() == 3) view_.strides[2] = 1;
  const int64_t start = kGuardElements + (layout == Layout::reversed ? std::max<int64_t>(0, tokens - 1) * token : 0);
  view_.data = memory_.data() + start * bytes;
  for_each([&](const Element& element) { element.set_bits(unwritten(dtype)); });
}

Element GuardedTensor::at(int64_t i, int64_t j, int64_t c) const {
  return {view_.dtype, view_.as<uint8_t>() + offset_of(view_, i, j, c) * size_in_bytes(view_.dtype)};
}

void GuardedTensor::for_each(const std::function<void(const Element&)>& visit) const {
  const int64_t channels = view_.num_dims == 3 ? view_.sizes[2] : 1;
  for (int64_t i = 0; i < view_.sizes[0]; ++i) {
    for (int64_t j = 0; j < view_.sizes[1]; ++j) {
      for (int64_t c = 0; c < channels; ++c) visit(at(i, j, c));
    }
  }
}

void GuardedTensor::fill(const std::function<float()>& next) {
  for_each([&](const Element& element) { element = next(); });
}

std::string GuardedTensor::fault() const {
  const size_t bytes = static_cast<size_t>(size_in_bytes(view_.dtype));
  std::vector<bool> inside(memory_.size() / bytes, false);
  const int64_t channels = view_.num_dims == 3 ? view_.sizes[2] : 1;
  const int64_t start = (view_.as<uint8_t>() - memory_.data()) / static_cast<int64_t>(bytes);
  for (int64_t i = 0; i < view_.sizes[0]; ++i) {
    for (int64_t j = 0; j < view_.sizes[1]; ++j) {
      for (int64_t c = 0; c < channels; ++c) {
        inside[static_cast<size_t>(start + offset_of(view_, i, j, c))] = true;
        if (at(i, j, c).bits() == unwritten(view_.dtype)) {
          return fmt::format("element [{}, {}, {}] was not written", i, j, c);
        }
      }
    }
  }
  for (size_t place = 0; place < inside.size(); ++place) {
    if (!inside[place] && load_bits(view_.dtype, &memory_[place * bytes]) != guard(view_.dtype)) {
      return fmt::format("guard {} of {} was overwritten", place, inside.size());
    }
  }
  return "";
}

PagedCache::PagedCache(const Problem& problem, const TensorView& k, const TensorView& v, Paging paging, uint32_t seed) {
  constexpr int64_t kSpare = 3;
  const int64_t heads = problem.num_kv_heads, dim = problem.head_dim, block = problem.kv_block_size;
  const int64_t num_pages = problem.total_kv_blocks() + kSpare, page = block * heads * dim;
  const int64_t bytes = size_in_bytes(k.dtype);
  // Strides of page, token and head, and where V begins, in elements.
  struct Strides {
    int64_t page, token, head;
  };
  const Strides tokens_first = {page, heads * dim, dim}, heads_first = {page, dim, block * dim};
  Strides of_k = paging == Paging::head_major ? heads_first : tokens_first, of_v = of_k;
  int64_t begin_v = page;
  switch (paging) {
    case Paging::apart:
      of_k = {page + block * 5 + 7, heads * dim + 5, dim};
      of_v = heads_first;
      begin_v = num_pages * of_k.page;
      break;
    case Paging::pairs:
    case Paging::head_major:
      of_k.page = of_v.page = 2 * page;
      break;
    case Paging::halves:
      begin_v = num_pages * page;
      break;
  }
  std::mt19937 random(seed);
  memory_.resize(static_cast<size_t>((begin_v + num_pages * of_v.page) * bytes));
  for (size_t at = 0; at < memory_.size(); at += static_cast<size_t>(bytes)) {
    store_bits(k.dtype, &memory_[at], hostile_bits(k.dtype, random));
  }
  const auto view_at = [&](int64_t begin, const Strides& strides) {
    TensorView view = contiguous_view(memory_.data() + begin * bytes, k.dtype, {num_pages, block, heads, dim});
    view.strides = {strides.page, strides.token, strides.head, 1};
    return view;
  };
  k_ = view_at(0, of_k);
  v_ = view_at(begin_v, of_v);

  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  int64_t width = 2;
  for (int64_t s = 0; s < problem.num_sequences(); ++s) width = std::max(width, problem.num_kv_blocks(s) + 2);
  constexpr int32_t kNoPage[] = {-1, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  for (int64_t i = 0; i < problem.num_sequences() * (width + 1) + 1; ++i) table_.push_back(kNoPage[i % 3]);
  block_table_ = contiguous_view(table_.data(), DType::i32, {problem.num_sequences(), width});
  block_table_.strides[0] = width + 1;

  int64_t token = 0;
  for (int64_t s = 0; s < problem.num_sequences(); ++s) {
    for (int64_t j = 0; j < problem.kv_lens[static_cast<size_t>(s)]; ++j, ++token) {
      int32_t& entry = table_[static_cast<size_t>(s * (width + 1) + j / block)];
      if (j % block == 0) {
        entry = pages.back();
        pages.pop_back();
      }
      for (const auto& [from, to] : {std::pair(k, k_), std::pair(v, v_)}) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t source = token * from.strides[0] + h * from.strides[1];
          const int64_t target = entry * to.strides[0] + j % block * to.strides[1] + h * to.strides[2];
          std::memcpy(to.as<uint8_t>() + target * bytes, from.as<uint8_t>() + source * bytes,
                      static_cast<size_t>(dim * bytes));
        }
      }
    }
  }
}

void page(Case& c, Paging paging, uint32_t seed) {
  c.pages = PagedCache(c.problem, c.k.view(), c.v.view(), paging, seed);
}

AttentionInputs Case::inputs() const {
  const bool paged = pages.block_table().data != nullptr;
  return {q.view(),
          paged ? pages.k() : k.view(),
          paged ? pages.v() : v.view(),
          pages.block_table(),
          q_scale.view(),
          k_scale.view(),
          v_scale.view()};
}

OwnedIndex::OwnedIndex(const Problem& problem, const std::vector<std::vector<int32_t>>& rows, int64_t capacity,
                       IndexLayout layout) {
  const int64_t heads = problem.num_kv_heads, num_rows = std::ssize(first_queries(problem));
  view_.num_heads = heads;
  view_.num_q_rows = num_rows;
  view_.capacity = capacity;
  switch (layout) {
    case IndexLayout::packed:
      view_.slot_stride = 1, view_.row_stride = capacity, view_.head_stride = num_rows * capacity;
      break;
    case IndexLayout::token_major:
      view_.slot_stride = 1, view_.head_stride = capacity + 2, view_.row_stride = heads * (capacity + 2) + 1;
      break;
    case IndexLayout::slot_strided:
      view_.row_stride = 2, view_.head_stride = 2 * num_rows + 3, view_.slot_stride = heads * view_.head_stride;
      break;
  }
  memory_.assign(
      static_cast<size_t>(std::max<int64_t>(0, heads - 1) * view_.head_stride +
                          std::max<int64_t>(0, num_rows - 1) * view_.row_stride + capacity * view_.slot_stride + 1),
      0);  // block 0 wherever strides are not honoured
  view_.kv_block = memory_.data();
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t q = 0; q < num_rows; ++q) {
      const std::vector<int32_t>& row = rows[static_cast<size_t>(h * num_rows + q)];
      for (int64_t slot = 0; slot < capacity; ++slot) {
        memory_[static_cast<size_t>(h * view_.head_stride + q * view_.row_stride + slot * view_.slot_stride)] =
            slot < static_cast<int64_t>(row.size()) ? row[static_cast<size_t>(slot)] : -1;
      }
    }
  }
}

std::vector<std::vector<int32_t>> rows_of(const BlockIndex& block_index) {
  std::vector<std::vector<int32_t>> rows;
  for (int64_t h = 0; h < block_index.num_heads; ++h) {
    for (int64_t q = 0; q < block_index.num_q_rows; ++q) {
      rows.emplace_back();
      for (int64_t slot = 0; slot < block_index.capacity; ++slot) rows.back().push_back(block_index.at(h, q, slot));
    }
  }
  return rows;
}

int64_t num_visible_keys(const Problem& problem, int64_t q) {
  const Place place = place_of(problem, q);
  const int64_t kv_len = problem.kv_lens[place.sequence];
  if (!problem.causal) return kv_len;
  return std::max<int64_t>(0, kv_len - problem.q_lens[place.sequence] + place.index + 1);
}

int64_t num_visible_blocks(const Problem& problem, int64_t q) {
  const std::vector<int64_t> begin =
      block_bounds(problem, problem.kv_lens[place_of(problem, q).sequence], problem.kv_block_size);
  return std::lower_bound(begin.begin(), begin.end(), num_visible_keys(problem, q)) - begin.begin();
}

std::vector<int64_t> first_queries(const Problem& problem) {
  std::vector<int64_t> queries;
  int64_t first = 0;
  for (int64_t q_len : problem.q_lens) {
    const std::vector<int64_t> begin = block_bounds(problem, q_len, problem.q_block_size);
    for (size_t row = 0; row + 1 < begin.size(); ++row) queries.push_back(first + begin[row]);
    first += q_len;
  }
  return queries;
}

int64_t first_key_of(const Problem& problem, int64_t q) {
  const size_t sequence = place_of(problem, q).sequence;
  return std::accumulate(problem.kv_lens.begin(), problem.kv_lens.begin() + static_cast<std::ptrdiff_t>(sequence),
                         int64_t{0});
}

std::vector<std::vector<int32_t>> hostile_rows(const Problem& problem, std::mt19937& random) {
  std::vector<std::vector<int32_t>> rows;
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int64_t h = 0; h < problem.num_kv_heads; ++h) {
    for (int64_t q : first_queries(problem)) {
      const int64_t visible = num_visible_blocks(problem, q);
      std::vector<int32_t> ids(static_cast<size_t>(visible));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      int64_t count = std::min(visible, problem.top_k);
      if (below(8) == 0) count = 0;
      if (below(4) == 0) count = std::min<int64_t>(count, 1);
      ids.resize(static_cast<size_t>(count));
      const int64_t kv_len = problem.kv_lens[place_of(problem, q).sequence];
      const int32_t past_end = static_cast<int32_t>(block_bounds(problem, kv_len, problem.kv_block_size).size()) - 1;
      const int32_t traps[] = {-1,
                               -1,
                               -2,
                               past_end,
                               std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max(),
                               static_cast<int32_t>(visible)};
      for (int32_t trap : traps) {
        if (below(2) == 0) ids.push_back(trap);
      }
      if (count > 0 && below(2) == 0) ids.push_back(ids[static_cast<size_t>(below(count))]);
      std::shuffle(ids.begin(), ids.end(), random);
      rows.push_back(ids);
    }
  }
  return rows;
}

std::vector<std::vector<int32_t>> full_rows(const Problem& problem) {
  std::vector<std::vector<int32_t>> rows;
  for (int64_t h = 0; h < problem.num_kv_heads; ++h) {
    for (int64_t q : first_queries(problem)) {
      rows.emplace_back(static_cast<size_t>(num_visible_blocks(problem, q)));
      std::iota(rows.back().begin(), rows.back().end(), 0);
    }
  }
  return rows;
}

void set_rows(Case& c, std::vector<std::vector<int32_t>> rows, IndexLayout layout) {
  size_t capacity = 1;
  for (const std::vector<int32_t>& row : rows) capacity = std::max(capacity, row.size());
  c.rows = std::move(rows);
  c.block_index = OwnedIndex(c.problem, c.rows, static_cast<int64_t>(capacity), layout);
}

Case make_case(const Problem& problem, uint32_t seed, Values values, Layout layout, IndexLayout index_layout) {
  Case c;
  c.problem = problem;
  // Each another layout, so that nobody's strides can stand in for another's.
  const auto next = [&](int step) { return kLayouts[(static_cast<size_t>(layout) + static_cast<size_t>(step)) % 4]; };
  c.q = GuardedTensor({problem.total_q(), problem.num_q_heads, problem.head_dim}, layout, problem.q_dtype);
  c.k = GuardedTensor({problem.total_kv(), problem.num_kv_heads, problem.head_dim}, next(1), problem.kv_dtype);
  c.v = GuardedTensor({problem.total_kv(), problem.num_kv_heads, problem.head_dim}, next(2), problem.kv_dtype);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto draw = [&] {
    const float x = normal(random);
    return values == Values::outliers && random() % 50 == 0 ? 20.0f * x : x;
  };
  // |logit| up to about 1e4: scale * |q| |k| = sqrt(head_dim) * factor^2; e4m3 ends at 448.
  const float factor = values == Values::large_logits ? 55.0f : 1.0f;
  c.q.fill([&] { return values == Values::equal ? 1.0f : draw() * factor; });
  c.k.fill([&] { return values == Values::equal ? 1.0f : draw() * factor; });
  c.v.fill(draw);
  set_rows(c, hostile_rows(problem, random), index_layout);
  return c;
}

Case make_case(const std::string& line, uint32_t seed, Values values) {
  return make_case(Problem::parse(line), seed, values);
}

void poison_unseen(Case& c) {
  const Problem& p = c.problem;
  const size_t heads = static_cast<size_t>(p.num_kv_heads);
  std::vector<bool> seen(static_cast<size_t>(p.total_kv()) * heads, false);
  const std::vector<int64_t> rows = first_queries(p);
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t q = 0; q < p.total_q(); ++q) {
      const int64_t visible = num_visible_keys(p, q), first = first_key_of(p, q);
      const std::vector<int64_t> begin = block_bounds(p, p.kv_lens[place_of(p, q).sequence], p.kv_block_size);
      const int64_t row = std::upper_bound(rows.begin(), rows.end(), q) - rows.begin() - 1;
      for (int64_t id : c.rows[static_cast<size_t>(h * std::ssize(rows) + row)]) {
        if (id < 0 || id + 1 >= std::ssize(begin)) continue;
        const size_t b = static_cast<size_t>(id);
        for (int64_t j = begin[b]; j < std::min(visible, begin[b + 1]); ++j) {
          seen[static_cast<size_t>(first + j) * heads + static_cast<size_t>(h)] = true;
        }
      }
    }
  }
  std::mt19937 random(1);
  for (int64_t j = 0; j < p.total_kv(); ++j) {
    for (int64_t h = 0; h < p.num_kv_heads; ++h) {
      if (seen[static_cast<size_t>(j) * heads + static_cast<size_t>(h)]) continue;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        c.k.at(j, h, d).set_bits(hostile_bits(p.kv_dtype, random));
        c.v.at(j, h, d).set_bits(hostile_bits(p.kv_dtype, random));
      }
    }
  }
}

std::vector<uint32_t> Output::bits() const {
  std::vector<uint32_t> result;
  for (int64_t t = 0; t < o.view().sizes[0]; ++t) {
    for (int64_t h = 0; h < o.view().sizes[1]; ++h) {
      for (int64_t d = 0; d < o.view().sizes[2]; ++d) result.push_back(o.at(t, h, d).bits());
      result.push_back(lse.at(t, h).bits());
    }
  }
  return result;
}

Output make_output(const Problem& problem, Layout layout, DType o_dtype) {
  return {GuardedTensor({problem.total_q(), problem.num_q_heads, problem.head_dim}, layout, o_dtype),
          GuardedTensor({problem.total_q(), problem.num_q_heads}, layout)};
}

std::vector<Kernel> kernels_for(const Problem& problem) {
  std::vector<Kernel> fitting = kernels();
  std::erase_if(fitting, [&](const Kernel& kernel) {
    return kernel.device != DeviceKind::cpu || !why_not(kernel, problem).empty();
  });
  return fitting;
}

std::vector<Isa> isas_for(const Problem& problem) {
  std::vector<Isa> isas;
  for (const Kernel& kernel : kernels_for(problem)) {
    if (kernel.loop_order == LoopOrder::q_outer) isas.push_back(kernel.isa);
  }
  return isas;
}

std::vector<Runner> sparse_runners(const Problem& problem) {
  std::vector<Runner> runners;
  for (const Kernel& kernel : kernels_for(problem)) {
    const auto add = [&](const char* how, Walk walk, bool small_workspace) {
      runners.push_back(
          {kernel.name + how, {2, kernel.isa}, kernel.loop_order, false, walk, small_workspace, kernel.arithmetic});
    };
    if (problem.q_block_size > 1) {
      if (kernel.loop_order == LoopOrder::q_outer) add(" query blocks", Walk::union_tiles, false);
    } else if (kernel.loop_order == LoopOrder::q_outer) {
      add(" per token", Walk::token_tiles, false);
      add(" union tiles", Walk::union_tiles, false);
      if (!kernel.tiles_alone) add(" gathered", Walk::gathered, false);
    } else {
      add(" one pass", Walk::token_tiles, false);
      add(" small workspace", Walk::token_tiles, true);
    }
  }
  return runners;
}

std::vector<Runner> dense_runners(const Problem& problem) {
  std::vector<Runner> runners;
  for (const Kernel& kernel : kernels_for(problem)) {
    if (kernel.loop_order != LoopOrder::q_outer) continue;
    Runner runner;
    runner.name = kernel.name + " dense";
    runner.execution = {2, kernel.isa};
    runner.dense = true;
    runner.arithmetic = kernel.arithmetic;
    runners.push_back(runner);
  }
  return runners;
}

std::vector<Runner> all_runners(const Problem& problem) {
  std::vector<Runner> runners = sparse_runners(problem);
  for (const Runner& runner : dense_runners(problem)) runners.push_back(runner);
  return runners;
}

int64_t smallest_workspace(const Problem& problem, const BlockIndex& block_index) {
  int64_t most = 0;
  const Selection selection = select_blocks(problem, block_index);
  for (size_t row = 0; row + 1 < selection.row_ptr.size(); ++row) {
    most = std::max(most, selection.row_ptr[row + 1] - selection.row_ptr[row]);
  }
  return most * partial_bytes_per_entry(problem);
}

std::vector<QRun> q_runs_of(const Problem& problem, int64_t tokens) {
  std::vector<QRun> runs;
  int64_t first = 0;
  for (int64_t q_len : problem.q_lens) {
    for (int64_t q = 0; q < q_len; q += tokens) {
      for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
        runs.push_back({head, first + q, first + std::min(q + tokens, q_len)});
      }
    }
    first += q_len;
  }
  return runs;
}

Plan plan_of(const Runner& runner, const Problem& problem, const BlockIndex& block_index) {
  AttentionOptions options;
  options.execution = runner.execution;
  options.loop_order = runner.loop_order;
  if (runner.small_workspace) options.workspace_limit = smallest_workspace(problem, block_index);
  Plan plan = plan_attention(problem, block_index, options);
  if (runner.loop_order == LoopOrder::q_outer && problem.q_block_size == 1) {
    const int64_t tile_rows = find_kernel(problem, LoopOrder::q_outer, runner.execution).tile_rows;
    const int64_t group = problem.group_size();
    plan.q_rows_per_tile = runner.walk == Walk::gathered      ? 0
                           : runner.walk == Walk::union_tiles ? tile_rows
                                                              : std::min(tile_rows, group);
    // As many tokens as four tiles hold, or an odd number of gathered ones.
    const int64_t tokens = plan.q_rows_per_tile == 0 ? 37 : std::max<int64_t>(1, 4 * plan.q_rows_per_tile / group);
    plan.q_runs = q_runs_of(problem, tokens);
  }
  return plan;
}

void run_into(const Runner& runner, const Problem& problem, const AttentionInputs& inputs,
              const BlockIndex& block_index, const AttentionOutputs& outputs, void* workspace) {
  if (runner.dense) return dense_attention(problem, inputs, outputs, runner.execution);
  run_plan(problem, inputs, plan_of(runner, problem, block_index), outputs, workspace, runner.execution);
}

Output run(const Runner& runner, const Case& c, Layout out_layout, DType o_dtype) {
  Output output = make_output(c.problem, out_layout, o_dtype);
  run_into(runner, c.problem, c.inputs(), c.block_index.view(), output.views());
  return output;
}

std::string trace(const Runner& runner, const Problem& problem) { return runner.name + " | " + problem.to_line(); }

}  // namespace tilesieve::testing
