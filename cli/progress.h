// SPDX-License-Identifier: Apache-2.0
// A progress bar on standard error for work that takes over two seconds, where standard error is a terminal.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace tilesieve::cli {

class Progress {
 public:
  // Shows nothing at all unless `wanted`, which commands deny for JSON.
  Progress(int64_t num_steps, bool wanted);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // The next of the steps begins, and the one before it is done.
  void begin(const std::string& what);

  // Clears the bar; to be called before anything else is printed.
  void finish();

 private:
  void redraw_until_finished();

  const int64_t num_steps_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable wake_;
  int64_t num_begun_ = 0;
  std::string what_;
  bool finished_ = false;
  std::thread thread_;  // steps are long calls into the library, so somebody else must redraw
};

}  // namespace tilesieve::cli
