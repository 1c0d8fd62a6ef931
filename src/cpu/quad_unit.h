// SPDX-License-Identifier: Apache-2.0
// Four int8 as the unit of a tile product: four multiply-adds a lane and step, in int32 and exact.
//
//   avx512_vnni  vpdpbusd multiplies bytes without a sign by bytes with one. Weights have none; a query's codes get 128
//                added, which the sums of a key begin without (KeyRows<Quad>::start)
//   avx2         vpmaddubsw adds two such products in int16, which holds 2 * 127 * 127 alone: a query's codes lose
//   their
//                signs to the keys', and weights have 7 bits
//   portable     int16 lanes, likewise
#pragma once

#include "cpu/int8_layout.h"
#include "cpu/row_tile.h"

namespace tilesieve::TILESIEVE_ISA {

struct Quad {  // of four channels of a key, or of a channel's value in four keys
  uint32_t codes;
};
struct QueryQuad {  // of four channels of a query
  uint32_t codes;
};
struct WeightQuad {  // of four keys, each from 0 to kLargestWeight
  uint32_t weights;
};

#if defined(TILESIEVE_ISA_IS_avx512_vnni)

inline constexpr int32_t kQueryOffset = 128;
inline constexpr int32_t kLargestWeight = 255;

// A vector of int32 in name too: of __m512i, whose elements are int64, g++ 12 keeps copies in the product's loop, which
// take a third of its time.
typedef int32_t QuadSums __attribute__((vector_size(64)));

struct QuadVector {
  QuadSums bytes;
};

TILESIEVE_INLINE QuadVector load_units(const QueryQuad* p) { return {(QuadSums)_mm512_loadu_si512(p)}; }
TILESIEVE_INLINE QuadVector load_units(const WeightQuad* p) { return {(QuadSums)_mm512_loadu_si512(p)}; }
TILESIEVE_INLINE QuadVector broadcast_unit(const Quad* p) {
  return {(QuadSums)_mm512_set1_epi32(static_cast<int>(p->codes))};
}
TILESIEVE_INLINE QuadSums multiply_add(QuadVector codes, QuadVector lanes, QuadSums acc) {
  return (QuadSums)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)lanes.bytes, (__m512i)codes.bytes);
}

#elif defined(TILESIEVE_ISA_IS_avx2)

inline constexpr int32_t kQueryOffset = 0;
inline constexpr int32_t kLargestWeight = 127;

using QuadSums = Vec::Ints;

struct QuadVector {
  __m256i bytes;
};
struct QueryVector {
  __m256i bytes;
};
struct WeightVector {
  __m256i bytes;
};

TILESIEVE_INLINE __m256i load_bytes(const void* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
TILESIEVE_INLINE QueryVector load_units(const QueryQuad* p) { return {load_bytes(p)}; }
TILESIEVE_INLINE WeightVector load_units(const WeightQuad* p) { return {load_bytes(p)}; }
TILESIEVE_INLINE QuadVector broadcast_unit(const Quad* p) { return {_mm256_set1_epi32(static_cast<int>(p->codes))}; }
TILESIEVE_INLINE Vec::Ints add_pairs(__m256i sums, Vec::Ints acc) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}
TILESIEVE_INLINE Vec::Ints multiply_add(QuadVector codes, QueryVector lanes, Vec::Ints acc) {
  return add_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(lanes.bytes), _mm256_sign_epi8(codes.bytes, lanes.bytes)), acc);
}
TILESIEVE_INLINE Vec::Ints multiply_add(QuadVector codes, WeightVector lanes, Vec::Ints acc) {
  return add_pairs(_mm256_maddubs_epi16(lanes.bytes, codes.bytes), acc);
}

#else

inline constexpr int32_t kQueryOffset = 0;
inline constexpr int32_t kLargestWeight = 127;

using QuadSums = Vec::Ints;

// The bytes of a quad in two pairs of int16 a lane.
struct QuadVector {
  typedef int16_t Words __attribute__((vector_size(16)));
  Words even, odd;

  TILESIEVE_INLINE static QuadVector of(Vec::Ints quads) {
    const Words words = (Words)quads;
    return {(words << 8) >> 8, words >> 8};
  }
};

TILESIEVE_INLINE QuadVector load_units(const void* p) {
  return QuadVector::of(Vec::load_ints(reinterpret_cast<const int32_t*>(p)));
}
TILESIEVE_INLINE QuadVector broadcast_unit(const Quad* p) {
  return QuadVector::of(Vec::set1_int(static_cast<int32_t>(p->codes)));
}
TILESIEVE_INLINE Vec::Ints multiply_add(QuadVector codes, QuadVector lanes, Vec::Ints acc) {
  const QuadVector::Words sums = codes.even * lanes.even + codes.odd * lanes.odd;
#if defined(__aarch64__)
  return (Vec::Ints)vpadalq_s16((int32x4_t)acc, (int16x8_t)sums);
#else
  const Vec::Ints pairs = (Vec::Ints)sums;
  return acc + (pairs >> 16) + ((pairs << 16) >> 16);
#endif
}

#endif

// The keys of a block; q_scale belongs to the rows in the lanes.
template <>
struct KeyRows<Quad> {
  const Quad* data;
  int64_t stride;
  int64_t count;
  const int32_t* starts;    // [keys]
  const float* key_scales;  // [ceil(keys / kInt8KeyGroup)]
  const float* q_scales;    // [N * kLanes]
  float scale_log2;

  TILESIEVE_INLINE QuadSums start(int64_t j) const { return (QuadSums)Vec::set1_int(starts[j]); }

  // In units of log2: the scales of rows differ, so that a tile has no factor for later.
  template <int M, int N>
  TILESIEVE_INLINE void to_scores(int64_t first, const QuadSums (&sums)[M][N], Vec::Reg (&scores)[M][N]) const {
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
