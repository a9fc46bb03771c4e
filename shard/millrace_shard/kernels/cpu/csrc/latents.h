// The values of latents: the first channels of keys, in the order in which products over positions take them.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace millrace {

constexpr int64_t kPage = 64;

// Writes the values [64, value_dim] of a page of keys [dim, 64].
inline void values_of_latents(float* to, const float* page, int64_t value_dim) {
  for (int64_t position = 0; position < kPage; position++)
    for (int64_t i = 0; i < value_dim; i++) to[position * value_dim + i] = page[i * kPage + position];
}

// Two channels of two positions are neighbours in both orders: channels first in keys, positions first in values.
struct FourValues {
  uint16_t values[4];
};

constexpr int64_t kPairsTogether = 8;  // of positions

#if defined(CPU_CAPABILITY_AVX512)
// Writes the values of 16 channels of 16 positions, whose rows of keys and of values are apart by these distances.
inline void turn_latents(BFloat16* to, int64_t to_stride, const BFloat16* from) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  __m512i rows[8], pairs[8];
  for (int row = 0; row < 8; row++)
    rows[row] = _mm512_shuffle_epi8(_mm512_loadu_si512(from + 2 * row * kPage), order);
  for (int row = 0; row < 8; row += 2) {
    pairs[row] = _mm512_unpacklo_epi64(rows[row], rows[row + 1]);
    pairs[row + 1] = _mm512_unpackhi_epi64(rows[row], rows[row + 1]);
  }
  for (int odd = 0; odd < 2; odd++) {
    const __m512i a = _mm512_shuffle_i64x2(pairs[odd], pairs[2 + odd], 0x44);
    const __m512i b = _mm512_shuffle_i64x2(pairs[odd], pairs[2 + odd], 0xee);
    const __m512i c = _mm512_shuffle_i64x2(pairs[4 + odd], pairs[6 + odd], 0x44);
    const __m512i d = _mm512_shuffle_i64x2(pairs[4 + odd], pairs[6 + odd], 0xee);
    _mm512_storeu_si512(to + odd * to_stride, _mm512_shuffle_i64x2(a, c, 0x88));
    _mm512_storeu_si512(to + (2 + odd) * to_stride, _mm512_shuffle_i64x2(a, c, 0xdd));
    _mm512_storeu_si512(to + (4 + odd) * to_stride, _mm512_shuffle_i64x2(b, d, 0x88));
    _mm512_storeu_si512(to + (6 + odd) * to_stride, _mm512_shuffle_i64x2(b, d, 0xdd));
  }
}
#endif

// Writes the values [32, value_dim, 2] of a page of keys [dim / 2, 64, 2].
inline void values_of_latents(BFloat16* to, const BFloat16* page, int64_t value_dim) {
  const int64_t stride = 2 * value_dim;
  for (int64_t first = 0; first < kPage / 2; first += kPairsTogether) {
    int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
    for (; i + 16 <= value_dim; i += 16) turn_latents(to + first * stride + 2 * i, stride, page + i * kPage + 4 * first);
#endif
    for (; i < value_dim; i += 2) {
      const BFloat16* from = page + i * kPage + 4 * first;
      for (int64_t pair = 0; pair < kPairsTogether; pair++) {
        FourValues four;
        std::memcpy(&four, from + 4 * pair, sizeof four);
        std::swap(four.values[1], four.values[2]);
        std::memcpy(to + (first + pair) * stride + 2 * i, &four, sizeof four);
      }
    }
  }
}

}  // namespace millrace
