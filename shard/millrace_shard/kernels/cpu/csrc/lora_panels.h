// Products by tiles whose rows have adapters: deltas join the sums before these are stored.
#pragma once

#include "lora_site.h"

namespace millrace {

// An `Emit` of products that adds the deltas of a site first. Row `begin` is the first row of the product.
template <typename Emit>
class WithDeltas {
 public:
  WithDeltas(const LoraSite& site, const Emit& emit, int64_t begin)
      : site_(site), emit_(emit), begin_(begin), late_(site.late_slots() + begin) {}

  void expand_block(int64_t panel, int64_t row, int64_t count) const {
    site_.expand_block(panel, begin_ + row, count);
  }

  void operator()(int64_t panel, int64_t row, const float* left, const float* right) const {
    if (late_[row] != 0) [[unlikely]] return emit_late(panel, row, left, right);
    emit_(panel, row, left, right);
  }

 private:
  [[gnu::noinline]] void emit_late(int64_t panel, int64_t row, const float* left, const float* right) const {
    alignas(64) float sums[2 * tiles::kColumns];
    std::memcpy(sums, left, tiles::kColumns * sizeof(float));
    std::memcpy(sums + tiles::kColumns, right, tiles::kColumns * sizeof(float));
    site_.expand(panel, begin_ + row, sums);
    emit_(panel, row, sums, sums + tiles::kColumns);
  }

  const LoraSite& site_;
  const Emit& emit_;
  int64_t begin_;
  const int32_t* late_;
};

// multiply_panels with the deltas of `site`, for rows [begin, begin + rows); `begin` is a multiple of 16.
template <typename Emit>
void multiply_panels(Team& team, const PackedWeight& w, const tiles::Tiled& x, int64_t rows, const LoraSite& site,
                     int64_t begin, const Emit& emit) {
  if (!site.any()) return multiply_panels(team, w, x, rows, emit);
  site.shrink(team, x, begin, rows);
  multiply_panels(team, w, x, rows, WithDeltas<Emit>(site, emit, begin));
}

}  // namespace millrace
