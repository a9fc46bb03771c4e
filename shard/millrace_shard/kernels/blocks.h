// The two halves of a decoder layer, each one parallel region: what a step of few tokens takes is mostly the way
// between operators otherwise.
#pragma once

#include "amx_attention.h"

#ifdef MILLRACE_AMX
#include "norms.h"
#include "panels.h"

namespace millrace {

// Rows and columns of x [rows, width], bfloat16.
struct Rows {
  BFloat16* data;
  int64_t count, width;

  explicit Rows(const at::Tensor& x) : data(x.mutable_data_ptr<BFloat16>()), count(x.size(0)), width(x.size(1)) {
    TORCH_CHECK(x.is_contiguous() && x.dim() == 2 && x.scalar_type() == at::kBFloat16);
  }
};

// Few rows are shared out evenly: all the threads are here already.
inline int64_t shared_grain(int64_t rows, int64_t width) {
  const int64_t threads = at::get_num_threads(), even = (rows + threads - 1) / threads;
  return std::max<int64_t>(1, std::min(row_grain(width), even));
}

// residual += x where there is an x, then its norm in tiles.
struct NormInput {
  const BFloat16* added;  // or null
  Rows residual;
  const BFloat16* weight;
  float eps;

  NormInput(const at::Tensor& x, const at::Tensor& residual_rows, const at::Tensor& norm, double epsilon)
      : added(x.numel() == 0 ? nullptr : x.const_data_ptr<BFloat16>()),
        residual(residual_rows),
        weight(norm.const_data_ptr<BFloat16>()),
        eps(static_cast<float>(epsilon)) {
    TORCH_CHECK(added == nullptr || (x.is_contiguous() && x.sizes() == residual_rows.sizes()));
    TORCH_CHECK(norm.is_contiguous() && norm.numel() == residual.width && norm.scalar_type() == at::kBFloat16);
    TORCH_CHECK(residual.width % amx::kDepth == 0);
  }

  // Rows [begin, end), stored from row `begin - first` of `tiled` on.
  void operator()(const amx::Tiled& tiled, int64_t first, int64_t begin, int64_t end) const {
    const int64_t width = residual.width;
    for (int64_t row = begin; row < end; row++) {
      BFloat16* x = residual.data + row * width;
      const float squares = added == nullptr ? sum_of_squares(x, width) : add_row(x, added + row * width, width);
      const Vec inverses(1.f / std::sqrt(squares / static_cast<float>(width) + eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        BFloat16* to = tiled.at(row - first, i);
        save(to, save(to, load(x + i) * inverses) * load(weight + i));
      }
    }
  }
};

// y = down(silu(gate(h)) * up(h)) with h = norm(residual += x); x may be empty, or y. All [rows, hidden] bfloat16.
void mlp_block(at::Tensor y, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& norm, double eps,
               const at::Tensor& gate_up, const at::Tensor& gate_up_bias, const at::Tensor& down,
               const at::Tensor& down_bias) {
  const NormInput input(x, residual, norm, eps);
  const Rows out(y);
  const int64_t rows = out.count, inner = gate_up.size(0) * amx::kColumns, width = input.residual.width;
  const Panels first(gate_up, gate_up_bias, width, 2 * inner), second(down, down_bias, inner, out.width);
  TORCH_CHECK(rows == input.residual.count);
  if (rows == 0) return;
  const int64_t at_once = std::min(rows, kRowsAtOnce);
  static thread_local Scratch normed_scratch, inner_scratch;
  const amx::Tiled normed(normed_scratch.reserve(amx::Tiled::bytes(at_once, width)), width);
  const amx::Tiled gated(inner_scratch.reserve(amx::Tiled::bytes(at_once, inner)), inner);
  if (inner % amx::kDepth != 0) std::memset(gated.data, 0, amx::Tiled::bytes(at_once, inner));

  run_team([&](Team& team) {
    amx::configure(std::min(rows, amx::kRows));
    for (int64_t begin = 0; begin < rows; begin += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - begin);
      team.share(count, shared_grain(count, width),
                 [&](int64_t from, int64_t to) { input(normed, begin, begin + from, begin + to); });
      multiply_panels(team, first, normed, count, [&](int64_t panel, int64_t row, const float* gates, const float* ups) {
        Vec gate = load(gates), up = load(ups);
        if (first.bias != nullptr) {
          gate = gate + load(first.bias + panel * amx::kColumns);
          up = up + load(first.bias + inner + panel * amx::kColumns);
        }
        save(gated.at(row, panel * amx::kColumns), silu<BFloat16>(gate) * up);
      });
      multiply_panels(team, second, gated, count, SaveSums<BFloat16>{out.data + begin * out.width, out.width, second.bias});
    }
    amx::release();
  });
}

// What a layer's attention knows besides its inputs.
struct Heads {
  int64_t queries, keys, dim;
  const BFloat16 *query_norm, *key_norm;  // or null
  float eps;
  const float* rope;
  int64_t rotary, positions;

  int64_t width() const { return (queries + 2 * keys) * dim; }

