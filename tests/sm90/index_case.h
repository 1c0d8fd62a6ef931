// SPDX-License-Identifier: Apache-2.0
// Cases for routing on a GPU: queries and keys of the index branch or of attention as a caller has them, packed or in
// pages, with poison wherever nobody may look; and what the CPU and float64 choose.
#pragma once

#include <string>
#include <vector>

#include "sm90/prefill_case.h"
#include "tilesieve/index_sm90.h"
#include "tilesieve/route.h"

namespace tilesieve::testing {

inline constexpr int64_t kIndexChannels = 128;

enum class Values {
  integers,  // small ones: every sum is exact in any order, and many scores are equal
  units,     // -1, 0 or 1: so is the mean of a whole block
  blocks,    // integers, the same for all keys of a block: so is the mean of any part of it
  normal,
  negative,  // normal, but no product is above 0
};

struct IndexCase {
  Problem problem;  // of the index branch: as many heads of queries and of keys as it has heads
  RouteOptions options;
  bool exact = false;  // means and scores are
  bool paged = false;
  bool strided = false;  // gaps between heads and between keys, ids token-major
  bool wants_scores = false;
  int64_t padding_tokens = 0;  // query tokens behind the last sequence
  std::vector<uint8_t> q, k;   // as stored, [total_q, num_q_heads, channels] and [total_kv, key_heads, channels]

  int64_t key_heads() const { return options.router == Router::index ? 1 : problem.num_kv_heads; }
  int64_t channels() const { return problem.head_dim; }
  // Element i of either, through the storage format.
  void set_q(int64_t element, double value);
  void set_k(int64_t element, double value);
  void set_key(int64_t key, double value);  // all its channels under all heads
};

// "heads=4 q=37,0,5 kv=300,40,129 block=128 topk=16 causal=1"; keys that no query sees are NaN.
IndexCase make_index_case(const std::string& line, DType dtype, Values values, uint32_t seed);

// "hq=16 hkv=2 d=64 q=37,0,5 kv=300,40,129 block=128 topk=16 causal=1" for a router that reads queries and keys.
IndexCase make_route_case(const std::string& line, Router router, DType q_dtype, DType k_dtype, Values values,
                          uint32_t seed);

struct IndexResult {
  std::vector<int32_t> ids;                         // [heads, total_q + padding, top_k]
  std::vector<float> scores;                        // [heads, total_q + padding, max_blocks], if wanted
  std::string fault;                                // of guard bytes
  bool operator==(const IndexResult& other) const;  // bit for bit
};

// A case on the device, ready to be called.
class IndexDevice {
 public:
  explicit IndexDevice(const IndexCase& c);
  void launch(void* stream = nullptr);
  // As if the device had so many multiprocessors.
  void launch_slices(int num_slices);
  IndexResult result() const;
  // New lengths and values of the same shapes, in place.
  void replace(const IndexCase& c);
  int64_t workspace_bytes() const { return workspace_.bytes(); }

  sm90::IndexInputs inputs;
  sm90::IndexOutputs outputs;
  sm90::IndexOptions options;

 private:
  void upload(const IndexCase& c);
  IndexCase shape_;
  int64_t max_pages_ = 0, num_pages_ = 0, token_stride_ = 0, page_stride_ = 0;  // of keys
  DeviceMemory q_, k_, cu_q_, cu_kv_, kv_lens_, table_, ids_, scores_, workspace_;
};

IndexResult run(const IndexCase& c);

// What the router chooses on the CPU, as the device gives it.
IndexResult on_cpu(const IndexCase& c);

// Of a visible block: in float64, NaN where a visible product is; and how far the device's may be off.
struct ExactScore {
  double score, rounding;
};
// Of every (head, query token).
using ExactScores = std::vector<std::vector<ExactScore>>;
ExactScores exact_scores(const IndexCase& c);

// The rules of the choice: ids ascend and are as many as they must be, forced ones are there, and no chosen block's
// score lies below that of one left out by more than their rounding.
void expect_right(const IndexCase& c, const ExactScores& exact, const IndexResult& result);

// Right, and ids equal to the CPU's.
void expect_exact(const IndexCase& c, const ExactScores& exact, const IndexResult& result);

}  // namespace tilesieve::testing
