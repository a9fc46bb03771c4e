// The rows that panels of codes are multiplied with: in the order of the codes, with their sums over groups, and, for
// integer products, as int8 with a scale per row. A row is prepared from itself alone.
#pragma once

#include <cmath>
#include <limits>

#include "codes.h"

namespace millrace {

constexpr float kLargestInt8 = 127.f;
// A row without a larger absolute value is quantised to zeros: its scale would have no reciprocal.
constexpr float kSmallestRow = 1e-30f;

// Stores 16 values, scaled and rounded to int8.
inline void save_int8(int8_t* to, const BFloat16* values, float scale) {
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

// The largest absolute value of `count` values, a multiple of 16; not finite if any value is not.
inline float largest_of(const BFloat16* values, int64_t count) {
  __m256i most = _mm256_setzero_si256();
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  for (int64_t i = 0; i < count; i += 16)
    most = _mm256_max_epu16(
        most, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i)), magnitude));
  alignas(32) uint16_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
  return static_cast<float>(BFloat16(*std::max_element(lanes, lanes + 16), BFloat16::from_bits()));
}

// The sum of `count` integers, a multiple of 32.
inline int32_t sum_int8(const int8_t* values, int64_t count) {
  __m256i total = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    const __m256i shifted = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
    total = _mm256_add_epi64(total, _mm256_sad_epu8(shifted, _mm256_setzero_si256()));
  }
  alignas(32) int64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), total);
  return static_cast<int32_t>(lanes[0] + lanes[1] + lanes[2] + lanes[3] - 128 * count);
}

// What the prepared rows of one or several weights take.
struct RowSizes {
  int64_t columns = 0, groups = 0;  // of the operand, in units of two bytes; of the sums

  void add(const CodePanels& w) {
    if (w.replaces_rows()) columns = std::max(columns, w.steps * tiles::kDepth);
    if (w.needs_sums()) groups = std::max(groups, w.groups);
  }
  void add(const RowSizes& other) {
    columns = std::max(columns, other.columns);
    groups = std::max(groups, other.groups);
  }
  bool any() const { return columns > 0 || groups > 0; }
};

// Memory for prepared rows. Instances of a thread share it.
class RowMemory {
 public:
  // Makes room for `rows` rows.
  RowMemory(const RowSizes& sizes, int64_t rows) : sizes_(sizes) {
    static thread_local Scratch operands, sums, scales;
    operands_ = &operands;
    sums_ = &sums;
    scales_ = &scales;
    if (sizes.columns > 0) {
      operands.reserve(tiles::Tiled::bytes(rows, sizes.columns));
      scales.reserve(rows * static_cast<int64_t>(sizeof(float)));
    }
    if (sizes.groups > 0) sums.reserve(rows * sizes.groups * static_cast<int64_t>(sizeof(float)));
  }

  tiles::Tiled operands() const { return {operands_->data(), sizes_.columns}; }
  float* sums(int64_t row) const { return reinterpret_cast<float*>(sums_->data()) + row * sizes_.groups; }
  float* scale(int64_t row) const { return reinterpret_cast<float*>(scales_->data()) + row; }

 private:
  RowSizes sizes_;
  Scratch *operands_, *sums_, *scales_;
};

// The rows of a product with panels of codes.
class CodedRows {
 public:
  // Rows in `memory`, whose sizes fit the weight.
  CodedRows(const CodePanels& w, const RowMemory& memory) : w_(w), memory_(memory) {}

  bool needs_work() const { return w_.replaces_rows() || has_sums(); }

  // The operand of products: `x` itself, if rows are multiplied as they are.
  tiles::Tiled operand(const tiles::Tiled& x) const { return w_.replaces_rows() ? memory_.operands() : x; }
  // [groups] of a row: float32 with exact products, else int32.
  const float* sums(int64_t row) const { return memory_.sums(row); }
  const int32_t* integer_sums(int64_t row) const { return reinterpret_cast<const int32_t*>(sums(row)); }
  bool has_sums() const { return w_.needs_sums(); }
  float scale(int64_t row) const { return *memory_.scale(row); }

  // Prepares rows [begin, end) of `x`, whose columns past the inputs are 0.
  void prepare(const tiles::Tiled& x, int64_t begin, int64_t end) const {
    static thread_local Scratch scratch;
    const int64_t padded = w_.steps * w_.depth();
    BFloat16* line = reinterpret_cast<BFloat16*>(scratch.reserve(padded * static_cast<int64_t>(sizeof(BFloat16))));
    for (int64_t row = begin; row < end; row++) {
      read_row(line, x, row, padded);
      if (w_.is_integer()) {
        quantize(line, row, padded);
      } else {
        finish(line, row);
      }
    }
  }

 private:
  // Copies a row in the order of the codes.
  void read_row(BFloat16* line, const tiles::Tiled& x, int64_t row, int64_t padded) const {
    const int64_t in = w_.header->in, whole = round_up(in, tiles::kDepth);
    if (w_.order != nullptr) {
      for (int64_t i = 0; i < in; i++) line[i] = *x.at(row, w_.order[i]);
      std::fill(line + in, line + padded, BFloat16(0));
      return;
    }
    for (int64_t i = 0; i < whole; i += tiles::kDepth) std::memcpy(line + i, x.at(row, i), tiles::kTileStride);
    std::fill(line + whole, line + padded, BFloat16(0));
  }

  void finish(const BFloat16* line, int64_t row) const {
    if (w_.order != nullptr) {
      const tiles::Tiled to = memory_.operands();
      for (int64_t step = 0; step < w_.steps; step++)
        std::memcpy(to.at(row, step * tiles::kDepth), line + step * tiles::kDepth, tiles::kTileStride);
    }
    if (!has_sums()) return;
    float* sums = memory_.sums(row);
    for (int64_t group = 0; group < w_.groups; group++) {
      Vec total(0.f);
      const auto [first, last] = columns(group);
      for (int64_t i = first; i < last; i += kLanes) total = total + load(line + i);
      sums[group] = sum(total);
    }
  }

  void quantize(const BFloat16* line, int64_t row, int64_t padded) const {
    const float largest = largest_of(line, padded);
    const float inverse = largest > kSmallestRow ? kLargestInt8 / largest : 0.f;
    const bool is_finite = std::isfinite(largest);
    *memory_.scale(row) =
        is_finite ? largest / kLargestInt8 : std::numeric_limits<float>::quiet_NaN();
    const tiles::Tiled to = memory_.operands();
    const auto place = [&](int64_t i) { return reinterpret_cast<int8_t*>(to.at(row, i / 2)); };
    for (int64_t i = 0; i < padded; i += 16) save_int8(place(i / 64 * 64) + i % 64, line + i, inverse);
    if (!has_sums()) return;
    int32_t* sums = reinterpret_cast<int32_t*>(memory_.sums(row));
    for (int64_t group = 0; group < w_.groups; group++) {
      const auto [first, last] = columns(group);
      int32_t total = 0;
      for (int64_t i = first; i < last; i += 32) total += sum_int8(place(i / 64 * 64) + i % 64, 32);
      sums[group] = total;
    }
  }

  // The columns of a group, with padding.
  Range columns(int64_t group) const {
    const int64_t size = w_.is_half ? w_.depth() / 2 : w_.group_steps * w_.depth();
    return {group * size, std::min((group + 1) * size, w_.steps * w_.depth())};
  }

  CodePanels w_;
  RowMemory memory_;
};

}  // namespace millrace
