// Products of tiles with vectors of 8 sums, for CPUs with AVX2 but without AVX-512.
//
// A row's sums run over K in one order, whatever other rows are present.
#pragma once

#include "tiles.h"

#if defined(CPU_CAPABILITY_AVX2)
#include <algorithm>
#include <type_traits>

namespace millrace::avx2 {

using namespace tiles;

constexpr int kPairs = 16, kVectors = 2, kVectorLanes = 8;
// The largest numbers of rows whose sums fit into registers, for one tile of columns and for two.
constexpr int64_t kMostRows = 6, kFewRows = 3;

// Few rows take both tiles of a step at once: memory bandwidth is the limit, and memory is read in order. More rows
// take one tile after the other.
inline int64_t passes(int64_t rows) { return rows <= kFewRows ? 1 : 2 * ((rows + kMostRows - 1) / kMostRows); }

// Pairs of K are split into their even and their odd values, which are widened to float32.
inline __m256 even(__m256i values) { return _mm256_castsi256_ps(_mm256_slli_epi32(values, 16)); }

inline __m256 odd(__m256i values) {
  return _mm256_castsi256_ps(_mm256_and_si256(values, _mm256_set1_epi32(0xffff0000)));
}

inline __m256i load_values(const BFloat16* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// The number of tiles of 16 columns that products of `rows` rows take at once from a page of more than two tiles.
inline int64_t page_width(int64_t rows) { return rows == 1 ? 4 : 2; }

// sums (+)= left [kCount, K] x right [K, 16 kWidth], from tile `first` of the right operand on. `meanwhile()` is called
// kPauses times per step, and twice as often for four tiles.
template <int kWidth, int kCount, typename RightOperand, typename Meanwhile>
void multiply_rows(const BFloat16* left, const RightOperand& right, const Sums& sums, int64_t first, bool add,
                   const Meanwhile& meanwhile) {
  // Tiles are taken in the order of memory.
  constexpr bool kIsTileByTile = std::is_same_v<RightOperand, PanelRight>;
  constexpr int kTogether = kIsTileByTile ? 1 : kWidth;
  constexpr int kPairsAtOnce = kPairs / kPauses * (kIsTileByTile ? kWidth : 1) / (kWidth > 2 ? 2 : 1);
  const auto place = [&](int row, int tile, int vector) {
    char* const data = reinterpret_cast<char*>(sums.data + (first + tile) * sums.second + vector * kVectorLanes);
    return reinterpret_cast<float*>(data + row * sums.stride);
  };
  __m256 totals[kWidth][kCount][kVectors];
#pragma GCC unroll 4
  for (int tile = 0; tile < kWidth; tile++)
#pragma GCC unroll 6
    for (int row = 0; row < kCount; row++)
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; vector++)
        totals[tile][row][vector] = add ? _mm256_loadu_ps(place(row, tile, vector)) : _mm256_setzero_ps();

  for (int64_t done = 0; done < right.total; done += right.steps) {
    const BFloat16* r = right.runs[done / right.steps] + first * right.second;
    const int64_t steps = std::min(right.steps, right.total - done);
    for (int64_t step = 0; step < steps; step++, left += kTile, r += right.step) {
      // The left operand is widened once for all columns.
      alignas(32) float halves[kCount][2][kPairs];
#pragma GCC unroll 6
      for (int row = 0; row < kCount; row++)
#pragma GCC unroll 2
        for (int pair = 0; pair < kPairs; pair += kVectorLanes) {
          const __m256i values = load_values(left + row * kDepth + 2 * pair);
          _mm256_store_ps(halves[row][0] + pair, even(values));
          _mm256_store_ps(halves[row][1] + pair, odd(values));
        }
      const auto add_pair = [&](int tile, int pair) {
        const BFloat16* from = reinterpret_cast<const BFloat16*>(
            reinterpret_cast<const char*>(r + tile * right.second) + pair * right.stride);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          __m256 values[kVectors];
#pragma GCC unroll 2
          for (int vector = 0; vector < kVectors; vector++) {
            const __m256i both = load_values(from + 2 * kVectorLanes * vector);
            values[vector] = half == 0 ? even(both) : odd(both);
          }
#pragma GCC unroll 6
          for (int row = 0; row < kCount; row++) {
            const __m256 shared = _mm256_broadcast_ss(halves[row][half] + pair);
#pragma GCC unroll 2
            for (int vector = 0; vector < kVectors; vector++)
              totals[tile][row][vector] = _mm256_fmadd_ps(shared, values[vector], totals[tile][row][vector]);
          }
        }
      };
#pragma GCC unroll 4
      for (int group = 0; group < kWidth; group += kTogether)
        for (int pairs = 0; pairs < kPairs; pairs += kPairsAtOnce) {
          meanwhile();
#pragma GCC unroll 8
          for (int pair = pairs; pair < pairs + kPairsAtOnce; pair++)
#pragma GCC unroll 4
            for (int tile = group; tile < group + kTogether; tile++) add_pair(tile, pair);
        }
    }
  }

#pragma GCC unroll 4
  for (int tile = 0; tile < kWidth; tile++)
#pragma GCC unroll 6
    for (int row = 0; row < kCount; row++)
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; vector++)
        _mm256_storeu_ps(place(row, tile, vector), totals[tile][row][vector]);
}

// `multiply` for 1 to 16 rows of one row of tiles, and two tiles of columns.
template <typename RightOperand, typename Meanwhile>
void multiply(const BFloat16* left, int64_t rows, const RightOperand& right, const Sums& sums, bool add,
              const Meanwhile& meanwhile) {
  switch (rows) {
    case 1: return multiply_rows<2, 1>(left, right, sums, 0, add, meanwhile);
    case 2: return multiply_rows<2, 2>(left, right, sums, 0, add, meanwhile);
    case 3: return multiply_rows<2, 3>(left, right, sums, 0, add, meanwhile);
  }
  const int64_t count = (rows + kMostRows - 1) / kMostRows;
  for (int64_t tile = 0; tile < 2; tile++)
    for (int64_t pass = 0; pass < count; pass++) {
      const int64_t begin = rows * pass / count, end = rows * (pass + 1) / count;
      const BFloat16* from = left + begin * kDepth;
      const Sums to{reinterpret_cast<float*>(reinterpret_cast<char*>(sums.data) + begin * sums.stride), sums.second,
                    sums.stride};
      switch (end - begin) {
        case 3: multiply_rows<1, 3>(from, right, to, tile, add, meanwhile); break;
        case 4: multiply_rows<1, 4>(from, right, to, tile, add, meanwhile); break;
        case 5: multiply_rows<1, 5>(from, right, to, tile, add, meanwhile); break;
        default: multiply_rows<1, kMostRows>(from, right, to, tile, add, meanwhile);
      }
    }
}

// `multiply` for one row and four tiles of columns.
template <typename Meanwhile>
void multiply_wide(const BFloat16* left, [[maybe_unused]] int64_t rows, const Right& right, const Sums& sums, bool add,
                   const Meanwhile& meanwhile) {
  multiply_rows<4, 1>(left, right, sums, 0, add, meanwhile);
}

}  // namespace millrace::avx2
#endif
