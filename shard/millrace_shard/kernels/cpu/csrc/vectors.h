// Float vectors over rows of float32 or bfloat16; all arithmetic is float32.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstdlib>
#include <type_traits>

namespace millrace {

using at::BFloat16;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// The number of consecutive rows that are interleaved in brgemm's right operand.
template <typename T>
constexpr int64_t kInterleave = std::is_same_v<T, BFloat16> ? 2 : 1;

// kLanes sums. Arrays of these stay in registers, which arrays of Vec do not always.
#if defined(CPU_CAPABILITY_AVX512)
using Lanes = __m512;
#else
using Lanes = __m256;
#endif

// Ends what the compiler knows of memory: it would keep more left operands for later products than there are registers.
[[gnu::always_inline]] inline void forget_loads() { asm volatile("" ::: "memory"); }

inline Vec load(const float* from) { return Vec::loadu(from); }

inline Vec load(const BFloat16* from) {
  Vec value;
  at::vec::load_fp32_from_bf16(from, value);
  return value;
}

// Stores `value` and returns it as stored.
inline Vec save(float* to, const Vec& value) {
  value.store(to);
  return value;
}

#if defined(CPU_CAPABILITY_AVX512)
inline __m256i to_bfloat16(__m512 values) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(values);
#else
  return at::vec::cvtfp32_bf16(values);
#endif
}

inline Vec save(BFloat16* to, const Vec& value) {
  const __m256i bits = to_bfloat16(value);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  __m512 stored;
  at::vec::cvtbf16_fp32(bits, stored);
  return stored;
}
#elif defined(CPU_CAPABILITY_AVX2)
inline Vec save(BFloat16* to, const Vec& value) {
  const __m128i bits = at::vec::cvtfp32_bf16(__m256(value));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
  __m256 stored;
  at::vec::cvtbf16_fp32(bits, stored);
  return stored;
}
#else
#error "AVX2 or AVX512 expected"
#endif

// Stores both halves at once where a vector holds them: a later load of both would have to wait for two stores.
inline void save(BFloat16* to, const Vec& low, const Vec& high) {
#if defined(CPU_CAPABILITY_AVX512)
#if defined(__AVX512BF16__)
  const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  const __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloat16(low)), to_bfloat16(high), 1);
#endif
  _mm512_storeu_si512(to, bits);
#else
  save(to, low);
  save(to + kLanes, high);
#endif
}

inline float first(const Vec& values) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtss_f32(values);
#else
  return _mm256_cvtss_f32(values);
#endif
}

inline float sum(const Vec& values) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, values);
}

inline float max(const Vec& values) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, values);
}

// 2^x with a relative error of at most 2^-13, by a polynomial in the fraction of x. NaN stays NaN, -inf gives 0. With AVX-512
// results that float32 has only as denormal numbers, which take Intel's CPUs a hundred cycles each, are 0.
inline Vec fast_exp2(const Vec& x) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kBelowFloor = 0x09;
  const Vec f = _mm512_reduce_ps(x, kBelowFloor);
#else
  // If an operand is NaN, the instruction returns the second one.
  constexpr float kLargest = 252.f;
  const __m256 within = _mm256_max_ps(_mm256_set1_ps(-kLargest), _mm256_min_ps(_mm256_set1_ps(kLargest), x));
  const __m256 whole = _mm256_floor_ps(within);
  const Vec f = _mm256_sub_ps(within, whole);
#endif
  Vec p = at::vec::fmadd(Vec(7.802452155e-02f), f, Vec(2.260671570e-01f));
  p = at::vec::fmadd(p, f, Vec(6.958335400e-01f));
  p = at::vec::fmadd(p, f, Vec(9.999252186e-01f));
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ), p, x);
#else
  // The power is applied in two factors: the exponent of the whole may be outside the range of a float.
  const auto power = [](__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  };
  const __m256i exponent = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(exponent, 1);
  return p * Vec(power(half)) * Vec(power(_mm256_sub_epi32(exponent, half)));
#endif
}

inline int64_t round_down(int64_t value, int64_t step) { return value / step * step; }

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// The half-open range [low, high).
struct Range {
  int64_t low, high;
};

// Calls body with a null pointer to the tensor's element type.
template <typename Body>
void dispatch(const at::Tensor& tensor, Body body) {
  if (tensor.scalar_type() == at::kBFloat16) {
    body(static_cast<BFloat16*>(nullptr));
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "millrace: float32 or bfloat16 expected");
    body(static_cast<float*>(nullptr));
  }
}

// Memory aligned to 64 bytes that a thread keeps between calls.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(64, round_up(bytes, 4096)));
      TORCH_CHECK(data_ != nullptr, "millrace: out of memory");
      size_ = round_up(bytes, 4096);
    }
    return data_;
  }

  // The memory of the last call of `reserve`.
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace millrace
