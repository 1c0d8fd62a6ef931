// SPDX-License-Identifier: Apache-2.0
// Roofline: the bytes that each loop order moves, the time they take in main memory and in the last cache, and where
// the two loop orders cross. A model, not a measurement; docs/roofline.md has the formulas, sources and limits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tilesieve/problem.h"

namespace [[gnu::visibility("default")]] tilesieve {

// A device as the model sees it: two bandwidths are enough. On a CPU "hbm" is main memory, "l2" the last cache.
struct RooflineDevice {
  std::string name = "custom";
  double hbm_bandwidth = 0;    // bytes / s
  double l2_bandwidth = 0;     // bytes / s
  double usable_l2_bytes = 0;  // that K and V may occupy; 0 = not known, they are taken to fit
  double peak_flops = 0;       // FLOP / s of the data's type; 0 = arithmetic is not modelled
};

std::vector<RooflineDevice> roofline_devices();         // the presets
RooflineDevice roofline_device(std::string_view name);  // in any case; Error that lists the presets when unknown

// The current CUDA device, as kernels that only read find it: main memory over a GiB, the L2 over a quarter of it, of
// which 80 % are taken to be usable. About 20 ms. Throws Error where there is no device that the build has code for
// (compute capability 9.0), or no CUDA in it.
RooflineDevice measure_roofline_device();

// Bytes of one element as it lies in memory; fractions are allowed (a 4-bit format with its scales: 0.5625).
struct RooflineSizes {
  double q = 1;
  double kv = 1;
  double o = 2;
  double partial = 2;
  double stats = 8;  // per row and split: 0 = none, 4 = lse, 8 = m and l

  // q, k and v as the problem stores them, o as attention returns it: of q's type, in bf16 where that is e4m3.
  static RooflineSizes of(const Problem& problem);
};

struct RooflineCase {
  // The lengths of the keys are not read. Every row of the block index is taken to pick top_k blocks.
  Problem problem = {.q_lens = {8192},
                     .kv_lens = {131072},
                     .num_q_heads = 64,
                     .num_kv_heads = 4,
                     .head_dim = 128,
                     .q_dtype = DType::f8_e4m3,
                     .kv_dtype = DType::f8_e4m3};
  RooflineSizes sizes;
  double num_selected_blocks = -1;    // distinct KV blocks selected under one KV head, mean of the heads; to be given
  int64_t tile_tokens = 0;            // query tokens of a union tile; 0 and 0 = one row of the block index
  double union_blocks = 0;            // distinct blocks that such a tile selects, mean of the tiles
  double work_items_per_block = 1;    // kv-outer: work items that read one selected block, mean
  int64_t num_resident_kv_heads = 1;  // KV heads whose blocks share the last cache at one time
};

enum class RooflineBound : uint8_t { hbm, l2, compute };
std::string_view name_of(RooflineBound bound);

struct RooflineRow {
  std::string name;
  double hbm_bytes = 0, l2_bytes = 0;        // moved, over all KV heads
  double hbm_kv_bytes = 0, l2_kv_bytes = 0;  // of these, K and V
  double flops = 0;                          // executed: a union tile multiplies all its rows by the whole union
  double hbm_seconds = 0, l2_seconds = 0, compute_seconds = 0;  // compute 0 where peak_flops is not given
  double seconds = 0;                        // the largest of the three; of kv_outer the sum of its two stages
  RooflineBound binds = RooflineBound::hbm;  // of kv_outer: what binds its longer stage
};

// kv-outer is faster below these numbers of distinct selected blocks per query token and KV head, as long as the
// selected K and V fit the last cache (beyond it q-outer only gets slower). 0 = nowhere.
struct RooflineCrossover {
  std::string accounting;    // "moved_once" or "written_and_read", said of the partials
  double q_outer = 0;        // against q-outer, one row of the block index at a time
  double q_outer_union = 0;  // against q-outer over union tiles
};

struct Roofline {
  // q_outer              one row of the block index at a time (a token where q_block_size is 1)
  // q_outer_union        a tile of tokens over the union of their blocks
  // kv_outer_attend      writes the partials
  // kv_outer_combine     reads them again
  // kv_outer             both, one after the other
  // kv_outer_moved_once  the same with the partials crossing main memory once, as the article counts
  std::vector<RooflineRow> rows;
  std::vector<RooflineCrossover> crossovers;  // moved_once, written_and_read
  double blocks_per_token = 0;                // num_selected_blocks / query tokens, to be compared with the crossovers
  double num_l2_blocks = 0;                   // blocks of one KV head that fit the last cache; 0 = not known
  double l2_miss_rate = 0;                    // of q-outer's repeated reads of K and V
  double flops = 0;                           // as rates count: 4 * query heads * head_dim * kv_block_size * all picks

  const RooflineRow& row(std::string_view name) const;                    // Error that lists the rows
  const RooflineCrossover& crossover(std::string_view accounting) const;  // Error that lists the accountings
};

// Throws Error naming the field that is negative, not finite, zero where it may not be, or more than the picks allow.
Roofline roofline(const RooflineCase& given, const RooflineDevice& device);

}  // namespace tilesieve
