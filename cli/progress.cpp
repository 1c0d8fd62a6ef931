// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tilesieve::cli {

namespace {

constexpr auto kSilence = std::chrono::seconds(2);
constexpr auto kRedraw = std::chrono::milliseconds(250);
constexpr int64_t kCells = 24;

}  // namespace

Progress::Progress(int64_t num_steps, bool wanted) : num_steps_(std::max<int64_t>(1, num_steps)) {
  if (wanted && isatty(STDERR_FILENO) != 0) thread_ = std::thread([this] { redraw_until_finished(); });
}

void Progress::begin(const std::string& what) {
  const std::lock_guard lock(mutex_);
  ++num_begun_;
  what_ = what;
}

void Progress::finish() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Progress::redraw_until_finished() {
  std::unique_lock lock(mutex_);
  if (wake_.wait_until(lock, start_ + kSilence, [this] { return finished_; })) return;
  do {
    const int64_t done = std::clamp<int64_t>(num_begun_ - 1, 0, num_steps_);
    const std::string filled(static_cast<size_t>(kCells * done / num_steps_), '#');
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    fmt::print(stderr, "\r[{:-<{}}] {:3} %  {:.0f} s  {}\033[K", filled, kCells, 100 * done / num_steps_, seconds,
               what_);
    std::fflush(stderr);
  } while (!wake_.wait_for(lock, kRedraw, [this] { return finished_; }));
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

}  // namespace tilesieve::cli
