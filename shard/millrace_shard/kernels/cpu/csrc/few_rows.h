// Products of a few rows at a time with panels of codes: codes become operands in registers.
//
// A row's sums run over the inputs of a group in the order of ManyRows, and over groups in order, so that its bits are
// those that it has among many rows.
#pragma once

#include "coded_rows.h"
#include "float_codes.h"
#include "unpack.h"

namespace millrace {

// Where the products of a group of inputs are: whole steps, or one half of a step.
struct GroupSteps {
  int64_t first, count, half;

  static GroupSteps of(const CodePanels& w, int64_t group) {
    if (w.is_half) return {group / 2, 1, group % 2};
    const int64_t first = group * w.group_steps;
    return {first, std::min(w.group_steps, w.steps - first), 0};
  }
};

// The results of kRows rows for a panel.
template <int kRows>
struct PanelTotals {
  static constexpr int kVectors = kPanelColumns / kLanes;
  Lanes values[kVectors][kRows] = {};

  // Adds scales * sums + offsets * (sum of the row over the group) to kCount vectors from `begin` on.
  template <int kCount>
  [[gnu::always_inline]] void add(const CodePanels& w, const CodedRows& rows, int64_t panel, int64_t group,
                                  int64_t first, int begin, const Lanes (&sums)[kCount][kRows]) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i++) {
      const Vec scale = w.load_scale(panel, group, (begin + i) * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
        values[begin + i][row] = at::vec::fmadd(scale, Vec(sums[i][row]), Vec(values[begin + i][row]));
    }
    if (w.offset_size == 0) return;
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i++) {
      const Vec offset = w.load_offset(panel, group, (begin + i) * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
        values[begin + i][row] =
            at::vec::fmadd(offset, Vec(rows.sums(first + row)[group]), Vec(values[begin + i][row]));
    }
  }

  void store(float* sums) const {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) save(sums + row * kPanelColumns + i * kLanes, Vec(values[i][row]));
  }
};

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kMostFewRows = 8;

// The most rows whose codes become operands in registers, in several passes: with slow lookups, few.
inline int64_t most_in_registers(const CodePanels& w) {
  if (w.header->codes == Codes::kTable8) return kMostFewRows;
  return w.header->codes == Codes::kTable4 ? 2 * tiles::kRows : tiles::kRows;
}

// Rows that are left operands in tiles; a pass takes rows of one tile.
struct FewLeft {
  static constexpr int64_t kTogether = tiles::kRows;
  const BFloat16* data;
  int64_t stride;

  const BFloat16* at(int64_t step) const { return data + step * tiles::kTile; }
  FewLeft from(int64_t row) const {
    return {data + row / tiles::kRows * stride + row % tiles::kRows * tiles::kDepth, stride};
  }
};

inline FewLeft few_rows_of(const tiles::Tiled& x, int64_t first, int64_t, int64_t) {
  return {x.rows(first), x.stride * tiles::kTile};
}

template <Codes kCodes, int kRows>
class FewRows {
 public:
  FewRows(const CodePanels& w, const CodedRows& rows) : w_(w), rows_(rows) {}

  // sums [kRows, 32] = left [kRows, K] x panel. `left` has row `first`.
  void operator()(int64_t panel, const FewLeft& left, int64_t first, float* sums) const {
    if constexpr (kRows == 1)
      if (kTogether * w_.block_bytes > kAhead) return multiply_far(panel, left, first, sums);
    multiply<false>(panel, left, first, sums);
  }

 private:
  using Lines = Unpacker<kCodes>;
  static constexpr int64_t kLines = tiles::kRows / Lines::kRows;  // of a tile and step
  static constexpr int64_t kAhead = 4096;
  // A chain of sums waits for each of its products, so several groups are summed at once.
  static constexpr int kTogether = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;

