// A linear for each head, by tiles.
#pragma once

#include "panels.h"

namespace millrace {

// The outputs of a linear of one head, whose rows are `stride` values apart.
struct SaveRows {
  BFloat16* y;
  int64_t stride;

  void operator()(int64_t panel, int64_t row, const float* left, const float* right) const {
    BFloat16* const to = y + row * stride + panel * kPanelColumns;
    for (int64_t i = 0; i < tiles::kColumns; i += kLanes) {
      save(to + i, load(left + i));
      save(to + tiles::kColumns + i, load(right + i));
    }
  }
};

// y [rows, heads, out] = x [rows, heads, in] @ the weight [out, in] of each head, transposed; both bfloat16 with a last
// stride of 1. `packed` holds the panels of head after head, as pack_panels makes them of [heads * out, in]; `in` and `out`
// are multiples of 32.
void heads_linear(at::Tensor y, const at::Tensor& x, const at::Tensor& packed) {
  const int64_t rows = x.size(0), heads = x.size(1), in = x.size(2), out = y.size(2);
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && y.scalar_type() == at::kBFloat16);
  TORCH_CHECK(y.size(0) == rows && y.size(1) == heads && x.stride(2) == 1 && y.stride(2) == 1);
  TORCH_CHECK(in % tiles::kDepth == 0 && out % kPanelColumns == 0);
  const Panels all(packed, packed.new_empty({0}), in, heads * out);
  if (rows == 0) return;
  const int64_t panels = out / kPanelColumns, size = tiles::Tiled::bytes(rows, in);
  const int64_t groups = (panels + kPanelsAtOnce - 1) / kPanelsAtOnce;
  const int64_t chunks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  static thread_local Scratch scratch;
  char* const memory = scratch.reserve(heads * size);
  const BFloat16* const from = x.const_data_ptr<BFloat16>();
  BFloat16* const to = y.mutable_data_ptr<BFloat16>();
  run_team([&](Team& team) {
    team.share(heads * rows, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t head = i / rows, row = i % rows;
        const tiles::Tiled tiled(memory + head * size, in);
        const BFloat16* const values = from + row * x.stride(0) + head * x.stride(1);
        for (int64_t column = 0; column < in; column += tiles::kDepth)
          std::memcpy(tiled.at(row, column), values + column, tiles::kTileStride);
      }
    });
    tiles::configure(std::min(rows, tiles::kRows));
    team.share(heads * groups * chunks, 1, [&](int64_t unit, int64_t) {
      const int64_t head = unit / (groups * chunks), chunk = unit / groups % chunks, group = unit % groups;
      const tiles::Tiled tiled(memory + head * size, in);
      const Panels own(all.weights + head * panels * all.steps * kPanelTile, panels, all.steps);
      const SaveRows emit{to + head * y.stride(1), y.stride(0)};
      PanelLoop<SaveRows> loop(own, tiled, emit);
      const int64_t first = chunk * kRowsAtOnce;
      loop.multiply(panels * group / groups, panels * (group + 1) / groups, first, std::min(kRowsAtOnce, rows - first));
      loop.finish();
    });
    tiles::release();
  });
}

}  // namespace millrace
