// Products of many rows with panels of codes by vectors: the codes of a few steps become operands in the first-level
// cache, once for all rows.
//
// A row's sums run over the inputs of a group in one order, in float32, and are then scaled and added to its results,
// group by group: in registers, for as many rows and columns as these hold.
#pragma once

#include "few_rows.h"

namespace millrace {

class ManyRows {
 public:
  static constexpr int64_t kResults = kPanelsAtOnce * kRowsAtOnce * kPanelColumns;

  ManyRows(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x) : w_(panels), rows_(rows), x_(x) {
    static thread_local Scratch scratch;
    char* memory = scratch.reserve(2 * kResults * sizeof(float) + kOperandBytes + kWideBytes + sizeof(Piece) * kPieces);
    results_ = reinterpret_cast<float*>(memory);
    kept_ = results_ + kResults;
    wide_ = kept_ + kResults;
    operand_ = reinterpret_cast<char*>(wide_) + kWideBytes;
    pieces_ = reinterpret_cast<Piece*>(operand_ + kOperandBytes);
  }

  // Multiplies panels [begin, end), at most kPanelsAtOnce, with at most kRowsAtOnce rows from `first` on; calls emit as
  // PanelLoop does.
  template <typename Emit>
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows, const Emit& emit) {
    const int64_t most = w_.group_steps >= kPart ? kPart : kPart / w_.group_steps * w_.group_steps;
    for (int64_t step = 0; step < w_.steps; step += most) {
      const Range steps{step, std::min(w_.steps, step + most)};
      const Left left = left_of(first, rows, steps);
      for (int64_t panel = begin; panel < end; panel++) {
        const bool is_last = panel + 1 == end, turns = is_last && steps.high < w_.steps;
        prepare(panel, steps, turns ? w_.codes(begin, steps.high) : w_.codes(panel + 1, is_last ? 0 : step));
        multiply_panel(left, first, rows, (panel - begin) * kRowsAtOnce * kPanelColumns);
      }
    }
    for (int64_t panel = begin; panel < end; panel++) {
      const float* results = results_ + (panel - begin) * kRowsAtOnce * kPanelColumns;
      for (int64_t row = 0; row < rows; row++, results += kPanelColumns)
        emit(panel, first + row, results, results + tiles::kColumns);
    }
  }

 private:
  // Inputs of one group, or of a part of it, in steps that are unpacked at once.
  struct alignas(64) Piece {
    float scales[kPanelColumns], offsets[kPanelColumns];
    int64_t begin, end, group;  // in halves of steps
    bool begins, ends;          // the group
  };
  static constexpr int64_t kHalf = tiles::kDepth / 2;  // of a step

#if defined(CPU_CAPABILITY_AVX512)
  // Operands are pairs of bfloat16: for each half step and part of the table [8 pairs, 32 columns, 2]. A vector has 16
  // columns.
  static constexpr int64_t kPart = 8, kElements = kHalf / 2, kElementBytes = kPanelColumns * 2 * sizeof(BFloat16);
  static constexpr int kMostRows = 8;
  static constexpr int kMostKeptRows = 6;  // whose results stay in registers beside their sums
  static constexpr int64_t kOperandBytes = 2 * 2 * kPart * kElements * kElementBytes, kWideBytes = 0;
  static constexpr int64_t kRowsTogether = tiles::kRows;  // those of a tile
  struct Left {
    const BFloat16* data;
    int64_t stride;

    // Half a step of a row.
    const BFloat16* at(int64_t row, int64_t half) const {
      return data + row / tiles::kRows * stride + row % tiles::kRows * tiles::kDepth + half / 2 * tiles::kTile +
             half % 2 * kHalf;
    }
    static constexpr int64_t kRow = tiles::kDepth, kElement = 2;
  };

  Left left_of(int64_t first, int64_t, Range steps) const {
    return {x_.rows(first) + steps.low * tiles::kTile, x_.stride * tiles::kTile};
  }

  static Lanes load_left(const BFloat16* pair) { return _mm512_castsi512_ps(avx512::load_left(pair)); }

  static Lanes add_product(Lanes sum, Lanes left, Lanes right) {
    return avx512::add_products(sum, _mm512_castps_si512(left), _mm512_castps_si512(right));
  }

