// A linear layer by tiles, for rows that are not in tiles.
#pragma once

#include "lora_panels.h"

namespace millrace {

// Copies rows [begin, end) of x [rows, in] into tiles; columns past `in` become zero.
inline void tile_rows(const tiles::Tiled& tiled, const BFloat16* x, int64_t in, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t column = 0; column < in; column += tiles::kDepth) {
      BFloat16* to = tiled.at(row, column);
      const int64_t count = std::min(tiles::kDepth, in - column);
      std::memcpy(to, x + row * in + column, count * sizeof(BFloat16));
      std::fill(to + count, to + tiles::kDepth, BFloat16(0));
    }
}

// y [rows, out] = x [rows, in] @ weight.T + bias; x bfloat16, y bfloat16 or float32, contiguous. An empty bias: none.
// Rows have adapters as in Adapters, whose modules from `lora_first` on have their first outputs at `lora_starts`.
void panel_linear(at::Tensor y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& bias,
                  const std::optional<at::Tensor>& lora_rows, const std::optional<at::Tensor>& lora_table,
                  int64_t lora_first, at::IntArrayRef lora_starts) {
  const int64_t rows = x.size(0), in = x.size(1), out = y.size(1);
  const PackedWeight w(packed, bias, in, out, rows);
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && y.size(0) == rows && x.scalar_type() == at::kBFloat16);
  Adapters adapters(lora_rows, lora_table, lora_first, static_cast<int64_t>(lora_starts.size()), rows);
  const LoraSite site = adapters.any() ? LoraSite(adapters, lora_first, lora_starts, w, out) : LoraSite();
  if (rows == 0) return;
  static thread_local Scratch scratch;
  const tiles::Tiled tiled(scratch.reserve(tiles::Tiled::bytes(rows, in)), in);
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  dispatch(y, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const SaveSums<T> emit{y.mutable_data_ptr<T>(), out, w.bias};
    run_team([&](Team& team) {
      team.share(rows, 16, [&](int64_t begin, int64_t end) { tile_rows(tiled, from, in, begin, end); });
      tiles::configure(std::min(rows, tiles::kRows));
      multiply_panels(team, w, tiled, rows, site, 0, emit);
      tiles::release();
    });
  });
}

}  // namespace millrace
