// SPDX-License-Identifier: Apache-2.0
// Aligned memory for tensors, workspaces and scratch.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace tilesieve {

// 64-byte aligned, not initialised; in huge pages where it is large and the system has them: a block of keys of several
// heads spans more small pages than the TLB holds. Throws std::bad_alloc.
void* allocate_aligned(int64_t bytes);

struct AlignedDelete {
  void operator()(void* pointer) const { std::free(pointer); }
};
template <class T>
using AlignedArray = std::unique_ptr<T[], AlignedDelete>;
template <class T>
AlignedArray<T> make_aligned(int64_t count) {
  return AlignedArray<T>(static_cast<T*>(allocate_aligned(count * static_cast<int64_t>(sizeof(T)))));
}

}  // namespace tilesieve
