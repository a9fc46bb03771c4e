// One thread's loop over panels of codes, with integer products.
#pragma once

#include "integer_rows.h"

namespace millrace {

// Calls emit as PanelLoop does. A part of a panel is unpacked once for all rows. With vectors, they are multiplied a few
// at a time; with AMX, in blocks of 32, of which few are left to vectors.
template <typename Emit>
class IntegerLoop {
 public:
  IntegerLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels), rows_(rows), x_(x), emit_(emit), memory_(scratch()), part_(memory_ + kStatesBytes) {}

  // Multiplies panels [begin, end), at most kPanelsAtOnce with more than a block of rows, with at most kRowsAtOnce rows
  // from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
#ifdef MILLRACE_AMX
    if (tiles::on_amx() && !w_.is_half && w_.header->input_parts == 1 && rows > kMostIntegerRows)
      return multiply_tiles(begin, end, first, rows);
#endif
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
  static constexpr int64_t kBlock = 2 * tiles::kRows;
  static constexpr int64_t kBlockSums = 4 * tiles::kSums;
  static constexpr int64_t kFewSteps = 8;  // whose values stay in the first-level cache
  static constexpr int64_t kAhead = 12288;
  static constexpr int64_t kFewPasses = 3;  // of rows, with which it pays to unpack codes anew for each pass
  static constexpr int64_t kStatesBytes = kRowsAtOnce * static_cast<int64_t>(sizeof(RowState));
  static constexpr bool kExpands = requires(const Emit& emit) { emit.expand_block(0, 0, 0); };

  static char* scratch() {
    static thread_local Scratch scratch;
    return scratch.reserve(kStatesBytes + IntegerPart::kBytes + kTilesBytes);
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
  // Results of kPanelsAtOnce panels with two kinds of sums, and the sums of a block that are new and those before.
  static constexpr int64_t kResults = kPanelsAtOnce * kRowsAtOnce * kPanelColumns * 2;
  static constexpr int64_t kTilesBytes = (kResults + 2 * kBlockSums) * static_cast<int64_t>(sizeof(float));

  // A step of a block of rows, whose sums are to be added to the results.
  struct Step {
    int64_t panel, row, count, step;
    const float* sums;
    float* results;
  };

  float* results() const { return reinterpret_cast<float*>(memory_ + kStatesBytes + IntegerPart::kBytes); }

  void multiply_tiles(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    const int64_t steps = part_steps(IntegerPart::kMostSteps);
    if (rows <= kBlock) {
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t step = 0; step < w_.steps; step += steps) multiply_tiles_of_part(panel, first, rows, step);
    } else {
      for (int64_t step = 0; step < w_.steps; step += steps)
        for (int64_t panel = begin; panel < end; panel++) multiply_tiles_of_part(panel, first, rows, step);
    }
  }

  void multiply_tiles_of_part(int64_t panel, int64_t first, int64_t rows, int64_t begin) {
    const int64_t end = std::min(w_.steps, begin + part_steps(IntegerPart::kMostSteps));
    part_.read(w_, panel, begin, end, true);
    part_.unpack(w_);
    const uint8_t* ahead = w_.codes(panel, begin) + w_.panel_bytes;
    for (int64_t i = 0; i < (end - begin) * w_.step_bytes; i += 64)
      asm volatile("prefetcht0 %0" : : "m"(ahead[i]));
    float* turns = results() + kResults;
    for (int64_t block = 0; block * kBlock < rows; block++) {
      const int64_t row = first + block * kBlock, count = std::min(kBlock, rows - block * kBlock);
      float* results = this->results() + (panel % kPanelsAtOnce * kRowsAtOnce / kBlock + block) * 2 * kBlockSums;
      Step before{panel, row, 0, 0, nullptr, results};
      for (int64_t step = begin; step < end; step++) {
        float* sums = turns + step % 2 * kBlockSums;
        const char* left = reinterpret_cast<const char*>(x_.rows(row) + step / 2 * tiles::kTile) + step % 2 * kRounded;
        const char* low = left + x_.stride * tiles::kTile * sizeof(BFloat16);
        const char* right = reinterpret_cast<const char*>(part_.values()) + (step - begin) * kStepValues;
        int64_t done = 0;
        amx::multiply_half(left, low, count, right, sums, [&] {
          const int64_t until = std::min(before.count, done + (before.count + tiles::kPauses - 1) / tiles::kPauses);
          add(before, done, until);
          done = until;
        });
        before = {panel, row, count, step, sums, results};
      }
      add(before, 0, count);
      if (end == w_.steps) emit_block(before);
    }
  }

