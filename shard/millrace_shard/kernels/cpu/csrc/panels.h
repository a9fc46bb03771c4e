// Linear layers by tiles. Weights are stored in panels of 32 outputs, each contiguous and read once from end to end.
#pragma once

#include "tile_unit.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "team.h"
#include "weight_memory.h"

namespace millrace {

constexpr int64_t kPanelColumns = 2 * tiles::kColumns;
constexpr int64_t kPanelTile = 2 * tiles::kTile;
constexpr int64_t kRowsAtOnce = 512;  // rows that stay in the second-level cache while all panels pass over them
constexpr int64_t kPanelsAtOnce = 8;  // panels that share the passes over a part of those rows
constexpr int64_t kGrainOfWeights = 65536;

// A weight packed as [panels, steps, 2, 16, 16, 2]: steps of 32 inputs, two tiles of 16 outputs, inputs in pairs.
struct Panels {
  const BFloat16* weights;
  const BFloat16* bias;  // of all outputs in order, or null
  int64_t count, steps;

  Panels(const BFloat16* data, int64_t panels, int64_t steps_of_k)
      : weights(data), bias(nullptr), count(panels), steps(steps_of_k) {}

  // The panels of a linear with `in` inputs and `out` outputs; `bias` may be empty.
  Panels(const at::Tensor& packed, const at::Tensor& bias, int64_t in, int64_t out)
      : weights(packed.const_data_ptr<BFloat16>()),
        bias(bias.numel() == 0 ? nullptr : bias.const_data_ptr<BFloat16>()),
        count(packed.size(0)),
        steps(packed.size(1)) {
    TORCH_CHECK(packed.is_contiguous() && packed.dim() == 6 && packed.size(2) == 2 && packed.size(5) == 2);
    TORCH_CHECK(steps > 0 && steps == (in + tiles::kDepth - 1) / tiles::kDepth);
    TORCH_CHECK(count == (out + kPanelColumns - 1) / kPanelColumns);
    TORCH_CHECK(bias.is_contiguous() && (bias.numel() == 0 || bias.numel() == out));
  }

  int64_t bytes() const { return steps * kPanelTile * static_cast<int64_t>(sizeof(BFloat16)); }
  int64_t grain() const { return std::max<int64_t>(1, kGrainOfWeights / bytes()); }
};

// The rows of a weight [out, in] that is stored in parts. Each part [n, in] may have its own row stride.
class WeightRows {
 public:
  explicit WeightRows(at::TensorList parts) {
    TORCH_CHECK(!parts.empty() && parts[0].dim() == 2);
    in_ = parts[0].size(1);
    for (const at::Tensor& part : parts) {
      TORCH_CHECK(part.scalar_type() == at::kBFloat16 && part.dim() == 2 && part.size(1) == in_ && part.stride(1) == 1);
      parts_.push_back({part.const_data_ptr<BFloat16>(), part.stride(0), out_});
      out_ += part.size(0);
    }
  }

  int64_t in() const { return in_; }
  int64_t out() const { return out_; }

  const BFloat16* row(int64_t row) const {
    const auto after = std::upper_bound(parts_.begin(), parts_.end(), row,
                                        [](int64_t wanted, const Part& part) { return wanted < part.first; });
    const Part& part = *std::prev(after);
    return part.data + (row - part.first) * part.stride;
  }

 private:
  struct Part {
    const BFloat16* data;
    int64_t stride, first;  // the output of its first row
  };
  std::vector<Part> parts_;
  int64_t in_ = 0, out_ = 0;
};

// Packs a right operand of `count` outputs (0 to 16) with `columns` inputs (1 to 32) from `first` on, padded with
// zeros.
inline void pack_tile(BFloat16* to, const BFloat16* const* rows, int64_t count, int64_t first, int64_t columns) {
  uint32_t pairs[tiles::kColumns][tiles::kDepth / 2] = {};
  for (int64_t row = 0; row < count; row++) std::memcpy(pairs[row], rows[row] + first, columns * sizeof(BFloat16));
  uint32_t* transposed = reinterpret_cast<uint32_t*>(to);
  for (int64_t pair = 0; pair < tiles::kDepth / 2; pair++)
    for (int64_t row = 0; row < tiles::kColumns; row++) transposed[pair * tiles::kColumns + row] = pairs[row][pair];
}

// Packs `parts` of a weight [out, in] bfloat16. Panel p holds outputs 32 p to 32 p + 31. If `gated`, the first half of the
// outputs are gates and the second half ups, and a panel holds 16 of each, so that one thread computes both.
inline at::Tensor pack_panels(at::TensorList parts, bool gated) {
  const WeightRows weight(parts);
  const int64_t out = weight.out(), in = weight.in();
  TORCH_CHECK(!gated || out % kPanelColumns == 0, "millrace: gates come in multiples of 16");
  const int64_t count = round_up(out, kPanelColumns) / kPanelColumns, steps = round_up(in, tiles::kDepth) / tiles::kDepth;
  at::Tensor packed = WeightMemory::empty({count, steps, 2, tiles::kColumns, tiles::kColumns, 2}, parts[0].options());
  BFloat16* to = packed.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++)
      for (int64_t half = 0; half < 2; half++) {
        const int64_t first = gated ? half * out / 2 + panel * tiles::kColumns
                                    : panel * kPanelColumns + half * tiles::kColumns;
        const int64_t given = std::clamp<int64_t>(out - first, 0, tiles::kColumns);
        const BFloat16* rows[tiles::kColumns];
        for (int64_t row = 0; row < given; row++) rows[row] = weight.row(first + row);
        for (int64_t step = 0; step < steps; step++)
          pack_tile(to + ((panel * steps + step) * 2 + half) * tiles::kTile, rows, given, step * tiles::kDepth,
                    std::min(tiles::kDepth, in - step * tiles::kDepth));
      }
  });
  return packed;
}