  void unpack(int64_t panel, Range steps, const uint8_t* next) const {
    const int64_t parts = w_.header->parts;
    dispatch_kind(*w_.header, [&](auto kind) {
      using Lines = Unpacker<kind()>;
      constexpr int64_t kLines = kElements / Lines::kRows;  // of half a step and a tile
      for (int64_t part = 0; part < parts; part++) {
        const Lines lines(*w_.header, part);
        char* to = operand_ + part * kElements * kElementBytes;
        for (int64_t step = steps.low; step < steps.high; step++) {
          const uint8_t* codes = w_.codes(panel, step);
          fetch_step(next, step - steps.low);
          for (int64_t half = 0; half < 2; half++, to += parts * kElements * kElementBytes)
            for (int64_t i = 0; i < 2 * kLines; i++) {
              const int64_t tile = i / kLines, line = i % kLines;
              __m512i values[Lines::kRows];
              lines(codes + (tile * 2 * kLines + half * kLines + line) * Lines::kLine, values);
#pragma GCC unroll 4
              for (int64_t row = 0; row < Lines::kRows; row++)
                _mm512_store_si512(to + (line * Lines::kRows + row) * kElementBytes + tile * 64, values[row]);
            }
        }
      }
    });
  }
#else
  // Operands are float32: for each half step [16 inputs, 32 columns]. A vector has 8 columns.
  static constexpr int64_t kPart = 4, kElements = kHalf, kElementBytes = kPanelColumns * sizeof(float);
  static constexpr int kMostRows = 6;
  static constexpr int kMostKeptRows = 0;
  static constexpr int64_t kOperandBytes = 2 * kPart * kElements * kElementBytes;
  static constexpr int64_t kWideBytes = kRowsAtOnce * kPart * tiles::kDepth * sizeof(float);
  static constexpr int64_t kRowsTogether = kRowsAtOnce;
  struct Left {
    const float* data;

    const float* at(int64_t row, int64_t half) const { return data + row * kRow + half * kHalf; }
    static constexpr int64_t kRow = kPart * tiles::kDepth, kElement = 1;
  };

  Left left_of(int64_t first, int64_t rows, Range steps) const {
    widen_rows(wide_, Left::kRow, x_, {first, first + rows}, steps);
    return {wide_};
  }

  static Lanes load_left(const float* value) { return _mm256_broadcast_ss(value); }

  static Lanes add_product(Lanes sum, Lanes left, Lanes right) { return _mm256_fmadd_ps(left, right, sum); }

  void unpack(int64_t panel, Range steps, const uint8_t* next) const {
    dispatch_kind(*w_.header, [&](auto kind) {
      using Lines = FloatLines<kind()>;
      const Lines lines(*w_.header);
      float* to = reinterpret_cast<float*>(operand_);
      for (int64_t step = steps.low; step < steps.high; step++) {
        const uint8_t* codes = w_.codes(panel, step);
        fetch_step(next, step - steps.low);
        for (int64_t tile = 0; tile < 2; tile++)
          for (int64_t line = 0; line < Lines::kLines; line++, codes += Lines::kLine) {
            float* at = to + line * Lines::kInputs * kPanelColumns + tile * tiles::kColumns;
#pragma GCC unroll 2
            for (int64_t half = 0; half < 2; half++) {
              const __m256i loaded = Lines::load_half(codes + half * Lines::kLine / 2);
              unrolled<Lines::kInputs>([&](auto input) __attribute__((always_inline)) {
                _mm256_store_ps(at + input() * kPanelColumns + half * kLanes, lines.template value<input()>(loaded));
              });
            }
          }
        to += tiles::kDepth * kPanelColumns;
      }
    });
  }
#endif

  static constexpr int64_t kVectors = 2, kSlices = kPanelColumns / (kVectors * kLanes);
  static constexpr int64_t kSliceBytes = kElementBytes / kSlices, kVectorBytes = kSliceBytes / kVectors;
  static constexpr int64_t kPieces = 2 * kPart;

