// SPDX-License-Identifier: Apache-2.0
#include "base/aligned.h"

#include <algorithm>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tilesieve {

namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

void* allocate_aligned(int64_t bytes) {
  const int64_t alignment = bytes >= 2 * kHugePage ? kHugePage : kCacheLine;
  if (bytes < 0 || bytes > INT64_MAX - alignment) throw std::bad_alloc();
  const int64_t size = std::max(alignment, (bytes + alignment - 1) / alignment * alignment);
  void* memory = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(size));
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
  return memory;
}

}  // namespace tilesieve
