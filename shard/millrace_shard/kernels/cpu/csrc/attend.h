// The attention operator. It works by tiles where shape and dtype allow it, and through ATen's products elsewhere.
#pragma once

#include "team_attention.h"
#include "attention.h"

namespace millrace {

// The largest number of query heads that read latents together: at most `tiles::kRows`, and so few that all threads have
// work where there are few rows. A row's bits do not depend on it.
inline int64_t heads_together(int64_t heads, int64_t rows) {
  int64_t together = std::min(heads, tiles::kRows);
  while (heads % together != 0 || (together > 1 && rows * heads / together < at::get_num_threads())) together--;
  return together;
}

// queries [rows, heads, dim] strided by row; out [rows, heads * dim] contiguous; tables [B, width], starts [B + 1] and
// contexts [B] int32; sinks [heads] float32 or none; key_ends [rows] int32 or none. `by_tiles` allows tiles.
void attend(at::Tensor out, const at::Tensor& queries, at::TensorList cache, const at::Tensor& tables,
            const at::Tensor& starts, const at::Tensor& contexts, double scale, int64_t window, double softcap,
            bool by_tiles, const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& key_ends) {
  Pages pages(cache, queries.scalar_type());
  const int64_t rows = queries.size(0), heads = queries.size(1);
  if (pages.is_latent()) {
    pages.value_dim = out.size(1) / heads;
    pages.heads = heads / heads_together(heads, rows);
  }
  TORCH_CHECK(queries.size(2) == pages.dim && queries.stride(2) == 1);
  TORCH_CHECK(heads == 1 || queries.stride(1) == pages.dim);
  TORCH_CHECK(heads % pages.heads == 0 && pages.dim % kInterleave<BFloat16> == 0);
  TORCH_CHECK(pages.value_dim <= pages.dim && pages.value_dim % kInterleave<BFloat16> == 0);
  TORCH_CHECK(out.is_contiguous() && out.numel() == rows * heads * pages.value_dim);
  TORCH_CHECK(out.scalar_type() == queries.scalar_type());
  TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->numel() == heads && sinks->scalar_type() == at::kFloat));
  check_sequences(tables, starts, contexts, queries.size(0));
  dispatch(queries, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Attention<T> attention{
        out.mutable_data_ptr<T>(), queries.const_data_ptr<T>(), tables.const_data_ptr<int32_t>(),
        starts.const_data_ptr<int32_t>(), contexts.const_data_ptr<int32_t>(), pages, contexts.numel(), heads,
        queries.stride(0), tables.stride(0), window, pages.key_scale() * static_cast<float>(scale),
        static_cast<float>(softcap), sinks ? sinks->const_data_ptr<float>() : nullptr, ends_of(key_ends, rows)};
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (by_tiles && pages.dim % tiles::kDepth == 0 && pages.value_dim % tiles::kDepth == 0) return attend_by_tiles(attention);
    }
    attend_all(attention);
  });
}

}  // namespace millrace
