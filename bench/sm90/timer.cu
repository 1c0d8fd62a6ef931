// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "cuda/launch.h"
#include "sm90/timer.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

constexpr int64_t kFlushBytes = int64_t{512} << 20;  // 0.12 ms, in which the host enqueues what is measured
constexpr int kWarmUps = 3, kCounted = 11;
constexpr uint64_t kProbeNanoseconds = 200'000;

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

struct Elapsed {
  int64_t cycles;
  uint64_t nanoseconds;
};

// From one tick of the timer to another: it may tick but once a microsecond.
__global__ void clock_kernel(Elapsed* out) {
  const uint64_t before = nanoseconds();
  uint64_t begin = before, now;
  while (begin == before) begin = nanoseconds();
  const int64_t first = clock64();
  do {
    now = nanoseconds();
  } while (now - begin < kProbeNanoseconds);
  *out = {clock64() - first, now - begin};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

Timer::Timer() {
  check(cudaEventCreate(&begin_), "event");
  check(cudaEventCreate(&end_), "event");
  flush_ = allocate(kFlushBytes);
  clock_ = allocate(sizeof(Elapsed));
}

Timing Timer::timed(const Launch& launch, int count) {
  check(cudaEventRecord(begin_), "record");
  for (int i = 0; i < count; ++i) launch();
  check(cudaEventRecord(end_), "record");
  clock_kernel<<<1, 1>>>(static_cast<Elapsed*>(clock_.get()));
  check(cudaGetLastError(), "clock");
  Elapsed elapsed;
  check(cudaMemcpy(&elapsed, clock_.get(), sizeof elapsed, cudaMemcpyDeviceToHost), "launch");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin_, end_), "elapsed");
  return {static_cast<double>(ms) / count,
          static_cast<double>(elapsed.cycles) * 1e3 / static_cast<double>(elapsed.nanoseconds)};
}

Timing Timer::burst(const Launch& launch, bool flush) {
  std::vector<double> times, clocks;
  for (int i = 0; i < kWarmUps + kCounted; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (flush) check(cudaMemsetAsync(flush_.get(), i, kFlushBytes), "flush");
    const Timing one = timed(launch, 1);
    if (i < kWarmUps) continue;
    times.push_back(one.ms);
    clocks.push_back(one.sm_mhz);
  }
  return {median(times), median(clocks)};
}

Timing Timer::sustained(const Launch& launch, double expected) {
  return timed(launch, std::max(3, static_cast<int>(500 / expected)));
}

double copy_rate(Timer& timer) {
  const int64_t bytes = int64_t{2} << 30;
  const Memory a = allocate(bytes), b = allocate(bytes);
  check(cudaMemset(a.get(), 1, bytes), "memset");
  const auto copy = [&] { check(cudaMemcpyAsync(b.get(), a.get(), bytes, cudaMemcpyDeviceToDevice), "copy"); };
  return 2.0 * static_cast<double>(bytes) / timer.burst(copy).ms;
}

}  // namespace tilesieve::bench
