// SPDX-License-Identifier: Apache-2.0
// Prints what call_overhead.py compares with: the microseconds of one call of the library on its smallest problem, the
// median of batches, and what the Python call does: check, plan, run.
#include <tilesieve/tilesieve.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

int main() {
  using namespace tilesieve;
  constexpr int kBatches = 41, kCalls = 5000;
  Problem problem = Problem::parse("hq=1 hkv=1 d=8 q=1 kv=1 block=8 topk=1");
  Tensor q(DType::f32, {1, 1, 8}), k(DType::f32, {1, 1, 8}), v(DType::f32, {1, 1, 8});
  Tensor o(DType::f32, {1, 1, 8}), lse(DType::f32, {1, 1}), ids(DType::i32, {1, 1, 1});
  AttentionInputs inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.v = v.view();
  AttentionOptions options;
  options.execution.num_threads = 1;
  std::vector<double> microseconds;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      sparse_attention(problem, inputs, BlockIndex::from(ids.view()), {o.view(), lse.view()}, options);
    }
    microseconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() * 1e6 /
                           kCalls);
  }
  std::nth_element(microseconds.begin(), microseconds.begin() + kBatches / 2, microseconds.end());
  std::printf("%.3f\n", microseconds[kBatches / 2]);
}
