// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "tilesieve/video_route.h"

namespace tilesieve {

bool DensePolicy::is_dense(int64_t step, int64_t layer) const {
  return step < first_steps || layer < first_layers || std::find(layers.begin(), layers.end(), layer) != layers.end();
}

}  // namespace tilesieve
