// Turns codes into operands of exact products: a line of 64 bytes of codes becomes two or four rows of a right tile. By AVX2,
// operands are those of float_codes.h.
#pragma once

#include "codes.h"

#if defined(CPU_CAPABILITY_AVX512)
namespace millrace {

// Unpacks the lines of one kind of codes, by part `part` of the table.
template <Codes kCodes>
class Unpacker {
 public:
  static constexpr int kRows = kCodes == Codes::kTable4 ? 4 : 2;
  static constexpr int64_t kLine = 64;

  Unpacker(const CodeHeader& header, int64_t part) { set(header, header.table.parts[part]); }

  void operator()(const uint8_t* line, __m512i (&rows)[kRows]) const {
    const __m512i codes = _mm512_loadu_si512(line);
    if constexpr (kCodes == Codes::kTable4) {
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

  // The upper halves of both, those of `even` first.
  static __m512i pair(__m512i even, __m512i odd) {
    constexpr __mmask64 kLower = 0x3333333333333333;
    return _mm512_mask_shuffle_epi8(odd, kLower, even, _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302));
  }

  __m512i look_up(__m512i codes) const {
    const auto quarter = [&](int i) { return _mm512_permutex2var_epi16(table_[2 * i], codes, table_[2 * i + 1]); };
    const __mmask32 second = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x80));
    return _mm512_mask_blend_epi16(upper, _mm512_mask_blend_epi16(second, quarter(0), quarter(1)),
                                   _mm512_mask_blend_epi16(second, quarter(2), quarter(3)));
  }

  void set(const CodeHeader& header, const uint16_t* values) {
    if constexpr (kCodes == Codes::kTable4) {
      table_[0] = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    } else if constexpr (kCodes == Codes::kTable8) {
      for (int i = 0; i < 8; i++) table_[i] = _mm512_loadu_si512(values + 32 * i);
    } else {
      table_[0] = _mm512_castps_si512(_mm512_set1_ps(0x1p23f + static_cast<float>(header.zero)));
      table_[1] = _mm512_castps_si512(_mm512_set1_ps(0x1p15f + static_cast<float>(header.zero)));
    }
  }

  __m512i table_[kCodes == Codes::kTable8 ? 8 : 2];
};

// Calls body with the kind of codes, of those that have exact products, as a compile-time constant.
template <typename Body>
void dispatch_codes(Codes codes, const Body& body) {
  switch (codes) {
    case Codes::kTable4: return body(std::integral_constant<Codes, Codes::kTable4>());
    case Codes::kInteger8: return body(std::integral_constant<Codes, Codes::kInteger8>());
    default: return body(std::integral_constant<Codes, Codes::kTable8>());
  }
}

// Unpacks `steps` steps of codes into right tiles [steps, 2, 16, 64 bytes]. Lines from `ahead` on are prefetched.
inline void unpack_steps(const CodeHeader& header, int64_t part, const uint8_t* codes, int64_t steps, char* to,
                         const uint8_t* ahead) {
  dispatch_codes(header.codes, [&](auto kind) {
    using Lines = Unpacker<kind()>;
    const Lines lines(header, part);
    const int64_t count = steps * 2 * tiles::kRows / Lines::kRows;
    for (int64_t i = 0; i < count; i++) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead) + i * Lines::kLine, _MM_HINT_T0);
      lines.store(codes + i * Lines::kLine, to + i * Lines::kRows * Lines::kLine);
    }
  });
}

#ifdef MILLRACE_AMX
// Unpacks one half of the inputs of a step into a step of right tiles. The values of the other half are 0.
inline void unpack_half_step(const CodeHeader& header, int64_t part, const uint8_t* codes, int64_t half, char* to) {
  dispatch_codes(header.codes, [&](auto kind) {
    using Lines = Unpacker<kind()>;
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
#endif

}  // namespace millrace
#endif
