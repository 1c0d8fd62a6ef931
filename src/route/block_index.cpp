// SPDX-License-Identifier: Apache-2.0
#include "base/fail.h"
#include "base/spelling.h"
#include "tilesieve/route.h"

namespace tilesieve {

BlockIndex BlockIndex::from(const TensorView& view) {
  if (view.dtype != DType::i32 || view.num_dims != 3 || view.device.kind != DeviceKind::cpu) {
    fail("block_index: got {}, expected i32[num_kv_heads, num_q_rows, capacity] on the CPU", view.describe());
  }
  BlockIndex index;
  index.kv_block = view.as<const int32_t>();
  index.num_heads = view.sizes[0];
  index.num_q_rows = view.sizes[1];
  index.capacity = view.sizes[2];
  index.head_stride = view.strides[0];
  index.row_stride = view.strides[1];
  index.slot_stride = view.strides[2];
  return index;
}

std::string_view name_of(Router router) {
  switch (router) {
    case Router::index:
      return "index";
    case Router::qk_max:
      return "qk_max";
    case Router::mean_pool:
      return "mean_pool";
    case Router::oracle:
      return "oracle";
    case Router::random:
      return "random";
  }
  return "unknown";
}

Router parse_router(std::string_view name) {
  for (Router router : {Router::index, Router::qk_max, Router::mean_pool, Router::oracle, Router::random}) {
    if (is_spelling_of(name, name_of(router))) return router;
  }
  fail("router: got '{}', expected index, qk_max, mean_pool, oracle or random", name);
}

}  // namespace tilesieve
