// Products of tiles by AMX's tile unit.
//
// A row's sums run over K in one order whatever rows come with it (Intel SDM, TDPBF16PS).
#pragma once

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(CPU_CAPABILITY_AVX512)
#define MILLRACE_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace millrace::amx {

using namespace tiles;

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

// sums += left x right, of tiles by their numbers, which are part of the instruction.
#define MILLRACE_MULTIPLY(sums, left, right)            \
  if constexpr (kFormat == Format::kInt8) {             \
    _tile_dpbssd(sums, left, right);                    \
  } else {                                              \
    _tile_dpbf16ps(sums, left, right);                  \
  }

// Few tiles are in use, at the price of loading one twice: on a core whose other hardware thread is busy, a step for 32
// rows took 3.3 times as long as alone with eight tiles in use, and 2.2 times with six.

// sums (+)= left [rows, K] x right [K, 32]. In each step, `meanwhile()` does something else kPauses times.
template <Format kFormat = Format::kBFloat16, typename RightOperand, typename Meanwhile>
void multiply_one(const BFloat16* left, const RightOperand& right, const Sums& sums, bool add,
                  const Meanwhile& meanwhile) {
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
template <Format kFormat = Format::kBFloat16, typename RightOperand, typename Meanwhile>
void multiply_two(const BFloat16* left, const BFloat16* left_low, const RightOperand& right, const Sums& sums,
                  float* low, bool add, const Meanwhile& meanwhile) {
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

}  // namespace millrace::amx
#endif
