// The layout of operands that are multiplied tile by tile: 16 rows by 32 of K with 32 of K by 16 columns.
//
// Left operands are stored tile by tile, [16, 32] each; right operands with pairs of K interleaved, [16, 16, 2] each.
#pragma once

#include "vectors.h"

#include <immintrin.h>

namespace millrace::tiles {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 16;
constexpr int64_t kDepth = 32;                 // of K in a tile
constexpr int64_t kTile = kRows * kDepth;      // bfloat16 values
constexpr int64_t kSums = kRows * kColumns;    // float32 values
constexpr int64_t kTileStride = kDepth * sizeof(BFloat16);

// What a tile's 64 bytes of K are: 32 bfloat16 in pairs with float32 sums, or 64 int8 in quads with int32 sums.
enum class Format { kBFloat16, kInt8 };

// Right operands: `total` steps of K in runs of `steps` in memory, two tiles in each. `step` and `second` are distances,
// `stride` bytes between tile rows.
struct Right {
  const BFloat16* const* runs;
  int64_t total, steps, step, second, stride;
};

// The same where all lies together. The compiler is to know the distances: vectors took an eighth longer with others.
struct PanelRight {
  const BFloat16* const* runs;
  int64_t total, steps;
  static constexpr int64_t step = 2 * kTile, second = kTile, stride = kTileStride;
};

// sums [16, 16] twice, `second` values apart and `stride` bytes from row to row.
struct Sums {
  float* data;
  int64_t second, stride;
};

// Times in a step of K that something else is done, a little each time: much at once would hold up the loads after it.
constexpr int64_t kPauses = 4;

// More steps of K than this are taken in parts, for which the tiles of neighbouring rows must not fall on one another in
// the second-level cache, which has a way of 128 tiles.
constexpr int64_t kPart = 16;
constexpr int64_t kStepsInOne = kPart + kPart / 2;

// Rows stored as left operands, tile by tile: `stride` tiles to 16 rows.
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
  // Where columns from `column` are, up to the next multiple of 32.
  BFloat16* at(int64_t row, int64_t column) const {
    return data + (row / kRows * stride + column / kDepth) * kTile + row % kRows * kDepth + column % kDepth;
  }
};

}  // namespace millrace::tiles
