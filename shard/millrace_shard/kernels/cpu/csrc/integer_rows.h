// Integer products of a few rows at a time with panels of codes.
//
// Sums over kRounded inputs are exact. They are added to the row's result one after the other, scaled as a weight's
// group and the row's inputs are. So a row's bits depend neither on other rows nor on the unit that computes the sums.
#pragma once

#include "coded_rows.h"
#include "unpack.h"

namespace millrace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kMostIntegerRows = 8;
#else
constexpr int64_t kMostIntegerRows = 4;
#endif

// total + scale * (sums * worth), for kLanes outputs.
inline Vec add_scaled(const Vec& total, const Vec& sums, float worth, const Vec& scale) {
  return at::vec::fmadd(sums * Vec(worth), scale, total);
}

// The scales and the offsets of a group, for 32 outputs.
struct GroupScales {
  static constexpr int kVectors = kPanelColumns / kLanes;
  Vec scales[kVectors], offsets[kVectors];

  GroupScales(const CodePanels& w, const uint8_t* from) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) scales[i] = load_scales(from, w.header->scales, i * kLanes);
    if (w.offset_size == 0) return;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) offsets[i] = load_scales(from + w.scale_size, w.header->offsets, i * kLanes);
  }
};

template <Codes kCodes, int kRows>
class IntegerRows {
 public:
  IntegerRows(const CodePanels& w, const CodedRows& rows) : w_(w), rows_(rows) {}

  // sums [kRows, 32] = left [kRows, K] x panel. `left` has row `first`.
  void operator()(int64_t panel, const BFloat16* left, int64_t first, float* sums) const {
    Totals totals;
    totals.clear();
    const RoundedInputs* rounded = rows_.rounded(first);
    const uint8_t* block = w_.data + panel * w_.panel_bytes;
    const Lines lines(*w_.header, 0);
    int64_t group = 0;
    for (int64_t step = 0; step < w_.steps; step += w_.group_steps, block += w_.block_bytes) {
      const int64_t count = std::min(w_.group_steps, w_.steps - step);
      const uint8_t *codes = block, *scales = block + count * w_.step_bytes;
      const int64_t parts = w_.is_half ? 2 : 1, halves = w_.is_half ? 1 : 2 * count;
      for (int64_t part = 0; part < parts && group < w_.groups; part++, group++) {
        const GroupScales of(w_, scales + part * (w_.scale_size + w_.offset_size));
        for (int64_t half = part; half < part + halves; half++, rounded++)
          add(lines, codes + half / 2 * w_.step_bytes, half % 2, left + half / 2 * tiles::kTile, rounded, of, totals);
        if (w_.offset_size > 0) add_offsets(first, group, of, totals);
      }
      left += count * tiles::kTile;
    }
    totals.store(sums);
  }

 private:
  using Lines = Unpacker<tiles::Format::kInt8, kCodes>;
  static constexpr int kVectors = GroupScales::kVectors;
  static constexpr int64_t kQuads = kRounded / 4;
  static constexpr int64_t kLinesOfHalf = kQuads / Lines::kRows;
  static constexpr int64_t kAhead = 4096;

#if defined(CPU_CAPABILITY_AVX512)
  struct Totals {
    Vec values[kVectors][kRows];

    void clear() {
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; i++)
#pragma GCC unroll 8
        for (int row = 0; row < kRows; row++) values[i][row] = Vec(0.f);
    }
    void store(float* sums) const {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i++) save(sums + row * kPanelColumns + i * kLanes, values[i][row]);
    }
  };

  // Adds the products of one half of a step, whose codes are at `codes`.
  void add(const Lines& lines, const uint8_t* codes, int64_t half, const BFloat16* left, const RoundedInputs* rounded,
           const GroupScales& of, Totals& totals) const {
    const int64_t stride = rows_.rounded_stride();
    codes += half * kLinesOfHalf * Lines::kLine;
    left += half * tiles::kDepth / 2;
#pragma GCC unroll 2
    for (int tile = 0; tile < kVectors; tile++, codes += 2 * kLinesOfHalf * Lines::kLine) {
      __m512i values[kQuads];
#pragma GCC unroll 8
      for (int line = 0; line < kLinesOfHalf; line++) {
        const uint8_t* from = codes + line * Lines::kLine;
        _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
        __m512i of_line[Lines::kRows];
        lines(from, of_line);
#pragma GCC unroll 2
        for (int i = 0; i < Lines::kRows; i++) values[line * Lines::kRows + i] = of_line[i];
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) {
        __m512 sum = _mm512_castsi512_ps(_mm512_set1_epi32(rounded[row * stride].start));
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; quad++)
          sum = avx512::add_products<tiles::Format::kInt8>(
              sum, avx512::load_left(left + row * tiles::kDepth + 2 * quad), values[quad]);
        const Vec number = _mm512_cvtepi32_ps(_mm512_castps_si512(sum));
        totals.values[tile][row] =
            add_scaled(totals.values[tile][row], number, rounded[row * stride].scale, of.scales[tile]);
      }
    }
  }

  void add_offsets(int64_t first, int64_t group, const GroupScales& of, Totals& totals) const {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++) {
      const Vec sum(rows_.sums(first + row)[group]);
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; i++)
        totals.values[i][row] = at::vec::fmadd(of.offsets[i], sum, totals.values[i][row]);
    }
  }
