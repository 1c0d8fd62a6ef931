// SPDX-License-Identifier: Apache-2.0
// Cases for the prefill on a GPU: tensors as a caller has them, packed or in pages, in the formats of the kernels, with
// poison wherever nobody may look; and what float64 and a plain implementation of the same precision say of them.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "reference.h"
#include "tilesieve/sparse_prefill_sm90.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::testing {

// Memory on the device; freed with its owner.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes);
  template <class T>
  explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(static_cast<int64_t>(values.size() * sizeof(T))) {
    upload(values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
  }
  void upload(const void* source, int64_t bytes, int64_t offset = 0) const;
  void download(void* target, int64_t bytes, int64_t offset = 0) const;
  void fill(int byte) const;
  void* data() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0;
};

TensorView device_view(const void* data, DType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides = {});

uint16_t bf16_from(double value);
uint8_t e4m3_from(double value);  // to nearest even, saturating; NaN stays

enum class Fill { normal, outliers, large_logits, equal };

struct PrefillCase {
  Problem problem;
  DType q_dtype = DType::bf16, kv_dtype = DType::bf16, o_dtype = DType::bf16;
  bool paged = false;
  bool packed_kv = false;      // k and v are halves of one tensor, heads before tokens
  bool padded_q = false;       // gaps between the query heads, and an id after each row of the block index
  int64_t padding_tokens = 0;  // query tokens behind the last sequence
  std::vector<float> q_scale, k_scale, v_scale;    // empty, one, or one a KV head
  int64_t workspace_limit = 0, max_kv_blocks = 0;  // 0 = default
  LoopOrder loop_order = LoopOrder::automatic;
  int64_t tile_tokens = 0;

  std::vector<std::vector<int32_t>> rows;  // [num_kv_heads * total_q]
  // What the stored values are, before scales: [tokens, heads, head_dim].
  std::vector<float> q, k, v;
  std::vector<float> clean_k, clean_v;  // before poison
};

// Formats and the loop.
struct Kind {
  const char* name;
  DType q, kv;
  LoopOrder loop_order;
};

// Values of the formats, hostile rows of the block index, NaN wherever no query of the sequence looks.
PrefillCase make_prefill_case(const std::string& line, const Kind& kind, uint32_t seed, Fill fill = Fill::normal);
// The same ids for every (KV head, query token), poisoned anew.
void set_rows(PrefillCase& c, const std::vector<int32_t>& ids);

struct PrefillOutput {
  std::vector<uint16_t> o;  // [total_q + padding, num_q_heads, head_dim] bits
  std::vector<float> lse;
  std::string fault;                                  // of guard bytes and unwritten elements
  bool operator==(const PrefillOutput& other) const;  // bit for bit
};

// A case on the device, ready to be called.
class DeviceCase {
 public:
  explicit DeviceCase(const PrefillCase& c);
  void clear_output();  // to bits that no arithmetic makes
  void launch(void* stream = nullptr);
  PrefillOutput output() const;
  // New ids, lengths and values of the same shapes, in place.
  void replace(const PrefillCase& c);
  int64_t workspace_bytes() const { return workspace_.bytes(); }

  sm90::PrefillInputs inputs;
  sm90::PrefillOutputs outputs;
  sm90::PrefillOptions options;

 private:
  void upload(const PrefillCase& c);
  int64_t capacity_ = 0;  // slots of the block index
  int64_t q_head_step_ = 0, max_pages_ = 0, num_pages_ = 0, lse_bytes_ = 0, o_bytes_ = 0;
  PrefillCase shape_;
  DeviceMemory q_, k_, v_, index_, cu_q_, cu_kv_, kv_lens_, table_, scales_, o_, lse_, workspace_;
};

PrefillOutput run(const PrefillCase& c);

// Errors against float64, of one problem or of a family. The largest and the root mean square of o are at most 1.25
// times those of a plain implementation that rounds where the kernel does, plus half an ulp of the output: that is
// judged of all together, because a small problem leaves its largest error to luck. LSE within 1e-4, or where the
// products are e4m3, whose accumulation has fewer bits, 1e-2 and 1e-3 in the mean. Non-finite and empty rows exactly.
class PrefillErrors {
 public:
  void add(const PrefillCase& c, const PrefillOutput& output, bool check_lse = true);
  void judge() const;

 private:
  double largest_ = 0, squares_ = 0, plain_largest_ = 0, plain_squares_ = 0, magnitude_ = 0, count_ = 0;
  int mantissa_bits_ = 8;
};

// Of one problem.
void expect_right(const PrefillCase& c, const PrefillOutput& output, bool check_lse = true);

}  // namespace tilesieve::testing
