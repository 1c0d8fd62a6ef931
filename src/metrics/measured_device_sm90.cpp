// SPDX-License-Identifier: Apache-2.0
#include "base/fail.h"
#include "tilesieve/roofline.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/bandwidth.h"
#endif

namespace tilesieve {

RooflineDevice measure_roofline_device() {
#ifdef TILESIEVE_HAS_CUDA
  const cuda::ReadBandwidth measured = cuda::measure_read_bandwidth();
  RooflineDevice device;
  device.name = measured.device;
  device.hbm_bandwidth = measured.memory;
  device.l2_bandwidth = measured.l2;
  device.usable_l2_bytes = 0.8 * static_cast<double>(measured.l2_bytes);
  return device;
#else
  fail("measure: this build has no CUDA (TILESIEVE_CUDA=OFF)");
#endif
}

}  // namespace tilesieve
