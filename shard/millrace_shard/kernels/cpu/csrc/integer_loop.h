// One thread's loop over panels of codes, with integer products.
#pragma once

#include "integer_rows.h"

namespace millrace {

// Calls emit as PanelLoop does. Few rows are multiplied with codes that become operands in registers, anew for every few
// rows; so are all rows where there is no AMX. With AMX, tiles of operands are stored first, for all rows of the loop.
template <typename Emit>
class IntegerLoop {
 public:
  IntegerLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels), rows_(rows), x_(x), emit_(emit) {
    static thread_local Scratch scratch;
    constexpr int64_t kSums = kPanelsAtOnce * kRowsAtOnce * kPanelColumns + 2 * kBlockSums;
    char* memory = scratch.reserve(kSums * static_cast<int64_t>(sizeof(float)) + kTilesBytes);
    results_ = reinterpret_cast<float*>(memory);
    turns_ = results_ + kPanelsAtOnce * kRowsAtOnce * kPanelColumns;
    tiles_ = memory + kSums * static_cast<int64_t>(sizeof(float));
  }

  // Multiplies panels [begin, end), at most kPanelsAtOnce with more than a block of rows, with at most kRowsAtOnce rows
  // from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
#ifdef MILLRACE_AMX
    if (tiles::on_amx() && (kExpands || rows > kMostIntegerRows)) return multiply_tiles(begin, end, first, rows);
#endif
    const int64_t tiles_of_rows = (rows + tiles::kRows - 1) / tiles::kRows;
    if (rows <= kBlock) {
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t tile = 0; tile < tiles_of_rows; tile++) multiply_rows(panel, first, rows, tile);
    } else {
      // The rows of a tile stay in the caches.
      for (int64_t tile = 0; tile < tiles_of_rows; tile++)
        for (int64_t panel = begin; panel < end; panel++) multiply_rows(panel, first, rows, tile);
    }
  }

  void finish() {}  // nothing is left

 private:
  static constexpr int64_t kBlock = 2 * tiles::kRows;
  static constexpr int64_t kBlockSums = 4 * tiles::kSums;
  static constexpr int64_t kStepBytes = kPanelTile * sizeof(BFloat16);
  static constexpr int64_t kTilesBytes = tiles::kPart * kStepBytes;
  static constexpr bool kExpands = requires(const Emit& emit) { emit.expand_block(0, 0, 0); };

  // Multiplies the rows of a tile with a panel, a few at a time.
  void multiply_rows(int64_t panel, int64_t first, int64_t rows, int64_t tile) const {
    const int64_t begin = first + tile * tiles::kRows, count = std::min(tiles::kRows, rows - tile * tiles::kRows);
    const int64_t passes = (count + kMostIntegerRows - 1) / kMostIntegerRows;
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t low = count * pass / passes, high = count * (pass + 1) / passes;
      const BFloat16* left = x_.rows(begin) + low * tiles::kDepth;
      multiply_integers(w_, rows_, panel, left, begin + low, high - low, results_);
      for (int64_t row = low; row < high; row++) {
        const float* sums = results_ + (row - low) * kPanelColumns;
        emit_(panel, begin + row, sums, sums + tiles::kColumns);
      }
    }
  }

