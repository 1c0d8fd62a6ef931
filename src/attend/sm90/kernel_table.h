// SPDX-License-Identifier: Apache-2.0
// The kernels of a loop, by what they are compiled for.
#pragma once

#include <stdexcept>
#include <vector>

#include "attend/sm90/tensors.h"
#include "cuda/launch.h"
#include "tilesieve/error.h"

namespace tilesieve::sm90 {

template <class Kernel>
struct KernelRow {
  PrefillKernel kernel;
  Kernel function;
  size_t shared_bytes;
  int threads;
};

template <class Config, class Shared, class Kernel>
constexpr KernelRow<Kernel> row_of(const char* name, Kernel function) {
  static_assert(sizeof(Shared) <= 227 * 1024);
  return {{name, Config::kE4m3 ? DType::f8_e4m3 : DType::bf16, Config::kHeadDim, Config::kBlock},
          function,
          sizeof(Shared),
          Config::kThreads};
}

template <class Kernel>
class KernelTable {
 public:
  KernelTable(std::initializer_list<KernelRow<Kernel>> rows) : rows_(rows) {}

  std::vector<PrefillKernel> kernels() const {
    std::vector<PrefillKernel> list;
    for (const KernelRow<Kernel>& row : rows_) list.push_back(row.kernel);
    return list;
  }

  // Ready to be launched.
  const KernelRow<Kernel>& find(const PrefillSizes& sizes, DType dtype) const {
    for (const KernelRow<Kernel>& row : rows_) {
      if (row.kernel.dtype != dtype || row.kernel.head_dim != sizes.head_dim ||
          row.kernel.kv_block_size != sizes.kv_block_size) {
        continue;
      }
      cuda::allow_shared_bytes(row.kernel.name, row.function, row.shared_bytes);
      return row;
    }
    throw Error("attend: no sm90 kernel for these sizes");  // the call has checked them by name
  }

 private:
  std::vector<KernelRow<Kernel>> rows_;
};

}  // namespace tilesieve::sm90
