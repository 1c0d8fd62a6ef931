// SPDX-License-Identifier: Apache-2.0
// What a result must say of the GPU that it was measured on.
#pragma once

#include <string>

namespace tilesieve::bench {

struct Gpu {
  std::string name;
  std::string driver = "unknown";  // as nvidia-smi says it, "580.159.03"
  std::string cuda;                // of the runtime, "13.0"
  std::string date;                // today, "2026-11-30"
  int num_sms = 0;
};

Gpu current_gpu();

// At this moment; 0 where the driver does not say.
int memory_mhz();

}  // namespace tilesieve::bench
