// What the halves of a decoder layer begin with: the sum of their input and the residual, and its norm.
#pragma once

#include "lora_panels.h"
#include "norms.h"

namespace millrace {

// A tensor [rows, width] bfloat16, contiguous.
struct Rows {
  BFloat16* data;
  int64_t count, width;

  explicit Rows(const at::Tensor& x) : data(x.mutable_data_ptr<BFloat16>()), count(x.size(0)), width(x.size(1)) {
    TORCH_CHECK(x.is_contiguous() && x.dim() == 2 && x.scalar_type() == at::kBFloat16);
  }
};

// Few rows are split evenly, since all threads are already running. All threads need the same grain, so it is derived
// from the team's size: ATen's number of threads may differ from thread to thread.
inline int64_t shared_grain(const Team& team, int64_t rows, int64_t width) {
  const int64_t threads = team.size(), even = (rows + threads - 1) / threads;
  return std::max<int64_t>(1, std::min(row_grain(width), even));
}

// Adds x, if any, to the residual, and stores the norm of the residual in tiles.
struct NormInput {
  const BFloat16* added;  // or null
  Rows residual;
  NormWeights<BFloat16> weights;
  float eps;

  NormInput(const at::Tensor& x, const at::Tensor& residual_rows, const at::Tensor& norm, double epsilon)
      : added(x.numel() == 0 ? nullptr : x.const_data_ptr<BFloat16>()),
        residual(residual_rows),
        weights(norm),
        eps(static_cast<float>(epsilon)) {
    TORCH_CHECK(added == nullptr || (x.is_contiguous() && x.sizes() == residual_rows.sizes()));
    TORCH_CHECK(norm.is_contiguous() && norm.numel() == residual.width);
    TORCH_CHECK(residual.width % tiles::kDepth == 0);
  }

  // Handles rows [begin, end), which are stored from row `begin - first` of `tiled` on.
  void operator()(const tiles::Tiled& tiled, int64_t first, int64_t begin, int64_t end) const {
    const int64_t width = residual.width;
    for (int64_t row = begin; row < end; row++) {
      BFloat16* x = residual.data + row * width;
      const float squares = added == nullptr ? sum_of_squares(x, width) : add_row(x, added + row * width, width);
      const Vec inverses(1.f / std::sqrt(squares / static_cast<float>(width) + eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        BFloat16* to = tiled.at(row - first, i);
        save(to, weights.scaled(to, load(x + i) * inverses, i));
      }
    }
  }
};

}  // namespace millrace
