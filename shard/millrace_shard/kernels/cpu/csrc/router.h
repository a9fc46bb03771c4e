// The router of a mixture of experts, in float32: the scores of all experts, the choice, and the shares of the chosen.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace millrace {

// How scores become shares, in the order of the Python enumeration Scoring.
enum class Scoring { kSoftmax, kSoftmaxOfChosen, kSigmoid };

struct Router {
  static constexpr int64_t kMostGroups = 64;
  const float *weight, *bias, *correction;  // [experts, width], [experts] or null
  int64_t experts, width, top_k;
  Scoring scoring;
  bool renormalise;
  int64_t groups, top_groups, group_members;
  float scale;

  // Working memory of a row, in floats.
  int64_t floats() const { return 2 * experts + 2 * groups; }

  // The chosen experts of a row, best first, and their shares; `memory` has floats(). Of equal experts the first is
  // chosen. A row that is not finite gets experts that exist, and shares that are NaN.
  void choose(const BFloat16* x, int32_t* chosen, float* shares, float* memory) const {
    float *scores = memory, *ranked = memory + experts;
    score(x, scores);
    if (scoring == Scoring::kSigmoid) {
      for (int64_t e = 0; e < experts; e++) {
        scores[e] = 1.f / (1.f + std::exp(-scores[e]));
        ranked[e] = correction == nullptr ? scores[e] : scores[e] + correction[e];
      }
    } else {
      std::copy_n(scores, experts, ranked);
    }
    if (groups > 1) keep_best_groups(ranked, ranked + experts);
    for (int64_t rank = 0; rank < top_k; rank++) {
      chosen[rank] = static_cast<int32_t>(best(ranked, experts, chosen, rank));
      shares[rank] = scores[chosen[rank]];
    }
    if (scoring == Scoring::kSoftmax) softmax(scores, experts, shares);
    if (scoring == Scoring::kSoftmaxOfChosen) softmax(shares, top_k, shares);
    float total = 1.f;
    if (renormalise) {
      total = kTiny;
      for (int64_t rank = 0; rank < top_k; rank++) total += shares[rank];
    }
    for (int64_t rank = 0; rank < top_k; rank++) shares[rank] = shares[rank] / total * scale;
  }

 private:
  static constexpr float kTiny = 1e-20f;
  static constexpr int64_t kTogether = 8;  // experts whose sums are kept in registers

  void score(const BFloat16* x, float* scores) const {
    int64_t e = 0;
    for (; e + kTogether <= experts; e += kTogether) score<kTogether>(x, scores, e);
    for (; e < experts; e++) score<1>(x, scores, e);
  }

  template <int kCount>
  void score(const BFloat16* x, float* scores, int64_t first) const {
    Vec sums[kCount];
    for (Vec& each : sums) each = Vec(0.f);
    const float* rows = weight + first * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec value = load(x + i);
#pragma GCC unroll 8
      for (int e = 0; e < kCount; e++) sums[e] = at::vec::fmadd(value, load(rows + e * width + i), sums[e]);
    }
    for (int e = 0; e < kCount; e++) scores[first + e] = sum(sums[e]) + (bias == nullptr ? 0.f : bias[first + e]);
  }

  // The first of the best of `count` values that is not among the `taken` indexes.
  static int64_t best(const float* values, int64_t count, const int32_t* indexes, int64_t taken) {
    int64_t found = -1;
    for (int64_t i = 0; i < count; i++) {
      if (found >= 0 && !(values[i] > values[found])) continue;
      if (std::find(indexes, indexes + taken, static_cast<int32_t>(i)) == indexes + taken) found = i;
    }
    return found;
  }

  // Replaces the shares of chosen scores by their softmax over `count` scores.
  void softmax(const float* scores, int64_t count, float* shares) const {
    const float top = *std::max_element(scores, scores + count);
    float total = 0.f;
    for (int64_t i = 0; i < count; i++) total += std::exp(scores[i] - top);
    for (int64_t rank = 0; rank < top_k; rank++) shares[rank] = std::exp(shares[rank] - top) / total;
  }

  // Makes the scores outside the best groups minus infinity. A group counts by its best, or by
  // the sum of its two best.
  void keep_best_groups(float* ranked, float* worths) const {
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    const int64_t size = experts / groups;
    for (int64_t group = 0; group < groups; group++) {
      float first = kMinusInfinity, second = kMinusInfinity;
      for (int64_t i = 0; i < size; i++) {
        const float value = ranked[group * size + i];
        second = std::max(second, std::min(first, value));
        first = std::max(first, value);
      }
      worths[group] = group_members == 1 ? first : first + second;
    }
    int32_t kept[kMostGroups];
    for (int64_t rank = 0; rank < top_groups; rank++)
      kept[rank] = static_cast<int32_t>(best(worths, groups, kept, rank));
    for (int64_t group = 0; group < groups; group++)
      if (std::find(kept, kept + top_groups, static_cast<int32_t>(group)) == kept + top_groups)
        std::fill_n(ranked + group * size, size, kMinusInfinity);
  }
};

}  // namespace millrace