  // Adds the sums of rows [begin, end) of a block to their results, in the order of IntegerRows.
  void add(const Step& of, int64_t begin, int64_t end) const {
    if (begin >= end) return;
    const bool counts = w_.counts_units();
    const int64_t group = of.step / w_.group_steps, steps = counts ? kUnitSteps : w_.group_steps;
    const int64_t first = of.step / steps * steps;
    const bool begins = of.step == first, ends = (of.step + 1) % steps == 0 || of.step + 1 == w_.steps;
    for (int64_t row = begin; row < end; row++) {
      const RoundedInputs& rounded = rows_.rounded(of.row + row)[of.step];
      for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
        const int64_t place = place_of(row, i / kLanes);
        float *total = of.results + place, *partial = total + kBlockSums;
        const __m512i numbers = _mm512_add_epi32(_mm512_load_si512(of.sums + place), all_ints(rounded.starts[0]));
        const Vec integers = counts ? to_float(numbers) * load(part_.scales(group) + i) : to_float(numbers);
        const Vec sum = at::vec::fmadd(integers, Vec(rounded.scale), begins ? Vec(0.f) : load(partial));
        if (!ends) {
          save(partial, sum);
          continue;
        }
        const Vec scale = counts ? w_.load_unit(of.panel, group, false, i) : load(part_.scales(group) + i);
        Vec result = at::vec::fmadd(sum, scale, first == 0 ? Vec(0.f) : load(total));
        if (w_.offset_size > 0) result = add_offsets(of, row, first, group, i, result);
        save(total, result);
      }
    }
  }

  // Adds the offsets of groups [first, last], which share a unit, to the i-th results of a row.
  Vec add_offsets(const Step& of, int64_t row, int64_t first, int64_t last, int64_t i, const Vec& result) const {
    const float* inputs = rows_.sums(of.row + row);
    if (!w_.counts_units()) return at::vec::fmadd(load(part_.offsets(last) + i), Vec(inputs[last]), result);
    Vec sum(0.f);
    for (int64_t group = first; group <= last; group++)
      sum = at::vec::fmadd(load(part_.offsets(group) + i), Vec(inputs[group]), sum);
    return at::vec::fmadd(sum, w_.load_unit(of.panel, last, true, i), result);
  }

  // Where the sums of a row of a block are, for the i-th 16 outputs.
  static int64_t place_of(int64_t row, int64_t i) {
    return row / tiles::kRows * 2 * tiles::kSums + i * tiles::kSums + row % tiles::kRows * tiles::kColumns;
  }

  void emit_block(const Step& last) const {
    if constexpr (kExpands) {
      amx::load_sums(last.results, last.count);
      emit_.expand_block(last.panel, last.row, last.count);
      amx::store_sums(last.results, last.count);
    }
    for (int64_t row = 0; row < last.count; row++)
      emit_(last.panel, last.row + row, last.results + place_of(row, 0), last.results + place_of(row, 1));
  }

  // Emits the states of rows as blocks.
  void emit_blocks(int64_t panel, int64_t first, int64_t rows) const {
    for (int64_t block = 0; block < rows; block += kBlock) {
      const int64_t count = std::min(kBlock, rows - block);
      for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < 2; i++)
          std::memcpy(results() + place_of(row, i), state(block + row)->totals + i * tiles::kColumns,
                      tiles::kColumns * sizeof(float));
      emit_block({panel, first + block, count, 0, nullptr, results()});
    }
  }
#else
  static constexpr int64_t kTilesBytes = 0;
#endif

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  char* memory_;
  IntegerPart part_;
};

}  // namespace millrace
