// Turns codes into float32 operands, by AVX2: its products are of float32, so values need no form in between.
#pragma once

#include "codes.h"

#if defined(CPU_CAPABILITY_AVX2)
#include <cmath>
#include <utility>

namespace millrace {

// How the codes of a weight become floats: kSigned are integers around 0, kUnsigned4 integers from 0 on, and kShifted8
// integers from any other one on.
enum class FloatCodes { kSigned4, kUnsigned4, kTable4, kSigned8, kShifted8, kTable8 };

// Calls body with each of 0 to kCount - 1 as a compile-time constant.
template <int kCount, typename Body>
[[gnu::always_inline]] inline void unrolled(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndex>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// The values of a line of codes: 32 bits of it have the codes of a column, first those of the even inputs of kPairs
// pairs, and then those of the odd ones.
template <FloatCodes kKind>
class FloatLines {
 public:
  static constexpr bool kIsShort = kKind <= FloatCodes::kTable4;
  static constexpr bool kIsSigned = kKind == FloatCodes::kSigned4 || kKind == FloatCodes::kSigned8;
  static constexpr bool kHasTable = kKind == FloatCodes::kTable4 || kKind == FloatCodes::kTable8;
  static constexpr int kBits = kIsShort ? 4 : 8, kInputs = 32 / kBits, kPairs = kInputs / 2;
  static constexpr int64_t kLine = 64, kLines = tiles::kDepth / kInputs;  // of a tile

  explicit FloatLines(const CodeHeader& header) {
    if constexpr (kHasTable) {
      for (int64_t code = 0; code < kValues; code++) {
        const auto part = [&](int64_t i) {
          return static_cast<float>(BFloat16(header.table.parts[i][code], BFloat16::from_bits()));
        };
        reinterpret_cast<float*>(table_)[code] = part(0) + part(1);
      }
    } else {
      table_[0] = _mm256_set1_ps(static_cast<float>(header.zero));
    }
  }

  // The codes of half a line, as `value` takes them.
  [[gnu::always_inline]] static __m256i load_half(const uint8_t* from) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    // The highest bit of every code becomes its sign.
    return kIsSigned ? _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(kIsShort ? 0x88 : 0x80))) : codes;
  }

  // The i-th input's value, of eight columns.
  template <int kInput>
  [[gnu::always_inline]] __m256 value(__m256i codes) const {
    constexpr int kBit = (kInput % 2 * kPairs + kInput / 2) * kBits;
    if constexpr (kIsSigned) {
      const __m256i above = kBit + kBits == 32 ? codes : _mm256_slli_epi32(codes, 32 - kBits - kBit);
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(above, 32 - kBits));
    } else if constexpr (kKind == FloatCodes::kTable4) {
      // The lookup reads 3 bits of each index; the fourth selects the half of the table.
      const __m256i index = _mm256_srli_epi32(codes, kBit), upper = _mm256_slli_epi32(codes, 32 - kBits - kBit);
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table_[0], index),
                              _mm256_permutevar8x32_ps(table_[1], index), _mm256_castsi256_ps(upper));
    } else {
      const __m256i below = kBit == 0 ? codes : _mm256_srli_epi32(codes, kBit);
      const __m256i code =
          kBit + kBits == 32 ? below : _mm256_and_si256(below, _mm256_set1_epi32((1 << kBits) - 1));
      if constexpr (kHasTable)
        return _mm256_i32gather_ps(reinterpret_cast<const float*>(table_), code, sizeof(float));
      const __m256 number = _mm256_cvtepi32_ps(code);
      return kKind == FloatCodes::kUnsigned4 ? number : _mm256_sub_ps(number, table_[0]);
    }
  }

 private:
  static constexpr int64_t kValues = kIsShort ? 16 : 256;
  __m256 table_[kHasTable ? kValues / kLanes : 1];
};

// Whether the value of every code of 4 bits is the code minus `zero`.
inline bool is_shifted(const CodeHeader& header, int64_t zero) {
  for (int64_t code = 0; code < 16; code++)
    if (header.parts != 1 || header.table.parts[0][code] != BFloat16(static_cast<float>(code - zero)).x) return false;
  return true;
}

// Calls body with the kind of a weight's codes as a compile-time constant.
template <typename Body>
void dispatch_floats(const CodeHeader& header, const Body& body) {
  using Kind = FloatCodes;
  if (header.codes == Codes::kTable8) return body(std::integral_constant<Kind, Kind::kTable8>());
  if (header.codes == Codes::kInteger8) {
    if (header.zero == 128) return body(std::integral_constant<Kind, Kind::kSigned8>());
    return body(std::integral_constant<Kind, Kind::kShifted8>());
  }
  if (is_shifted(header, 8)) return body(std::integral_constant<Kind, Kind::kSigned4>());
  if (is_shifted(header, 0)) return body(std::integral_constant<Kind, Kind::kUnsigned4>());
  return body(std::integral_constant<Kind, Kind::kTable4>());
}

// Stores steps of rows as floats, `stride` values from row to row.
inline void widen_rows(float* to, int64_t stride, const tiles::Tiled& x, Range rows, Range steps) {
  for (int64_t row = rows.low; row < rows.high; row++, to += stride)
    for (int64_t step = steps.low; step < steps.high; step++) {
      const BFloat16* from = x.at(row, step * tiles::kDepth);
      for (int64_t i = 0; i < tiles::kDepth; i += kLanes)
        save(to + (step - steps.low) * tiles::kDepth + i, load(from + i));
    }
}

}  // namespace millrace
#endif
