// Linear layers in int8 by tiles: weights have a scale per output, and rows a scale each, which is computed per call.
//
// Sums are int32 and exact, so a row's bits depend neither on their order nor on other rows.
#pragma once

#include <cmath>

#include "panels.h"

namespace millrace {

constexpr int64_t kInt8Depth = 64;  // values of K in a tile
constexpr int64_t kInt8Tile = tiles::kRows * kInt8Depth;
constexpr float kLargestInt8 = 127.f;
// A row without a larger absolute value is quantised to zeros: its scale would have no reciprocal.
constexpr float kSmallestRow = 1e-30f;
// Longer sums of products could overflow int32.
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

// Stores 16 values, scaled and rounded to int8.
inline void save_int8(int8_t* to, const float* values, float scale) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i rounded = _mm512_cvtps_epi32(load(values) * Vec(scale));
  const __m128i bytes = _mm512_cvtsepi32_epi8(rounded);
#else
  const auto rounded = [&](int64_t i) {
    const __m256i eight = _mm256_cvtps_epi32(load(values + i) * Vec(scale));
    return _mm_packs_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  };
  const __m128i bytes = _mm_packs_epi16(rounded(0), rounded(kLanes));
#endif
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

// Loads integers as floats.
inline Vec load(const int32_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_loadu_si512(from));
#else
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
}

// Quantises one row x [width] bfloat16 into int8 tiles; returns the value of one unit, which is not finite if x is not.
inline float quantize_row(const tiles::Tiled& tiled, int64_t row, const BFloat16* x, int64_t width) {
  float largest = 0.f;
  bool is_finite = true;
  for (int64_t i = 0; i < width; i++) {
    const float size = std::fabs(static_cast<float>(x[i]));
    is_finite = is_finite && std::isfinite(size);
    largest = size > largest ? size : largest;
  }
  const float inverse = largest > kSmallestRow ? kLargestInt8 / largest : 0.f;
  for (int64_t i = 0; i < tiled.stride * kInt8Depth; i += 16) {
    // Columns of `tiled` have two bytes.
    int8_t* to = reinterpret_cast<int8_t*>(tiled.at(row, i / 32 * 16)) + i % 32;
    alignas(64) float values[16] = {};
    if (i + 16 <= width) {
      for (int64_t j = 0; j < 16; j += kLanes) save(values + j, load(x + i + j));
    } else {
      for (int64_t j = i; j < width; j++) values[j - i] = static_cast<float>(x[j]);
    }
    save_int8(to, values, inverse);
  }
  return is_finite ? largest / kLargestInt8 : std::numeric_limits<float>::quiet_NaN();
}

// y [rows, out] = x [rows, in] @ (weight * scales).T + bias. x and y are bfloat16, scales and bias float32; an empty
// bias stands for none.
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
    for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
      const int64_t column = panel * kPanelColumns + i, count = std::min(kLanes, out - column);
      if (count <= 0) return;
      const float* sums = (i < tiles::kColumns ? left : right) + i % tiles::kColumns;
      const Vec sum = load(reinterpret_cast<const int32_t*>(sums));
      const Vec scale = Vec(row_scales[row]) * Vec::loadu(output_scales + column, count);
      const Vec values = added == nullptr ? sum * scale : at::vec::fmadd(sum, scale, Vec::loadu(added + column, count));
      BFloat16* const place = to + row * out + column;
      if (count == kLanes) {
        save(place, values);
      } else {
        BFloat16 rounded[kLanes];
        save(rounded, values);
        std::memcpy(place, rounded, count * sizeof(BFloat16));
      }
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
