// Products of a few rows at a time with panels of codes, by AVX-512: codes become operands in registers.
//
// A row's sums run over the inputs of a group in the order of tiles::multiply, and over groups in order, so that its
// bits are those that it has among many rows.
#pragma once

#include "coded_rows.h"
#include "unpack.h"

namespace millrace {

constexpr int64_t kFewSteps = 8;  // that are unpacked at once for a single block of rows

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kMostFewRows = 8;

template <Codes kCodes, int kRows>
class FewRows {
 public:
  FewRows(const CodePanels& w, const CodedRows& rows) : w_(w), rows_(rows) {}

  // sums [kRows, 32] = left [kRows, K] x panel. `left` has row `first`.
  void operator()(int64_t panel, const BFloat16* left, int64_t first, float* sums) const {
    __m512 totals[2][kRows];
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++)
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) totals[tile][row] = _mm512_setzero_ps();
    int64_t group = 0;
    // A chain of sums waits for each of its products, so two groups are summed at once.
    constexpr int kTogether = kRows <= 2 ? 2 : 1;
    const int64_t whole = w_.is_half || w_.header->parts > 1 ? 0 : w_.steps / w_.group_steps;
    for (; group + kTogether <= whole; group += kTogether) {
      __m512 partial[kTogether][2][kRows] = {};
      add_groups<kTogether, false>(panel, {group * w_.group_steps, w_.group_steps, 0}, 0, left, partial);
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; i++) scale(panel, group + i, first, partial[i], totals);
    }
    for (; group < w_.groups; group++) {
      __m512 partial[1][2][kRows] = {};
      add_group(panel, group, left, partial);
      scale(panel, group, first, partial[0], totals);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; tile++)
        _mm512_store_ps(sums + row * kPanelColumns + tile * tiles::kColumns, totals[tile][row]);
  }

 private:
  using Lines = Unpacker<Format::kBFloat16, kCodes>;
  static constexpr int64_t kLines = tiles::kRows / Lines::kRows;  // of a tile and step
  static constexpr int64_t kAhead = 4096;

  struct Steps {
    int64_t first, count, half;  // the half is of interest where groups are half a step
  };

  // Adds the products of a group. With tables in two parts, they are taken in the order in which CodeLoop takes them.
  void add_group(int64_t panel, int64_t group, const BFloat16* left, __m512 (&partial)[1][2][kRows]) const {
    if (w_.is_half) {
      for (int64_t part = 0; part < w_.header->parts; part++)
        add_groups<1, true>(panel, {group / 2, 1, group % 2}, part, left, partial);
      return;
    }
    const int64_t end = std::min((group + 1) * w_.group_steps, w_.steps);
    const bool is_whole = w_.header->parts == 1 || w_.group_steps <= kFewSteps;
    for (int64_t step = group * w_.group_steps, next; step < end; step = next) {
      next = is_whole ? end : std::min(end, round_down(step, kFewSteps) + kFewSteps);
      for (int64_t part = 0; part < w_.header->parts; part++)
        add_groups<1, false>(panel, {step, next - step, 0}, part, left, partial);
    }
  }

  // Adds the products of some steps of kGroups groups that follow each other; with kHalf, of one half of a step.
  template <int kGroups, bool kHalf>
  void add_groups(int64_t panel, Steps steps, int64_t part, const BFloat16* left,
                  __m512 (&partial)[kGroups][2][kRows]) const {
    const Lines lines(*w_.header, part);
    const uint8_t* codes = w_.codes(panel, steps.first);
    left += steps.first * tiles::kTile + (kHalf ? steps.half * tiles::kDepth / 2 : 0);
    if (kHalf) codes += steps.half * kLines / 2 * Lines::kLine;
    for (int64_t done = 0; done < steps.count; done++, left += tiles::kTile)
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; tile++, codes += kLines * Lines::kLine)
#pragma GCC unroll 8
        for (int64_t line = 0; line < (kHalf ? kLines / 2 : kLines); line++)
#pragma GCC unroll 2
          for (int group = 0; group < kGroups; group++) {
            const uint8_t* from = codes + line * Lines::kLine + group * w_.block_bytes;
            _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
            __m512i values[Lines::kRows];
            lines(from, values);
            const BFloat16* pair = left + group * w_.group_steps * tiles::kTile + line * Lines::kRows * 2;
#pragma GCC unroll 4
            for (int i = 0; i < Lines::kRows; i++)
#pragma GCC unroll 8
              for (int row = 0; row < kRows; row++)
                partial[group][tile][row] = avx512::add_products<Format::kBFloat16>(
                    partial[group][tile][row],
                    avx512::load_left(pair + row * tiles::kDepth + 2 * i), values[i]);
          }
  }

  // totals += scales * partial + offsets * (sum of the row over the group)
  void scale(int64_t panel, int64_t group, int64_t first, const __m512 (&partial)[2][kRows],
             __m512 (&totals)[2][kRows]) const {
    const uint8_t* scales = w_.scales(panel, group);
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++) {
      const __m512 factor = load_scales(scales, w_.header->scales, tile * tiles::kColumns);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
        totals[tile][row] = _mm512_fmadd_ps(factor, partial[tile][row], totals[tile][row]);
    }
    if (w_.offset_size == 0) return;
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++) {
      const __m512 offset = load_scales(scales + w_.scale_size, w_.header->offsets, tile * tiles::kColumns);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
        totals[tile][row] =
            _mm512_fmadd_ps(offset, _mm512_set1_ps(rows_.sums(first + row)[group]), totals[tile][row]);
    }
  }

  const CodePanels& w_;
  const CodedRows& rows_;
};

// sums [rows, 32] = left [rows, K] x panel, for 1 to 8 rows, of which the first is `first`. Sums of further rows, up to
// the eighth, are undefined.
inline void multiply_few(const CodePanels& w, const CodedRows& prepared, int64_t panel, const BFloat16* left,
                         int64_t first, int64_t rows, float* sums) {
  dispatch_codes<Format::kBFloat16>(w.header->codes, [&](auto kind) {
    switch (rows) {
      case 1: return FewRows<kind(), 1>(w, prepared)(panel, left, first, sums);
      case 2: return FewRows<kind(), 2>(w, prepared)(panel, left, first, sums);
      case 3: return FewRows<kind(), 3>(w, prepared)(panel, left, first, sums);
      case 4: return FewRows<kind(), 4>(w, prepared)(panel, left, first, sums);
      case 5: return FewRows<kind(), 5>(w, prepared)(panel, left, first, sums);
      case 6: return FewRows<kind(), 6>(w, prepared)(panel, left, first, sums);
      case 7: return FewRows<kind(), 7>(w, prepared)(panel, left, first, sums);
      default: return FewRows<kind(), 8>(w, prepared)(panel, left, first, sums);
    }
  });
}
#endif

}  // namespace millrace
