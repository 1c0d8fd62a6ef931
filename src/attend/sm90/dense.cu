// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one thread fetches, three warpgroups compute, each its 64 rows.
#include <algorithm>

#include "attend/sm90/dense_consumer.h"
#include "attend/sm90/dense_producer.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace tilesieve::sm90 {

namespace {

template <class Config>
__global__ void __launch_bounds__(kDenseThreads, 1)
    dense_kernel(const __grid_constant__ DenseMaps maps, const __grid_constant__ DenseArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  DenseShared<Config>& shared = *reinterpret_cast<DenseShared<Config>*>(raw);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  take_roles([&] { dense_produce(shared, maps, args); },
             [&](int consumer) { DenseConsumer<Config>(shared, args, consumer).run(); });
}

CUtensorMap map_of(const char* name, const DenseRows& rows, int64_t head_dim, int64_t tokens, int64_t heads,
                   int64_t sequences, int box_channels, int box_tokens) {
  cuda::TensorMapShape shape;
  shape.argument = name;
  shape.data = rows.data;
  shape.element_bytes = 2;
  shape.rank = 4;
  shape.sizes[0] = head_dim, shape.sizes[1] = tokens, shape.sizes[2] = heads, shape.sizes[3] = sequences;
  shape.stride_bytes[0] = rows.token_stride * 2;
  shape.stride_bytes[1] = rows.head_stride * 2;
  shape.stride_bytes[2] = rows.sequence_stride * 2;
  shape.box[0] = box_channels, shape.box[1] = box_tokens;
  return cuda::make_tensor_map(shape);
}

template <class Config>
void launch(const DenseTensors& tensors, DenseArgs args, int num_sms, void* stream) {
  const auto map = [&](const char* name, const DenseRows& rows, int64_t tokens, int64_t heads, int box_tokens) {
    return map_of(name, rows, args.head_dim, tokens, heads, args.num_sequences, Config::kPanelElements, box_tokens);
  };
  const DenseMaps maps = {map("q", tensors.q, args.q_len, args.num_q_heads, kTileRows),
                          map("k", tensors.k, args.kv_len, args.num_kv_heads, kDenseBlock),
                          map("v", tensors.v, args.kv_len, args.num_kv_heads, kDenseBlock)};
  count_tiles(args);
  if (args.num_tiles == 0) return;
  constexpr auto kernel = dense_kernel<Config>;
  static_assert(sizeof(DenseShared<Config>) <= 227 * 1024);
  cuda::allow_shared_bytes("dense attention", kernel, sizeof(DenseShared<Config>));
  cuda::launch("dense attention", kernel, dim3(static_cast<unsigned>(std::min(num_sms, args.num_tiles))), kDenseThreads,
               sizeof(DenseShared<Config>), stream, maps, args);
}

}  // namespace

void launch_dense(const DenseTensors& tensors, const DenseArgs& args, int dim, int num_sms, void* stream) {
  if (dim == 64) return launch<DenseConfig<64, 4>>(tensors, args, num_sms, stream);
  launch<DenseConfig<128, 2>>(tensors, args, num_sms, stream);
}

}  // namespace tilesieve::sm90
