// Turns codes into operands of products: a line of 64 bytes of codes becomes one to four rows of a right tile.
#pragma once

#include "codes.h"

namespace millrace {

using tiles::Format;

// Unpacks the lines of one kind of codes for operands of one format, by part `part` of the table.
template <Format kFormat, Codes kCodes>
class Unpacker {
 public:
  static constexpr int kRows =
      (kFormat == Format::kInt8 ? 1 : 2) * (kCodes == Codes::kTable4 || kCodes == Codes::kInteger4 ? 2 : 1);
  static constexpr int64_t kLine = 64;

  Unpacker(const CodeHeader& header, int64_t part) { set(header, header.table.parts[part]); }

#if defined(CPU_CAPABILITY_AVX512)
  void operator()(const uint8_t* line, __m512i (&rows)[kRows]) const {
    const __m512i codes = _mm512_loadu_si512(line);
    if constexpr (kFormat == Format::kInt8) {
      if constexpr (kRows == 1) {
        rows[0] = codes;
        return;
      }
      const __m512i low = _mm512_set1_epi8(0x0f);
      rows[0] = _mm512_and_si512(codes, low);
      rows[kRows - 1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
      if constexpr (kCodes == Codes::kTable4)
        for (__m512i& row : rows) row = _mm512_shuffle_epi8(table_[0], row);
    } else if constexpr (kCodes == Codes::kTable4) {
      // The lookup reads 5 bits of each index, and the table is there twice.
      rows[0] = _mm512_permutexvar_epi16(codes, table_[0]);
      rows[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table_[0]);
      rows[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table_[0]);
      rows[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table_[0]);
    } else if constexpr (kCodes == Codes::kTable8) {
      rows[0] = look_up(codes);
      rows[1] = look_up(_mm512_srli_epi16(codes, 8));
    } else {
      // A code in the mantissa of 2^23, and, one byte higher, of 2^15. The differences are exact in bfloat16.
      const __m512i odd = _mm512_srli_epi32(codes, 16);
      rows[0] = pair(value<0xff, 0x4b000000>(codes, table_[0]), value<0xff, 0x4b000000>(odd, table_[0]));
      rows[1] = pair(value<0xff00, 0x47000000>(codes, table_[1]), value<0xff00, 0x47000000>(odd, table_[1]));
    }
  }

  // Stores the rows of a line, 64 bytes each.
  void store(const uint8_t* line, char* to) const {
    __m512i rows[kRows];
    (*this)(line, rows);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; row++) _mm512_store_si512(to + row * kLine, rows[row]);
  }

 private:
  template <uint32_t kMask, uint32_t kMagic>
  static __m512i value(__m512i codes, __m512i subtracted) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i shifted =
        _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(kMask), _mm512_set1_epi32(kMagic), kAndOr);
    return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(shifted), _mm512_castsi512_ps(subtracted)));
  }

  static __m512i pair(__m512i even, __m512i odd) { return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd); }

  __m512i look_up(__m512i codes) const {
    const auto quarter = [&](int i) { return _mm512_permutex2var_epi16(table_[2 * i], codes, table_[2 * i + 1]); };
    const __mmask32 second = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x80));
    return _mm512_mask_blend_epi16(upper, _mm512_mask_blend_epi16(second, quarter(0), quarter(1)),
                                   _mm512_mask_blend_epi16(second, quarter(2), quarter(3)));
  }

  void set(const CodeHeader& header, const uint16_t* values) {
    if constexpr (kFormat == Format::kInt8) {
      table_[0] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header.bytes)));
    } else if constexpr (kCodes == Codes::kTable4) {
      table_[0] = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    } else if constexpr (kCodes == Codes::kTable8) {
      for (int i = 0; i < 8; i++) table_[i] = _mm512_loadu_si512(values + 32 * i);
    } else {
      table_[0] = _mm512_castps_si512(_mm512_set1_ps(0x1p23f + static_cast<float>(header.zero)));
      table_[1] = _mm512_castps_si512(_mm512_set1_ps(0x1p15f + static_cast<float>(header.zero)));
    }
  }

  __m512i table_[kCodes == Codes::kTable8 ? 8 : 2];
