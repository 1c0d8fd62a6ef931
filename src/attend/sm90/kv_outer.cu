// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one warp finds the work, one fetches, two make values ready, three or
// four warpgroups compute.
#include <algorithm>
#include <new>

#include "attend/sm90/consumer.h"
#include "attend/sm90/kv_outer.h"
#include "attend/sm90/producer.h"
#include "attend/sm90/values.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "tilesieve/error.h"

namespace tilesieve {

namespace sm90 {
namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ AttendArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  Shared<Config>& shared = *reinterpret_cast<Shared<Config>*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kQStages; ++i) {
      cuda::barrier_init(&shared.q_full[i], args.gather_by_boxes ? 1 : 33);
      cuda::barrier_init(&shared.q_empty[i], 4);
    }
    for (int i = 0; i < kPieces; ++i) {
      cuda::barrier_init(&shared.piece_full[i], 1);
      cuda::barrier_init(&shared.piece_empty[i], 1);
    }
    for (int i = 0; i < kKvStages; ++i) {
      cuda::barrier_init(&shared.k_full[i], 1);
      cuda::barrier_init(&shared.v_landed[i], 1);
      cuda::barrier_init(&shared.v_full[i], kValueWarps);
      cuda::barrier_init(&shared.kv_empty[i], 4 * Config::kNumConsumers);
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kOtherRegisters));
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      produce(shared, q_map, k_map, v_map, args);
    } else if (warp <= kValueWarps) {
      prepare_values<Config>(shared, warp - 1);
    } else {
      plan_pieces(shared, args);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegisters));
    Consumer<Config>(shared, args, warpgroup - 1).run();
  }
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, AttendArgs);

struct Row {
  PrefillKernel kernel;
  Kernel function;
  size_t shared_bytes;
  int threads;
  int box_elements;  // a panel
};

template <class Config>
constexpr Row row_of(const char* name) {
  static_assert(sizeof(Shared<Config>) <= 227 * 1024);
  return {{name, Config::kE4m3 ? DType::f8_e4m3 : DType::bf16, Config::kHeadDim, Config::kBlock},
          attend_kernel<Config>,
          sizeof(Shared<Config>),
          Config::kThreads,
          Config::kPanelElements};
}

// As many stages of queries as fit beside two blocks.
const Row kRows[] = {
    row_of<Config<__nv_fp8_e4m3, 128, 128, 12>>("sm90.kv_outer.e4m3.d128.b128"),
    row_of<Config<__nv_fp8_e4m3, 128, 64, 12>>("sm90.kv_outer.e4m3.d128.b64"),
    row_of<Config<__nv_fp8_e4m3, 64, 128, 12>>("sm90.kv_outer.e4m3.d64.b128"),
    row_of<Config<__nv_fp8_e4m3, 64, 64, 12>>("sm90.kv_outer.e4m3.d64.b64"),
    row_of<Config<__nv_bfloat16, 128, 128, 6>>("sm90.kv_outer.bf16.d128.b128"),
    row_of<Config<__nv_bfloat16, 128, 64, 9>>("sm90.kv_outer.bf16.d128.b64"),
    row_of<Config<__nv_bfloat16, 64, 128, 12>>("sm90.kv_outer.bf16.d64.b128"),
    row_of<Config<__nv_bfloat16, 64, 64, 12>>("sm90.kv_outer.bf16.d64.b64"),
};

CUtensorMap kv_map(const char* argument, void* data, const PrefillSizes& sizes, const KvOuterInputs& inputs,
                   const Row& row, int64_t token_stride, int64_t head_stride, int64_t page_stride) {
  const int64_t bytes = size_in_bytes(inputs.dtype);
  cuda::TensorMapShape shape;
  shape.argument = argument;
  shape.data = data;
  shape.element_bytes = static_cast<int>(bytes);
  shape.rank = 4;
  const int64_t extents[] = {sizes.head_dim, sizes.num_kv_heads, inputs.kv_tokens, inputs.num_pages};
  const int64_t strides[] = {head_stride * bytes, token_stride * bytes, page_stride * bytes};
  std::copy(extents, extents + 4, shape.sizes);
  std::copy(strides, strides + 3, shape.stride_bytes);
  shape.box[0] = row.box_elements;
  shape.box[2] = sizes.kv_block_size;
  return cuda::make_tensor_map(shape);
}