#else
  // Totals do not fit into registers beside sums.
  struct Totals {
    alignas(64) float values[kRows * kPanelColumns];

    void clear() { std::fill_n(values, kRows * kPanelColumns, 0.f); }
    void store(float* sums) const { std::memcpy(sums, values, sizeof values); }
  };

  // Adds the products of one half of a step, whose codes are at `codes`. Quads are split into their even and their odd
  // values, which are widened to 16 bits: 8 bits cannot hold the products of quads.
  void add(const Lines& lines, const uint8_t* codes, int64_t half, const BFloat16* left, const RoundedInputs* rounded,
           const GroupScales& of, Totals& totals) const {
    const int64_t stride = rows_.rounded_stride();
    codes += half * kLinesOfHalf * Lines::kLine;
    left += half * tiles::kDepth / 2;
    alignas(32) int32_t even[kRows][kQuads], odd[kRows][kQuads];
    for (int row = 0; row < kRows; row++) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(left + row * tiles::kDepth));
      const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
      _mm256_store_si256(reinterpret_cast<__m256i*>(even[row]), low);
      _mm256_store_si256(reinterpret_cast<__m256i*>(odd[row]), _mm256_srai_epi16(bytes, 8));
    }
    for (int i = 0; i < kVectors; i++) {
      const int tile = i / 2;
      alignas(64) char values[kQuads * Lines::kLine];
      const uint8_t* from = codes + tile * 2 * kLinesOfHalf * Lines::kLine;
      if (i % 2 == 0)
        for (int line = 0; line < kLinesOfHalf; line++, from += Lines::kLine) {
          _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
          lines.store(from, values + line * Lines::kRows * Lines::kLine);
        }
      __m256i sums[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; row++) sums[row] = _mm256_set1_epi32(rounded[row * stride].start);
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuads; quad++) {
        const __m256i both =
            _mm256_load_si256(reinterpret_cast<const __m256i*>(values + quad * Lines::kLine + i % 2 * 32));
        const __m256i right_even = _mm256_and_si256(both, _mm256_set1_epi16(0xff));
        const __m256i right_odd = _mm256_srli_epi16(both, 8);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; row++) {
          sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(_mm256_set1_epi32(even[row][quad]), right_even));
          sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(_mm256_set1_epi32(odd[row][quad]), right_odd));
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; row++) {
        float* to = totals.values + row * kPanelColumns + i * kLanes;
        const Vec number = _mm256_cvtepi32_ps(sums[row]);
        save(to, add_scaled(load(to), number, rounded[row * stride].scale, of.scales[i]));
      }
    }
  }

  void add_offsets(int64_t first, int64_t group, const GroupScales& of, Totals& totals) const {
    for (int row = 0; row < kRows; row++)
      for (int i = 0; i < kVectors; i++) {
        float* to = totals.values + row * kPanelColumns + i * kLanes;
        save(to, at::vec::fmadd(of.offsets[i], Vec(rows_.sums(first + row)[group]), load(to)));
      }
  }
#endif

  const CodePanels& w_;
  const CodedRows& rows_;
};

// sums [rows, 32] = left [rows, K] x panel, for 1 to kMostIntegerRows rows, of which the first is `first`.
inline void multiply_integers(const CodePanels& w, const CodedRows& prepared, int64_t panel, const BFloat16* left,
                              int64_t first, int64_t rows, float* sums) {
  dispatch_codes<tiles::Format::kInt8>(w.header->codes, [&](auto kind) {
    switch (rows) {
      case 1: return IntegerRows<kind(), 1>(w, prepared)(panel, left, first, sums);
      case 2: return IntegerRows<kind(), 2>(w, prepared)(panel, left, first, sums);
      case 3: return IntegerRows<kind(), 3>(w, prepared)(panel, left, first, sums);
#if defined(CPU_CAPABILITY_AVX512)
      case 4: return IntegerRows<kind(), 4>(w, prepared)(panel, left, first, sums);
      case 5: return IntegerRows<kind(), 5>(w, prepared)(panel, left, first, sums);
      case 6: return IntegerRows<kind(), 6>(w, prepared)(panel, left, first, sums);
      case 7: return IntegerRows<kind(), 7>(w, prepared)(panel, left, first, sums);
#endif
      default: return IntegerRows<kind(), kMostIntegerRows>(w, prepared)(panel, left, first, sums);
    }
  });
}

}  // namespace millrace
