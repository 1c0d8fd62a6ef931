// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "base/fail.h"

namespace tilesieve {

namespace {

constexpr int kMaxThreads = 1024;  // OpenMP ends the process when it cannot start as many as asked for

}  // namespace

int resolve_num_threads(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    fail("execution.num_threads: got {}, expected 0 (OpenMP's default) to {}", num_threads, kMaxThreads);
  }
  return num_threads > 0 ? num_threads : std::max(1, omp_get_max_threads());
}

void parallel_for(int num_threads, int64_t count, const std::function<void(int, int64_t)>& body) {
  const int threads = static_cast<int>(std::min<int64_t>(resolve_num_threads(num_threads), count));
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(0, i);
    return;
  }
  std::exception_ptr error;
  std::atomic<bool> failed{false};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    if (failed.load(std::memory_order_relaxed)) continue;
    try {
      body(omp_get_thread_num(), i);
    } catch (...) {
#pragma omp critical(tilesieve_parallel_for)
      if (!error) error = std::current_exception();
      failed = true;
    }
  }
  if (error) std::rethrow_exception(error);
}

void parallel_for(int num_threads, int64_t count, std::atomic<int64_t>* done,
                  const std::function<void(int, int64_t)>& body) {
  if (done == nullptr) return parallel_for(num_threads, count, body);
  parallel_for(num_threads, count, [&](int thread, int64_t index) {
    body(thread, index);
    done->fetch_add(1, std::memory_order_relaxed);
  });
}

}  // namespace tilesieve
