// Products of tiles with vectors of 16 sums, for CPUs without a tile unit.
//
// A row's sums run over K in one order, whatever other rows are present.
#pragma once

#include "tiles.h"

#if defined(CPU_CAPABILITY_AVX512)
#include <algorithm>
#include <cstring>

namespace millrace::avx512 {

using namespace tiles;

// The largest number of rows whose sums all fit into registers.
constexpr int64_t kMostRows = 8;
// Up to this many rows, memory bandwidth is the limit, and the right operand is read in the order of memory. With more,
// products are the limit, and a value of the left operand is loaded once for all of its products.
constexpr int kFewRows = 4;

inline int64_t passes(int64_t rows) { return (rows + kMostRows - 1) / kMostRows; }

// sums += left x right of a pair of K; `left` is the same in all lanes.
inline __m512 add_products(__m512 sums, __m512i left, __m512i right) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sums, (__m512bh)left, (__m512bh)right);
#else
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const auto even = [](__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); };
  const auto odd = [&](__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, high)); };
  return _mm512_fmadd_ps(even(left), even(right), _mm512_fmadd_ps(odd(left), odd(right), sums));
#endif
}

inline __m512i load_left(const BFloat16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return _mm512_set1_epi32(bits);
}

// The number of tiles of 16 columns that products of `rows` rows take at once from a page of more than two tiles.
inline int64_t page_width(int64_t rows) { return rows <= kFewRows ? 4 : 2; }

// sums (+)= left [kCount, K] x right [K, 16 kWidth]. `meanwhile()` is called kPauses times per step and two tiles.
template <int kWidth, int kCount, typename RightOperand, typename Meanwhile>
void multiply_rows(const BFloat16* left, const RightOperand& right, const Sums& sums, bool add,
                   const Meanwhile& meanwhile) {
  constexpr int kPairs = 16, kPairsAtOnce = kPairs / kPauses;
  // Tiles are taken in the order of memory where memory bandwidth is the limit.
  constexpr bool kIsTileByTile = kCount <= kFewRows && std::is_same_v<RightOperand, PanelRight>;
  const auto place = [&](int row, int tile) {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(sums.data + tile * sums.second) + row * sums.stride);
  };
  __m512 totals[kWidth][kCount];
#pragma GCC unroll 4
  for (int tile = 0; tile < kWidth; tile++)
#pragma GCC unroll 8
    for (int row = 0; row < kCount; row++)
      totals[tile][row] = add ? _mm512_loadu_ps(place(row, tile)) : _mm512_setzero_ps();

  for (int64_t done = 0; done < right.total; done += right.steps) {
    const BFloat16* r = right.runs[done / right.steps];
    const int64_t steps = std::min(right.steps, right.total - done);
    for (int64_t step = 0; step < steps; step++, left += kTile, r += right.step) {
      const auto add_pair = [&](int pair, int first, int last) {
        __m512i values[kWidth];
#pragma GCC unroll 4
        for (int tile = first; tile < last; tile++)
          values[tile] =
              _mm512_loadu_si512(reinterpret_cast<const char*>(r + tile * right.second) + pair * right.stride);
#pragma GCC unroll 8
        for (int row = 0; row < kCount; row++) {
          const __m512i shared = load_left(left + row * kDepth + 2 * pair);
#pragma GCC unroll 4
          for (int tile = first; tile < last; tile++)
            totals[tile][row] = add_products(totals[tile][row], shared, values[tile]);
        }
      };
      if constexpr (kIsTileByTile) {
#pragma GCC unroll 4
        for (int tile = 0; tile < kWidth; tile++)
#pragma GCC unroll 16
          for (int pair = 0; pair < kPairs; pair++) {
            if (pair % (2 * kPairsAtOnce) == 0) meanwhile();
            add_pair(pair, tile, tile + 1);
          }
      } else {
#pragma GCC unroll 16
        for (int pair = 0; pair < kPairs; pair++) {
          if (pair % (2 * kPairsAtOnce / kWidth) == 0) meanwhile();
          add_pair(pair, 0, kWidth);
        }
      }
    }
  }

#pragma GCC unroll 4
  for (int tile = 0; tile < kWidth; tile++)
#pragma GCC unroll 8
    for (int row = 0; row < kCount; row++) _mm512_storeu_ps(place(row, tile), totals[tile][row]);
}

// `multiply` for 1 to 16 rows of one row of tiles, and two tiles of columns.
template <typename RightOperand, typename Meanwhile>
void multiply(const BFloat16* left, int64_t rows, const RightOperand& right, const Sums& sums, bool add,
              const Meanwhile& meanwhile) {
  const int64_t count = passes(rows);
  for (int64_t pass = 0; pass < count; pass++) {
    const int64_t first = rows * pass / count, last = rows * (pass + 1) / count;
    const BFloat16* from = left + first * kDepth;
    const Sums to{reinterpret_cast<float*>(reinterpret_cast<char*>(sums.data) + first * sums.stride), sums.second,
                  sums.stride};
    switch (last - first) {
      case 1: multiply_rows<2, 1>(from, right, to, add, meanwhile); break;
      case 2: multiply_rows<2, 2>(from, right, to, add, meanwhile); break;
      case 3: multiply_rows<2, 3>(from, right, to, add, meanwhile); break;
      case 4: multiply_rows<2, 4>(from, right, to, add, meanwhile); break;
      case 5: multiply_rows<2, 5>(from, right, to, add, meanwhile); break;
      case 6: multiply_rows<2, 6>(from, right, to, add, meanwhile); break;
      case 7: multiply_rows<2, 7>(from, right, to, add, meanwhile); break;
      default: multiply_rows<2, kMostRows>(from, right, to, add, meanwhile);
    }
  }
}

// `multiply` for 1 to kFewRows rows and four tiles of columns.
template <typename Meanwhile>
void multiply_wide(const BFloat16* left, int64_t rows, const Right& right, const Sums& sums, bool add,
                   const Meanwhile& meanwhile) {
  switch (rows) {
    case 1: return multiply_rows<4, 1>(left, right, sums, add, meanwhile);
    case 2: return multiply_rows<4, 2>(left, right, sums, add, meanwhile);
    case 3: return multiply_rows<4, 3>(left, right, sums, add, meanwhile);
    default: return multiply_rows<4, 4>(left, right, sums, add, meanwhile);
  }
}

}  // namespace millrace::avx512
#endif
