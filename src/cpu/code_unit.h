// SPDX-License-Identifier: Apache-2.0
// Codes of 8 bits as the unit of a tile product, several multiply-adds a lane and step, in int32 and exact.
//
//   avx512_vnni     four int8. vpdpbusd multiplies bytes without a sign by bytes with one: weights have none, and a
//                   query's codes get 128 added, which the sums of a key begin without (KeyRows<CodeUnit>::start)
//   avx2, portable  two int16: vpmaddwd. Bytes (vpmaddubsw, with the queries' signs moved to the keys) were no
//                   faster, 105 against 108 GFLOP/s, and hold 7 bits of a weight where these hold 14
#pragma once

#include "cpu/int8_layout.h"
#include "cpu/row_tile.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tilesieve::TILESIEVE_ISA {

#if defined(TILESIEVE_ISA_IS_avx512_vnni)
using Code = int8_t;
inline constexpr int32_t kQueryOffset = 128;
inline constexpr int32_t kLargestWeight = 255;
#else
using Code = int16_t;
inline constexpr int32_t kQueryOffset = 0;
inline constexpr int32_t kLargestWeight = 16383;  // the sums over 1,024 keys stay below 2^31
#endif

inline constexpr int kCodesPerUnit = 4 / sizeof(Code);

struct CodeUnit {  // of neighbouring channels of a key, or of a channel's value in neighbouring keys
  uint32_t codes;
};
struct QueryUnit {  // of neighbouring channels of a query
  uint32_t codes;
};
struct Weights {  // of neighbouring keys, each from 0 to kLargestWeight
  uint32_t weights;
};

// int8 codes [count] as units.
inline void store_codes(const uint8_t* codes, int64_t count, CodeUnit* target) {
  uint8_t* place = reinterpret_cast<uint8_t*>(target);
  for (int64_t c = 0; c < count; ++c) {
    const Code code = static_cast<int8_t>(codes[c]);
    __builtin_memcpy(place + c * static_cast<int64_t>(sizeof(Code)), &code, sizeof(Code));
  }
}

// Whole numbers as one unit a lane: weights, which have no sign, and codes.
TILESIEVE_INLINE Vec::Ints join_weights(const Vec::Ints (&x)[4]) { return Vec::join_bytes(x[0], x[1], x[2], x[3]); }
TILESIEVE_INLINE Vec::Ints join_weights(const Vec::Ints (&x)[2]) { return Vec::join_words(x[0], x[1]); }
TILESIEVE_INLINE Vec::Ints join_codes(const Vec::Ints (&x)[4]) {
  return Vec::join_bytes(Vec::low_byte(x[0]), Vec::low_byte(x[1]), Vec::low_byte(x[2]), x[3]);
}
TILESIEVE_INLINE Vec::Ints join_codes(const Vec::Ints (&x)[2]) { return Vec::join_words(x[0], x[1]); }

// Vectors of int32 in name too: of __m512i and __m256i, whose elements are int64, g++ 12 keeps copies of each
// accumulator in the product's loop, which take a third of its time.
typedef int32_t CodeSums __attribute__((vector_size(sizeof(Vec::Ints))));

struct CodeVector {
  CodeSums codes;
};

TILESIEVE_INLINE CodeVector load_codes(const uint32_t* p) {
  CodeVector vector;
  __builtin_memcpy(&vector.codes, p, sizeof vector.codes);
  return vector;
}
TILESIEVE_INLINE CodeVector load_units(const QueryUnit* p) { return load_codes(&p->codes); }
TILESIEVE_INLINE CodeVector load_units(const Weights* p) { return load_codes(&p->weights); }
TILESIEVE_INLINE CodeVector broadcast_unit(const CodeUnit* p) {
  return {(CodeSums)Vec::set1_int(static_cast<int32_t>(p->codes))};
}
TILESIEVE_INLINE CodeSums multiply_add(CodeVector codes, CodeVector lanes, CodeSums acc) {
#if defined(TILESIEVE_ISA_IS_avx512_vnni)
  return (CodeSums)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)lanes.codes, (__m512i)codes.codes);
#elif defined(TILESIEVE_ISA_IS_avx2)
  return acc + (CodeSums)_mm256_madd_epi16((__m256i)codes.codes, (__m256i)lanes.codes);
#elif defined(__SSE2__)
  return acc + (CodeSums)_mm_madd_epi16((__m128i)codes.codes, (__m128i)lanes.codes);
#else
  const CodeSums low = ((codes.codes << 16) >> 16) * ((lanes.codes << 16) >> 16);
  return acc + low + (codes.codes >> 16) * (lanes.codes >> 16);
#endif
}

// The keys of a block; q_scale belongs to the rows in the lanes.
template <>
struct KeyRows<CodeUnit> {
  const CodeUnit* data;
  int64_t stride;
  int64_t count;
  const int32_t* starts;    // [keys]
  const float* key_scales;  // [ceil(keys / kInt8KeyGroup)]
  const float* q_scales;    // [N * kLanes]
  float scale_log2;

  TILESIEVE_INLINE CodeSums start(int64_t j) const { return (CodeSums)Vec::set1_int(starts[j]); }

  // In units of log2: the scales of rows differ, so that a tile has no factor for later.
  template <int M, int N>
  TILESIEVE_INLINE void to_scores(int64_t first, const CodeSums (&sums)[M][N], Vec::Reg (&scores)[M][N]) const {
    const Vec::Reg scale = Vec::set1(key_scales[first / kInt8KeyGroup] * scale_log2);  // the M keys are of one group
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec::Reg factor = Vec::mul(Vec::load(q_scales + n * Vec::kLanes), scale);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) scores[i][n] = Vec::mul(Vec::to_floats((Vec::Ints)sums[i][n]), factor);
    }
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
