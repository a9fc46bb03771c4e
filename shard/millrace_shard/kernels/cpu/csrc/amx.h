// Products of tiles on the AMX tile unit.
//
// A row's sums run over K in one order, whatever other rows are present (Intel SDM, TDPBF16PS).
#pragma once

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(CPU_CAPABILITY_AVX512)
#define MILLRACE_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace millrace::amx {

using namespace tiles;

struct Nothing {
  void operator()() const {}
};

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Requests the tile registers from the system; returns whether it grants them.
inline bool granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool result = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return result;
}

// Configures the tiles until `release`: 0 to 3 hold sums, 4 a left operand of `rows` rows, and 5 a right operand; 6 and 7
// hold a left and a right operand of half the depth.
inline void configure(int64_t rows) {
  Config config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = i == 6 ? kTileStride / 2 : kTileStride;
    config.rows[i] = i < 5 || i == 6 ? static_cast<uint8_t>(rows) : i == 7 ? kRows / 2 : kRows;
  }
  // Assembly, since some compilers treat only the first bytes as the input of the intrinsic.
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

inline void release() { _tile_release(); }

// A compiler barrier between ordinary stores and tile loads of the same memory, which some compilers would reorder.
inline void order_stores() { asm volatile("" ::: "memory"); }

// The instructions, whose intrinsics do not take template parameters as numbers of tiles.
template <int kTo>
void load(const void* from, int64_t stride = kTileStride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTo));
}

template <int kTo, int kLeft, int kRight>
void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kTo), "i"(kLeft), "i"(kRight));
}

template <int kTo>
void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTo));
}

// Lets tiles kTo and kTo + 1 begin with the sums at `from`, or with zeros.
template <int kTo>
void begin_sums(const float* from, const Sums& sums, bool add) {
  if (add) {
    load<kTo>(from, sums.stride);
    load<kTo + 1>(from + sums.second, sums.stride);
  } else {
    zero<kTo>();
    zero<kTo + 1>();
  }
}

// Six tiles are in use in the loops, and one is loaded twice. On a core whose other hardware thread is busy, a step for 32 rows
// takes 2.2 times as long as alone with six tiles, and 3.3 times with eight. Other loads and stores take time from those of
// tiles, so other work is done only in the first `busy` steps, and what `fetch()` changes is copied to registers.

// Calls step(right operand, meanwhile) for each step; after the first `busy` steps, `meanwhile` does nothing.
template <typename RightOperand, typename Meanwhile, typename Step>
[[gnu::always_inline]] inline void each_step(const RightOperand& right, int64_t busy, const Meanwhile& meanwhile,
                                             const Step& step) {
  right.each_run([&](const BFloat16* r, int64_t steps) __attribute__((always_inline)) {
    const int64_t some = std::min(busy, steps);
    busy -= some;
    int64_t i = 0;
    for (; i < some; i++, r += right.step) step(r, meanwhile);
    for (; i < steps; i++, r += right.step) step(r, Nothing());
  });
}

// sums (+)= left [rows, K] x right [K, 32]. `fetch()` is called kPauses times per step, `meanwhile()` too, but only in the
// first `busy` steps, and `after()` when tiles 0 and 1 hold the left and the right sums.
template <typename RightOperand, typename Fetch, typename Meanwhile, typename After = Nothing>
[[gnu::always_inline]] inline void multiply_one(const BFloat16* left, const RightOperand& right, const Sums& sums,
                                                bool add, const Fetch& fetch, int64_t busy,
                                                const Meanwhile& meanwhile, const After& after = {}) {
  order_stores();
  begin_sums<0>(sums.data, sums, add);
  Fetch ahead = fetch;
  each_step(right, busy, meanwhile, [&](const BFloat16* r, const auto& work) __attribute__((always_inline)) {
    const auto pause = [&]() __attribute__((always_inline)) { ahead(), work(); };
    load<4>(left);
    pause();
    load<5>(r, right.stride);
    pause();
    add_product<0, 4, 5>();
    pause();
    load<5>(r + right.second, right.stride);
    pause();
    add_product<1, 4, 5>();
    left += kTile;
  });
  if constexpr (requires { fetch.resume(ahead); }) fetch.resume(ahead);
  after();
  _tile_stored(0, sums.data, sums.stride);
  _tile_stored(1, sums.data + sums.second, sums.stride);
}

