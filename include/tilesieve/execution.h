// SPDX-License-Identifier: Apache-2.0
// How a call runs on the CPU: instruction set and threads. Nothing of this is global, and none of it changes a bit of
// the result, except that different instruction sets may round differently.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] tilesieve {

// Ordered: a later set is preferred where the machine has it and a kernel exists for the problem. avx512_vnni computes
// products of int8 and has kernels of Arithmetic::int8 alone, avx512 has none of it; avx512_bf16 and amx compute
// products of bf16 and have kernels for bf16 and e4m3 storage alone, amx also some of int8. Everything around those
// (combining, routing but for the index branch, which amx scores) runs as avx512 under them.
enum class Isa : uint8_t { portable, avx2, avx512, avx512_vnni, avx512_bf16, amx, best = 255 };

std::string_view name_of(Isa isa);
Isa parse_isa(std::string_view name);  // with - or _; Error when unknown
bool is_available(Isa isa);            // built in, and this machine has it
std::vector<Isa> available_isas();     // worst first

// How far a call has come, counted by its threads, for whoever watches from another one. Routing, measuring and
// attending count the runs of queries or the work items that they hand out.
struct Progress {
  std::atomic<int64_t> done{0}, total{0};  // total 0 = not begun

  // Starts from 0 towards a total; returns the counter, nullptr where nobody watches.
  static std::atomic<int64_t>* begin(Progress* progress, int64_t total) {
    if (progress == nullptr) return nullptr;
    progress->done = 0;
    progress->total = total;
    return &progress->done;
  }
};

struct Execution {
  int num_threads = 0;           // 0 = as many as OpenMP would use
  Isa isa = Isa::best;           // sets that this machine lacks, or that have no kernel for the problem, are refused
  Progress* progress = nullptr;  // to be counted up; nullptr = nobody watches
};

}  // namespace tilesieve
