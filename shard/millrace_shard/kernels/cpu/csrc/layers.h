// All layers of a decoder in one parallel region, without a return to Python between the halves.
#pragma once

#include "blocks.h"

namespace millrace {

// The weights of one layer, in the order that the operators of its halves take: norm, QKV, QKV bias, query norm, key
// norm, output, output bias; then norm, gates and ups, their bias, down, down bias.
constexpr int64_t kAttentionWeights = 7, kLayerWeights = 12;

// Runs all layers. Writes to y [rows, hidden] what is to be added to `residual` [rows, hidden] after the last layer,
// and changes `residual` in place. `weights` holds kLayerWeights tensors per layer, and `caches` the tensors of each
// layer's cache; layers have equal sizes. `windows` holds one attention window per layer, 0 for none. Rows have adapters as in
// Adapters, whose modules from `lora_first` on are those of the halves, layer by layer.
void decoder_layers(at::Tensor y, const at::Tensor& residual, at::TensorList weights, at::TensorList caches, double eps,
                    const at::Tensor& rope, const at::Tensor& positions, const at::Tensor& cache_rows,
                    const at::Tensor& tables, const at::Tensor& starts, const at::Tensor& contexts, int64_t num_heads,
                    double scale, at::IntArrayRef windows, const std::optional<at::Tensor>& lora_rows,
                    const std::optional<at::Tensor>& lora_table, int64_t lora_first) {
  const int64_t count = static_cast<int64_t>(windows.size());
  TORCH_CHECK(count > 0 && static_cast<int64_t>(weights.size()) == kLayerWeights * count);
  const int64_t parts = static_cast<int64_t>(caches.size()) / count;
  TORCH_CHECK(parts >= 2 && static_cast<int64_t>(caches.size()) == parts * count);
  const Places places{rope, positions, cache_rows, tables, starts, contexts};
  constexpr int64_t kModules = kAttentionModules + kMlpModules;
  Adapters adapters(lora_rows, lora_table, lora_first, kModules * count, residual.size(0));
  const at::Tensor nothing = residual.narrow(0, 0, 0);
  std::vector<AttentionHalf> attention;
  std::vector<MlpHalf> mlp;
  attention.reserve(count);
  mlp.reserve(count);
  for (int64_t layer = 0; layer < count; layer++) {
    const at::Tensor* w = &weights[kLayerWeights * layer];
    const at::TensorList cache = caches.slice(parts * layer, parts);
    for (int64_t i : {1, 5, 8, 10})
      TORCH_CHECK(PackedWeight::count_of(w[i]) == PackedWeight::count_of(weights[i]), "millrace: layers differ in size");
    TORCH_CHECK(cache[0].sizes() == caches[0].sizes() && cache[0].scalar_type() == caches[0].scalar_type(),
                "millrace: caches differ in size");
    attention.emplace_back(y, layer == 0 ? nothing : y, residual, w[0], eps, w[1], w[2], w[3], w[4], w[5], w[6],
                           places, cache, num_heads, scale, windows[layer],
                           adapters, lora_first + kModules * layer);
    w += kAttentionWeights;
    mlp.emplace_back(y, y, residual, w[0], eps, w[1], w[2], w[3], w[4], adapters,
                     lora_first + kModules * layer + kAttentionModules);
  }
  if (residual.size(0) == 0) return;
  static thread_local std::vector<Tile> planned;
  attention[0].plan(planned);
  const std::vector<Tile>& tiles = planned;
  run_team([&](Team& team) {
    for (int64_t layer = 0; layer < count; layer++) {
      attention[layer](team, tiles);
      mlp[layer](team);
    }
  });
}

}  // namespace millrace
