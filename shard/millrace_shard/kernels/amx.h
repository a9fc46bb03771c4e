// Products of bfloat16 tiles on AMX: the tile unit multiplies 16 rows by 32 of K with 32 of K by 16 columns.
//
// Left operands are stored tile by tile, [16, 32] each; right operands with pairs of K interleaved, [16, 16, 2] each.
// A row's sums run over K in one order whatever rows come with it (Intel SDM, TDPBF16PS).
#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(CPU_CAPABILITY_AVX512)
#define MILLRACE_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace millrace::amx {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 16;
constexpr int64_t kDepth = 32;                 // of K in a tile
constexpr int64_t kTile = kRows * kDepth;      // bfloat16 values
constexpr int64_t kSums = kRows * kColumns;    // float32 values
constexpr int64_t kTileStride = kDepth * sizeof(BFloat16);

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Whether the system grants this process the tile registers, for which it has to be asked.
inline bool granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool result = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return result;
}

// Tiles 0 to 3 hold sums, 4 left operands of `rows` rows and 5 right operands. Until `release`.
inline void configure(int64_t rows) {
  Config config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = kTileStride;
    config.rows[i] = i < 5 ? static_cast<uint8_t>(rows) : kRows;
  }
  // The intrinsic of some compilers takes the first bytes alone for its input.
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

inline void release() { _tile_release(); }

// To be called between ordinary stores and tile loads of the same memory: some compilers do not know that those read it.
inline void order_stores() { asm volatile("" ::: "memory"); }

// Right operands: `total` steps of K in runs of `steps` in memory, two tiles in each. `step` and `second` are distances,
// `stride` bytes between tile rows.
struct Right {
  const BFloat16* const* runs;
  int64_t total, steps, step, second, stride;
};

// sums [16, 16] twice, `second` values apart and `stride` bytes from row to row.
struct Sums {
  float* data;
  int64_t second, stride;
};

// What a tile's 64 bytes of K are: 32 bfloat16 in pairs with float32 sums, or 64 int8 in quads with int32 sums.
enum class Format { kBFloat16, kInt8 };

#if defined(__AMX_INT8__)
#define MILLRACE_AMX_INT8 1
#define MILLRACE_MULTIPLY(sums, left, right)            \
  if constexpr (kFormat == Format::kInt8) {             \
    _tile_dpbssd(sums, left, right);                    \
  } else {                                              \
    _tile_dpbf16ps(sums, left, right);                  \
  }
#else
#define MILLRACE_MULTIPLY(sums, left, right) _tile_dpbf16ps(sums, left, right)
#endif

// Few tiles are in use, at the price of loading one twice: on a core whose other hardware thread is busy, a step for 32
// rows took 3.3 times as long as alone with eight tiles in use, and 2.2 times with six.

// Times in a step that something else is done, a little each time: much at once would hold up the loads after it.
constexpr int64_t kPauses = 4;

// sums (+)= left [rows, K] x right [K, 32]. In each step, `meanwhile()` does something else kPauses times.
template <Format kFormat = Format::kBFloat16, typename Meanwhile>
void multiply_one(const BFloat16* left, const Right& right, const Sums& sums, bool add, const Meanwhile& meanwhile) {
  order_stores();
  if (add) {
    _tile_loadd(0, sums.data, sums.stride);
    _tile_loadd(1, sums.data + sums.second, sums.stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t done = 0; done < right.total; done += right.steps) {
    const BFloat16* r = right.runs[done / right.steps];
    const int64_t steps = std::min(right.steps, right.total - done);
    for (int64_t i = 0; i < steps; i++, left += kTile, r += right.step) {
      _tile_loadd(4, left, kTileStride);
      meanwhile();
      _tile_loadd(5, r, right.stride);
      meanwhile();
      MILLRACE_MULTIPLY(0, 4, 5);
      meanwhile();
      _tile_loadd(5, r + right.second, right.stride);
      meanwhile();
      MILLRACE_MULTIPLY(1, 4, 5);
    }
  }
  _tile_stored(0, sums.data, sums.stride);
  _tile_stored(1, sums.data + sums.second, sums.stride);
}

// The same for 32 rows, whose second half has its left tiles at `left_low` and its sums at `low`.
template <Format kFormat = Format::kBFloat16, typename Meanwhile>
void multiply_two(const BFloat16* left, const BFloat16* left_low, const Right& right, const Sums& sums, float* low,
                  bool add, const Meanwhile& meanwhile) {
  order_stores();
  if (add) {
    _tile_loadd(0, sums.data, sums.stride);
    _tile_loadd(1, sums.data + sums.second, sums.stride);
    _tile_loadd(2, low, sums.stride);
    _tile_loadd(3, low + sums.second, sums.stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t done = 0; done < right.total; done += right.steps) {
    const BFloat16* r = right.runs[done / right.steps];
    const int64_t steps = std::min(right.steps, right.total - done);
    for (int64_t i = 0; i < steps; i++, left += kTile, left_low += kTile, r += right.step) {
      _tile_loadd(4, left, kTileStride);
      meanwhile();
      _tile_loadd(5, r, right.stride);
      MILLRACE_MULTIPLY(0, 4, 5);
      meanwhile();
      _tile_loadd(5, r + right.second, right.stride);
      MILLRACE_MULTIPLY(1, 4, 5);
      meanwhile();
      _tile_loadd(4, left_low, kTileStride);
      MILLRACE_MULTIPLY(3, 4, 5);
      meanwhile();
      _tile_loadd(5, r, right.stride);
      MILLRACE_MULTIPLY(2, 4, 5);
    }
  }
  _tile_stored(0, sums.data, sums.stride);
  _tile_stored(1, sums.data + sums.second, sums.stride);
  _tile_stored(2, low, sums.stride);
  _tile_stored(3, low + sums.second, sums.stride);
}

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
  // Where 16 columns from `column`, a multiple of 16, are.
  BFloat16* at(int64_t row, int64_t column) const {
    return data + (row / kRows * stride + column / kDepth) * kTile + row % kRows * kDepth + column % kDepth;
  }
};

}  // namespace millrace::amx
#endif
