// The rows that panels of codes are multiplied with: in the order of the codes, with their sums over groups, and, for
// integer products, as integers of one or two bytes with a scale for every 32 inputs. A row is prepared from itself alone.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "codes.h"

namespace millrace {

constexpr float kLargestInt8 = 127.f;
// Its upper byte is rounded, and the lower one has a sign.
constexpr float kLargestInt16 = 127.f * 256.f;
// Inputs without a larger absolute value are rounded to zeros: their scale would have no reciprocal.
constexpr float kSmallestInputs = 1e-30f;
// Inputs of a row that are rounded with one scale.
constexpr int64_t kRounded = 32;

// 16 values, scaled and rounded to integers of 16 bits.
inline __m256i to_int16(const BFloat16* values, float scale) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(load(values) * Vec(scale)));
#else
  const auto rounded = [&](int64_t i) { return _mm256_cvtps_epi32(load(values + i) * Vec(scale)); };
  // Within each half, four of the first eight values are followed by four of the last.
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(rounded(0), rounded(kLanes)), 0xd8);
#endif
}

// Stores 16 integers of 16 bits that int8 holds.
inline void save_int8(int8_t* to, __m256i values) {
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

// Stores kRounded values, scaled and rounded to int8.
inline void save_rounded(int8_t* to, const BFloat16* values, float scale) {
  for (int64_t i = 0; i < kRounded; i += 16) save_int8(to + i, to_int16(values + i, scale));
}

// Stores kRounded values, scaled and rounded to integers of 16 bits, which are 256 times their upper bytes and lower ones.
inline void save_rounded(int8_t* upper, int8_t* lower, const BFloat16* values, float scale) {
  for (int64_t i = 0; i < kRounded; i += 16) {
    const __m256i rounded = to_int16(values + i, scale);
    const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(rounded, _mm256_set1_epi16(128)), 8);
    save_int8(upper + i, high);
    save_int8(lower + i, _mm256_sub_epi16(rounded, _mm256_slli_epi16(high, 8)));
  }
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

// The sums of both halves of kRounded integers.
inline std::pair<int32_t, int32_t> sums_int8(const int8_t* values) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  const __m256i shifted = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
  const __m256i sums = _mm256_sad_epu8(shifted, _mm256_setzero_si256());
  const auto sum = [](__m128i half) {
    return static_cast<int32_t>(_mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1) - 128 * kRounded / 2);
  };
  return {sum(_mm256_castsi256_si128(sums)), sum(_mm256_extracti128_si256(sums, 1))};
}

// Of kRounded inputs of a row: their scale, and what the integer sums of their products begin with, which takes away
// what was added to the values of the codes. Where groups are half a step, each half has a start, else the first counts.
struct RoundedInputs {
  float scale;
  int32_t starts[2];
};
static_assert(kRounded == tiles::kDepth);

// Calls body with `count`, 1 to kMost, as a compile-time constant.
template <int kMost, typename Body>
void dispatch_count(int64_t count, const Body& body) {
  if constexpr (kMost > 1)
    if (count < kMost) return dispatch_count<kMost - 1>(count, body);
  body(std::integral_constant<int, kMost>());
}

// What the prepared rows of one or several weights take.
struct RowSizes {
  int64_t columns = 0;  // of the operand, in units of two bytes
  int64_t groups = 0;   // of the sums
  int64_t rounded = 0;  // inputs with one scale each

  void add(const CodePanels& w) {
    RowSizes other;
    const int64_t steps = w.is_integer() ? (w.steps + 1) / 2 * w.header->input_parts : w.steps;
    if (w.replaces_rows()) other.columns = steps * tiles::kDepth;
    if (w.needs_sums()) other.groups = w.groups;
    if (w.is_integer()) other.rounded = w.steps;
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
    // Rows are taken by tiles.
    sums.reserve(round_up(rows, tiles::kRows) * sizes.groups * static_cast<int64_t>(sizeof(float)));
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
    const int64_t padded = w_.steps * tiles::kDepth;
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

  // Bytes of integers fill operands of 64 inputs, of which an odd last step needs half.
  void quantize(const BFloat16* line, int64_t row, int64_t padded) const {
    const tiles::Tiled to = memory_.operands();
    RoundedInputs* rounded = memory_.rounded(row);
    const bool needs_sums = w_.needs_sums();
    const bool has_lower = w_.header->input_parts == 2;
    const float most = has_lower ? kLargestInt16 : kLargestInt8;
    float* sums = memory_.sums(row);
    if (needs_sums) std::fill_n(sums, w_.groups, 0.f);
    for (int64_t i = 0; i < padded; i += kRounded, rounded++) {
      const float largest = largest_of(line + i);
      const float inverse = largest > kSmallestInputs ? most / largest : 0.f;
      int8_t* bytes = reinterpret_cast<int8_t*>(to.at(row, i / 2));
      if (has_lower) {
        save_rounded(bytes, bytes + w_.lower_bytes(), line + i, inverse);
      } else {
        save_rounded(bytes, line + i, inverse);
      }
      const float scale = std::isfinite(largest) ? largest / most : std::numeric_limits<float>::quiet_NaN();
      *rounded = {scale, {0, 0}};
      if (!needs_sums) continue;
      auto [low, high] = sums_int8(bytes);
      if (has_lower) {
        const auto [of_low, of_high] = sums_int8(bytes + w_.lower_bytes());
        low = 256 * low + of_low;
        high = 256 * high + of_high;
      }
      const int64_t parts = w_.is_half ? 2 : 1;
      for (int64_t part = 0; part < parts; part++) {
        const int32_t total = parts == 1 ? low + high : part == 0 ? low : high;
        rounded->starts[part] = static_cast<int32_t>(-w_.header->zero * total);
        const int64_t group = (i + part * kRounded / 2) / w_.header->group;
        if (group < w_.groups) sums[group] += scale * static_cast<float>(total);
      }
    }
  }

  // The columns of a group, with padding.
  Range columns(int64_t group) const {
    const int64_t size = w_.is_half ? tiles::kDepth / 2 : w_.group_steps * tiles::kDepth;
    return {group * size, std::min((group + 1) * size, w_.steps * tiles::kDepth)};
  }

  CodePanels w_;
  RowMemory memory_;
};

}  // namespace millrace