// The same for 32 rows, whose second half has its left tiles at `left_low`, and its sums at `low` and in tiles 2 and 3.
template <typename RightOperand, typename Fetch, typename Meanwhile, typename After = Nothing>
[[gnu::always_inline]] inline void multiply_two(const BFloat16* left, const BFloat16* left_low,
                                                const RightOperand& right, const Sums& sums, float* low, bool add,
                                                const Fetch& fetch, int64_t busy, const Meanwhile& meanwhile,
                                                const After& after = {}) {
  order_stores();
  begin_sums<0>(sums.data, sums, add);
  begin_sums<2>(low, sums, add);
  Fetch ahead = fetch;
  each_step(right, busy, meanwhile, [&](const BFloat16* r, const auto& work) __attribute__((always_inline)) {
    const auto pause = [&]() __attribute__((always_inline)) { ahead(), work(); };
    load<4>(left);
    pause();
    load<5>(r, right.stride);
    add_product<0, 4, 5>();
    pause();
    load<5>(r + right.second, right.stride);
    add_product<1, 4, 5>();
    pause();
    load<4>(left_low);
    add_product<3, 4, 5>();
    pause();
    load<5>(r, right.stride);
    add_product<2, 4, 5>();
    left += kTile;
    left_low += kTile;
  });
  if constexpr (requires { fetch.resume(ahead); }) fetch.resume(ahead);
  after();
  _tile_stored(0, sums.data, sums.stride);
  _tile_stored(1, sums.data + sums.second, sums.stride);
  _tile_stored(2, low, sums.stride);
  _tile_stored(3, low + sums.second, sums.stride);
}

// Adds left [rows, 32] x right [32, 16], a tile each, to tile `sums`, 0 or 1.
inline void add_step(int64_t sums, const BFloat16* left, const BFloat16* right) {
  load<4>(left);
  load<5>(right);
  sums == 0 ? add_product<0, 4, 5>() : add_product<1, 4, 5>();
}

// sums [rows, 16] = left [rows, K] x right [K, 16] over `steps` steps of K, of contiguous right tiles. `fetch(tile)` is
// called for each right tile.
template <typename Fetch>
void multiply_column(const BFloat16* left, const BFloat16* right, int64_t steps, float* sums, const Fetch& fetch) {
  order_stores();
  _tile_zero(0);
  for (int64_t step = 0; step < steps; step++, left += kTile, right += kTile) {
    fetch(right);
    _tile_loadd(4, left, kTileStride);
    _tile_loadd(5, right, kTileStride);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, sums, kColumns * sizeof(float));
}

// Stores tiles 0 and 1, and for more than 16 rows tiles 2 and 3, to `sums` [4, 16, 16].
inline void store_sums(float* sums, int64_t rows) {
  _tile_stored(0, sums, kColumns * sizeof(float));
  _tile_stored(1, sums + kSums, kColumns * sizeof(float));
  if (rows > kRows) {
    _tile_stored(2, sums + 2 * kSums, kColumns * sizeof(float));
    _tile_stored(3, sums + 3 * kSums, kColumns * sizeof(float));
  }
  order_stores();
}

// Loads tiles 0 and 1 from `sums` [4, 16, 16], and for more than 16 rows tiles 2 and 3.
inline void load_sums(const float* sums, int64_t rows) {
  order_stores();
  _tile_loadd(0, sums, kColumns * sizeof(float));
  _tile_loadd(1, sums + kSums, kColumns * sizeof(float));
  if (rows <= kRows) return;
  _tile_loadd(2, sums + 2 * kSums, kColumns * sizeof(float));
  _tile_loadd(3, sums + 3 * kSums, kColumns * sizeof(float));
}

// Adds left [rows, 16] x right [16, 16] to tile `sums`, 0 to 3; the right operand is stored in pairs, [8, 16, 2].
inline void add_ranks(int64_t sums, const BFloat16* left, const BFloat16* right) {
  _tile_loadd(6, left, kTileStride / 2);
  _tile_loadd(7, right, kTileStride);
  switch (sums) {
    case 0: _tile_dpbf16ps(0, 6, 7); break;
    case 1: _tile_dpbf16ps(1, 6, 7); break;
    case 2: _tile_dpbf16ps(2, 6, 7); break;
    default: _tile_dpbf16ps(3, 6, 7);
  }
}

}  // namespace millrace::amx
#endif
