// SPDX-License-Identifier: Apache-2.0
// Writing past the caches, where the machine can: a line that will be written whole need not be read first.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tilesieve {

inline constexpr int64_t kStreamAlignment = 16;  // of the target, in bytes
inline constexpr int64_t kStreamLine = 64;       // rows are whole lines

#if defined(__SSE2__)

inline constexpr bool kCanStream = true;

// The four stores of a line stand together: so they leave as one.
inline void stream_row(uint8_t* target, const uint8_t* source, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kStreamLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i);
    auto* to = reinterpret_cast<__m128i*>(target + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2),
                  d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

// What a thread has streamed is seen by the others after this alone.
inline void end_stream() { _mm_sfence(); }

#else

inline constexpr bool kCanStream = false;
inline void stream_row(uint8_t* target, const uint8_t* source, int64_t bytes) {
  std::memcpy(target, source, static_cast<size_t>(bytes));
}
inline void end_stream() {}

#endif

}  // namespace tilesieve