// Fetches `each` lines of weights at a call, until all are fetched. It is not part of the loop below, which is compiled
// for each kind of output: products that call it are compiled once.
struct Prefetch {
  static constexpr int64_t kLine = 64 / sizeof(BFloat16);
  mutable const BFloat16* ahead;
  const BFloat16* stop;
  int64_t each;

  void operator()() const {
    if (ahead >= stop) return;
    for (int64_t line = 0; line < each; line++, ahead += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
  }

  // Goes on where a copy is.
  void resume(const Prefetch& copy) const { ahead = copy.ahead; }
};

// One thread's loop over panels. It calls emit(panel, row, left 16 sums, right 16 sums) for every row of every panel, and
// on AMX, if there is one, emit.expand_block(panel, row, count) while the tiles hold the sums of `count` rows.
//
// On AMX the sums of a block of 32 rows are emitted, and the next weights prefetched, between the products of the next
// block: to read the sums at once would stall both the core and the tile unit.
template <typename Emit>
class PanelLoop {
 public:
  PanelLoop(const Panels& panels, const tiles::Tiled& x, const Emit& emit)
      : w_(panels), x_(x), emit_(emit) {
    static thread_local Scratch scratch;
    sums_ = reinterpret_cast<float*>(scratch.reserve(kPanelsAtOnce * kRowsAtOnce * kPanelColumns * sizeof(float)));
  }

