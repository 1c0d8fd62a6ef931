// SPDX-License-Identifier: Apache-2.0
// What somebody writes who has only the installed package: one call across the library's border, and its exception
// caught on this side of it.
#include <tilesieve/tilesieve.h>

#include <iostream>

int main() {
  const std::string line = "hq=8 hkv=2 d=64 q=100 kv=300 block=128 topk=2 causal=1";
  const tilesieve::Problem problem = tilesieve::Problem::parse(line);
  std::cout << problem.to_line() << ": " << problem.total_kv_blocks() << " blocks of keys\n";
  if (problem != tilesieve::Problem::parse(problem.to_line()) || problem.total_kv_blocks() != 3) return 1;

  // The kernel table comes out of the objects that were compiled for one instruction set each.
  for (const tilesieve::Kernel& kernel : tilesieve::kernels()) {
    std::cout << kernel.name << (kernel.available ? "\n" : " (not on this machine)\n");
  }

  try {
    tilesieve::Problem::parse("hq=banana");
  } catch (const tilesieve::Error& error) {
    std::cout << "refused as it should be: " << error.what() << '\n';
    return 0;
  }
  std::cerr << "a faulty line was accepted\n";
  return 1;
}
