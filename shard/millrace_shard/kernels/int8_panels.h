// Linear layers in int8 by tiles: weights with a scale per output, rows with a scale each, found as they come.
//
// Sums are int32 and exact, so neither their order nor the rows beside them can matter.
#pragma once

#include "panels.h"

#ifdef MILLRACE_TILES
#include <cmath>

namespace millrace {

constexpr int64_t kInt8Depth = 64;  // of K in a tile
constexpr int64_t kInt8Tile = tiles::kRows * kInt8Depth;
constexpr float kLargestInt8 = 127.f;
// Rows without a larger value count as zeros: their scale would have no reciprocal.
constexpr float kSmallestRow = 1e-30f;
// Longer sums of products could leave int32.
constexpr int64_t kLongestInt8 = 131072;

// weight [out, in] int8 -> [panels, steps, 2, 16, 16, 4]: panels of 32 outputs, inputs in quads; zeros fill up.
inline at::Tensor pack_int8(const at::Tensor& weight) {
  TORCH_CHECK(weight.scalar_type() == at::kChar && weight.is_contiguous() && weight.dim() == 2);
  TORCH_CHECK(weight.size(1) <= kLongestInt8, "millrace: too many inputs for int8");
  const int64_t out = weight.size(0), in = weight.size(1);
  const int64_t count = round_up(out, kPanelColumns) / kPanelColumns, steps = round_up(in, kInt8Depth) / kInt8Depth;
  at::Tensor packed = WeightMemory::empty({count, steps, 2, tiles::kColumns, tiles::kColumns, 4}, weight.options());
  const int8_t* from = weight.const_data_ptr<int8_t>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  at::parallel_for(0, count * steps * 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t row = tile / (2 * steps) * kPanelColumns + tile % 2 * tiles::kColumns;
      const int64_t first = tile / 2 % steps * kInt8Depth;
      for (int64_t k = 0; k < kInt8Depth; k++)
        for (int64_t column = 0; column < tiles::kColumns; column++)
          to[tile * kInt8Tile + k / 4 * kInt8Depth + column * 4 + k % 4] =
              row + column < out && first + k < in ? from[(row + column) * in + first + k] : int8_t(0);
    }
  });
  return packed;
}

// One row of x [width] bfloat16 into int8 tiles; returns what a unit of it is worth. Not finite where x is not.
inline float quantize_row(const tiles::Tiled& tiled, int64_t row, const BFloat16* x, int64_t width) {
  float largest = 0.f;
  bool is_finite = true;
  for (int64_t i = 0; i < width; i++) {
    const float size = std::fabs(static_cast<float>(x[i]));
    is_finite = is_finite && std::isfinite(size);
    largest = size > largest ? size : largest;
  }
  const float inverse = largest > kSmallestRow ? kLargestInt8 / largest : 0.f;
  const __m512 scale = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < tiled.stride * kInt8Depth; i += 16) {
    // Columns of `tiled` are of two bytes.
    int8_t* to = reinterpret_cast<int8_t*>(tiled.at(row, i / 32 * 16)) + i % 32;
    __m512 values = _mm512_setzero_ps();
    if (i + 16 <= width) {
      values = load(x + i);
    } else if (i < width) {
      alignas(64) float rest[16] = {};
      for (int64_t j = i; j < width; j++) rest[j - i] = static_cast<float>(x[j]);
      values = _mm512_load_ps(rest);
    }
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, scale));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(rounded));
  }
  return is_finite ? largest / kLargestInt8 : std::numeric_limits<float>::quiet_NaN();
}

// y [rows, out] = x [rows, in] @ (weight * scales).T + bias (empty: none); x and y bfloat16, the rest float32.
void int8_linear(at::Tensor y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                 const at::Tensor& bias) {
  const int64_t rows = x.size(0), in = x.size(1), out = y.size(1), steps = packed.size(1);
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && packed.is_contiguous() && y.size(0) == rows);
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && y.scalar_type() == at::kBFloat16);
  TORCH_CHECK(packed.scalar_type() == at::kChar && packed.dim() == 6 && packed.size(5) == 4);
  TORCH_CHECK(round_up(in, kInt8Depth) == steps * kInt8Depth);
  TORCH_CHECK(round_up(out, kPanelColumns) == packed.size(0) * kPanelColumns);
  TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == at::kFloat && scales.numel() == out);
  TORCH_CHECK(bias.is_contiguous() && bias.scalar_type() == at::kFloat && (bias.numel() == 0 || bias.numel() == out));
  if (rows == 0) return;
  static thread_local Scratch tiles_scratch, scales_scratch;
  const int64_t width = steps * kInt8Depth / 2;  // in units of two bytes
  const tiles::Tiled tiled(tiles_scratch.reserve(tiles::Tiled::bytes(rows, width)), width);
  float* row_scales = reinterpret_cast<float*>(scales_scratch.reserve(rows * sizeof(float)));
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  BFloat16* to = y.mutable_data_ptr<BFloat16>();
  const float* output_scales = scales.const_data_ptr<float>();
  const float* added = bias.numel() == 0 ? nullptr : bias.const_data_ptr<float>();
  const Panels panels(reinterpret_cast<const BFloat16*>(packed.const_data_ptr<int8_t>()), packed.size(0), steps);
  const auto emit = [&](int64_t panel, int64_t row, const float* left, const float* right) {
    for (int64_t half = 0; half < 2; half++) {
      const int32_t* sums = reinterpret_cast<const int32_t*>(half == 0 ? left : right);
      const int64_t column = panel * kPanelColumns + half * tiles::kColumns;
      const int64_t count = std::min(tiles::kColumns, out - column);
      if (count <= 0) continue;
      const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
      const __m512 worth = _mm512_maskz_loadu_ps(lanes, output_scales + column);
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(row_scales[row]), worth);
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
      const __m512 values = added == nullptr ? _mm512_mul_ps(sum, scale)
                                             : _mm512_fmadd_ps(sum, scale, _mm512_maskz_loadu_ps(lanes, added + column));
      _mm256_mask_storeu_epi16(to + row * out + column, lanes, to_bfloat16(values));
    }
  };
  run_team([&](Team& team) {
    team.share(rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) row_scales[row] = quantize_row(tiled, row, from + row * in, in);
    });
    tiles::configure(std::min(rows, tiles::kRows));
    multiply_panels<tiles::Format::kInt8>(team, panels, tiled, rows, emit);
    tiles::release();
  });
}

}  // namespace millrace
#endif
