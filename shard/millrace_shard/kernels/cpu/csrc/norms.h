// Root-mean-square norm with an optional residual sum, and the gated activation.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>

#include "vectors.h"

namespace millrace {

// The least number of values that is worth another thread.
constexpr int64_t kGrainValues = 16384;

inline int64_t row_grain(int64_t width) { return std::max<int64_t>(1, kGrainValues / std::max<int64_t>(1, width)); }

template <typename T>
float sum_of_squares(const T* x, int64_t width) {
  Vec total(0.f);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec value = load(x + i);
    total = at::vec::fmadd(value, value, total);
  }
  float result = sum(total);
  for (; i < width; i++) result += static_cast<float>(x[i]) * static_cast<float>(x[i]);
  return result;
}

// residual += x, rounded to T; returns the sum of squares of the result.
template <typename T>
float add_row(T* residual, const T* x, int64_t width) {
  Vec total(0.f);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec value = save(residual + i, load(residual + i) + load(x + i));
    total = at::vec::fmadd(value, value, total);
  }
  float result = sum(total);
  for (; i < width; i++) {
    residual[i] = static_cast<T>(static_cast<float>(residual[i]) + static_cast<float>(x[i]));
    result += static_cast<float>(residual[i]) * static_cast<float>(residual[i]);
  }
  return result;
}

// The weights of a norm, of which one pointer is set, or none. The normalised value is rounded to T and then multiplied
// by weights of T, as in Llama; it is multiplied by those in float32 before it is rounded, as in Gemma.
template <typename T>
struct NormWeights {
  const T* narrow = nullptr;
  const float* wide = nullptr;

  explicit NormWeights(const at::Tensor& weight) {
    TORCH_CHECK(weight.is_contiguous());
    if (weight.numel() == 0) return;
    if (std::is_same_v<T, float> || weight.scalar_type() != at::kFloat)
      narrow = weight.const_data_ptr<T>();
    else
      wide = weight.const_data_ptr<float>();
  }

  bool any() const { return narrow != nullptr || wide != nullptr; }

  // Normalised values by their weights from `i` on; `rounded` may be changed.
  Vec scaled(T* rounded, const Vec& normed, int64_t i) const {
    return wide != nullptr ? normed * load(wide + i) : save(rounded, normed) * load(narrow + i);
  }
  float scaled(float normed, int64_t i) const {
    return wide != nullptr ? normed * wide[i] : static_cast<float>(static_cast<T>(normed)) * static_cast<float>(narrow[i]);
  }
};

template <typename T>
void norm_row(T* out, const T* x, const NormWeights<T>& weights, float squares, float eps, int64_t width) {
  const float inverse = 1.f / std::sqrt(squares / static_cast<float>(width) + eps);
  const Vec inverses(inverse);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) save(out + i, weights.scaled(out + i, load(x + i) * inverses, i));
  for (; i < width; i++) out[i] = static_cast<T>(weights.scaled(static_cast<float>(x[i]) * inverse, i));
}

// out [A, B, width] is contiguous; x [A, B, width] may have any strides, with the last 1.
void rms_norm(at::Tensor out, const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t rows = x.size(0), parts = x.size(1), width = x.size(2);
  TORCH_CHECK(x.stride(2) == 1 && weight.numel() == width);
  TORCH_CHECK(out.is_contiguous() && out.scalar_type() == x.scalar_type() && out.numel() == x.numel());
  dispatch(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = x.const_data_ptr<T>();
    const NormWeights<T> scale(weight);
    T* to = out.mutable_data_ptr<T>();
    const int64_t outer = x.stride(0), inner = x.stride(1);
    at::parallel_for(0, rows, row_grain(parts * width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        for (int64_t part = 0; part < parts; part++) {
          const T* row_values = from + row * outer + part * inner;
          norm_row(to + (row * parts + part) * width, row_values, scale, sum_of_squares(row_values, width),
                   static_cast<float>(eps), width);
        }
    });
  });
}

// residual += x, out = norm(residual); all are [rows, width] and contiguous.
void add_rms_norm(at::Tensor out, const at::Tensor& x, at::Tensor residual, const at::Tensor& weight, double eps) {
  const int64_t rows = x.size(0), width = x.size(1);
  const auto dtype = x.scalar_type();
  TORCH_CHECK(x.is_contiguous() && residual.is_contiguous() && out.is_contiguous());
  TORCH_CHECK(residual.sizes() == x.sizes() && out.sizes() == x.sizes() && weight.numel() == width);
  TORCH_CHECK(residual.scalar_type() == dtype && out.scalar_type() == dtype);
  dispatch(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* added = x.const_data_ptr<T>();
    const NormWeights<T> scale(weight);
    T* sums = residual.mutable_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, rows, row_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const float squares = add_row(sums + row * width, added + row * width, width);
        norm_row(to + row * width, sums + row * width, scale, squares, static_cast<float>(eps), width);
      }
    });
  });
}

// float32 uses the exact exponential, since its outputs are compared token for token. The exponential of bfloat16 has a
// relative error of 2^-12, an eighth of the error of rounding.
template <typename T>
Vec silu(const Vec& x) {
  if constexpr (std::is_same_v<T, float>) {
    return x / (Vec(1.f) + x.neg().exp());
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    const __m512 power = fast_exp2(x * Vec(-1.442695041f));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.f))));
#else
    return x / (Vec(1.f) + x.neg().exp_u20());
#endif
  }
}

// out [rows, width] = silu(gate_up[:, :width]) * gate_up[:, width:]; contiguous.
void silu_mul(at::Tensor out, const at::Tensor& gate_up) {
  const int64_t rows = out.size(0), width = out.size(1);
  TORCH_CHECK(gate_up.is_contiguous() && out.is_contiguous() && out.scalar_type() == gate_up.scalar_type());
  TORCH_CHECK(gate_up.size(0) == rows && gate_up.size(1) == 2 * width);
  dispatch(gate_up, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = gate_up.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, rows, row_grain(2 * width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const T* gate = from + row * 2 * width;
        const T* up = gate + width;
        T* result = to + row * width;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) save(result + i, silu<T>(load(gate + i)) * load(up + i));
        for (; i < width; i++) {
          const float value = static_cast<float>(gate[i]);
          result[i] = static_cast<T>(value / (1.f + std::exp(-value)) * static_cast<float>(up[i]));
        }
      }
    });
  });
}

}  // namespace millrace
