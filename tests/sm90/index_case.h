// SPDX-License-Identifier: Apache-2.0
// Cases for the index branch on a GPU: index queries and keys as a caller has them, packed or in pages, with poison
// wherever nobody may look; and what the CPU and float64 choose.
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
  normal,
  negative,  // normal, but no product is above 0
};

struct IndexCase {
  Problem problem;  // num_kv_heads index heads
  DType dtype = DType::bf16;
  RouteOptions options;
  bool paged = false;
  bool strided = false;  // gaps between heads and between keys, ids token-major
  bool wants_scores = false;
  int64_t padding_tokens = 0;  // query tokens behind the last sequence
  std::vector<uint8_t> q, k;   // as stored, [total_q, heads, 128] and [total_kv, 128]

  // Element i of either, through the storage format.
  void set_q(int64_t element, double value);
  void set_k(int64_t element, double value);
  void set_key(int64_t key, double value);  // all its channels
};

// "heads=4 q=37,0,5 kv=300,40,129 block=128 topk=16 causal=1"; keys that no query sees are NaN.
IndexCase make_index_case(const std::string& line, DType dtype, Values values, uint32_t seed);

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
  int64_t max_pages_ = 0, num_pages_ = 0;
  DeviceMemory q_, k_, cu_q_, cu_kv_, kv_lens_, table_, ids_, scores_, workspace_;
};

IndexResult run(const IndexCase& c);

// What Router::index chooses and scores on the CPU, as the device gives it.
IndexResult on_cpu(const IndexCase& c);

// Scores of the visible blocks of every (head, query token) in float64; NaN where a visible product is.
using ExactScores = std::vector<std::vector<double>>;
ExactScores exact_scores(const IndexCase& c);

// The rules of the choice: ids ascend and are as many as they must be, forced ones are there, and no chosen block's
// score lies below that of one left out by more than the rounding of products of this dtype.
void expect_right(const IndexCase& c, const ExactScores& exact, const IndexResult& result);

// Right, and ids equal to the CPU's.
void expect_exact(const IndexCase& c, const ExactScores& exact, const IndexResult& result);

}  // namespace tilesieve::testing