  // Prefetches the codes and scales of the i-th step from `next` on. Not inlined, it would count as having no effect.
  [[gnu::always_inline]] void fetch_step(const uint8_t* next, int64_t i) const {
    const int64_t bytes = (w_.block_bytes + w_.group_steps - 1) / w_.group_steps;
    for (int64_t at = 0; at < bytes; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next) + i * bytes + at, _MM_HINT_T0);
  }

  // Unpacks steps of a panel, and divides them into pieces. Codes at `next` are prefetched.
  void prepare(int64_t panel, Range steps, const uint8_t* next) {
    unpack(panel, steps, next);
    count_ = 0;
    const int64_t each = w_.is_half ? 1 : 2 * w_.group_steps;
    for (int64_t half = 2 * steps.low; half < 2 * steps.high;) {
      const int64_t group = half / each, end = std::min(2 * steps.high, (group + 1) * each);
      if (group == w_.groups) break;  // the padding of the last step
      Piece& piece = pieces_[count_++];
      piece.begin = half - 2 * steps.low;
      piece.end = end - 2 * steps.low;
      piece.group = group;
      piece.begins = half == group * each;
      piece.ends = end == (group + 1) * each || end == 2 * w_.steps;
      half = end;
      for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
        save(piece.scales + i, w_.load_scale(panel, group, i));
        if (w_.offset_size > 0) save(piece.offsets + i, w_.load_offset(panel, group, i));
      }
    }
  }

  void multiply_panel(const Left& left, int64_t first, int64_t rows, int64_t place) const {
    if constexpr (kMostKeptRows > 0)
      // With larger groups, more rows at a time are faster.
      if (w_.group_steps <= 2 && w_.header->parts == 1)
        return each_pass<kMostKeptRows>(rows, [&](auto some, int64_t row) {
          for (int64_t slice = 0; slice < kSlices; slice++)
            multiply_kept<some()>(left, row, first, slice, place + row * kPanelColumns + slice * kVectors * kLanes);
        });
    each_pass<kMostRows>(rows, [&](auto some, int64_t row) {
      for (int64_t slice = 0; slice < kSlices; slice++)
        multiply_slice<some()>(left, row, first, slice, place + row * kPanelColumns + slice * kVectors * kLanes);
    });
  }

  // Calls body(count, row) for passes of 1 to kMost rows, whose number is a compile-time constant.
  template <int kMost, typename Body>
  static void each_pass(int64_t rows, const Body& body) {
    for (int64_t begin = 0; begin < rows; begin += kRowsTogether) {
      const int64_t count = std::min(kRowsTogether, rows - begin), passes = (count + kMost - 1) / kMost;
      for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t row = begin + count * pass / passes, end = begin + count * (pass + 1) / passes;
        dispatch_count<kMost>(end - row, [&](auto some) { body(some, row); });
      }
    }
  }

  // As multiply_slice, with pieces that are whole groups.
  template <int kRows>
  void multiply_kept(const Left& left, int64_t row, int64_t first, int64_t slice, int64_t place) const {
    Lanes totals[kRows][kVectors];
    load_sums(totals, pieces_[0].group == 0 ? nullptr : results_ + place);
    for (int64_t i = 0; i < count_; i++) {
      const Piece& piece = pieces_[i];
      Lanes sums[kRows][kVectors] = {};
      const char* right = operand_ + piece.begin * kElements * kElementBytes + slice * kSliceBytes;
      for (int64_t half = piece.begin; half < piece.end; half++, right += kElements * kElementBytes)
        add_half(left.at(row, half), right, sums);
      add_group(piece, sums, first + row, slice * kVectors * kLanes, totals);
    }
    store_sums(totals, results_ + place);
  }

  // Multiplies kRows rows, of which the first is number `row` of those from `first` on, with kVectors vectors of columns.
  template <int kRows>
  void multiply_slice(const Left& left, int64_t row, int64_t first, int64_t slice, int64_t place) const {
    const int64_t parts = kElements == kHalf ? 1 : w_.header->parts;
    for (int64_t i = 0; i < count_; i++) {
      const Piece& piece = pieces_[i];
      Lanes sums[kRows][kVectors];
      load_sums(sums, piece.begins ? nullptr : kept_ + place);
      const char* right = operand_ + piece.begin * parts * kElements * kElementBytes + slice * kSliceBytes;
      for (int64_t half = piece.begin; half < piece.end; half++, right += kElements * kElementBytes) {
        add_half(left.at(row, half), right, sums);
        if (parts == 1) continue;
        right += kElements * kElementBytes;
        forget_loads();
        add_half(left.at(row, half), right, sums);
      }
      if (!piece.ends) {
        store_sums(sums, kept_ + place);
        continue;
      }
      Lanes totals[kRows][kVectors];
      load_sums(totals, piece.group == 0 ? nullptr : results_ + place);
      add_group(piece, sums, first + row, slice * kVectors * kLanes, totals);
      store_sums(totals, results_ + place);
    }
  }

  template <int kRows, typename Values>
  [[gnu::always_inline]] static void add_half(const Values* left, const char* right, Lanes (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < kElements; i++, left += Left::kElement, right += kElementBytes) {
      Lanes values[kVectors];
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; vector++)
        values[vector] = load(reinterpret_cast<const float*>(right + vector * kVectorBytes));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) {
        const Lanes shared = load_left(left + row * Left::kRow);
#pragma GCC unroll 2
        for (int vector = 0; vector < kVectors; vector++)
          sums[row][vector] = add_product(sums[row][vector], shared, values[vector]);
      }
    }
  }

  template <int kRows>
  [[gnu::always_inline]] static void load_sums(Lanes (&sums)[kRows][kVectors], const float* from) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; vector++) sums[row][vector] = Lanes{};
    if (from == nullptr) return;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; vector++)
        sums[row][vector] = load(from + row * kPanelColumns + vector * kLanes);
  }

  template <int kRows>
  [[gnu::always_inline]] static void store_sums(const Lanes (&sums)[kRows][kVectors], float* to) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++)
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; vector++) save(to + row * kPanelColumns + vector * kLanes, Vec(sums[row][vector]));
  }

  // totals += scales * sums + offsets * (sums of the rows over the group), from `column` on.
  template <int kRows>
  [[gnu::always_inline]] void add_group(const Piece& piece, const Lanes (&sums)[kRows][kVectors], int64_t first,
                                        int64_t column, Lanes (&totals)[kRows][kVectors]) const {
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; vector++) {
      const Vec scale = load(piece.scales + column + vector * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
        totals[row][vector] = at::vec::fmadd(scale, Vec(sums[row][vector]), Vec(totals[row][vector]));
    }
    if (w_.offset_size == 0) return;
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; vector++) {
      const Vec offset = load(piece.offsets + column + vector * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++)
        totals[row][vector] =
            at::vec::fmadd(offset, Vec(rows_.sums(first + row)[piece.group]), Vec(totals[row][vector]));
    }
  }

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  float *results_, *kept_, *wide_;
  char* operand_;
  Piece* pieces_;
  int64_t count_ = 0;
};

}  // namespace millrace
