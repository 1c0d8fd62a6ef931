// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "attend/sm90/tensors.h"

namespace tilesieve {

struct AttendMaps::Maps {
  CUtensorMap q, k, v;
};

}  // namespace tilesieve
