// SPDX-License-Identifier: Apache-2.0
// The caller's workspace of a Hopper call: how places in it are handed out, found again, and checked.
#pragma once

#include <cstdint>

#include "base/fail.h"
#include "base/rounding.h"

namespace tilesieve::sm90 {

inline constexpr int64_t kWorkspaceAlignment = 256;

// Where `bytes` more begin; `taken` is what the workspace has so far.
inline int64_t take_workspace(int64_t& taken, int64_t bytes) {
  const int64_t at = taken;
  taken += round_up(bytes, kWorkspaceAlignment);
  return at;
}

template <class T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(workspace) + offset);
}

// Throws Error when it is absent, too small or not aligned.
inline void check_workspace(const void* workspace, int64_t bytes, int64_t needed) {
  if (bytes < needed || workspace == nullptr) {
    fail("workspace: got {} bytes, need {}", workspace == nullptr ? 0 : bytes, needed);
  }
  if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    fail("workspace: not aligned to {} bytes", kWorkspaceAlignment);
  }
}

}  // namespace tilesieve::sm90
