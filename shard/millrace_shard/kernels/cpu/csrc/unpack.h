// Turns codes into operands of exact products: a line of 64 bytes of codes becomes two or four rows of a right tile. By AVX2,
// operands are those of float_codes.h.
#pragma once

#include "codes.h"

#if defined(CPU_CAPABILITY_AVX512)
namespace millrace {

// Pairs of the upper halves of 32 bits, those of `even` first.
inline __m512i upper_halves(__m512i even, __m512i odd) {
  constexpr __mmask64 kLower = 0x3333333333333333;
  return _mm512_mask_shuffle_epi8(odd, kLower, even, _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302));
}

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
      rows[0] = upper_halves(value<0xff, 0x4b000000>(codes, table_[0]), value<0xff, 0x4b000000>(odd, table_[0]));
      rows[1] = upper_halves(value<0xff00, 0x47000000>(codes, table_[1]), value<0xff00, 0x47000000>(odd, table_[1]));
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

#ifdef MILLRACE_AMX
// Fetches lines one after the other.
class LinesAhead {
 public:
  explicit LinesAhead(const uint8_t* from) : next_(reinterpret_cast<const char*>(from)) {}

  void fetch() {
    _mm_prefetch(next_, _MM_HINT_T0);
    next_ += tiles::kTileStride;
  }
  void fetch_bytes(int64_t bytes) {
    for (; bytes > 0; bytes -= tiles::kTileStride) fetch();
  }

 private:
  const char* next_;
};

// Unpacks steps of a panel into right tiles [steps, 2, 16, 64 bytes]. What lies `ahead` bytes after their codes is
// prefetched.
inline void unpack_steps(const CodePanels& w, int64_t part, int64_t panel, Range steps, char* to, int64_t ahead) {
  dispatch_codes(w.header->codes, [&](auto kind) {
    using Lines = Unpacker<kind()>;
    const Lines lines(*w.header, part);
    const int64_t between = w.block_bytes - w.group_steps * w.step_bytes;
    int64_t left = w.group_steps - steps.low % w.group_steps;  // steps of the group
    const uint8_t* codes = w.codes(panel, steps.low);
    LinesAhead next(codes + ahead);
    char* at = to;  // in a register
    for (int64_t step = steps.low; step < steps.high; step++) {
      for (int64_t row = 0; row < 2 * tiles::kRows; row += Lines::kRows) {
        next.fetch();
        lines.store(codes, at);
        codes += Lines::kLine;
        at += Lines::kRows * Lines::kLine;
      }
      if (--left > 0) continue;
      left = w.group_steps;
      next.fetch_bytes(between);
      codes += between;
    }
  });
}

// Pairs of values of a code table, as weights of 16 outputs in bfloat16.
struct WidenedPairs {
  Vec scale, offset;

  // `low` has the low parts of the values, if there are any.
  template <bool kHasLow>
  [[gnu::always_inline]] __m512i operator()(__m512i pairs, __m512i low) const {
    Vec even = even_of(pairs), odd = odd_of(pairs);
    if (kHasLow) {
      even = even + even_of(low);
      odd = odd + odd_of(low);
    }
    even = at::vec::fmadd(even, scale, offset);
    odd = at::vec::fmadd(odd, scale, offset);
    return upper_halves(rounded(even), rounded(odd));
  }

 private:
  // Half a unit of the upper half is added: a conversion to bfloat16 takes four times as long as an addition.
  static __m512i rounded(const Vec& value) {
    return _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
  }
  static Vec even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static Vec odd_of(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
};

// The scales and offsets of groups of at most a step, which follow each step's codes. Units are read once for all groups
// that share them.
class StepScales {
 public:
  StepScales(const CodePanels& w, int64_t panel) : w_(w), panel_(panel) {}

  // Those of a group, for 16 outputs from `first` on. `scales`: where the group's scales are.
  [[gnu::always_inline]] WidenedPairs of(int64_t group, const uint8_t* scales, int64_t first) {
    const CodeHeader& header = *w_.header;
    const int64_t inputs = group * header.group / kUnitInputs * kUnitInputs;
    if (w_.unit_size > 0 && inputs != inputs_) read_units(group, inputs);
    const int64_t i = first / kLanes;
    return {scaled(scales, header.scales, first, units_[0][i]),
            w_.offset_size == 0 ? Vec(0.f) : scaled(scales + w_.scale_size, header.offsets, first, units_[1][i])};
  }

 private:
  void read_units(int64_t group, int64_t inputs) {
    inputs_ = inputs;
    const bool have_scales = w_.header->scales == ScaleType::kUnits, have_offsets = w_.header->offsets == ScaleType::kUnits;
    for (int64_t i = 0; i < 2; i++) {
      if (have_scales) units_[0][i] = w_.load_unit(panel_, group, false, i * kLanes);
      if (have_offsets) units_[1][i] = w_.load_unit(panel_, group, have_scales, i * kLanes);
    }
  }

  static Vec scaled(const uint8_t* from, ScaleType type, int64_t i, const Vec& unit) {
    return type == ScaleType::kUnits ? load_int8(from + i) * unit : load_scales(from, type, i, nullptr);
  }

  const CodePanels& w_;
  int64_t panel_, inputs_ = -1;
  Vec units_[2][2];
};

// The same, but of weights in bfloat16; groups have at most one step. Steps are kept in a ring of kRing, and `between(step,
// tile)` is called after each tile, for other work that leaves the vector registers free.
template <int64_t kRing, typename Between>
void widen_steps(const CodePanels& w, int64_t panel, Range steps, char* to, int64_t ahead, const Between& between) {
  constexpr int64_t kStep = 2 * tiles::kRows * tiles::kTileStride;
  const auto widen = [=, &w](auto kind, auto has_low) {
    using Lines = Unpacker<kind()>;
    const Lines high(*w.header, 0), low(*w.header, has_low() ? 1 : 0);
    const int64_t halves = w.is_half ? 2 : 1, lines = tiles::kRows / Lines::kRows / halves;
    StepScales scales(w, panel);
    const uint8_t* codes = w.codes(panel, steps.low);
    LinesAhead next(codes + ahead);
    for (int64_t step = steps.low; step < steps.high; step++) {
      const uint8_t* of_groups = codes + w.step_bytes;
      char* at = to + (step - steps.low) % kRing * kStep;
      for (int64_t i = 0; i < 2 * halves; i++) {
        const int64_t half = i % halves;
        // Inputs after the last group are zeros.
        const int64_t group = std::min(step * halves + half, w.groups - 1), of = group - step * halves;
        const WidenedPairs pairs =
            scales.of(group, of_groups + of * (w.scale_size + w.offset_size), i / halves * tiles::kColumns);
        for (int64_t line = 0; line < lines; line++, codes += Lines::kLine) {
          next.fetch();
          __m512i values[Lines::kRows], rest[Lines::kRows];
          high(codes, values);
          if (has_low()) low(codes, rest);
#pragma GCC unroll 4
          for (int row = 0; row < Lines::kRows; row++, at += tiles::kTileStride)
            _mm512_store_si512(at, pairs.template operator()<has_low()>(values[row], has_low() ? rest[row] : values[row]));
        }
        if (half + 1 == halves) between(step, i / halves);
      }
      next.fetch_bytes(w.block_bytes - w.step_bytes);
      codes += w.block_bytes - w.step_bytes;
    }
  };
  dispatch_codes(w.header->codes, [&](auto kind) {
    w.header->parts > 1 ? widen(kind, std::true_type()) : widen(kind, std::false_type());
  });
}
#endif

}  // namespace millrace
#endif
