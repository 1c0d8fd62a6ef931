// SPDX-License-Identifier: Apache-2.0
// What call_overhead.py compares with, loaded into its process so that both meet the same heap and threads: calls of
// the library on its smallest problem that do what the Python call does: check, plan, run.
#include <tilesieve/tilesieve.h>

#include <chrono>

// Seconds of `num_calls` calls.
extern "C" [[gnu::visibility("default")]] double smallest_calls(int num_calls) {
  using namespace tilesieve;
  const Problem problem = Problem::parse("hq=1 hkv=1 d=8 q=1 kv=1 block=8 topk=1");
  const Tensor q(DType::f32, {1, 1, 8}), k(DType::f32, {1, 1, 8}), v(DType::f32, {1, 1, 8});
  const Tensor o(DType::f32, {1, 1, 8}), lse(DType::f32, {1, 1}), ids(DType::i32, {1, 1, 1});
  AttentionInputs inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.v = v.view();
  AttentionOptions options;
  options.execution.num_threads = 1;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < num_calls; ++i) {
    sparse_attention(problem, inputs, BlockIndex::from(ids.view()), {o.view(), lse.view()}, options);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
