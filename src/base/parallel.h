// SPDX-License-Identifier: Apache-2.0
// Parallel loops. Work is handed out one index at a time; which thread takes which index is not fixed, so bodies must
// write to places that depend on the index alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace tilesieve {

// The number of threads a call uses: `num_threads` where positive, OpenMP's default where 0. Error otherwise.
int resolve_num_threads(int num_threads);

// Runs body(thread, index) for every index in [0, count), thread in [0, resolve_num_threads(num_threads)). The first
// exception of a body is rethrown after all threads have stopped.
void parallel_for(int num_threads, int64_t count, const std::function<void(int thread, int64_t index)>& body);

// The same, and counts the bodies that have returned in `done`; nullptr = nobody looks.
void parallel_for(int num_threads, int64_t count, std::atomic<int64_t>* done,
                  const std::function<void(int thread, int64_t index)>& body);

}  // namespace tilesieve
