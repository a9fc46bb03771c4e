// The rows that panels of codes are multiplied with: in the order of the codes, with their sums over groups, and, for
// integer products, as int8 with a scale for every 32 inputs. A row is prepared from itself alone.
#pragma once

#include <cmath>
#include <limits>

#include "codes.h"

namespace millrace {

constexpr float kLargestInt8 = 127.f;
// Inputs without a larger absolute value are rounded to zeros: their scale would have no reciprocal.
constexpr float kSmallestInputs = 1e-30f;
// Inputs of a row that are rounded to int8 with one scale.
constexpr int64_t kRounded = 32;

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

// The largest absolute value of kRounded values; not finite if any value is not.
inline float largest_of(const BFloat16* values) {
  const __m256i* from = reinterpret_cast<const __m256i*>(values);
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  const __m256i most = _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256(from), magnitude),
                                        _mm256_and_si256(_mm256_loadu_si256(from + 1), magnitude));
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  // There is an instruction for the least of 8 integers.
  const __m128i ones = _mm_set1_epi16(-1);
  const int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, ones)), 0);
  return static_cast<float>(BFloat16(static_cast<uint16_t>(~least), BFloat16::from_bits()));
}

// The sum of kRounded integers.
inline int32_t sum_int8(const int8_t* values) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  const __m256i shifted = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
  const __m256i sums = _mm256_sad_epu8(shifted, _mm256_setzero_si256());
  const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return static_cast<int32_t>(_mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1) - 128 * kRounded);
}

// Of kRounded inputs of a row: their scale, and what the integer sums of their products begin with, which takes away
// what was added to the values of the codes.
struct RoundedInputs {
  float scale;
  int32_t start;
};

// What the prepared rows of one or several weights take.
struct RowSizes {
  int64_t columns = 0;  // of the operand, in units of two bytes
  int64_t groups = 0;   // of the sums
  int64_t rounded = 0;  // inputs with one scale each

  void add(const CodePanels& w) {
    RowSizes other;
    if (w.replaces_rows()) other.columns = w.steps * tiles::kDepth;
    if (w.needs_sums()) other.groups = w.groups;
    if (w.is_integer()) other.rounded = w.steps * w.depth() / kRounded;
    add(other);
  }
  void add(const RowSizes& other) {
    columns = std::max(columns, other.columns);
    groups = std::max(groups, other.groups);
    rounded = std::max(rounded, other.rounded);
  }
  bool any() const { return columns > 0 || groups > 0; }
};

// Memory for prepared rows. Instances of a thread share it.
class RowMemory {
 public:
  // Makes room for `rows` rows.
  RowMemory(const RowSizes& sizes, int64_t rows) : sizes_(sizes) {
    static thread_local Scratch operands, sums, rounded;
    operands_ = &operands;
    sums_ = &sums;
    rounded_ = &rounded;
    operands.reserve(tiles::Tiled::bytes(rows, sizes.columns));
    sums.reserve(rows * sizes.groups * static_cast<int64_t>(sizeof(float)));
    rounded.reserve(rows * sizes.rounded * static_cast<int64_t>(sizeof(RoundedInputs)));
  }

  tiles::Tiled operands() const { return {operands_->data(), sizes_.columns}; }
  float* sums(int64_t row) const { return reinterpret_cast<float*>(sums_->data()) + row * sizes_.groups; }
  RoundedInputs* rounded(int64_t row) const {
    return reinterpret_cast<RoundedInputs*>(rounded_->data()) + row * sizes_.rounded;
  }
  // From one row to the next.
  int64_t rounded_stride() const { return sizes_.rounded; }

 private:
  RowSizes sizes_;
  Scratch *operands_, *sums_, *rounded_;
};

// The rows of a product with panels of codes.
class CodedRows {
 public:
  // Rows in `memory`, whose sizes fit the weight.
  CodedRows(const CodePanels& w, const RowMemory& memory) : w_(w), memory_(memory) {}

  bool needs_work() const { return w_.replaces_rows() || w_.needs_sums(); }

  // The operand of products: `x` itself, if rows are multiplied as they are.
  tiles::Tiled operand(const tiles::Tiled& x) const { return w_.replaces_rows() ? memory_.operands() : x; }
  // [groups] of a row: the sums of its inputs, as they are multiplied.
  const float* sums(int64_t row) const { return memory_.sums(row); }
  // [inputs / kRounded] of a row, for integer products.
  const RoundedInputs* rounded(int64_t row) const { return memory_.rounded(row); }
  int64_t rounded_stride() const { return memory_.rounded_stride(); }

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
    if (!w_.needs_sums()) return;
    float* sums = memory_.sums(row);
    for (int64_t group = 0; group < w_.groups; group++) {
      Vec total(0.f);
      const auto [first, last] = columns(group);
      for (int64_t i = first; i < last; i += kLanes) total = total + load(line + i);
      sums[group] = sum(total);
    }
  }

  void quantize(const BFloat16* line, int64_t row, int64_t padded) const {
    const tiles::Tiled to = memory_.operands();
    RoundedInputs* rounded = memory_.rounded(row);
    const bool needs_sums = w_.needs_sums();
    float* sums = memory_.sums(row);
    if (needs_sums) std::fill_n(sums, w_.groups, 0.f);
    for (int64_t i = 0; i < padded; i += kRounded, rounded++) {
      const float largest = largest_of(line + i);
      const float inverse = largest > kSmallestInputs ? kLargestInt8 / largest : 0.f;
      int8_t* bytes = reinterpret_cast<int8_t*>(to.at(row, i / 2));
      save_int8(bytes, line + i, inverse);
      save_int8(bytes + kRounded / 2, line + i + kRounded / 2, inverse);
      *rounded = {std::isfinite(largest) ? largest / kLargestInt8 : std::numeric_limits<float>::quiet_NaN(), 0};
      if (!needs_sums) continue;
      const int32_t total = sum_int8(bytes);
      rounded->start = static_cast<int32_t>(-w_.header->zero * total);
      sums[std::min(i / w_.header->group, w_.groups - 1)] += rounded->scale * static_cast<float>(total);
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
