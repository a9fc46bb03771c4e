// Exact products with panels of codes on AMX: the codes of a few steps become tiles in the first-level cache, once for
// all rows.
//
// A row's sums run over the inputs of a group in one order, in float32, and are then added to the row's result, scaled,
// group by group. Sums leave the tile unit through memory, where vectors read them some products later.
#pragma once

#include "few_rows.h"

#ifdef MILLRACE_AMX
namespace millrace {

// A part of a panel, whose codes are tiles.
class AmxPart {
 public:
  static constexpr int64_t kMostSteps = tiles::kPart / 2;

  // Steps of one group; the sums of a group begin and end with one of its runs.
  struct alignas(64) Run {
    float scales[kPanelColumns], offsets[kPanelColumns];
    int64_t group, steps, first;  // `first`: of the inputs of a row
    const BFloat16* operands[2];  // by the parts of the table
    bool begins, ends;
  };

  static constexpr int64_t kTilesBytes = 2 * kMostSteps * kPanelTile * static_cast<int64_t>(sizeof(BFloat16));
  static constexpr int64_t kRunsBytes = kMostSteps * static_cast<int64_t>(sizeof(Run));

  // `tiles` has kTilesBytes bytes, `runs` kRunsBytes.
  AmxPart(const CodePanels& w, char* tiles, char* runs)
      : w_(w), memory_(tiles), runs_(reinterpret_cast<Run*>(runs)) {}

  // Unpacks steps of a panel and divides them into runs; what lies `ahead` bytes after their codes is prefetched.
  void read(int64_t panel, Range steps, int64_t ahead) {
    if (w_.is_widened()) return read_widened(panel, steps, ahead);
    const int64_t parts = w_.header->parts;
    BFloat16* to[2];
    for (int64_t part = 0; part < parts; part++) {
      to[part] = reinterpret_cast<BFloat16*>(memory_) + part * kMostSteps * kPanelTile;
      unpack_steps(w_, part, panel, steps, reinterpret_cast<char*>(to[part]), ahead);
    }
    count_ = 0;
    for (int64_t step = steps.low; step < steps.high; count_++) {
      const int64_t group = step / w_.group_steps, next = (group + 1) * w_.group_steps;
      const int64_t last = std::min({steps.high, w_.steps, next});
      Run& run = runs_[count_];
      run.group = group;
      run.steps = last - step;
      run.first = step * tiles::kTile;
      for (int64_t part = 0; part < parts; part++)
        run.operands[part] = to[part] + (step - steps.low) * kPanelTile;
      run.begins = step == group * w_.group_steps;
      run.ends = last == next || last == w_.steps;
      step = last;
    }
  }

  // Reads the scales of the runs that end.
  void read_scales(int64_t panel) {
    if (w_.is_widened()) return;
    for (Run& run : *this)
      for (int64_t i = 0; run.ends && i < kPanelColumns; i += kLanes) {
        save(run.scales + i, w_.load_scale(panel, run.group, i));
        if (w_.offset_size > 0) save(run.offsets + i, w_.load_offset(panel, run.group, i));
      }
  }

  // The same with a single run, which goes on in the next part.
  void read_widened(int64_t panel, Range steps, int64_t ahead) {
    widen_steps<kMostSteps>(w_, panel, steps, memory_, ahead, [](int64_t, int64_t) {});
    Run& run = runs_[0];
    count_ = 1;
    run.group = w_.groups - 1;
    run.steps = steps.high - steps.low;
    run.first = steps.low * tiles::kTile;
    run.operands[0] = reinterpret_cast<BFloat16*>(memory_);
    run.begins = steps.low == 0;
    run.ends = steps.high == w_.steps;
  }

  char* memory() const { return memory_; }
  Run* begin() const { return runs_; }
  Run* end() const { return runs_ + count_; }

