// SPDX-License-Identifier: Apache-2.0
// Cases for dense attention on a GPU: sequences of one length, tensors laid out as callers have them, NaN in every gap.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "sage_operands_sm90.h"
#include "sm90/prefill_case.h"
#include "tilesieve/sage.h"
#include "tilesieve/sage_sm90.h"

namespace tilesieve::testing {

struct DenseCase {
  Problem problem;  // sequences of equal lengths
  bool hnd = false;
  int64_t gap = 0;  // elements behind each row of head_dim, a multiple of 8
  // Elements from token to token, where that is to be far; 0 = as the layout has it. Of one head and sequence alone.
  int64_t q_token_stride = 0, kv_token_stride = 0;
  SageGroups groups = SageGroups::per_thread;
  DType o_dtype = DType::bf16;
  Tensor q, k, v;  // of the problem's dtypes, [tokens, heads, head_dim]

  AttentionInputs inputs() const;
  int64_t num_sequences() const { return problem.num_sequences(); }
};

// Gaussian; each channel of k and v has an offset of its own, of this deviation.
DenseCase make_dense_case(const std::string& line, uint32_t seed, float k_offset = 2.0f, float v_offset = 0.5f);

struct DenseResult {
  Tensor o, lse;                                    // o_dtype [tokens, heads, head_dim], f32 [tokens, heads]
  bool operator==(const DenseResult& other) const;  // bit for bit
};

enum class DenseForm { bf16, exact, relaxed };

// The tensors of a case on the device, o and lse poisoned.
class DenseDevice {
 public:
  DenseDevice(const DenseCase& c, DenseForm form);
  void launch(cudaStream_t stream = nullptr) const;
  DenseResult result() const;  // waits

  const sm90::DenseInputs& inputs() const { return inputs_; }
  const sm90::DenseOutputs& outputs() const { return outputs_; }
  const sm90::SageCallOptions& options() const { return options_; }
  void* workspace() const { return workspace_.data(); }

 private:
  TensorView place(const TensorView& host, int64_t token_stride, DeviceMemory& memory);
  TensorView take_back(const TensorView& device, const DeviceMemory& memory, const Tensor& host) const;

  const DenseCase& case_;
  const DenseForm form_;
  DeviceMemory q_, k_, v_, o_, lse_, workspace_;
  sm90::DenseInputs inputs_;
  sm90::DenseOutputs outputs_;
  sm90::SageCallOptions options_;
};

DenseResult run(const DenseCase& c, DenseForm form);

// What the device's quantisers left in a workspace, as the CPU's model takes it.
struct SageSlots {
  int64_t q_slots, k_slots, v_slots;  // of a head
};
SageTensors sage_tensors_at(const void* workspace, int64_t workspace_bytes, const sm90::SagePlaces& at,
                            const Problem& problem, const SageOptions& options, const SageSlots& slots);
SageTensors quantized_by_device(const DenseCase& c);

}  // namespace tilesieve::testing
