// A bfloat16 linear. Every output is one float32 sum over K in one order, for any number of rows.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace millrace {

// More rows than this are multiplied from a copy whose stride does not alias in the first-level cache.
constexpr int64_t kFewRows = 32;
constexpr int64_t kRowsInCache = 512;
// Longer sums are split into steps, so that the weights and rows of a step stay in the second-level cache.
constexpr int64_t kLongSum = 4096;
constexpr int64_t kSumStep = 2048;
constexpr int64_t kStridePadding = 32;
constexpr int64_t kGrainBytes = 65536;

struct PackedLayer {
  const BFloat16* weights;
  const BFloat16* bias;
  int64_t in, out, block, blocks;

  int64_t step() const { return in > kLongSum ? kSumStep : in; }
  int64_t tile() const { return in > kLongSum || block > 64 ? 64 : 128; }
};

// Wide blocks reuse rows better, but every thread needs a block. The width does not change any bit.
inline int64_t block_width(int64_t out) {
  const int64_t enough = std::max<int64_t>(8, 4 * at::get_num_threads());
  for (const int64_t width : {128, 64})
    if ((out % width == 0 || out >= 32 * width) && out / width >= enough) return width;
  return 32;
}

// Packs weight [out, in] bfloat16, `in` even, as [ceil(out / block), in / 2, block, 2]; missing outputs are zero.
at::Tensor pack_linear(const at::Tensor& weight) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.is_contiguous() && weight.size(1) % 2 == 0);
  const int64_t out = weight.size(0), in = weight.size(1);
  const int64_t block = block_width(out), blocks = (out + block - 1) / block;
  at::Tensor packed = at::zeros({blocks, in / 2, block, 2}, weight.options());
  const BFloat16* from = weight.const_data_ptr<BFloat16>();
  BFloat16* to = packed.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * block; row < std::min(out, end * block); row++) {
      BFloat16* pairs = to + row / block * block * in + row % block * 2;
      for (int64_t i = 0; i < in; i += 2) std::memcpy(pairs + i * block, from + row * in + i, 2 * sizeof(BFloat16));
    }
  });
  return packed;
}

inline void save_outputs(BFloat16* to, const float* sums, const BFloat16* bias, int64_t count) {
  const auto at = [&](int64_t i) { return bias == nullptr ? load(sums + i) : load(sums + i) + load(bias + i); };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) save(to + i, at(i));
  for (; i < count; i++) to[i] = static_cast<BFloat16>(bias == nullptr ? sums[i] : sums[i] + static_cast<float>(bias[i]));
}

// Computes one block of outputs for `used` of `rows` rows, `stride` apart; `sums` has room for [rows, block].
inline void multiply(const PackedLayer& layer, int64_t block, const BFloat16* x, int64_t stride, int64_t rows,
                     int64_t used, BFloat16* y, float* sums) {
  const BFloat16* weights = layer.weights + block * layer.block * layer.in;
  for (int64_t k = 0; k < layer.in; k += layer.step())
    for (int64_t first = 0; first < rows; first += layer.tile())
      at::native::cpublas::brgemm(std::min(layer.tile(), rows - first), layer.block,
                                  std::min(layer.step(), layer.in - k), stride, layer.block, layer.block, k > 0,
                                  x + first * stride + k, weights + k * layer.block, sums + first * layer.block);
  const int64_t start = block * layer.block, count = std::min(layer.block, layer.out - start);
  for (int64_t row = 0; row < used; row++)
    save_outputs(y + row * layer.out + start, sums + row * layer.block,
                 layer.bias == nullptr ? nullptr : layer.bias + start, count);
}

// Computes all outputs of `rows` rows. Threads share the blocks of outputs and, if there are more threads, row tiles.
inline void multiply_rows(const PackedLayer& layer, const BFloat16* x, int64_t stride, int64_t rows, BFloat16* y) {
  const int64_t padded = rows <= kFewRows ? rows : round_up(rows, 16);
  int64_t part = layer.in > kLongSum ? padded : std::min(padded, layer.tile());
  while (part > layer.tile() && layer.blocks * (padded / part) < 2 * at::get_num_threads())
    part = round_up(part / 2, layer.tile());
  const int64_t parts = (padded + part - 1) / part;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / (layer.block * layer.in * sizeof(BFloat16)));
  at::parallel_for(0, layer.blocks * parts, grain, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* sums = reinterpret_cast<float*>(scratch.reserve(part * layer.block * sizeof(float)));
    for (int64_t item = begin; item < end; item++) {
      const int64_t first = item % parts * part;
      multiply(layer, item / parts, x + first * stride, stride, std::min(part, padded - first),
               std::min(part, rows - first), y + first * layer.out, sums);
    }
    at::native::cpublas::brgemm_release();
  });
}

// y [rows, out] = x [rows, in] @ weight.T + bias; all bfloat16 and contiguous. An empty bias stands for none.
void packed_linear(at::Tensor y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& bias) {
  const int64_t rows = x.size(0), in = x.size(1), out = y.size(1), block = packed.size(2);
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && packed.is_contiguous() && y.size(0) == rows);
  TORCH_CHECK(packed.size(1) * 2 == in && out <= packed.size(0) * block && out > (packed.size(0) - 1) * block);
  TORCH_CHECK(bias.numel() == 0 || (bias.numel() == out && bias.is_contiguous()));
  const PackedLayer layer{packed.const_data_ptr<BFloat16>(),
                          bias.numel() == 0 ? nullptr : bias.const_data_ptr<BFloat16>(), in, out, block, packed.size(0)};
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  BFloat16* to = y.mutable_data_ptr<BFloat16>();
  if (rows == 0) return;
  if (rows <= kFewRows) return multiply_rows(layer, from, in, rows, to);

  static thread_local Scratch scratch;
  const int64_t stride = round_up(in, 64) + kStridePadding;
  for (int64_t start = 0; start < rows; start += kRowsInCache) {
    const int64_t count = std::min(kRowsInCache, rows - start);
    const int64_t bytes = round_up(count, 16) * stride * static_cast<int64_t>(sizeof(BFloat16));
    BFloat16* copy = reinterpret_cast<BFloat16*>(scratch.reserve(bytes));
    at::parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / in), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        std::memcpy(copy + row * stride, from + (start + row) * in, in * sizeof(BFloat16));
    });
    multiply_rows(layer, copy, stride, count, to + start * out);
  }
}

}  // namespace millrace
