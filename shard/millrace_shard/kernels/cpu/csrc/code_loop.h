// One thread's loop over panels of codes, with exact products.
//
// A row's sums run over the inputs of a group in one order, in float32, and are then added to the row's result, scaled,
// group by group. So a row's bits depend on the row alone.
#pragma once

#include "many_rows.h"

namespace millrace {

#ifdef MILLRACE_AMX
// The loop on AMX. Codes are unpacked into tiles once for all rows, and the sums of a group are added to the results
// between the products of the next group.
template <typename Emit>
class AmxCodeLoop {
 public:
  AmxCodeLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels), rows_(rows), x_(x), emit_(emit) {
    static thread_local Scratch scratch;
    constexpr int64_t kSumsBytes = kBlocksAtOnce * kBlockSums * sizeof(float);
    char* memory = scratch.reserve(2 * kSumsBytes + 2 * kBlockSums * sizeof(float) + 4 * kTilesBytes);
    results_ = reinterpret_cast<float*>(memory);
    kept_ = reinterpret_cast<float*>(memory + kSumsBytes);
    turns_ = reinterpret_cast<float*>(memory + 2 * kSumsBytes);
    tiles_ = memory + 2 * kSumsBytes + 2 * kBlockSums * sizeof(float);
  }

  // Multiplies panels [begin, end), at most kPanelsAtOnce with more than a block of rows, with at most kRowsAtOnce rows
  // from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    place_ = 0;
    if (rows <= kBlock) {
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t step = 0; step < w_.steps; step += part_steps(kFewSteps))
          multiply_part(panel, first, rows, step, kFewSteps);
      return;
    }
    // With tables in two parts, a row's sums depend on how a group is divided.
    const int64_t most = w_.header->parts == 1 ? tiles::kPart : kFewSteps;
    for (int64_t step = 0; step < w_.steps; step += part_steps(most))
      for (int64_t panel = begin; panel < end; panel++) {
        place_ = (panel - begin) * kRowsAtOnce / kBlock;
        multiply_part(panel, first, rows, step, most);
      }
  }

  void finish() { work_until(pending_.count); }  // adds and emits the remaining sums

 private:
  static constexpr int64_t kFewSteps = 8;  // that are unpacked at once for a single block of rows
  static constexpr int64_t kBlock = 2 * tiles::kRows;
  static constexpr int64_t kBlockSums = 4 * tiles::kSums;
  static constexpr int64_t kBlocksAtOnce = kPanelsAtOnce * kRowsAtOnce / kBlock;
  static constexpr int64_t kTilesBytes = tiles::kPart * kPanelTile * sizeof(BFloat16);
  static constexpr int64_t kAhead = 4096;
  static constexpr bool kExpands = requires(const Emit& emit) { emit.expand_block(0, 0, 0); };

  // Steps of one group, or half a step; the sums of a group begin and end with one of its runs.
  struct Run {
    int64_t step, steps, group;
    bool begins, ends;
    const BFloat16* tiles[2];  // by the parts of the table
  };
  // The sums of a group of a block of rows, which are to be added to the results.
  struct Block {
    int64_t panel, row, count, group;
    const float* sums;
    float* results;
  };

  // How many steps are unpacked at once: at most `most`, and whole groups if one fits.
  int64_t part_steps(int64_t most) const {
    if (w_.is_half) return most / 2;
    return w_.group_steps >= most ? most : most / w_.group_steps * w_.group_steps;
  }

  void multiply_part(int64_t panel, int64_t first, int64_t rows, int64_t step, int64_t most) {
    const int64_t end = std::min(w_.steps, step + part_steps(most)), blocks = (rows + kBlock - 1) / kBlock;
    // Where the sums of a group go on in the next part, each block keeps its own.
    const bool keeps = blocks > 1 && !w_.is_half && w_.group_steps > part_steps(most);
    static thread_local std::vector<Run> runs;
    unpack(runs, panel, step, end, blocks > 1);
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = first + block * kBlock, count = std::min(kBlock, rows - block * kBlock);
      for (const Run& run : runs) {
        float* sums = keeps ? kept_ + (place_ + block) * kBlockSums : turns_ + turn_ * kBlockSums;
        multiply_run(run, row, count, sums);
        if (!run.ends) continue;
        turn_ = 1 - turn_;
        done_ = 0;
        pending_ = {panel, row, count, run.group, sums, results_ + (place_ + block) * kBlockSums};
        if (kExpands && is_last(run.group)) finish();
      }
    }
  }

  bool is_last(int64_t group) const { return group + 1 == w_.groups; }

  // Unpacks steps [begin, end) of a panel and divides them into runs.
  void unpack(std::vector<Run>& runs, int64_t panel, int64_t begin, int64_t end, bool shares) {
    runs.clear();
    const int64_t parts = w_.header->parts;
    side_ = 1 - side_;  // the products may not have read the last part's tiles yet
    char* to = tiles_ + side_ * 2 * kTilesBytes;
    for (int64_t step = begin; step < end;) {
      const uint8_t* codes = w_.codes(panel, step);
      Run run{step, 1, step / w_.group_steps, true, true, {nullptr, nullptr}};
      if (w_.is_half) {
        for (int64_t half = 0; half < 2 && 2 * step + half < w_.groups; half++, to += kStepBytes) {
          run.group = 2 * step + half;
          for (int64_t part = 0; part < parts; part++) {
            unpack_half_step(*w_.header, part, codes, half, to + part * kTilesBytes);
            run.tiles[part] = reinterpret_cast<const BFloat16*>(to + part * kTilesBytes);
          }
          runs.push_back(run);
        }
        step++;
        continue;
      }
      const int64_t last = std::min({end, w_.steps, (run.group + 1) * w_.group_steps});
      run.steps = last - step;
      run.begins = step % w_.group_steps == 0;
      run.ends = last % w_.group_steps == 0 || last == w_.steps;
      for (int64_t part = 0; part < parts; part++) {
        run.tiles[part] = reinterpret_cast<const BFloat16*>(to + part * kTilesBytes);
        const uint8_t* ahead = codes + (shares ? w_.panel_bytes : kAhead);
        unpack_steps(*w_.header, part, codes, run.steps, to + part * kTilesBytes, ahead);
      }
      runs.push_back(run);
      to += run.steps * kStepBytes;
      step = last;
    }
  }

  void multiply_run(const Run& run, int64_t row, int64_t count, float* sums) {
    const int64_t pauses = run.steps * tiles::kPauses, each = (pending_.count - done_ + pauses - 1) / pauses;
    const tiles::Sums to{sums, tiles::kSums, tiles::kColumns * sizeof(float)};
    const BFloat16* left = x_.rows(row) + run.step * tiles::kTile;
    const int64_t parts = w_.header->parts;
    for (int64_t part = 0; part < parts; part++) {
      const tiles::PanelRight right{&run.tiles[part], run.steps, run.steps};
      tiles::multiply(left, left + x_.stride * tiles::kTile, count, right, to, sums + 2 * tiles::kSums,
                      part > 0 || !run.begins, [] {}, [&] { work_until(done_ + each); }, [] {});
    }
    finish();
  }

  // Adds the pending sums of rows [done_, end) to their results; emits these after the last group.
  void work_until(int64_t end) {
    end = std::min(end, pending_.count);
    if (done_ >= end) return;
    const int64_t first = done_;
    done_ = end;
    for (int64_t i = 0; i < kPanelColumns; i += kLanes) add_sums(i, first, end);
    if (!is_last(pending_.group)) return;
    if constexpr (kExpands) expand();
    for (int64_t row = first; row < end; row++) {
      const float* sums = pending_.results + place_of(row, 0);
      emit_(pending_.panel, pending_.row + row, sums, sums + tiles::kSums);
    }
  }

  // Where the sums of a row of a block are, from the i-th of 32 outputs on.
  static int64_t place_of(int64_t row, int64_t i) {
    return row / tiles::kRows * 2 * tiles::kSums + i / tiles::kColumns * tiles::kSums +
           row % tiles::kRows * tiles::kColumns + i % tiles::kColumns;
  }

  // results += scales * sums + offsets * (sums of the rows over the group), for kLanes outputs of rows [begin, end).
  void add_sums(int64_t i, int64_t begin, int64_t end) {
    const int64_t group = pending_.group;
    const Vec scale = w_.load_scale(pending_.panel, group, i);
    const bool has_offsets = w_.offset_size > 0;
    const Vec offset = has_offsets ? w_.load_offset(pending_.panel, group, i) : Vec(0.f);
    for (int64_t row = begin; row < end; row++) {
      const int64_t place = place_of(row, i), number = pending_.row + row;
      Vec total = group == 0 ? Vec(0.f) : load(pending_.results + place);
      total = at::vec::fmadd(scale, load(pending_.sums + place), total);
      if (has_offsets) total = at::vec::fmadd(offset, Vec(rows_.sums(number)[group]), total);
      save(pending_.results + place, total);
    }
  }

  // Lets the tile unit add deltas to the results of a block, all of whose rows are complete.
  void expand() const {
    amx::load_sums(pending_.results, pending_.count);
    emit_.expand_block(pending_.panel, pending_.row, pending_.count);
    amx::store_sums(pending_.results, pending_.count);
  }

  static constexpr int64_t kStepBytes = kPanelTile * sizeof(BFloat16);

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  float *results_, *kept_, *turns_;
  char* tiles_;
  int64_t place_ = 0, done_ = 0, turn_ = 0, side_ = 0;
  Block pending_{0, 0, 0, 0, nullptr, nullptr};
};
#endif

