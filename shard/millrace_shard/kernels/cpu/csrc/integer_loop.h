// One thread's loop over panels of codes, with integer products.
#pragma once

#include "integer_rows.h"

namespace millrace {

// Calls emit as PanelLoop does. A part of a panel is unpacked once for all rows, which are multiplied a few at a time, by
// vectors on every CPU: AMX takes up to twice as long, since sums of 32 inputs would leave its tiles to be scaled.
template <typename Emit>
class IntegerLoop {
 public:
  IntegerLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels), rows_(rows), x_(x), emit_(emit), memory_(scratch()), part_(memory_ + kStatesBytes) {}

  // Multiplies panels [begin, end) with at most kRowsAtOnce rows from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    const ScalesOf scales = rows == 1 ? scales_of_row(w_) : ScalesOf::kPart;
    for (int64_t panel = begin; panel < end; panel++) {
      for (int64_t step = 0; step < w_.steps; step += part_steps(kFewSteps)) {
        const int64_t last = std::min(w_.steps, step + part_steps(kFewSteps));
        part_.read(w_, panel, step, last, scales == ScalesOf::kPart);
        if (unpacks(rows)) part_.unpack(w_);
        multiply_part(first, rows, w_.codes(panel, step) + kAhead, scales);
      }
      emit_rows(panel, first, rows);
    }
  }

  void finish() {}  // nothing is left

 private:
  static constexpr int64_t kFewSteps = 8;  // whose values stay in the first-level cache
  static constexpr int64_t kAhead = 12288;
  static constexpr int64_t kFewPasses = 3;  // of rows, with which it pays to unpack codes anew for each pass
  static constexpr int64_t kStatesBytes = kRowsAtOnce * static_cast<int64_t>(sizeof(RowState));
  static constexpr bool kExpands = requires(const Emit& emit) { emit.expand_block(0, 0, 0); };

  static char* scratch() {
    static thread_local Scratch scratch;
    return scratch.reserve(kStatesBytes + IntegerPart::kBytes + kBlockBytes);
  }

  RowState* state(int64_t row) const { return reinterpret_cast<RowState*>(memory_) + row; }

  // Whether codes are unpacked before they are multiplied.
  bool unpacks(int64_t rows) const {
    if (w_.header->codes == Codes::kInteger8) return false;
    return rows > kFewPasses * most_integer_rows(w_) || !unpacks_in_registers(w_.header->codes);
  }

  // How many steps are unpacked at once: at most `most`, and whole groups if one fits.
  int64_t part_steps(int64_t most) const {
    return w_.group_steps >= most ? most : most / w_.group_steps * w_.group_steps;
  }

  // Multiplies all rows with the part. Memory from `ahead` on is prefetched.
  void multiply_part(int64_t first, int64_t rows, const uint8_t* ahead, ScalesOf scales) const {
    for (int64_t tile = 0; tile < rows; tile += tiles::kRows) {
      const int64_t count = std::min(tiles::kRows, rows - tile);
      const int64_t most = most_integer_rows(w_), passes = (count + most - 1) / most;
      const int8_t* left = reinterpret_cast<const int8_t*>(x_.rows(first + tile));
      for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t low = count * pass / passes, high = count * (pass + 1) / passes;
        multiply_integers(w_, rows_, left + low * tiles::kTileStride, first + tile + low, high - low, part_,
                          state(tile + low), ahead, scales);
        ahead = nullptr;
      }
    }
  }

  void emit_rows(int64_t panel, int64_t first, int64_t rows) {
#ifdef MILLRACE_AMX
    if (kExpands && tiles::on_amx()) return emit_blocks(panel, first, rows);
#endif
    for (int64_t row = 0; row < rows; row++) {
      const float* totals = state(row)->totals;
      emit_(panel, first + row, totals, totals + tiles::kColumns);
    }
  }

#ifdef MILLRACE_AMX
  static constexpr int64_t kBlock = 2 * tiles::kRows;
  static constexpr int64_t kBlockBytes = 4 * tiles::kSums * static_cast<int64_t>(sizeof(float));

  // Emits the states of rows by blocks, to whose results the tile unit adds deltas.
  void emit_blocks(int64_t panel, int64_t first, int64_t rows) const {
    float* results = reinterpret_cast<float*>(memory_ + kStatesBytes + IntegerPart::kBytes);
    const auto place_of = [&](int64_t row, int64_t i) {
      return results + row / tiles::kRows * 2 * tiles::kSums + i * tiles::kSums + row % tiles::kRows * tiles::kColumns;
    };
    for (int64_t block = 0; block < rows; block += kBlock) {
      const int64_t count = std::min(kBlock, rows - block), row = first + block;
      for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < 2; i++)
          std::memcpy(place_of(j, i), state(block + j)->totals + i * tiles::kColumns, tiles::kColumns * sizeof(float));
      if constexpr (kExpands) {
        amx::load_sums(results, count);
        emit_.expand_block(panel, row, count);
        amx::store_sums(results, count);
      }
      for (int64_t j = 0; j < count; j++) emit_(panel, row + j, place_of(j, 0), place_of(j, 1));
    }
  }
#else
  static constexpr int64_t kBlockBytes = 0;
#endif

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  char* memory_;
  IntegerPart part_;
};

}  // namespace millrace