#ifdef MILLRACE_AMX
  // Half a step of a block of rows, whose sums are to be added to the results.
  struct Half {
    int64_t panel, row, count, index;  // the index among the halves of all steps
    const float* sums;
    float* results;
  };

  void multiply_tiles(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    if (rows <= kBlock) {
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t step = 0; step < w_.steps; step += tiles::kPart) multiply_part(panel, first, rows, step);
    } else {
      for (int64_t step = 0; step < w_.steps; step += tiles::kPart)
        for (int64_t panel = begin; panel < end; panel++) multiply_part(panel, first, rows, step);
    }
  }

  // Multiplies up to kPart steps of a panel.
  void multiply_part(int64_t panel, int64_t first, int64_t rows, int64_t begin) {
    const int64_t end = std::min(w_.steps, begin + tiles::kPart), blocks = (rows + kBlock - 1) / kBlock;
    unpack(panel, begin, end);
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = first + block * kBlock, count = std::min(kBlock, rows - block * kBlock);
      float* results = results_ + (panel % kPanelsAtOnce * kRowsAtOnce / kBlock + block) * kBlockSums;
      Half before{panel, row, 0, 0, nullptr, results};
      for (int64_t half = 2 * begin; half < 2 * end; half++) {
        float* sums = turns_ + half % 2 * kBlockSums;
        const char* left = reinterpret_cast<const char*>(x_.rows(row) + half / 2 * tiles::kTile) + half % 2 * kRounded;
        const char* low = left + x_.stride * tiles::kTile * sizeof(BFloat16);
        const char* right = tiles_ + (half / 2 - begin) * kStepBytes + half % 2 * kStepBytes / 4;
        int64_t done = 0;
        amx::multiply_half(left, low, count, right, sums, [&] {
          const int64_t until = std::min(before.count, done + (before.count + tiles::kPauses - 1) / tiles::kPauses);
          add(before, done, until);
          done = until;
        });
        before = {panel, row, count, half, sums, results};
      }
      add(before, 0, count);
      if (end == w_.steps) emit_block(before);
    }
  }

  // Unpacks steps [begin, end) of a panel into tiles.
  void unpack(int64_t panel, int64_t begin, int64_t end) {
    char* to = tiles_;
    for (int64_t step = begin; step < end;) {
      const int64_t last = std::min(end, step - step % w_.group_steps + w_.group_steps);
      const uint8_t* codes = w_.codes(panel, step);
      unpack_steps<tiles::Format::kInt8>(*w_.header, 0, codes, last - step, to, codes + w_.panel_bytes);
      to += (last - step) * kStepBytes;
      step = last;
    }
  }

  // Adds the sums of rows [begin, end) of a block to their results.
  void add(const Half& half, int64_t begin, int64_t end) const {
    if (begin >= end) return;
    const int64_t per_group = w_.is_half ? 1 : 2 * w_.group_steps, group = half.index / per_group;
    if (group >= w_.groups) return;  // the padding of the last step
    const GroupScales of(w_, w_.scales(half.panel, group));
    const bool adds_offsets = w_.offset_size > 0 && ((half.index + 1) % per_group == 0 || half.index + 1 == 2 * w_.steps);
    for (int64_t row = begin; row < end; row++) {
      const RoundedInputs& rounded = rows_.rounded(half.row + row)[half.index];
      for (int i = 0; i < GroupScales::kVectors; i++) {
        const int64_t place = place_of(row, i);
        const __m512i sums = _mm512_load_si512(half.sums + place);
        const Vec number = _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_set1_epi32(rounded.start)));
        Vec total = half.index == 0 ? Vec(0.f) : load(half.results + place);
        total = add_scaled(total, number, rounded.scale, of.scales[i]);
        if (adds_offsets) total = at::vec::fmadd(of.offsets[i], Vec(rows_.sums(half.row + row)[group]), total);
        save(half.results + place, total);
      }
    }
  }

  // Where the sums of a row of a block are, for the i-th 16 outputs.
  static int64_t place_of(int64_t row, int64_t i) {
    return row / tiles::kRows * 2 * tiles::kSums + i * tiles::kSums + row % tiles::kRows * tiles::kColumns;
  }

  void emit_block(const Half& last) const {
    if constexpr (kExpands) {
      amx::load_sums(last.results, last.count);
      emit_.expand_block(last.panel, last.row, last.count);
      amx::store_sums(last.results, last.count);
    }
    for (int64_t row = 0; row < last.count; row++)
      emit_(last.panel, last.row + row, last.results + place_of(row, 0), last.results + place_of(row, 1));
  }
#endif

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  float *results_, *turns_;
  char* tiles_;
};

}  // namespace millrace