// Calls emit as PanelLoop does.
template <typename Emit>
class CodeLoop {
 public:
  CodeLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels),
        rows_(rows),
        x_(x),
        emit_(emit),
        many_(panels, rows, x)
#ifdef MILLRACE_AMX
        ,
        amx_(panels, rows, x, emit)
#endif
  {
  }

  // Multiplies panels [begin, end) with at most kRowsAtOnce rows from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
#ifdef MILLRACE_AMX
    if (tiles::on_amx()) return amx_.multiply(begin, end, first, rows);
#endif
    if (rows <= most_in_registers(w_)) return multiply_few_rows(begin, end, first, rows);
    for (int64_t panel = begin; panel < end; panel += kPanelsAtOnce)
      many_.multiply(panel, std::min(end, panel + kPanelsAtOnce), first, rows, emit_);
  }

  // Adds and emits the remaining sums.
  void finish() {
#ifdef MILLRACE_AMX
    amx_.finish();
#endif
  }

 private:
  void multiply_few_rows(int64_t begin, int64_t end, int64_t first, int64_t rows) const {
    const FewLeft left = few_rows_of(x_, first, rows, w_.steps);
    for (int64_t panel = begin; panel < end; panel++)
      for (int64_t tile = 0; tile < rows; tile += FewLeft::kTogether) {
        const int64_t count = std::min(FewLeft::kTogether, rows - tile);
        const int64_t passes = (count + kMostFewRows - 1) / kMostFewRows;
        for (int64_t pass = 0; pass < passes; pass++)
          multiply_pass(panel, left, first, {tile + count * pass / passes, tile + count * (pass + 1) / passes});
      }
  }

  // Multiplies `rows` of those from `first` on.
  void multiply_pass(int64_t panel, const FewLeft& left, int64_t first, Range rows) const {
    alignas(64) float sums[kMostFewRows * kPanelColumns];
    multiply_few(w_, rows_, panel, left.from(rows.low), first + rows.low, rows.high - rows.low, sums);
    for (int64_t row = rows.low; row < rows.high; row++) {
      const float* of_row = sums + (row - rows.low) * kPanelColumns;
      emit_(panel, first + row, of_row, of_row + tiles::kColumns);
    }
  }

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  ManyRows many_;
#ifdef MILLRACE_AMX
  AmxCodeLoop<Emit> amx_;
#endif
};

}  // namespace millrace
