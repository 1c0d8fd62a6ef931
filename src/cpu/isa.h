// SPDX-License-Identifier: Apache-2.0
// Choosing between what the instruction sets' translation units provide.
#pragma once

#include "tilesieve/execution.h"

// TILESIEVE_ISA_TABLE declares `extern const type name;` in the namespace of every instruction set that this build has;
// TILESIEVE_ISA_PICK gives the one for `isa` (Isa::best resolved, checked for availability).
#if defined(TILESIEVE_HAS_avx512)
#define TILESIEVE_IF_X86(...) __VA_ARGS__
#else
#define TILESIEVE_IF_X86(...)
#endif
#define TILESIEVE_ISA_TABLE(type, name) \
  namespace portable {                  \
  extern const type name;               \
  }                                     \
  TILESIEVE_IF_X86(namespace avx2 { extern const type name; } namespace avx512 { extern const type name; })
#define TILESIEVE_ISA_PICK(isa, name) pick_isa(isa, &portable::name TILESIEVE_IF_X86(, &avx2::name, &avx512::name))

namespace tilesieve {

// Throws Error when this machine or this build lacks the set.
Isa resolve_isa(Isa isa);

template <class T>
const T& pick_isa(Isa isa, const T* portable, const T* avx2 = nullptr, const T* avx512 = nullptr) {
  const T* table[] = {portable, avx2, avx512};
  return *table[static_cast<int>(resolve_isa(isa))];
}

}  // namespace tilesieve
