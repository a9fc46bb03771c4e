// Packs the weights of adapters for the products of lora.h.
#pragma once

#include "lora.h"

#include <ATen/ops/empty.h>

#include <cmath>

namespace millrace {

inline void check_lora_weight(const at::Tensor& weight) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.dim() == 2 && weight.is_contiguous() &&
                  weight.size(0) > 0 && weight.size(1) > 0,
              "millrace: an adapter's weight is a bfloat16 matrix");
}

// a [ranks, in] bfloat16 -> [slices, steps, 16, 16, 2]: slices of 16 ranks, steps of 32 inputs, inputs in pairs; zeros
// fill up.
inline at::Tensor pack_lora_a(const at::Tensor& a) {
  check_lora_weight(a);
  const int64_t ranks = a.size(0), in = a.size(1);
  const int64_t slices = (ranks + kRanks - 1) / kRanks, steps = (in + tiles::kDepth - 1) / tiles::kDepth;
  at::Tensor packed = at::empty({slices, steps, tiles::kDepth / 2, kRanks, 2}, a.options());
  const BFloat16* from = a.const_data_ptr<BFloat16>();
  BFloat16* to = packed.mutable_data_ptr<BFloat16>();
  for (int64_t slice = 0; slice < slices; slice++) {
    const int64_t given = std::min(kRanks, ranks - slice * kRanks);
    const BFloat16* rows[kRanks];
    for (int64_t rank = 0; rank < given; rank++) rows[rank] = from + (slice * kRanks + rank) * in;
    for (int64_t step = 0; step < steps; step++, to += tiles::kTile)
      pack_tile(to, rows, given, step * tiles::kDepth, std::min(tiles::kDepth, in - step * tiles::kDepth));
  }
  return packed;
}

// b [out, ranks] bfloat16 -> [tiles of 16 outputs, slices, 8, 16, 2]: ranks in pairs; zeros fill up, and replace values
// below kSmallestFactor.
inline at::Tensor pack_lora_b(const at::Tensor& b) {
  check_lora_weight(b);
  const int64_t out = b.size(0), ranks = b.size(1);
  const int64_t count = (out + tiles::kColumns - 1) / tiles::kColumns, slices = (ranks + kRanks - 1) / kRanks;
  at::Tensor packed = at::empty({count, slices, kRanks / 2, tiles::kColumns, 2}, b.options());
  const BFloat16* from = b.const_data_ptr<BFloat16>();
  BFloat16* to = packed.mutable_data_ptr<BFloat16>();
  std::fill(to, to + packed.numel(), BFloat16(0));
  for (int64_t output = 0; output < out; output++)
    for (int64_t rank = 0; rank < ranks; rank++) {
      const BFloat16 value = from[output * ranks + rank];
      if (std::fabs(static_cast<float>(value)) < kSmallestFactor) continue;
      const int64_t tile = output / tiles::kColumns * slices + rank / kRanks;
      to[tile * kExpandTile + (rank % kRanks / 2 * tiles::kColumns + output % tiles::kColumns) * 2 + rank % 2] = value;
    }
  return packed;
}

}  // namespace millrace
