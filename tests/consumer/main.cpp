// SPDX-License-Identifier: Apache-2.0
// What somebody writes who has only the installed package: a call of the whole way from routing to outputs, and
// exceptions caught on this side of the library's border.
#include <tilesieve/tilesieve.h>

#include <cerrno>
#include <cmath>
#include <iostream>

int main() {
  const std::string line = "hq=8 hkv=2 d=64 q=100 kv=300 block=128 topk=2 causal=1";
  const tilesieve::Problem problem = tilesieve::Problem::parse(line);
  std::cout << problem.to_line() << ": " << problem.total_kv_blocks() << " blocks of keys\n";
  if (problem != tilesieve::Problem::parse(problem.to_line()) || problem.total_kv_blocks() != 3) return 1;

  // The README's call, on zeros: every score is 0, so the lse of a query is the log of the keys that it attends to.
  tilesieve::Tensor q(tilesieve::DType::f32, {100, 8, 64}), o(tilesieve::DType::f32, {100, 8, 64});
  tilesieve::Tensor k(tilesieve::DType::f32, {300, 2, 64}), v(tilesieve::DType::f32, {300, 2, 64});
  tilesieve::Tensor index_q(tilesieve::DType::f32, {100, 2, 32}), index_k(tilesieve::DType::f32, {300, 32});
  tilesieve::Tensor lse(tilesieve::DType::f32, {100, 8});
  const tilesieve::AttentionInputs inputs{q.view(), k.view(), v.view()};
  const tilesieve::RouteInputs route_inputs{q.view(), k.view(), index_q.view(), index_k.view()};
  const tilesieve::AttentionOutputs outputs{o.view(), lse.view()};
  std::cout << tilesieve::sparse_prefill(problem, inputs, route_inputs, outputs) << '\n';
  // The last query sees 300 keys and picks its own block of 44 and, all scores being equal, the first one of 128.
  const float got = lse.as<float>()[99 * 8];
  if (std::abs(got - std::log(172.0f)) > 1e-4f) {
    std::cerr << "lse: got " << got << ", expected " << std::log(172.0f) << '\n';
    return 1;
  }

  int num_refused = 0;
  try {
    tilesieve::Problem::parse("hq=banana");
  } catch (const tilesieve::Error& error) {
    std::cout << "refused as it should be: " << error.what() << '\n';
    ++num_refused;
  }
  try {
    tilesieve::read_tensors("no/such.safetensors");
  } catch (const tilesieve::FileError& error) {
    std::cout << "refused as it should be: " << error.what() << '\n';
    num_refused += error.code == ENOENT;
  }
  if (num_refused == 2) return 0;
  std::cerr << "a faulty line or file was accepted\n";
  return 1;
}
