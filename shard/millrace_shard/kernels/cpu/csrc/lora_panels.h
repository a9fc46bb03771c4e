// Products by tiles whose rows have adapters: deltas join the sums before these are stored.
#pragma once

#include "lora_site.h"

namespace millrace {

// An `Emit` of products that adds the deltas of a site first. Row `begin` is the first row of the product.
template <typename Emit>
struct WithDeltas {
  const LoraSite& site;
  const Emit& emit;
  int64_t begin;

  void expand_block(int64_t panel, int64_t row, int64_t count) const { site.expand_block(panel, begin + row, count); }

  void operator()(int64_t panel, int64_t row, const float* left, const float* right) const {
    alignas(64) float sums[2 * tiles::kColumns];
    if (site.expand(panel, begin + row, left, right, sums)) {
      emit(panel, row, sums, sums + tiles::kColumns);
    } else {
      emit(panel, row, left, right);
    }
  }
};

// multiply_panels with the deltas of `site`, for rows [begin, begin + rows); `begin` is a multiple of 16.
template <typename Emit>
void multiply_panels(Team& team, const Panels& w, const tiles::Tiled& x, int64_t rows, const LoraSite& site,
                     int64_t begin, const Emit& emit) {
  if (!site.any()) return multiply_panels(team, w, x, rows, emit);
  site.shrink(team, x, begin, rows);
  multiply_panels(team, w, x, rows, WithDeltas<Emit>{site, emit, begin});
}

}  // namespace millrace