  // With kIsFar, what lies kAhead of a group is another one of them, so that what is fetched lies behind them all.
  template <bool kIsFar>
  [[gnu::always_inline]] void multiply(int64_t panel, const FewLeft& left, int64_t first, float* sums) const {
    PanelTotals<kRows> totals;
    int64_t group = 0;
    const int64_t whole = w_.is_half || w_.header->parts > 1 ? 0 : w_.steps / w_.group_steps;
    for (; group + kTogether <= whole; group += kTogether) {
      __m512 partial[kTogether][2][kRows] = {};
      add_steps<kTogether, false, kIsFar>(panel, GroupSteps::of(w_, group), 0, left, partial);
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; i++) totals.add(w_, rows_, panel, group + i, first, 0, partial[i]);
    }
    for (; group < w_.groups; group++) {
      __m512 partial[1][2][kRows] = {};
      add_group(panel, GroupSteps::of(w_, group), left, partial);
      totals.add(w_, rows_, panel, group, first, 0, partial[0]);
    }
    totals.store(sums);
  }

  [[gnu::noinline]] void multiply_far(int64_t panel, const FewLeft& left, int64_t first, float* sums) const {
    multiply<true>(panel, left, first, sums);
  }

  // Adds the products of a group. With tables in two parts, both are multiplied half a step at a time.
  [[gnu::always_inline]] void add_group(int64_t panel, const GroupSteps& steps, const FewLeft& left,
                                        __m512 (&partial)[1][2][kRows]) const {
    const int64_t parts = w_.header->parts;
    if (parts == 1 && !w_.is_half) return add_steps<1, false>(panel, steps, 0, left, partial);
    const int64_t begin = 2 * steps.first + steps.half, end = w_.is_half ? begin + 1 : begin + 2 * steps.count;
    for (int64_t half = begin; half < end; half++)
      for (int64_t part = 0; part < parts; part++) {
        add_steps<1, true>(panel, {half / 2, 1, half % 2}, part, left, partial);
        forget_loads();
      }
  }

  // Adds the products of some steps of kGroups groups that follow each other; with kHalf, of one half of a step.
  template <int kGroups, bool kHalf, bool kIsFar = false>
  [[gnu::always_inline]] void add_steps(int64_t panel, const GroupSteps& steps, int64_t part, const FewLeft& rows,
                                        __m512 (&partial)[kGroups][2][kRows]) const {
    const Lines lines(*w_.header, part);
    const uint8_t* codes = w_.codes(panel, steps.first);
    const BFloat16* left = rows.at(steps.first) + (kHalf ? steps.half * tiles::kDepth / 2 : 0);
    if (kHalf) codes += steps.half * kLines / 2 * Lines::kLine;
    // Memory bandwidth is the limit for one row and group, whose tiles are taken in the order of memory.
    constexpr int kTiles = kRows == 1 && kGroups == 1 ? 1 : 2;
    const int64_t ahead = kIsFar ? kGroups * w_.block_bytes : kAhead;
    for (int64_t done = 0; done < steps.count; done++, left += tiles::kTile, codes += w_.step_bytes) {
      const auto add_tiles = [&](auto tile) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < (kHalf ? kLines / 2 : kLines); line++)
#pragma GCC unroll 4
          for (int group = 0; group < kGroups; group++)
            add_line<tile(), kTiles>(lines, codes + line * Lines::kLine + group * w_.block_bytes, ahead,
                                     left + group * w_.group_steps * tiles::kTile + line * Lines::kRows * 2,
                                     partial[group]);
      };
      add_tiles(std::integral_constant<int, 0>());
      if constexpr (kTiles == 1) add_tiles(std::integral_constant<int, 1>());
    }
  }

  // Adds the products of a line of kTiles tiles from tile kTile on, which share the left operands.
  template <int kTile, int kTiles>
  [[gnu::always_inline]] static void add_line(const Lines& lines, const uint8_t* from, int64_t ahead,
                                              const BFloat16* left, __m512 (&partial)[2][kRows]) {
    __m512i values[kTiles][Lines::kRows];
#pragma GCC unroll 2
    for (int tile = 0; tile < kTiles; tile++) {
      const uint8_t* line = from + (kTile + tile) * kLines * Lines::kLine;
      _mm_prefetch(reinterpret_cast<const char*>(line) + ahead, _MM_HINT_T0);
      lines(line, values[tile]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < Lines::kRows; i++)
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) {
        const __m512i shared = avx512::load_left(left + row * tiles::kDepth + 2 * i);
#pragma GCC unroll 2
        for (int tile = 0; tile < kTiles; tile++)
          partial[kTile + tile][row] =
              avx512::add_products(partial[kTile + tile][row], shared, values[tile][i]);
      }
  }

  const CodePanels& w_;
  const CodedRows& rows_;
};

template <typename Body>
void dispatch_kind(const CodeHeader& header, const Body& body) {
  dispatch_codes(header.codes, body);
}
#else
constexpr int kMostFewRows = 6;

// The most rows whose codes become operands in registers, in several passes.
inline int64_t most_in_registers(const CodePanels&) { return 2 * kMostFewRows; }

// Rows are float32, `stride` values apart.
struct FewLeft {
  static constexpr int64_t kTogether = 2 * kMostFewRows;
  const float* data;
  int64_t stride;

  FewLeft from(int64_t row) const { return {data + row * stride, stride}; }
};

