// Masks of structured output, applied to scores.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace millrace {

// Adds minus infinity to the scores [R, size] float32 of ids that `bits` [G, W] int32 forbid in `rows` [G] int64, which
// are distinct. Bit i of word j allows id 32 j + i; ids from 32 W on are forbidden. NaN stays NaN.
void forbid(at::Tensor scores, const at::Tensor& rows, const at::Tensor& bits) {
  const int64_t height = scores.size(0), size = scores.size(1), count = bits.size(0), words = bits.size(1);
  TORCH_CHECK(scores.is_contiguous() && rows.is_contiguous() && bits.is_contiguous() && rows.numel() == count);
  float* to = scores.mutable_data_ptr<float>();
  const int64_t* row_of = rows.const_data_ptr<int64_t>();
  const int32_t* masks = bits.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; i++) TORCH_CHECK(0 <= row_of[i] && row_of[i] < height);
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  constexpr int64_t kBits = 32, kScoresPerThread = 1 << 18;
  const int64_t grain = std::max<int64_t>(1, kScoresPerThread / std::max<int64_t>(1, size));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float* x = to + row_of[i] * size;
      const int64_t whole = std::min(words, size / kBits);
      for (int64_t j = 0; j < whole; j++) {
        const uint32_t word = masks[i * words + j];
        for (int64_t bit = 0; bit < kBits; bit++) x[j * kBits + bit] += word >> bit & 1 ? 0.f : kForbidden;
      }
      for (int64_t id = whole * kBits; id < size; id++) {
        const bool is_allowed = id < words * kBits && masks[i * words + id / kBits] >> id % kBits & 1;
        x[id] += is_allowed ? 0.f : kForbidden;
      }
    }
  });
}

}  // namespace millrace
