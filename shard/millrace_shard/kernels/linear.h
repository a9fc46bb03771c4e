// A bfloat16 linear whose every output is one sum over the whole of K in one order, for any number of rows.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/zeros.h>

#include "vectors.h"

namespace millrace {

#ifndef MILLRACE_NB
#define MILLRACE_NB 32
#endif
constexpr int64_t kOutBlock = MILLRACE_NB;
static const int64_t kRowBlock = getenv("MR_MB") ? atoi(getenv("MR_MB")) : 32;

// weight [out, in] bfloat16, in even -> [ceil(out / kOutBlock), in / 2, kOutBlock, 2], missing outputs zero.
at::Tensor pack_linear(const at::Tensor& weight) {
  const int64_t out = weight.size(0), in = weight.size(1), blocks = (out + kOutBlock - 1) / kOutBlock;
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.is_contiguous() && in % 2 == 0);
  at::Tensor packed = at::zeros({blocks, in / 2, kOutBlock, 2}, weight.options());
  const BFloat16* from = weight.const_data_ptr<BFloat16>();
  BFloat16* to = packed.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kOutBlock; row < std::min(out, end * kOutBlock); row++) {
      BFloat16* block = to + row / kOutBlock * kOutBlock * in + row % kOutBlock * 2;
      for (int64_t i = 0; i < in; i += 2) std::memcpy(block + i * kOutBlock, from + row * in + i, 2 * sizeof(BFloat16));
    }
  });
  return packed;
}

inline void save_block(BFloat16* to, const float* sums, const BFloat16* bias, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec value = load(sums + i);
    save(to + i, bias == nullptr ? value : value + load(bias + i));
  }
  for (; i < width; i++) to[i] = static_cast<BFloat16>(bias == nullptr ? sums[i] : sums[i] + static_cast<float>(bias[i]));
}

// y [rows, out] = x [rows, in] @ weight.T + bias (empty: none).
void packed_linear(at::Tensor y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& bias) {
  const int64_t rows = x.size(0), in = x.size(1), out = y.size(1);
  const int64_t out_blocks = packed.size(0), row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && packed.is_contiguous() && y.size(0) == rows);
  TORCH_CHECK(packed.size(1) * 2 == in && packed.size(2) == kOutBlock && out <= out_blocks * kOutBlock);
  TORCH_CHECK(bias.numel() == 0 || (bias.numel() == out && bias.is_contiguous()));
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  const BFloat16* weights = packed.const_data_ptr<BFloat16>();
  const BFloat16* offsets = bias.numel() == 0 ? nullptr : bias.const_data_ptr<BFloat16>();
  BFloat16* to = y.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, out_blocks * row_blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[128 * kOutBlock];
    for (int64_t item = begin; item < end; item++) {
      const int64_t block = item / row_blocks, first = item % row_blocks * kRowBlock;
      const int64_t count = std::min(kRowBlock, rows - first), width = std::min(kOutBlock, out - block * kOutBlock);
      at::native::cpublas::brgemm(count, kOutBlock, in, in, kOutBlock, kOutBlock, false, from + first * in,
                                  weights + block * kOutBlock * in, sums);
      for (int64_t row = 0; row < count; row++)
        save_block(to + (first + row) * out + block * kOutBlock, sums + row * kOutBlock,
                   offsets == nullptr ? nullptr : offsets + block * kOutBlock, width);
    }
    at::native::cpublas::brgemm_release();
  });
}

}  // namespace millrace