inline FewLeft few_rows_of(const tiles::Tiled& x, int64_t first, int64_t rows, int64_t steps) {
  static thread_local Scratch scratch;
  const int64_t stride = steps * tiles::kDepth;
  float* to = reinterpret_cast<float*>(scratch.reserve(rows * stride * static_cast<int64_t>(sizeof(float))));
  widen_rows(to, stride, x, {first, first + rows}, {0, steps});
  return {to, stride};
}

template <FloatCodes kKind, int kRows>
class FewRows {
 public:
  FewRows(const CodePanels& w, const CodedRows& rows) : w_(w), rows_(rows), lines_(*w.header) {}

  // sums [kRows, 32] = left [kRows, K] x panel. `left` has row `first`.
  void operator()(int64_t panel, const FewLeft& left, int64_t first, float* sums) const {
    PanelTotals<kRows> totals;
    int64_t group = 0;
    // A chain of sums waits for each of its products, so two groups are summed at once.
    constexpr int kTogether = kRows == 1 ? 2 : 1;
    const int64_t whole = w_.is_half ? 0 : w_.steps / w_.group_steps;
    for (; group + kTogether <= whole; group += kTogether) add<kTogether>(panel, group, left, first, totals);
    for (; group < w_.groups; group++) add<1>(panel, group, left, first, totals);
    totals.store(sums);
  }

 private:
  using Lines = FloatLines<kKind>;
  static constexpr int64_t kAhead = 4096;
  // Vectors of columns whose sums fit into registers: both tiles, or one after the other.
  static constexpr int kVectors = kRows <= 3 ? 4 : 2;

  // Adds kGroups groups that follow each other.
  template <int kGroups>
  void add(int64_t panel, int64_t group, const FewLeft& rows, int64_t first, PanelTotals<kRows>& totals) const {
    const GroupSteps steps = GroupSteps::of(w_, group);
    const int64_t begin = steps.half * Lines::kLines / 2, end = w_.is_half ? begin + Lines::kLines / 2 : Lines::kLines;
    const float* left = rows.data + steps.first * tiles::kDepth;
#pragma GCC unroll 2
    for (int vector = 0; vector < 4; vector += kVectors) {
      __m256 partial[kGroups][kVectors][kRows] = {};
      const uint8_t* codes = w_.codes(panel, steps.first) + vector / 2 * Lines::kLines * Lines::kLine;
      for (int64_t step = 0; step < steps.count; step++, codes += w_.step_bytes)
        for (int64_t line = begin; line < end; line++)
#pragma GCC unroll 2
          for (int i = 0; i < kGroups; i++)
            add_line(codes + line * Lines::kLine + i * w_.block_bytes,
                     left + (step + i * w_.group_steps) * tiles::kDepth + line * Lines::kInputs, rows.stride, partial[i]);
#pragma GCC unroll 2
      for (int i = 0; i < kGroups; i++) totals.add(w_, rows_, panel, group + i, first, vector, partial[i]);
    }
  }

  // Adds the products of the inputs of a line.
  [[gnu::always_inline]] void add_line(const uint8_t* from, const float* left, int64_t stride,
                                       __m256 (&partial)[kVectors][kRows]) const {
    __m256i codes[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const uint8_t* at = from + i / 2 * Lines::kLines * Lines::kLine + i % 2 * Lines::kLine / 2;
      if (i % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead, _MM_HINT_T0);
      codes[i] = Lines::load_half(at);
    }
    unrolled<Lines::kInputs>([&](auto input) __attribute__((always_inline)) {
      __m256 values[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) values[i] = lines_.template value<input()>(codes[i]);
#pragma GCC unroll 6
      for (int row = 0; row < kRows; row++) {
        const __m256 shared = _mm256_broadcast_ss(left + row * stride + input());
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; i++) partial[i][row] = _mm256_fmadd_ps(shared, values[i], partial[i][row]);
      }
    });
  }

  const CodePanels& w_;
  const CodedRows& rows_;
  const Lines lines_;
};

template <typename Body>
void dispatch_kind(const CodeHeader& header, const Body& body) {
  dispatch_floats(header, body);
}
#endif

// sums [rows, 32] = left [rows, K] x panel, for 1 to kMostFewRows rows, of which the first is `first`.
inline void multiply_few(const CodePanels& w, const CodedRows& prepared, int64_t panel, const FewLeft& left,
                         int64_t first, int64_t rows, float* sums) {
  dispatch_kind(*w.header, [&](auto kind) {
    dispatch_count<kMostFewRows>(rows, [&](auto count) {
      FewRows<kind(), count()>(w, prepared)(panel, left, first, sums);
    });
  });
}

}  // namespace millrace
