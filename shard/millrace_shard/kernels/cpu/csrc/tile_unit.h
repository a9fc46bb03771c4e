// The unit that multiplies tiles: AMX where the build targets it and the system grants it, else vectors.
#pragma once

#include "amx.h"
#include "avx2.h"
#include "avx512.h"

#include <string>

namespace millrace::tiles {

#if defined(CPU_CAPABILITY_AVX512)
namespace vectors = avx512;
constexpr const char* kVectorUnit = "avx512";
#else
namespace vectors = avx2;
constexpr const char* kVectorUnit = "avx2";
#endif

#ifdef MILLRACE_AMX
inline bool& on_amx() {
  static bool wanted = amx::granted();
  return wanted;
}
#else
inline bool on_amx() { return false; }
#endif

// Selects AMX, where the CPU has it, or vectors; returns whether AMX is selected. No operator may run meanwhile.
inline bool use_amx([[maybe_unused]] bool wanted) {
#ifdef MILLRACE_AMX
  on_amx() = wanted && amx::granted();
#endif
  return on_amx();
}

// The selected unit: "amx", "avx512" or "avx2".
inline std::string name() { return on_amx() ? "amx" : kVectorUnit; }

// Prepares the calling thread for products of at most `rows` rows of a row of tiles, until `release`.
inline void configure([[maybe_unused]] int64_t rows) {
#ifdef MILLRACE_AMX
  if (on_amx()) amx::configure(rows);
#endif
}

inline void release() {
#ifdef MILLRACE_AMX
  if (on_amx()) amx::release();
#endif
}

// How often products of `rows` rows pass over the right operand.
inline int64_t passes(int64_t rows) {
  return on_amx() ? (rows + 2 * kRows - 1) / (2 * kRows) : vectors::passes(rows);
}

// How many steps of K are a part: AMX reads both operands from the first-level cache, which has to hold them.
inline int64_t part_steps() { return on_amx() ? kPart / 2 : kPart; }

// sums (+)= left x right for 1 to 32 rows. Rows from the 16th on have their tiles at `left_low` and their sums at
// `low`. In each step of each pass, `fetch()` is called kPauses times; on AMX, where products leave the vector
// registers free, `meanwhile()` is called with it in the first `busy` steps, and `after()` at the end, while the sums are in
// its tiles.
template <typename RightOperand, typename Fetch, typename Meanwhile, typename After>
void multiply(const BFloat16* left, const BFloat16* left_low, int64_t rows, const RightOperand& right, const Sums& sums,
              float* low, bool add, const Fetch& fetch, [[maybe_unused]] int64_t busy,
              [[maybe_unused]] const Meanwhile& meanwhile, [[maybe_unused]] const After& after) {
#ifdef MILLRACE_AMX
  if (on_amx()) {
    if (rows <= kRows) {
      amx::multiply_one(left, right, sums, add, fetch, busy, meanwhile, after);
    } else {
      amx::multiply_two(left, left_low, right, sums, low, add, fetch, busy, meanwhile, after);
    }
    return;
  }
#endif
  vectors::multiply(left, std::min(rows, kRows), right, sums, add, fetch);
  if (rows > kRows) vectors::multiply(left_low, rows - kRows, right, {low, sums.second, sums.stride}, add, fetch);
}

// The fastest number of tiles of columns to take at once from a page, for products of `rows` rows.
inline int64_t page_width(int64_t rows) { return on_amx() ? 2 : vectors::page_width(rows); }

// The same over pages, for `page_width(rows)` tiles of columns or for two.
template <typename Fetch>
void multiply_pages(const BFloat16* left, const BFloat16* left_low, int64_t rows, int64_t width, const Right& right,
                    const Sums& sums, float* low, bool add, const Fetch& fetch) {
  if (width > 2) return vectors::multiply_wide(left, rows, right, sums, add, fetch);
  multiply(left, left_low, rows, right, sums, low, add, fetch, 0, [] {}, [] {});
}

}  // namespace millrace::tiles
