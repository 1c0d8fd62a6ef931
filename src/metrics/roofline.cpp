// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/roofline.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/fail.h"

namespace tilesieve {

namespace {

double to_double(int64_t count) { return static_cast<double>(count); }

void check_positive(std::string_view name, double value) {
  if (!(value > 0) || std::isinf(value)) fail("{}: got {}, expected a positive finite number", name, value);
}

void check_not_negative(std::string_view name, double value) {
  if (!(value >= 0) || std::isinf(value)) fail("{}: got {}, expected 0 or a positive finite number", name, value);
}

void check_range(std::string_view name, double value, double low, double high, std::string_view meaning_of_high) {
  if (!(value >= low && value <= high))
    fail("{}: got {}, expected {} to {} ({})", name, value, low, high, meaning_of_high);
}

void check_device(const RooflineDevice& device) {
  check_positive("device.hbm_bandwidth", device.hbm_bandwidth);
  check_positive("device.l2_bandwidth", device.l2_bandwidth);
  check_not_negative("device.usable_l2_bytes", device.usable_l2_bytes);
  check_not_negative("device.peak_flops", device.peak_flops);
}

void check_sizes(const RooflineSizes& sizes) {
  check_positive("sizes.q", sizes.q);
  check_positive("sizes.kv", sizes.kv);
  check_positive("sizes.o", sizes.o);
  check_positive("sizes.partial", sizes.partial);
  check_not_negative("sizes.stats", sizes.stats);
}

// The model takes any head_dim and block size, so it asks less of a problem than the kernels do.
void check_problem(const Problem& problem) {
  const auto check = [](std::string_view name, int64_t value) {
    if (value < 1) fail("problem.{}: got {}, expected 1 or more", name, value);
  };
  check("num_q_heads", problem.num_q_heads);
  check("num_kv_heads", problem.num_kv_heads);
  check("head_dim", problem.head_dim);
  check("q_block_size", problem.q_block_size);
  check("kv_block_size", problem.kv_block_size);
  check("top_k", problem.top_k);
  if (problem.num_q_heads % problem.num_kv_heads != 0) {
    fail("problem.num_kv_heads: got {}, expected a divisor of num_q_heads ({})", problem.num_kv_heads,
         problem.num_q_heads);
  }
  for (const int64_t q_len : problem.q_lens) {
    if (q_len < 0) fail("problem.q_lens: got {}, expected 0 or more", q_len);
  }
}

// Pieces of `step` tokens that the sequences are cut into.
double count_pieces(const Problem& problem, int64_t step) {
  double pieces = 0;
  for (const int64_t q_len : problem.q_lens) pieces += to_double(q_len / step + (q_len % step != 0));
  return pieces;
}

// What moves, over all KV heads and the whole call.
struct Traffic {
  double tokens = 0;
  double block = 0;                   // bytes of one block of K and V under every KV head
  double q = 0, o = 0;                // bytes, each element once
  double partials = 0;                // bytes, o_partial and stats, each once
  double q_gathered = 0;              // bytes of q read by kv-outer: once for each pick
  double selected = 0;                // distinct blocks under one KV head
  double reads = 0, union_reads = 0;  // blocks that q-outer reads under one KV head
  double flops = 0, union_flops = 0;
};

Traffic count_traffic(const RooflineCase& given) {
  const Problem& problem = given.problem;
  const RooflineSizes& sizes = given.sizes;
  check_problem(problem);
  check_sizes(sizes);
  Traffic traffic;
  traffic.tokens = count_pieces(problem, 1);
  if (traffic.tokens < 1) fail("problem.q_lens: got no query token, expected 1 or more");

  const double top_k = to_double(problem.top_k);
  const double rows = traffic.tokens * to_double(problem.num_q_heads);
  const double head_dim = to_double(problem.head_dim);
  traffic.block = to_double(problem.num_kv_heads) * 2 * to_double(problem.kv_block_size) * head_dim * sizes.kv;
  traffic.q = rows * head_dim * sizes.q;
  traffic.o = rows * head_dim * sizes.o;
  traffic.partials = rows * top_k * (head_dim * sizes.partial + sizes.stats);
  traffic.q_gathered = traffic.q * top_k;

  const bool has_tile = given.tile_tokens != 0 || given.union_blocks != 0;
  const int64_t tile_tokens = has_tile ? given.tile_tokens : problem.q_block_size;
  const double union_blocks = has_tile ? given.union_blocks : top_k;
  if (tile_tokens < 1) fail("tile_tokens: got {}, expected 1 or more where union tiles are asked for", tile_tokens);
  check_positive("union_blocks", union_blocks);
  const int64_t rows_of_tile = tile_tokens / problem.q_block_size + (tile_tokens % problem.q_block_size != 0);
  check_range("union_blocks", union_blocks, 0, top_k * to_double(rows_of_tile), "all picks of a tile");
  traffic.reads = count_pieces(problem, problem.q_block_size) * top_k;
  traffic.union_reads = count_pieces(problem, tile_tokens) * union_blocks;
  const double picks = std::min(traffic.reads, traffic.union_reads);
  check_range("num_selected_blocks", given.num_selected_blocks, 0, picks, "what the rows and tiles pick in all");
  traffic.selected = given.num_selected_blocks;

  const double flops_per_block = 4 * rows * head_dim * to_double(problem.kv_block_size);
  traffic.flops = flops_per_block * top_k;
  traffic.union_flops = flops_per_block * union_blocks;
  return traffic;
}

void set_times(RooflineRow& row, const RooflineDevice& device) {
  row.hbm_seconds = row.hbm_bytes / device.hbm_bandwidth;
  row.l2_seconds = row.l2_bytes / device.l2_bandwidth;
  row.compute_seconds = device.peak_flops > 0 ? row.flops / device.peak_flops : 0;
  row.seconds = std::max({row.hbm_seconds, row.l2_seconds, row.compute_seconds});
  row.binds = row.seconds == row.hbm_seconds  ? RooflineBound::hbm
              : row.seconds == row.l2_seconds ? RooflineBound::l2
                                              : RooflineBound::compute;
}

// Every read of a block goes through the last cache; main memory gives each block once, and again for every repeated
// read that misses.
RooflineRow q_outer_row(std::string name, const Traffic& traffic, double reads, double flops, double miss_rate) {
  RooflineRow row;
  row.name = std::move(name);
  row.l2_kv_bytes = reads * traffic.block;
  row.hbm_kv_bytes = (traffic.selected + (reads - traffic.selected) * miss_rate) * traffic.block;
  row.l2_bytes = row.l2_kv_bytes + traffic.q + traffic.o;
  row.hbm_bytes = row.hbm_kv_bytes + traffic.q + traffic.o;
  row.flops = flops;
  return row;
}

RooflineRow attend_row(const Traffic& traffic, double work_items_per_block) {
  RooflineRow row;
  row.name = "kv_outer_attend";
  row.hbm_kv_bytes = traffic.selected * traffic.block;
  row.l2_kv_bytes = row.hbm_kv_bytes * work_items_per_block;
  row.hbm_bytes = row.hbm_kv_bytes + traffic.q + traffic.partials;
  row.l2_bytes = row.l2_kv_bytes + traffic.q_gathered + traffic.partials;
  row.flops = traffic.flops;
  return row;
}

RooflineRow combine_row(const Traffic& traffic) {
  RooflineRow row;
  row.name = "kv_outer_combine";
  row.hbm_bytes = row.l2_bytes = traffic.partials + traffic.o;
  return row;
}

RooflineRow sum_of_stages(const RooflineRow& attend, const RooflineRow& combine) {
  RooflineRow row = attend;
  row.name = "kv_outer";
  row.hbm_bytes += combine.hbm_bytes;
  row.l2_bytes += combine.l2_bytes;
  row.hbm_seconds += combine.hbm_seconds;
  row.l2_seconds += combine.l2_seconds;
  row.seconds += combine.seconds;
  row.binds = attend.seconds >= combine.seconds ? attend.binds : combine.binds;
  return row;
}

// The number of selected blocks, per query token, at which `kv_outer` and then `seconds_after` take as long as
// `q_outer` with K and V in the last cache. Of kv_outer only the K and V grow with that number, by known slopes; of
// q_outer only its time in main memory does, which never decides: kv_outer moves the same there and the partials too.
double find_crossover(const RooflineRow& q_outer, const RooflineRow& kv_outer, double seconds_after,
                      const Traffic& traffic, double work_items_per_block, const RooflineDevice& device) {
  const double seconds = std::max(q_outer.l2_seconds, q_outer.compute_seconds) - seconds_after;
  if (kv_outer.compute_seconds >= seconds) return 0;  // the same arithmetic, so at best as long
  const double hbm_left = seconds * device.hbm_bandwidth - (kv_outer.hbm_bytes - kv_outer.hbm_kv_bytes);
  const double l2_left = seconds * device.l2_bandwidth - (kv_outer.l2_bytes - kv_outer.l2_kv_bytes);
  const double blocks = std::min(hbm_left, l2_left / work_items_per_block) / traffic.block;
  return std::max(blocks, 0.0) / traffic.tokens;
}

template <class Named, class NameOf>
const Named& find_named(const std::vector<Named>& list, std::string_view what, std::string_view name,
                        const NameOf& name_in) {
  std::string names;
  for (const Named& item : list) {
    if (name_in(item) == name) return item;
    names += (names.empty() ? "" : ", ") + name_in(item);
  }
  fail("{}: got \"{}\", expected one of {}", what, name, names);
}

std::string upper(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

RooflineSizes RooflineSizes::of(const Problem& problem) {
  RooflineSizes sizes;
  sizes.q = to_double(size_in_bytes(problem.q_dtype));
  sizes.kv = to_double(size_in_bytes(problem.kv_dtype));
  sizes.o = problem.q_dtype == DType::f8_e4m3 ? 2 : sizes.q;
  return sizes;
}

std::vector<RooflineDevice> roofline_devices() {
  return {
      // Bandwidths as in the Fireworks AI article, which also bounds the selected blocks by about 3,200 of 32 KiB.
      {.name = "B200", .hbm_bandwidth = 7.4e12, .l2_bandwidth = 24e12, .usable_l2_bytes = 3200.0 * 32 * 1024},
      // Measured; main memory reading (writing: 4.35e12). 80 % of 60 MiB.
      {.name = "H200", .hbm_bandwidth = 4.53e12, .l2_bandwidth = 8.65e12, .usable_l2_bytes = 0.8 * 60 * 1024 * 1024},
  };
}

RooflineDevice roofline_device(std::string_view name) {
  const std::vector<RooflineDevice> devices = roofline_devices();
  return find_named(devices, "device", upper(name), [](const RooflineDevice& device) { return device.name; });
}

std::string_view name_of(RooflineBound bound) {
  constexpr std::string_view kNames[] = {"hbm", "l2", "compute"};
  return kNames[static_cast<int>(bound)];
}

const RooflineRow& Roofline::row(std::string_view name) const {
  return find_named(rows, "row", name, [](const RooflineRow& item) { return item.name; });
}

const RooflineCrossover& Roofline::crossover(std::string_view accounting) const {
  return find_named(crossovers, "accounting", accounting,
                    [](const RooflineCrossover& item) { return item.accounting; });
}

Roofline roofline(const RooflineCase& given, const RooflineDevice& device) {
  check_device(device);
  const Traffic traffic = count_traffic(given);
  const double work_items = given.work_items_per_block;
  if (!(work_items >= 1) || std::isinf(work_items))
    fail("work_items_per_block: got {}, expected 1 or more", work_items);
  const int64_t num_kv_heads = given.problem.num_kv_heads;
  const int64_t resident_heads = given.num_resident_kv_heads;
  check_range("num_resident_kv_heads", to_double(resident_heads), 1, to_double(num_kv_heads), "num_kv_heads");

  Roofline result;
  result.blocks_per_token = traffic.selected / traffic.tokens;
  result.flops = traffic.flops;
  if (device.usable_l2_bytes > 0) {
    const double block_of_one_head = traffic.block / to_double(num_kv_heads);
    result.num_l2_blocks = device.usable_l2_bytes / (block_of_one_head * to_double(resident_heads));
    // Where the selected blocks are more than the cache holds, and are read in no useful order, a read hits as often as
    // its block is among those held.
    if (traffic.selected > result.num_l2_blocks) result.l2_miss_rate = 1 - result.num_l2_blocks / traffic.selected;
  }

  RooflineRow q_outer = q_outer_row("q_outer", traffic, traffic.reads, traffic.flops, result.l2_miss_rate);
  RooflineRow q_outer_union =
      q_outer_row("q_outer_union", traffic, traffic.union_reads, traffic.union_flops, result.l2_miss_rate);
  RooflineRow attend = attend_row(traffic, work_items);
  RooflineRow combine = combine_row(traffic);
  for (RooflineRow* row : {&q_outer, &q_outer_union, &attend, &combine}) set_times(*row, device);
  const RooflineRow kv_outer = sum_of_stages(attend, combine);
  RooflineRow moved_once = kv_outer;
  moved_once.name = "kv_outer_moved_once";
  moved_once.hbm_bytes -= traffic.partials;  // what combine reads
  set_times(moved_once, device);

  const auto crossover = [&](const RooflineRow& q_row, const RooflineRow& kv_row, double seconds_after) {
    return find_crossover(q_row, kv_row, seconds_after, traffic, work_items, device);
  };
  result.crossovers = {
      {"moved_once", crossover(q_outer, moved_once, 0), crossover(q_outer_union, moved_once, 0)},
      {"written_and_read", crossover(q_outer, attend, combine.seconds),
       crossover(q_outer_union, attend, combine.seconds)},
  };
  result.rows = {q_outer, q_outer_union, attend, combine, kv_outer, moved_once};
  return result;
}

}  // namespace tilesieve
