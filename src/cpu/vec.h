// SPDX-License-Identifier: Apache-2.0
// The vector type of the instruction set that this translation unit is compiled for: tilesieve::TILESIEVE_ISA::Vec.
// Everything that includes this lives in that namespace, so that no two instruction sets share a symbol, and uses no
// inline function of the standard library: the linker would keep one copy, possibly one that other machines cannot run.
#pragma once

#define TILESIEVE_INLINE inline __attribute__((always_inline))

#if defined(TILESIEVE_ISA_IS_portable)
#include "cpu/vec_portable.h"
#elif defined(TILESIEVE_ISA_IS_avx2)
#include "cpu/vec_avx2.h"
#else  // avx512, and avx512_vnni, avx512_bf16 and amx, which have all of it
#include "cpu/vec_avx512.h"
#endif