 private:
  const CodePanels& w_;
  char* memory_;
  Run* runs_;
  int64_t count_ = 0;
};

// Calls emit as PanelLoop does.
template <typename Emit>
class AmxCodeLoop {
 public:
  AmxCodeLoop(const CodePanels& panels, const CodedRows& rows, const tiles::Tiled& x, const Emit& emit)
      : w_(panels),
        rows_(rows),
        x_(x),
        emit_(emit),
        runs_(scratch() + AmxPart::kTilesBytes),
        parts_{{panels, runs_ - AmxPart::kTilesBytes, runs_},
               {panels, runs_ - AmxPart::kTilesBytes, runs_ + AmxPart::kRunsBytes}} {
    results_ = reinterpret_cast<float*>(runs_ + 2 * AmxPart::kRunsBytes);
    kept_ = results_ + kBlocksAtOnce * kBlockSums;
    turns_ = kept_ + kBlocksAtOnce * kBlockSums;
    zeros_ = turns_ + 2 * kBlockSums;
    std::memset(zeros_, 0, kBlockSums * sizeof(float));
  }

  // Multiplies panels [begin, end), at most kPanelsAtOnce with more than a block of rows, with at most kRowsAtOnce rows
  // from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    if (rows <= kMostKeptRows) {
      finish();  // the sums of a group are where pending ones may be
      for (int64_t panel = begin; panel < end; panel++)
        multiply_few(panel, first, rows);
      return;
    }
    place_ = 0;
    if (rows <= kBlock) {
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t step = 0; step < w_.steps; step += part_steps(kFewSteps))
          multiply_part(panel, first, rows, step, kFewSteps);
      return;
    }
    // With tables in two parts, a row's sums depend on how a group is divided.
    const int64_t most = w_.header->parts == 1 ? AmxPart::kMostSteps : kFewSteps;
    for (int64_t step = 0; step < w_.steps; step += part_steps(most))
      for (int64_t panel = begin; panel < end; panel++) {
        place_ = (panel - begin) * kRowsAtOnce / kBlock;
        multiply_part(panel, first, rows, step, most);
      }
  }

  void finish() { finish(pending_); }  // adds and emits the remaining sums

 private:
  using Run = AmxPart::Run;
  static constexpr int64_t kFewSteps = 4;  // that are unpacked at once for at most a block of rows
  static constexpr int kMostKeptRows = 8;  // whose results stay in registers
  static constexpr int64_t kTurns = 4, kTurnSums = 2 * tiles::kSums;
  static constexpr int64_t kBlock = 2 * tiles::kRows;
  static constexpr int64_t kBlockSums = 4 * tiles::kSums;
  static constexpr int64_t kBlocksAtOnce = kPanelsAtOnce * kRowsAtOnce / kBlock;
  static constexpr int64_t kAhead = 4096;
  static constexpr bool kExpands = requires(const Emit& emit) { emit.expand_block(0, 0, 0); };

  // The sums of a group of a block of rows, which are to be added to the results.
  struct Block {
    int64_t panel, row, count;
    const Run* run;
    const float *sums, *before;  // `before`: the results so far; null: the sums are the results
    float* results;
    const float* inputs;  // the sums of the rows' inputs over the group, `stride` values apart; null: there are no offsets
    int64_t stride;

    int64_t to_add() const { return before == nullptr ? 0 : count; }  // rows

    // results = before + scales * sums + offsets * inputs, for kCount rows of a tile. Instructions between products count:
    // those that wait for a product keep others from beginning.
    template <int kCount>
    [[gnu::always_inline]] void add(int64_t row) const {
      inputs == nullptr ? add_as<kCount, false>(row) : add_as<kCount, true>(row);
    }

   private:
    template <int kCount, bool kHasOffsets>
    [[gnu::always_inline]] void add_as(int64_t row) const {
      const int64_t place = place_of(row);
      const float *from = sums + place, *begin = before + place;
      float* to = results + place;
      // Else the compiler adds each offset to all three in registers, of which there are not enough.
      asm("" : "+r"(from), "+r"(begin), "+r"(to));
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; i++) {
        const Vec scale = load(run->scales + i * kLanes), offset = load(run->offsets + i * kLanes);
        const float* input = inputs + row * stride;
#pragma GCC unroll 8
        for (int64_t j = 0; j < kCount; j++, input += stride) {
          const int64_t at = i * tiles::kSums + j * tiles::kColumns;
          Vec total = at::vec::fmadd(scale, load(from + at), load(begin + at));
          if (kHasOffsets) {
            asm("" : "+r"(input));
            total = at::vec::fmadd(offset, Vec(*input), total);
          }
          save(to + at, total);
        }
      }
    }
  };

  static char* scratch() {
    static thread_local Scratch scratch;
    constexpr int64_t kSums = (2 * kBlocksAtOnce + 3) * kBlockSums;
    return scratch.reserve(AmxPart::kTilesBytes + 2 * AmxPart::kRunsBytes + kSums * static_cast<int64_t>(sizeof(float)));
  }

  // How many steps are unpacked at once: at most `most`, and whole groups if one fits.
  int64_t part_steps(int64_t most) const {
    return w_.group_steps >= most ? most : most / w_.group_steps * w_.group_steps;
  }

  AmxPart& read_part(int64_t panel, int64_t step, int64_t most, int64_t ahead) {
    side_ = 1 - side_;
    AmxPart& part = parts_[side_];
    part.read(panel, {step, std::min(w_.steps, step + part_steps(most))}, ahead);
    return part;
  }

  // Multiplies `count` rows with a run, and works in the pauses of its first `busy` steps. Sums that have begun are at `sums`.
  template <typename Work>
  [[gnu::always_inline]] void multiply_run(const Run& run, int64_t row, int64_t count, float* sums, int64_t busy,
                                           const Work& work) const {
    const tiles::Sums to{sums, tiles::kSums, tiles::kColumns * sizeof(float)};
    const BFloat16 *left = x_.rows(row) + run.first, *low = left + x_.stride * tiles::kTile;
    for (int64_t part = 0; part < (w_.is_widened() ? 1 : w_.header->parts); part++) {
      const tiles::PanelRight right{&run.operands[part], run.steps, run.steps};
      const bool add = part > 0 || !run.begins;
      float* sums_low = sums + 2 * tiles::kSums;
      count > tiles::kRows ? amx::multiply_two(left, low, right, to, sums_low, add, amx::Nothing(), busy, work)
                           : amx::multiply_one(left, right, to, add, amx::Nothing(), busy, work);
    }
  }

  void multiply_few(int64_t panel, int64_t first, int64_t rows) {
    if (w_.is_widened()) return multiply_widened(panel, first, rows);
    dispatch_count<kMostKeptRows>(rows, [&](auto count) { multiply_kept<count()>(panel, first); });
  }

  // Multiplies kRows rows with a panel. The sums of a group are added two groups later.
  template <int kRows>
  void multiply_kept(int64_t panel, int64_t first) {
    PanelTotals<kRows> totals;
    const auto add = [&](int64_t group) {
      const float* from = turns_ + group % kTurns * kTurnSums;
      Lanes sums[2][kRows];
      amx::order_stores();
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) {
        sums[0][row] = load(from + row * kLanes);
        sums[1][row] = load(from + tiles::kSums + row * kLanes);
      }
      totals.template add<2>(w_, rows_, panel, group, first, 0, sums);
    };
    for (int64_t step = 0; step < w_.steps; step += part_steps(kFewSteps))
      for (const Run& run : read_part(panel, step, kFewSteps, kAhead)) {
        multiply_run(run, first, kRows, turns_ + run.group % kTurns * kTurnSums, 0, amx::Nothing());
        if (run.ends && run.group >= 2) add(run.group - 2);
      }
    for (int64_t group = std::max<int64_t>(0, w_.groups - 2); group < w_.groups; group++) add(group);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++)
      for (int64_t i = 0; i < 2; i++) save(turns_ + i * tiles::kSums + row * kLanes, Vec(totals.values[i][row]));
    emit_rows(panel, first, kRows, turns_);
  }

  // Multiplies rows of a tile with a panel of widened weights: each step while the next one is unpacked.
  void multiply_widened(int64_t panel, int64_t first, int64_t rows) {
    char* operands = parts_[0].memory();
    const BFloat16* left = x_.rows(first);
    const auto multiply = [=](int64_t step, int64_t tile) {
      const char* right = operands + (step % kFewSteps * 2 + tile) * tiles::kRows * tiles::kTileStride;
      amx::add_step(tile, left + step * tiles::kTile, reinterpret_cast<const BFloat16*>(right));
    };
    _tile_zero(0);
    _tile_zero(1);
    widen_steps<kFewSteps>(w_, panel, {0, w_.steps}, operands, kAhead, [=](int64_t step, int64_t tile) {
      amx::order_stores();
      if (step > 0) multiply(step - 1, tile);
    });
    amx::order_stores();
    for (int64_t tile = 0; tile < 2; tile++) multiply(w_.steps - 1, tile);
    amx::store_sums(turns_, std::min(rows, tiles::kRows));
    emit_rows(panel, first, rows, turns_);
  }

  void multiply_part(int64_t panel, int64_t first, int64_t rows, int64_t step, int64_t most) {
    const int64_t blocks = (rows + kBlock - 1) / kBlock;
    // Where the sums of a group go on in the next part, each block keeps its own.
    const bool keeps = blocks > 1 && (w_.is_widened() || w_.group_steps > part_steps(most));
    AmxPart& part = read_part(panel, step, most, blocks > 1 ? w_.panel_bytes : kAhead);
    part.read_scales(panel);
    const float* inputs = w_.needs_sums() ? rows_.sums(first) : nullptr;
    const int64_t stride = w_.needs_sums() ? rows_.sums(first + 1) - inputs : 0;
    Block pending = pending_;  // in registers
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = first + block * kBlock, count = std::min(kBlock, rows - block * kBlock);
      for (const Run& run : part) {
        float* sums = keeps ? kept_ + (place_ + block) * kBlockSums : turns_ + turn_ * kBlockSums;
        if (run.steps >= 4) {
          multiply_with<2>(run, row, count, sums, pending);
        } else {
          multiply_with<8>(run, row, count, sums, pending);
        }
        emit(pending);
        pending.count = 0;
        if (!run.ends) continue;
        turn_ = 1 - turn_;
        float* results = results_ + (place_ + block) * kBlockSums;
        pending = {panel, row, count, &run, sums, run.group == 0 ? zeros_ : results, results, nullptr, stride};
        if (w_.is_widened()) {
          pending.before = nullptr;
          pending.results = sums;
        }
        if (inputs != nullptr) pending.inputs = inputs + block * kBlock * stride + run.group;
        if (kExpands && is_last(run)) finish(pending);
      }
    }
    pending_ = pending;
  }

  // Multiplies a block of rows with a run, and adds pending sums, kEach rows at each pause.
  template <int kEach>
  [[gnu::always_inline]] void multiply_with(const Run& run, int64_t row, int64_t count, float* sums,
                                            const Block& pending) const {
    constexpr int64_t kStep = kEach * tiles::kPauses;
    const int64_t rows = pending.to_add();
    int64_t done = 0;
    multiply_run(run, row, count, sums, (rows + kStep - 1) / kStep, [&]() __attribute__((always_inline)) {
      if (done < rows) pending.template add<kEach>(done);
      done += kEach;
    });
    for (; done < rows; done += kEach) pending.template add<kEach>(done);
  }

  bool is_last(const Run& run) const { return run.group + 1 == w_.groups; }

  void finish(Block& of) const {
    for (int64_t row = 0; row < of.to_add(); row += 8) of.template add<8>(row);
    emit(of);
    of.count = 0;
  }

  // Emits the results of a block after its last group.
  [[gnu::always_inline]] void emit(const Block& of) const {
    if (of.count > 0 && is_last(*of.run)) emit_rows(of.panel, of.row, of.count, of.results);
  }

  [[gnu::noinline]] void emit_rows(int64_t panel, int64_t first, int64_t count, float* results) const {
    if constexpr (kExpands) expand(panel, first, count, results);
    for (int64_t row = 0; row < count; row++) {
      const float* sums = results + place_of(row);
      emit_(panel, first + row, sums, sums + tiles::kSums);
    }
  }

  // Where the first 16 results of a row of a block are.
  static int64_t place_of(int64_t row) { return (row + row / tiles::kRows * tiles::kRows) * tiles::kColumns; }

  // Lets the tile unit add deltas to the results of a block, all of whose rows are complete.
  void expand(int64_t panel, int64_t row, int64_t count, float* results) const {
    amx::load_sums(results, count);
    emit_.expand_block(panel, row, count);
    amx::store_sums(results, count);
  }

  const CodePanels& w_;
  const CodedRows& rows_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  char* runs_;
  AmxPart parts_[2];  // in turn, while sums of the last one are pending
  float *results_, *kept_, *turns_, *zeros_;
  int64_t place_ = 0, turn_ = 0, side_ = 0;
  Block pending_{0, 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
};

}  // namespace millrace
#endif
