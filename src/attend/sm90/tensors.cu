// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <new>

#include "attend/sm90/tensor_maps.h"
#include "attend/sm90/tensors.h"
#include "cuda/tensor_map.h"

namespace tilesieve {

namespace {

// A box is a panel wide: a row of head_dim elements, or 128 bytes of it (TileConfig).
int32_t box_elements(const PrefillSizes& sizes, const AttendTensors& tensors) {
  return static_cast<int32_t>(std::min<int64_t>(sizes.head_dim, 128 / size_in_bytes(tensors.dtype)));
}

CUtensorMap kv_map(const char* argument, void* data, const PrefillSizes& sizes, const AttendTensors& tensors,
                   int64_t token_stride, int64_t head_stride, int64_t page_stride) {
  const int64_t bytes = size_in_bytes(tensors.dtype);
  cuda::TensorMapShape shape;
  shape.argument = argument;
  shape.data = data;
  shape.element_bytes = static_cast<int>(bytes);
  shape.rank = 4;
  const int64_t extents[] = {sizes.head_dim, sizes.num_kv_heads, tensors.kv_tokens, tensors.num_pages};
  const int64_t strides[] = {head_stride * bytes, token_stride * bytes, page_stride * bytes};
  std::copy(extents, extents + 4, shape.sizes);
  std::copy(strides, strides + 3, shape.stride_bytes);
  shape.box[0] = box_elements(sizes, tensors);
  shape.box[2] = sizes.kv_block_size;
  return cuda::make_tensor_map(shape);
}

CUtensorMap q_map(const PrefillSizes& sizes, const AttendTensors& tensors) {
  const int64_t bytes = size_in_bytes(tensors.dtype);
  cuda::TensorMapShape shape;
  shape.argument = "q";
  shape.data = tensors.q;
  shape.element_bytes = static_cast<int>(bytes);
  shape.rank = 3;
  const int64_t extents[] = {sizes.head_dim, sizes.num_q_heads, tensors.q_tokens};
  const int64_t strides[] = {tensors.q_head_stride * bytes, tensors.q_token_stride * bytes};
  std::copy(extents, extents + 3, shape.sizes);
  std::copy(strides, strides + 2, shape.stride_bytes);
  shape.box[0] = box_elements(sizes, tensors);
  shape.box[1] = sizes.group_size;
  return cuda::make_tensor_map(shape);
}

}  // namespace

AttendMaps::AttendMaps(const PrefillSizes& sizes, const AttendTensors& tensors) {
  static_assert(sizeof(Maps) <= sizeof bytes_ && alignof(Maps) <= 128);
  new (bytes_) Maps{
      q_map(sizes, tensors),
      kv_map("k", tensors.k, sizes, tensors, tensors.k_token_stride, tensors.k_head_stride, tensors.k_page_stride),
      kv_map("v", tensors.v, sizes, tensors, tensors.v_token_stride, tensors.v_head_stride, tensors.v_page_stride)};
}

const AttendMaps::Maps& AttendMaps::get() const { return *std::launder(reinterpret_cast<const Maps*>(bytes_)); }

AttendQueries queries_of(const PrefillSizes& sizes, const AttendTensors& tensors) {
  const int64_t bytes = size_in_bytes(tensors.dtype);
  AttendQueries queries;
  queries.data = static_cast<const uint8_t*>(tensors.q);
  queries.token_bytes = tensors.q_token_stride * bytes;
  queries.head_bytes = tensors.q_head_stride * bytes;
  queries.origin = static_cast<int32_t>(tensors.q_origin);
  while (1 << queries.group_shift < sizes.group_size) ++queries.group_shift;
  queries.row_scale = tensors.q_row_scale;
  queries.q_scale = tensors.q_scale;
  queries.k_scale = tensors.k_scale;
  queries.logit_scale = static_cast<float>(tensors.softmax_scale * 1.4426950408889634);
  return queries;
}

}  // namespace tilesieve
