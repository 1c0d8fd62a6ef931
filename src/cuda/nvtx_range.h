// SPDX-License-Identifier: Apache-2.0
// A named range of the host's time that profilers show, and with it the launches inside. Without a profiler it costs
// the test of a pointer.
#pragma once

#include <nvtx3/nvtx3.hpp>

namespace tilesieve::cuda {

struct NvtxDomain {
  static constexpr const char* name = "tilesieve";
};

using NvtxRange = nvtx3::scoped_range_in<NvtxDomain>;  // NvtxRange range("attend");

}  // namespace tilesieve::cuda
