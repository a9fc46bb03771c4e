// The most likely token of each row and the logarithm of its probability.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "vectors.h"

namespace millrace {

// logits [rows, vocabulary] float32 contiguous; ids [rows] int64, the first of equals; logprobs [rows] float32, NaN
// where a logit is NaN or plus infinity. The order of the sum depends on the vocabulary alone.
void greedy(at::Tensor ids, at::Tensor logprobs, const at::Tensor& logits) {
  const int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(logits.is_contiguous() && logits.scalar_type() == at::kFloat && ids.scalar_type() == at::kLong);
  TORCH_CHECK(ids.is_contiguous() && logprobs.is_contiguous() && ids.numel() == rows && logprobs.numel() == rows);
  const float* from = logits.const_data_ptr<float>();
  int64_t* chosen = ids.mutable_data_ptr<int64_t>();
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
      for (; i + kLanes <= size; i += kLanes) total = total + (load(x + i) - shift).exp();
      float rest = sum(total);
      for (; i < size; i++) rest += std::exp(x[i] - top);

      int64_t first = 0;
      while (first + 1 < size && x[first] != top) first++;
      chosen[row] = first;
      logprob[row] = -std::log(rest);
    }
  });
}

}  // namespace millrace
