// Keys and values as codes of 8 bits: int8 with a scale per position and head, or fp8 with a scale for all.
//
// Every code is a value of bfloat16, so codes are widened exactly, and products run over exact values. Scales apply to
// scores and weights.
#pragma once

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace millrace {

// How a cache stores keys and values: as they are, or as codes.
enum class Stored { kPlain, kInt8, kE4m3, kE5m2 };

inline Stored stored_as(at::ScalarType type) {
  switch (type) {
    case at::kChar: return Stored::kInt8;
    case at::kFloat8_e4m3fn: return Stored::kE4m3;
    case at::kFloat8_e5m2: return Stored::kE5m2;
    default: return Stored::kPlain;
  }
}

// The largest magnitude of `x` [dim], NaN if a value is NaN.
template <typename T>
float largest_of(const T* x, int64_t dim) {
  Vec largest(0.f);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) largest = at::vec::maximum(largest, load(x + i).abs());
  float result = max(largest);
  for (; i < dim; i++) {
    const float value = std::abs(static_cast<float>(x[i]));
    result = (value > result || std::isnan(value)) ? value : result;
  }
  return result;
}

// Writes the codes of `x` [dim] and returns their scale. The scale of values that are not finite is NaN.
template <typename T>
float encode_int8(uint8_t* codes, const T* x, int64_t dim) {
  constexpr float kLargest = 127.f;
  const float scale = largest_of(x, dim) * (1.f / kLargest);
  if (!(scale > 0.f && std::isfinite(scale))) {
    std::memset(codes, 0, dim);
    return scale == 0.f ? 0.f : std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t i = 0; i < dim; i++) {
    const float code = std::min(kLargest, std::max(-kLargest, std::nearbyint(static_cast<float>(x[i]) / scale)));
    codes[i] = static_cast<uint8_t>(static_cast<int8_t>(code));
  }
  return scale;
}

// Values past the largest one saturate; those that are not finite become NaN.
template <typename Code, typename T>
void encode_fp8(uint8_t* codes, const T* x, int64_t dim, float scale) {
  const float largest = static_cast<float>(std::numeric_limits<Code>::max());
  for (int64_t i = 0; i < dim; i++) {
    const float value = static_cast<float>(x[i]) / scale;
    const float within = std::min(largest, std::max(-largest, value));
    codes[i] = Code(std::isfinite(value) ? within : std::numeric_limits<float>::quiet_NaN()).x;
  }
}

// The codes of kLanes values, as float32.
template <Stored kStored>
Vec decode(const uint8_t* codes) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  if constexpr (kStored == Stored::kInt8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  const __m256i wide = _mm256_cvtepi8_epi16(bytes);
  // A code of e5m2 is the upper half of a float16.
  if constexpr (kStored == Stored::kE5m2) return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
  // The same bits of a float16 mean 2^-8 of a code of e4m3, which has NaN but no infinity.
  const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m256i largest = _mm256_set1_epi16(0x7f);
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, largest), largest);
  const __m256i half = _mm256_or_si256(bits, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.f));
#else
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  if constexpr (kStored == Stored::kInt8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  const __m128i wide = _mm_cvtepi8_epi16(bytes);
  if constexpr (kStored == Stored::kE5m2) return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
  const __m128i bits = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m128i largest = _mm_set1_epi16(0x7f);
  const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(wide, largest), largest);
  const __m128i half = _mm_or_si128(bits, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.f));
#endif
}

template <Stored kStored, typename T>
void widen_codes(T* to, const uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    const Vec low = decode<kStored>(codes + i), high = decode<kStored>(codes + i + kLanes);
    if constexpr (std::is_same_v<T, BFloat16>) {
      save(to + i, low, high);
    } else {
      save(to + i, low);
      save(to + i + kLanes, high);
    }
  }
}

// Widens `count` codes, a multiple of 64, to values of T in the same order.
template <typename T>
void widen_codes(T* to, const uint8_t* codes, int64_t count, Stored stored) {
  switch (stored) {
    case Stored::kInt8: return widen_codes<Stored::kInt8>(to, codes, count);
    case Stored::kE4m3: return widen_codes<Stored::kE4m3>(to, codes, count);
    case Stored::kE5m2: return widen_codes<Stored::kE5m2>(to, codes, count);
    case Stored::kPlain: return;
  }
}

}  // namespace millrace
