// SPDX-License-Identifier: Apache-2.0
// Choosing between what the instruction sets' translation units provide.
#pragma once

#include "tilesieve/execution.h"

// What every vector instruction set provides (portable, avx2, avx512): TILESIEVE_VECTOR_TABLE declares `extern const
// type name;` in each one's namespace that this build has, TILESIEVE_VECTOR_PICK gives the one for `isa`.
#if defined(TILESIEVE_HAS_avx512)
#define TILESIEVE_IF_X86(...) __VA_ARGS__
#else
#define TILESIEVE_IF_X86(...)
#endif
#define TILESIEVE_DECLARE_IN(isa, type, name) \
  namespace isa {                             \
  extern const type name;                     \
  }
#define TILESIEVE_VECTOR_TABLE(type, name)   \
  TILESIEVE_DECLARE_IN(portable, type, name) \
  TILESIEVE_IF_X86(TILESIEVE_DECLARE_IN(avx2, type, name) TILESIEVE_DECLARE_IN(avx512, type, name))
#define TILESIEVE_VECTOR_PICK(isa, name) \
  pick_vector_isa(isa, &portable::name TILESIEVE_IF_X86(, &avx2::name, &avx512::name))

// The same of what the sets with kernels in int8 provide (portable, avx2, avx512_vnni, amx).
#define TILESIEVE_INT8_TABLE(type, name)                                                                \
  TILESIEVE_DECLARE_IN(portable, type, name)                                                            \
  TILESIEVE_IF_X86(TILESIEVE_DECLARE_IN(avx2, type, name) TILESIEVE_DECLARE_IN(avx512_vnni, type, name) \
                       TILESIEVE_DECLARE_IN(amx, type, name))
#define TILESIEVE_INT8_PICK(isa, name) \
  pick_int8_isa(isa, &portable::name TILESIEVE_IF_X86(, &avx2::name, &avx512_vnni::name, &amx::name))

namespace tilesieve {

// Throws Error when this machine or this build lacks the set.
void check_available(Isa isa);

// The set whose vectors carry everything but the products of `isa`: avx512 under avx512_vnni, avx512_bf16 and amx, the
// best vector set of this machine for Isa::best. Throws Error as check_available does.
Isa vector_isa(Isa isa);

// The set itself; the best of this machine that has kernels in int8 for Isa::best. Throws Error when the set has none,
// or this machine lacks it.
Isa int8_isa(Isa isa);

template <class T>
const T& pick_int8_isa(Isa isa, const T* portable, const T* avx2 = nullptr, const T* avx512_vnni = nullptr,
                       const T* amx = nullptr) {
  switch (int8_isa(isa)) {
    case Isa::amx:
      return *amx;
    case Isa::avx512_vnni:
      return *avx512_vnni;
    case Isa::avx2:
      return *avx2;
    default:
      return *portable;
  }
}

template <class T>
const T& pick_vector_isa(Isa isa, const T* portable, const T* avx2 = nullptr, const T* avx512 = nullptr) {
  const T* table[] = {portable, avx2, avx512};
  return *table[static_cast<int>(vector_isa(isa))];
}

}  // namespace tilesieve
