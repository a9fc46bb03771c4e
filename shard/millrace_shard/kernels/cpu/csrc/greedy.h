// The most likely token of each row and the logarithm of its probability.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "vectors.h"

namespace millrace {

#if defined(CPU_CAPABILITY_AVX512)
// e^x for x <= 0, with a relative error of at most 2^-23, or of -x 2^-23 below -1. 1 for 0, 0 for -inf, NaN for NaN.
inline Vec exp_of_negative(const Vec& x) {
  constexpr int kBelowFloor = 0x09;
  const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1.442695041f));
  const __m512 f = _mm512_reduce_ps(y, kBelowFloor);
  __m512 p = _mm512_set1_ps(2.170225488e-04f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.243968800e-03f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.678840978e-03f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.548334199e-02f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402298363e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931469838e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, y);
}
#else
inline Vec exp_of_negative(const Vec& x) { return x.exp(); }
#endif

// The first index at which x [size] equals `value`; the last index if there is none.
inline int64_t first_of(const float* x, int64_t size, float value) {
  int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (const __m512 sought = _mm512_set1_ps(value); i + kLanes <= size; i += kLanes)
    if (const uint32_t equal = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), sought, _CMP_EQ_OQ); equal != 0)
      return i + __builtin_ctz(equal);
#endif
  while (i < size && x[i] != value) i++;
  return std::min(i, size - 1);
}

// For logits [rows, vocabulary] float32, contiguous, returns the ids [rows] int64 of the best tokens, the first among
// equals; their logprobs [rows] float32, NaN where a logit is NaN or plus infinity; and flags of those rows [rows]
// bool. The order of the sum depends on the size of the vocabulary alone.
std::tuple<at::Tensor, at::Tensor, at::Tensor> greedy(const at::Tensor& logits) {
  const int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(logits.is_contiguous() && logits.scalar_type() == at::kFloat);
  at::Tensor ids = at::empty({rows}, at::kLong), logprobs = at::empty({rows}, at::kFloat);
  at::Tensor failed = at::empty({rows}, at::kBool);
  const float* from = logits.const_data_ptr<float>();
  int64_t* chosen = ids.mutable_data_ptr<int64_t>();
  bool* bad = failed.mutable_data_ptr<bool>();
  float* logprob = logprobs.mutable_data_ptr<float>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* x = from + row * size;
      Vec highest(-std::numeric_limits<float>::infinity());
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) highest = at::vec::maximum(highest, load(x + i));
      float top = max(highest);
      for (; i < size; i++) top = x[i] > top || std::isnan(x[i]) ? x[i] : top;

      Vec total(0.f);
      const Vec shift(top);
      i = 0;
      for (; i + kLanes <= size; i += kLanes) total = total + exp_of_negative(load(x + i) - shift);
      float rest = sum(total);
      for (; i < size; i++) rest += std::exp(x[i] - top);

      chosen[row] = first_of(x, size, top);
      logprob[row] = 0.f - std::log(rest);  // 0 for a single possible token, as other implementations give, and not -0
      bad[row] = !std::isfinite(logprob[row]);
    }
  });
  return {ids, logprobs, failed};
}

}  // namespace millrace
