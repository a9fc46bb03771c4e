// The layout of operands that are multiplied tile by tile: left tiles of 16 rows by 32 of K, right tiles of 32 of K by
// 16 columns.
//
// Left operands are stored tile by tile, [16, 32] each; right operands with pairs of K interleaved, [16, 16, 2] each.
#pragma once

#include "vectors.h"

#include <immintrin.h>

#include <algorithm>

namespace millrace::tiles {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 16;
constexpr int64_t kDepth = 32;                 // of K in a tile
constexpr int64_t kTile = kRows * kDepth;      // bfloat16 values
constexpr int64_t kSums = kRows * kColumns;    // float32 values
constexpr int64_t kTileStride = kDepth * sizeof(BFloat16);

// A right operand: `total` steps of K in runs of `steps` contiguous steps, two tiles per step. `step` and `second` are
// distances in values; `stride` is the distance of tile rows in bytes.
struct Right {
  const BFloat16* const* runs;
  int64_t total, steps, step, second, stride;

  // Calls body(operand, steps) for each run.
  template <typename Body>
  [[gnu::always_inline]] void each_run(const Body& body) const {
    const BFloat16* const* run = runs;
    for (int64_t done = 0; done < total; done += steps) body(*run++, std::min(steps, total - done));
  }
};

// A right operand that is contiguous. Its distances are compile-time constants: variable ones cost the vector path an
// eighth of its speed.
struct PanelRight {
  const BFloat16* const* runs;
  int64_t total, steps;
  static constexpr int64_t step = 2 * kTile, second = kTile, stride = kTileStride;

  template <typename Body>
  [[gnu::always_inline]] void each_run(const Body& body) const {
    body(*runs, total);
  }
};

// Two tiles of sums [16, 16], `second` values apart, with `stride` bytes from row to row.
struct Sums {
  float* data;
  int64_t second, stride;
};

// How often per step of K other work is interleaved. Much of it at once would delay the loads after it.
constexpr int64_t kPauses = 4;

// Sums over more steps of K than kStepsInOne are taken in parts of at most kPart steps. The tiles of neighbouring rows must not
// alias in the second-level cache then, which has ways of 128 tiles.
constexpr int64_t kPart = 16;
constexpr int64_t kStepsInOne = kPart + kPart / 2;

// Rows stored as left operands, tile by tile, with `stride` tiles per 16 rows.
struct Tiled {
  BFloat16* data;
  int64_t stride;

  Tiled(char* memory, int64_t columns) : data(reinterpret_cast<BFloat16*>(memory)), stride(tiles(columns)) {}

  static int64_t tiles(int64_t columns) {
    const int64_t steps = (columns + kDepth - 1) / kDepth, parts = (steps + kPart - 1) / kPart;
    return steps <= kStepsInOne ? steps : (parts | 1) * kPart;
  }
  static int64_t bytes(int64_t rows, int64_t columns) {
    return (rows + kRows - 1) / kRows * tiles(columns) * kTile * static_cast<int64_t>(sizeof(BFloat16));
  }

  const BFloat16* rows(int64_t row) const { return data + row / kRows * stride * kTile; }
  // The address of `column`; columns up to the next multiple of 32 follow it.
  BFloat16* at(int64_t row, int64_t column) const {
    return data + (row / kRows * stride + column / kDepth) * kTile + row % kRows * kDepth + column % kDepth;
  }
};

}  // namespace millrace::tiles
