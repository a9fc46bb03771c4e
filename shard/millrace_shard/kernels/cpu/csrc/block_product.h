// The product of a block of rows with a right operand whose rows are interleaved: ATen's brgemm where it has one for the
// type, which for bfloat16 takes AVX512-BF16, and elsewhere a loop of our own.
#pragma once

#include <ATen/native/CPUBlas.h>

#include <cstring>

#include "vectors.h"

namespace millrace {

#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kHasBrgemm = true;
#elif defined(CPU_CAPABILITY_AVX512)
template <typename T>
constexpr bool kHasBrgemm = std::is_same_v<T, float>;
#else
template <typename T>
constexpr bool kHasBrgemm = false;
#endif

// Sizes, and the distances of rows in elements; `width` is a multiple of kBlockLanes, `depth` of kInterleave.
struct BlockShape {
  int64_t rows, width, depth;
  int64_t left_stride, right_stride, sums_stride;
};

constexpr int64_t kBlockLanes = 8;

// The neighbours of bfloat16 in each 32 bits, as floats.
inline void widen_pairs(__m256i pairs, __m256 (&values)[2]) {
  values[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  values[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// kBlockLanes columns of as many rows of the right operand as are interleaved.
inline void load_right(const BFloat16* from, __m256 (&values)[2]) {
  widen_pairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), values);
}
inline void load_right(const float* from, __m256 (&values)[1]) { values[0] = _mm256_loadu_ps(from); }

// As many values of a left row, each in all lanes.
inline void spread_left(const BFloat16* from, __m256 (&values)[2]) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  widen_pairs(_mm256_set1_epi32(pair), values);
}
inline void spread_left(const float* from, __m256 (&values)[1]) { values[0] = _mm256_set1_ps(*from); }

// Multiplies R rows with C vectors of columns. Every sum runs over `depth` in order, whatever R and C are.
template <int R, int C, typename T>
void multiply_part(const BlockShape& shape, bool add, const T* left, const T* right, float* sums) {
  constexpr int kDeep = kInterleave<T>;
  __m256 total[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++)
      total[r][c] = add ? _mm256_loadu_ps(sums + r * shape.sums_stride + c * kBlockLanes) : _mm256_setzero_ps();
  for (int64_t k = 0; k < shape.depth; k += kDeep) {
    __m256 columns[C][kDeep];
    for (int c = 0; c < C; c++) load_right(right + k * shape.right_stride + c * kDeep * kBlockLanes, columns[c]);
    for (int r = 0; r < R; r++) {
      __m256 values[kDeep];
      spread_left(left + r * shape.left_stride + k, values);
      for (int i = 0; i < kDeep; i++)
        for (int c = 0; c < C; c++) total[r][c] = _mm256_fmadd_ps(values[i], columns[c][i], total[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) _mm256_storeu_ps(sums + r * shape.sums_stride + c * kBlockLanes, total[r][c]);
}

template <int C, typename T>
void multiply_columns(const BlockShape& shape, bool add, const T* left, const T* right, float* sums) {
  constexpr int64_t kRowsOfPart = 4;
  int64_t row = 0;
  for (; row + kRowsOfPart <= shape.rows; row += kRowsOfPart)
    multiply_part<kRowsOfPart, C>(shape, add, left + row * shape.left_stride, right, sums + row * shape.sums_stride);
  for (; row < shape.rows; row++)
    multiply_part<1, C>(shape, add, left + row * shape.left_stride, right, sums + row * shape.sums_stride);
}

// sums [rows, width] = left [rows, depth] * right, or, with `add`, += it. A row's bits depend on no other row.
template <typename T>
void multiply_block(const BlockShape& shape, bool add, const T* left, const T* right, float* sums) {
  if constexpr (kHasBrgemm<T>) {
    at::native::cpublas::brgemm(shape.rows, shape.width, shape.depth, shape.left_stride, shape.right_stride,
                                shape.sums_stride, add, left, right, sums, kInterleave<T> == 2);
  } else {
    constexpr int64_t step = kInterleave<T> * kBlockLanes;
    int64_t vector = 0;
    for (; (vector + 2) * kBlockLanes <= shape.width; vector += 2)
      multiply_columns<2>(shape, add, left, right + vector * step, sums + vector * kBlockLanes);
    if (vector * kBlockLanes < shape.width)
      multiply_columns<1>(shape, add, left, right + vector * step, sums + vector * kBlockLanes);
  }
}

// Ends what multiply_block has set up in this thread.
template <typename T>
void release_block_product() {
  if constexpr (kHasBrgemm<T>) at::native::cpublas::brgemm_release(kInterleave<T> == 2);
}

}  // namespace millrace