CUtensorMap q_map(const PrefillSizes& sizes, const KvOuterInputs& inputs, const Row& row) {
  const int64_t bytes = size_in_bytes(inputs.dtype);
  cuda::TensorMapShape shape;
  shape.argument = "q";
  shape.data = inputs.q;
  shape.element_bytes = static_cast<int>(bytes);
  shape.rank = 3;
  const int64_t extents[] = {sizes.head_dim, sizes.num_q_heads, inputs.q_tokens};
  const int64_t strides[] = {inputs.q_head_stride * bytes, inputs.q_token_stride * bytes};
  std::copy(extents, extents + 3, shape.sizes);
  std::copy(strides, strides + 2, shape.stride_bytes);
  shape.box[0] = row.box_elements;
  shape.box[1] = sizes.group_size;
  return cuda::make_tensor_map(shape);
}

const Row& find_row(const PrefillSizes& sizes, DType dtype) {
  for (const Row& row : kRows) {
    if (row.kernel.dtype == dtype && row.kernel.head_dim == sizes.head_dim &&
        row.kernel.kv_block_size == sizes.kv_block_size) {
      return row;
    }
  }
  throw Error("attend: no sm90.kv_outer kernel for these sizes");  // the call has checked them by name
}

}  // namespace
}  // namespace sm90

const std::vector<PrefillKernel>& prefill_kernels() {
  static const std::vector<PrefillKernel> kernels = [] {
    std::vector<PrefillKernel> list;
    for (const sm90::Row& row : sm90::kRows) list.push_back(row.kernel);
    return list;
  }();
  return kernels;
}

struct KvOuterMaps::Maps {
  CUtensorMap q, k, v;
};

KvOuterMaps::KvOuterMaps(const PrefillSizes& sizes, const KvOuterInputs& inputs) {
  static_assert(sizeof(Maps) <= sizeof bytes_ && alignof(Maps) <= 128);
  const sm90::Row& row = sm90::find_row(sizes, inputs.dtype);
  new (bytes_) Maps{sm90::q_map(sizes, inputs, row),
                    sm90::kv_map("k", inputs.k, sizes, inputs, row, inputs.k_token_stride, inputs.k_head_stride,
                                 inputs.k_page_stride),
                    sm90::kv_map("v", inputs.v, sizes, inputs, row, inputs.v_token_stride, inputs.v_head_stride,
                                 inputs.v_page_stride)};
}

const KvOuterMaps::Maps& KvOuterMaps::get() const { return *std::launder(reinterpret_cast<const Maps*>(bytes_)); }

void launch_attend(const PrefillSizes& sizes, const PrefillMap& map, const KvOuterInputs& inputs,
                   const KvOuterMaps& maps, const PrefillPartials& partials, int32_t head_begin, int32_t num_heads,
                   Stream stream) {
  const sm90::Row& row = sm90::find_row(sizes, inputs.dtype);
  static const bool allowed = [] {
    for (const sm90::Row& each : sm90::kRows) {
      cuda::allow_shared_bytes(each.kernel.name, each.function, each.shared_bytes);
    }
    return true;
  }();
  static_cast<void>(allowed);
  const int64_t bytes = size_in_bytes(inputs.dtype);
  sm90::AttendArgs args;
  args.sizes = sizes;
  args.map = map;
  args.partials = partials;
  args.q_scale = inputs.q_scale;
  args.k_scale = inputs.k_scale;
  args.q_row_scale = inputs.q_row_scale;
  args.q = inputs.q;
  args.q_token_bytes = inputs.q_token_stride * bytes;
  args.q_head_bytes = inputs.q_head_stride * bytes;
  args.q_origin = static_cast<int32_t>(inputs.q_origin);
  args.head_begin = head_begin;
  args.num_heads = num_heads;
  args.group_shift = 0;
  while (1 << args.group_shift < sizes.group_size) ++args.group_shift;
  args.gather_by_boxes = sizes.group_size >= 8;
  args.logit_scale = static_cast<float>(inputs.softmax_scale * 1.4426950408889634);
  cuda::launch(row.kernel.name, row.function, dim3(static_cast<unsigned>(sizes.num_sms)), row.threads, row.shared_bytes,
               stream, maps.get().q, maps.get().k, maps.get().v, args);
}

}  // namespace tilesieve
