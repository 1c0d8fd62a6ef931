// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

namespace tilesieve::bench {

namespace {

// Calls `visit` with what follows the colon of every line of /proc/cpuinfo that begins with `key`.
template <class Visit>
void for_cpuinfo(const std::string& key, Visit&& visit) {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos) visit(line.substr(colon + 2));
  }
}

}  // namespace

std::string cpu_name() {
  std::string name = "unknown CPU";
  for_cpuinfo("model name", [&](const std::string& value) { name = value; });
  return name;
}

double clock_mhz() {
  double sum = 0;
  int num_cores = 0;
  for_cpuinfo("cpu MHz", [&](const std::string& value) {
    sum += std::stod(value);
    ++num_cores;
  });
  return num_cores > 0 ? sum / num_cores : 0;
}

void evict_l2(int num_threads) {
  const int threads = num_threads > 0 ? num_threads : omp_get_max_threads();
  // 0 or less where the C library does not know: 2 MiB, as server cores have.
  const long l2 = std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0L);
  const size_t share = 2 * (l2 > 0 ? static_cast<size_t>(l2) : size_t{2} << 20);
  static std::vector<unsigned char> memory;
  memory.resize(share * static_cast<size_t>(threads));
#pragma omp parallel num_threads(threads)
  {
    unsigned char* mine = memory.data() + share * static_cast<size_t>(omp_get_thread_num());
    for (size_t i = 0; i < share; i += 64) ++mine[i];
  }
}

}  // namespace tilesieve::bench