  // Whether sums over `rows` rows are taken in parts of K, so that the operands of a part stay in the caches.
  static bool in_parts(const Panels& w, int64_t rows) { return rows > kBlock && w.steps > tiles::kStepsInOne; }
  // Multiplies panels [begin, end), at most kPanelsAtOnce if in parts, with at most kRowsAtOnce rows from `first` on.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    if (!in_parts(w_, rows)) {
      for (int64_t panel = begin; panel < end; panel++) {
        const int64_t after = panel + 1 < w_.count ? panel + 1 : panel;
        multiply_part({panel, first, rows, 0, w_.steps, weights(after, 0)});
      }
      return;
    }
    finish();  // every block now keeps its sums, in memory that may hold sums still to be emitted
    const int64_t steps = tiles::part_steps();
    for (int64_t step = 0; step < w_.steps; step += steps)
      for (int64_t panel = begin; panel < end; panel++) {
        const BFloat16* next = panel + 1 < end ? weights(panel + 1, step) : weights(begin, step + steps);
        place_ = (panel - begin) * kRowsAtOnce / kBlock;
        multiply_part({panel, first, rows, step, std::min(w_.steps, step + steps), next});
      }
  }

  void finish() { emit_until(pending_.count); }  // emits the remaining sums

 private:
  static constexpr int64_t kBlock = 2 * tiles::kRows;
  static constexpr int64_t kBlockSums = 4 * tiles::kSums;
  static constexpr int64_t kAhead = 8192 / sizeof(BFloat16);

  struct Part {
    int64_t panel, row, rows, begin, end;  // steps of K
    const BFloat16* next;                  // the weights to prefetch
    bool is_whole(const Panels& w) const { return begin == 0 && end == w.steps; }
  };
  struct Block {
    int64_t panel, row, count;
    const float* sums;
  };

  const BFloat16* weights(int64_t panel, int64_t step) const {
    return w_.weights + (panel * w_.steps + step) * kPanelTile;
  }

  void multiply_part(const Part& part) {
    const int64_t blocks = (part.rows + kBlock - 1) / kBlock, steps = part.end - part.begin;
    const int64_t passes = tiles::passes(part.rows);
    const int64_t lines = steps * kPanelTile / Prefetch::kLine;
    // A single pass is bound by memory: a short distance ahead is enough. A thread's panels are contiguous in memory.
    const BFloat16* ahead = passes == 1 ? weights(part.panel, part.begin) + kAhead : part.next;
    const int64_t pauses = passes * steps * tiles::kPauses, each = (lines + pauses - 1) / pauses;
    const Prefetch fetch{ahead, ahead + lines * Prefetch::kLine, each};
    for (int64_t block = 0; block < blocks; block++) {
      const bool alternates = part.is_whole(w_);
      if (alternates) place_ = place_ == 0 ? 1 : 0;
      float* sums = sums_ + (alternates ? place_ : place_ + block) * kBlockSums;
      const int64_t row = part.row + block * kBlock, count = std::min(kBlock, part.rows - block * kBlock);
      multiply_block(part, row, count, sums, fetch);
      if (part.end == w_.steps) {
        done_ = 0;
        pending_ = {part.panel, row, count, sums};
      }
    }
  }

  void multiply_block(const Part& part, int64_t row, int64_t count, float* sums, const Prefetch& fetch) {
    const int64_t steps = part.end - part.begin, rows = pending_.count - done_;
    // A row at each pause, or more with few steps.
    const int64_t each = (rows + steps * tiles::kPauses - 1) / (steps * tiles::kPauses);
    const int64_t busy = (rows + tiles::kPauses - 1) / tiles::kPauses;
    const BFloat16* run = weights(part.panel, part.begin);
    const tiles::PanelRight right{&run, steps, steps};
    const tiles::Sums to{sums, tiles::kSums, tiles::kColumns * sizeof(float)};
    const BFloat16* left = x_.rows(row) + part.begin * tiles::kTile;
    tiles::multiply(left, left + x_.stride * tiles::kTile, count, right, to, sums + 2 * tiles::kSums, part.begin > 0,
                    fetch, busy, [&] { emit_until(done_ + each); },
                    [&] {
                      if constexpr (requires { emit_.expand_block(row, row, count); })
                        if (part.end == w_.steps) emit_.expand_block(part.panel, row, count);
                    });
    finish();
  }

  void emit_until(int64_t end) {
    for (end = std::min(end, pending_.count); done_ < end; done_++) {
      const float* sums =
          pending_.sums + done_ / tiles::kRows * 2 * tiles::kSums + done_ % tiles::kRows * tiles::kColumns;
      emit_(pending_.panel, pending_.row + done_, sums, sums + tiles::kSums);
    }
  }

  const Panels& w_;
  const tiles::Tiled& x_;
  const Emit& emit_;
  float* sums_;
  int64_t place_ = 0, done_ = 0;
  Block pending_{0, 0, 0, nullptr};
};

// Lets a loop multiply `count` panels, `grain` at a time, with `rows` rows on the team.
template <typename Loop>
void share_panels(Team& team, Loop& loop, int64_t count, int64_t grain, int64_t rows) {
  const int64_t chunks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t groups = std::min(count, round_up((count + grain - 1) / grain, team.size()));
  team.share(
      chunks * groups, 1,
      [&](int64_t unit, int64_t) {
        const int64_t first = unit / groups * kRowsAtOnce, group = unit % groups;
        loop.multiply(count * group / groups, count * (group + 1) / groups, first, std::min(kRowsAtOnce, rows - first));
      },
      [&] { loop.finish(); });
}

// Multiplies all panels with `rows` rows of `x` on the team; calls emit(panel, row, left sums, right sums).
template <typename Emit>
void multiply_panels(Team& team, const Panels& w, const tiles::Tiled& x, int64_t rows, const Emit& emit) {
  PanelLoop<Emit> loop(w, x, emit);
  share_panels(team, loop, w.count, loop.in_parts(w, rows) ? kPanelsAtOnce : w.grain(), rows);
}

// Stores sums, with the bias added, in columns of y [rows, out], in y's type.
template <typename T>
struct SaveSums {
  T* y;
  int64_t out;
  const BFloat16* bias;

  void operator()(int64_t panel, int64_t row, const float* left, const float* right) const {
    save_half(row, panel * kPanelColumns, left);
    save_half(row, panel * kPanelColumns + tiles::kColumns, right);
  }

 private:
  void save_half(int64_t row, int64_t column, const float* sums) const {
    T* to = y + row * out + column;
    const BFloat16* added = bias == nullptr ? nullptr : bias + column;
    if (column + tiles::kColumns <= out) {
      for (int64_t i = 0; i < tiles::kColumns; i += kLanes) {
        const Vec values = load(sums + i);
        save(to + i, added == nullptr ? values : values + load(added + i));
      }
    } else {
      for (int64_t i = 0; i < out - column; i++)
        to[i] = static_cast<T>(added == nullptr ? sums[i] : sums[i] + static_cast<float>(added[i]));
    }
  }
};

}  // namespace millrace
