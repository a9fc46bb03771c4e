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

// brgemm reads its right operand with this many consecutive rows interleaved.
template <typename T>
constexpr int64_t kInterleave = std::is_same_v<T, BFloat16> ? 2 : 1;

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

inline __m512i to_bfloat16(__m512 low, __m512 high) {
#if defined(__AVX512BF16__)
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloat16(low)), to_bfloat16(high), 1);
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

inline float sum(const Vec& values) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, values);
}

inline float max(const Vec& values) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, values);
}

#if defined(CPU_CAPABILITY_AVX512)
// 2^x to within 2^-13 of itself, by a polynomial in its fraction; NaN stays NaN, -inf gives 0.
inline __m512 fast_exp2(__m512 x) {
  constexpr int kBelowFloor = 0x09;
  const __m512 f = _mm512_reduce_ps(x, kBelowFloor);
  __m512 p = _mm512_set1_ps(7.802452155e-02f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.260671570e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.958335400e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.999252186e-01f));
  return _mm512_scalef_ps(p, x);
}
#endif

inline int64_t round_down(int64_t value, int64_t step) { return value / step * step; }

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// [low, high)
struct Range {
  int64_t low, high;
};

// Calls body with a null pointer whose type is the tensor's element type.
template <typename Body>
void dispatch(const at::Tensor& tensor, Body body) {
  if (tensor.scalar_type() == at::kBFloat16) {
    body(static_cast<BFloat16*>(nullptr));
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "millrace: float32 or bfloat16 expected");
    body(static_cast<float*>(nullptr));
  }
}

// 64-byte aligned memory that a thread keeps from call to call.
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

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace millrace