#else
  // Stores the rows of a line, 64 bytes each.
  void store(const uint8_t* line, char* to) const {
    for (int64_t half = 0; half < kLine; half += kLine / 2) store_half(line + half, to + half);
  }

 private:
  void store_half(const uint8_t* line, char* to) const {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    const auto save_row = [&](int row, __m256i values) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + row * kLine), values);
    };
    if constexpr (kFormat == Format::kInt8) {
      const auto value_of = [&](__m256i shifted) {
        const __m256i code = _mm256_and_si256(shifted, _mm256_set1_epi8(0x0f));
        return kCodes == Codes::kTable4 ? _mm256_shuffle_epi8(table_[0], code) : code;
      };
      save_row(0, kRows == 1 ? codes : value_of(codes));
      if constexpr (kRows == 2) save_row(1, value_of(_mm256_srli_epi16(codes, 4)));
    } else if constexpr (kCodes == Codes::kTable4) {
      save_row(0, look_up(codes));
      save_row(1, look_up(_mm256_srli_epi16(codes, 4)));
      save_row(2, look_up(_mm256_srli_epi16(codes, 8)));
      save_row(3, look_up(_mm256_srli_epi16(codes, 12)));
    } else if constexpr (kCodes == Codes::kTable8) {
      for (int row = 0; row < kRows; row++)
        for (int lane = 0; lane < 16; lane++)
          reinterpret_cast<uint16_t*>(to + row * kLine)[lane] = values_[line[2 * lane + row]];
    } else {
      const __m256i odd = _mm256_srli_epi32(codes, 16);
      save_row(0, pair(value<0xff, 0x4b000000>(codes, table_[0]), value<0xff, 0x4b000000>(odd, table_[0])));
      save_row(1, pair(value<0xff00, 0x47000000>(codes, table_[1]), value<0xff00, 0x47000000>(odd, table_[1])));
    }
  }

  // A code in the mantissa of 2^23, and, one byte higher, of 2^15. The differences are exact in bfloat16.
  template <uint32_t kMask, uint32_t kMagic>
  static __m256i value(__m256i codes, __m256i subtracted) {
    const __m256i shifted = _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi32(kMask)), _mm256_set1_epi32(kMagic));
    return _mm256_castps_si256(_mm256_sub_ps(_mm256_castsi256_ps(shifted), _mm256_castsi256_ps(subtracted)));
  }

  static __m256i pair(__m256i even, __m256i odd) { return _mm256_or_si256(_mm256_srli_epi32(even, 16), odd); }

  // The low and the high bytes of the values of 16 codes, which are in the low bits of 16 bits each. An index with its
  // highest bit set gives 0.
  __m256i look_up(__m256i codes) const {
    const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi16(0x0f));
    const __m256i low = _mm256_or_si256(index, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m256i high = _mm256_or_si256(_mm256_slli_epi16(index, 8), _mm256_set1_epi16(0x80));
    return _mm256_or_si256(_mm256_shuffle_epi8(table_[0], low), _mm256_shuffle_epi8(table_[1], high));
  }

  void set(const CodeHeader& header, const uint16_t* values) {
    values_ = values;
    if constexpr (kFormat == Format::kInt8) {
      table_[0] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header.bytes)));
    } else if constexpr (kCodes == Codes::kTable4) {
      alignas(16) uint8_t bytes[2][16];
      for (int code = 0; code < 16; code++) {
        bytes[0][code] = static_cast<uint8_t>(values[code]);
        bytes[1][code] = static_cast<uint8_t>(values[code] >> 8);
      }
      for (int i = 0; i < 2; i++)
        table_[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[i])));
    } else if constexpr (kCodes == Codes::kInteger8) {
      table_[0] = _mm256_castps_si256(_mm256_set1_ps(0x1p23f + static_cast<float>(header.zero)));
      table_[1] = _mm256_castps_si256(_mm256_set1_ps(0x1p15f + static_cast<float>(header.zero)));
    }
  }

  __m256i table_[2];
  const uint16_t* values_;
#endif
};

// Calls body with the kind of codes, of those that have products of the format, as a compile-time constant.
template <Format kFormat, typename Body>
void dispatch_codes(Codes codes, const Body& body) {
  if constexpr (kFormat == Format::kInt8) {
    switch (codes) {
      case Codes::kInteger4: return body(std::integral_constant<Codes, Codes::kInteger4>());
      case Codes::kInteger8: return body(std::integral_constant<Codes, Codes::kInteger8>());
      default: return body(std::integral_constant<Codes, Codes::kTable4>());
    }
  } else {
    switch (codes) {
      case Codes::kTable4: return body(std::integral_constant<Codes, Codes::kTable4>());
      case Codes::kInteger8: return body(std::integral_constant<Codes, Codes::kInteger8>());
      default: return body(std::integral_constant<Codes, Codes::kTable8>());
    }
  }
}

// Unpacks `steps` steps of codes into right tiles [steps, 2, 16, 64 bytes]. Lines from `ahead` on are prefetched.
template <Format kFormat>
void unpack_steps(const CodeHeader& header, int64_t part, const uint8_t* codes, int64_t steps, char* to,
                  const uint8_t* ahead) {
  dispatch_codes<kFormat>(header.codes, [&](auto kind) {
    using Lines = Unpacker<kFormat, kind()>;
    const Lines lines(header, part);
    const int64_t count = steps * 2 * tiles::kRows / Lines::kRows;
    for (int64_t i = 0; i < count; i++) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead) + i * Lines::kLine, _MM_HINT_T0);
      lines.store(codes + i * Lines::kLine, to + i * Lines::kRows * Lines::kLine);
    }
  });
}

// Unpacks one half of the inputs of a step into a step of right tiles. The values of the other half are 0.
inline void unpack_half_step(const CodeHeader& header, int64_t part, const uint8_t* codes, int64_t half, char* to) {
  dispatch_codes<Format::kBFloat16>(header.codes, [&](auto kind) {
    using Lines = Unpacker<Format::kBFloat16, kind()>;
    const Lines lines(header, part);
    constexpr int64_t kLines = tiles::kRows / Lines::kRows, kRowsBytes = Lines::kRows * Lines::kLine;
    for (int64_t tile = 0; tile < 2; tile++)
      for (int64_t line = 0; line < kLines; line++, codes += Lines::kLine, to += kRowsBytes) {
        if (line * 2 / kLines == half) {
          lines.store(codes, to);
        } else {
          std::memset(to, 0, kRowsBytes);
        }
      }
  });
}

}  // namespace millrace