  // Norms and rotates queries and keys of one row of qkv in place.
  void prepare(BFloat16* row, int64_t position) const {
    for (int64_t head = 0; head < queries + keys; head++) {
      BFloat16* x = row + head * dim;
      const BFloat16* norm = head < queries ? query_norm : key_norm;
      if (norm != nullptr) norm_row(x, x, norm, sum_of_squares(x, dim), eps, dim);
      rotate(x, rope + position * rotary, rotary / 2);
    }
  }
};

// y = out(attention(h)) with h = norm(residual += x); x may be empty, or y. Keys and values go to their pages.
void attention_block(at::Tensor y, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& norm, double eps,
                     const at::Tensor& qkv, const at::Tensor& qkv_bias, const at::Tensor& query_norm,
                     const at::Tensor& key_norm, const at::Tensor& out, const at::Tensor& out_bias,
                     const at::Tensor& rope, const at::Tensor& positions, const at::Tensor& cache_rows,
                     const at::Tensor& keys, const at::Tensor& values, const at::Tensor& tables,
                     const at::Tensor& starts, const at::Tensor& contexts, int64_t num_heads, double scale,
                     int64_t window) {
  const NormInput input(x, residual, norm, eps);
  const Pages pages(keys, values);
  const Rows result(y);
  const int64_t rows = result.count, width = input.residual.width, attended_width = num_heads * pages.dim;
  TORCH_CHECK(rope.is_contiguous() && rope.scalar_type() == at::kFloat);
  TORCH_CHECK(rope.size(1) % 2 == 0 && rope.size(1) <= pages.dim);
  for (const at::Tensor& each : {query_norm, key_norm})
    TORCH_CHECK(each.is_contiguous() && (each.numel() == 0 || each.numel() == pages.dim));
  const Heads heads{num_heads, pages.heads, pages.dim,
                    query_norm.numel() == 0 ? nullptr : query_norm.const_data_ptr<BFloat16>(),
                    key_norm.numel() == 0 ? nullptr : key_norm.const_data_ptr<BFloat16>(), static_cast<float>(eps),
                    rope.const_data_ptr<float>(), rope.size(1), rope.size(0)};
  const Panels first(qkv, qkv_bias, width, heads.width()), second(out, out_bias, attended_width, result.width);
  TORCH_CHECK(rows == input.residual.count && positions.numel() == rows && cache_rows.numel() == rows);
  TORCH_CHECK(positions.is_contiguous() && cache_rows.is_contiguous() && keys.scalar_type() == at::kBFloat16);
  TORCH_CHECK(num_heads % pages.heads == 0 && pages.dim % amx::kDepth == 0);
  check_sequences(tables, starts, contexts, rows);
  if (rows == 0) return;
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const int64_t* cache_row = cache_rows.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; row++) {
    TORCH_CHECK(position[row] >= 0 && position[row] < heads.positions, "millrace: position out of range");
    TORCH_CHECK(cache_row[row] >= 0 && cache_row[row] < pages.blocks * kPage, "millrace: cache row out of range");
  }

  static thread_local Scratch normed_scratch, qkv_scratch, attended_scratch;
  static thread_local std::vector<Tile> planned;
  const amx::Tiled normed(normed_scratch.reserve(amx::Tiled::bytes(rows, width)), width);
  const amx::Tiled attended(attended_scratch.reserve(amx::Tiled::bytes(rows, attended_width)),
                            attended_width);
  BFloat16* projected = reinterpret_cast<BFloat16*>(qkv_scratch.reserve(rows * heads.width() * sizeof(BFloat16)));
  BFloat16* key_pages = keys.mutable_data_ptr<BFloat16>();
  BFloat16* value_pages = values.mutable_data_ptr<BFloat16>();
  const BFloat16* key = projected + num_heads * pages.dim;
  const Source<BFloat16> from{key, key + pages.heads * pages.dim, heads.width(), heads.width(), pages.dim, pages.dim};
  const Attention<BFloat16> attention{nullptr, projected, key_pages, value_pages, tables.const_data_ptr<int32_t>(),
                                      starts.const_data_ptr<int32_t>(), contexts.const_data_ptr<int32_t>(), pages,
                                      contexts.numel(), num_heads, heads.width(), tables.stride(0), window,
                                      static_cast<float>(scale), 0.f};
  plan_tiles(attention, planned);
  const std::vector<Tile>& tiles = planned;

  run_team([&](Team& team) {
    team.share(rows, shared_grain(rows, width), [&](int64_t begin, int64_t end) { input(normed, 0, begin, end); });
    amx::configure(std::min(rows, amx::kRows));
    multiply_panels(team, first, normed, rows, SaveSums<BFloat16>{projected, heads.width(), first.bias});
    team.share(rows, shared_grain(rows, heads.width()), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) heads.prepare(projected + row * heads.width(), position[row]);
      store_tokens(key_pages, value_pages, pages, cache_row, from, begin, end);
    });
    attend_tiles(team, attention, tiles, [&](int64_t token, int64_t column) { return attended.at(token, column); });
    amx::configure(std::min(rows, amx::kRows));
    multiply_panels(team, second, attended, rows, SaveSums<BFloat16>{result.data, result.width, second.bias});
    amx::release();
  });
}

}  // namespace millrace
#endif
