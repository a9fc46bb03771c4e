// The table of operators, between their registration, which is compiled once, and the kernels, once for each variant.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace millrace {

struct Operators {
  using In = const at::Tensor&;
  using Maybe = const std::optional<at::Tensor>&;
  using List = at::TensorList;
  using Ints = at::IntArrayRef;

  void (*rms_norm)(at::Tensor out, In x, In weight, double eps);
  void (*add_rms_norm)(at::Tensor out, In x, at::Tensor residual, In weight, double eps);
  void (*silu_mul)(at::Tensor out, In gate_up);
  void (*store)(In key, In value, In cache_rows, List cache);
  void (*rope_store)(at::Tensor qkv, In rope, In positions, In cache_rows, List cache, int64_t num_heads);
  void (*attend)(at::Tensor out, In queries, List cache, In tables, In starts, In contexts, double scale,
      int64_t window, double softcap, bool by_tiles, Maybe sinks, Maybe key_ends);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> (*greedy)(In logits);
  void (*forbid)(at::Tensor scores, In rows, In bits);
  at::Tensor (*pack_panels)(List parts, bool gated);
  at::Tensor (*expert_table)(List packed, int64_t in, int64_t out);
  void (*experts)(at::Tensor y, In x, In router, In router_bias, In correction, Ints rule, double scale, In gate_up,
      In gate_up_bias, In down, In down_bias, double alpha, double limit);
  void (*panel_linear)(at::Tensor y, In x, In packed, In bias, Maybe lora_rows, Maybe lora_table, int64_t lora_first,
      Ints lora_starts);
  void (*heads_linear)(at::Tensor y, In x, In packed);
  void (*mlp_block)(at::Tensor y, In x, In residual, In norm, double eps, In gate_up, In gate_up_bias, In down,
      In down_bias, Maybe lora_rows, Maybe lora_table, int64_t lora_first);
  void (*attention_block)(at::Tensor y, In x, In residual, In norm, double eps, In qkv, In qkv_bias, In query_norm,
      In key_norm, In out, In out_bias, In rope, In positions, In cache_rows, List cache, In tables, In starts,
      In contexts, int64_t num_heads, double scale, int64_t window, Maybe lora_rows, Maybe lora_table,
      int64_t lora_first, Maybe sinks, Maybe key_ends);
  void (*decoder_layers)(at::Tensor y, In residual, List weights, List caches, double eps, In rope, In positions,
      In cache_rows, In tables, In starts, In contexts, int64_t num_heads, double scale, Ints windows, Maybe lora_rows,
      Maybe lora_table, int64_t lora_first);
  at::Tensor (*pack_lora_a)(In a);
  at::Tensor (*pack_lora_b)(In b);
  at::Tensor (*pack_codes)(List codes, In values, List scales, List offsets, int64_t group, In order, bool gated,
      int64_t input_parts, List scale_units, List offset_units);
  at::Tensor (*join_codes)(List packed);
  void (*delta_rule)(at::Tensor out, In qkv, In z, In b, In a, In weight, In rates, In biases, In norm, double eps,
      In conv, In state, In pages, In starts, In saved);
  void (*causal_conv)(at::Tensor out, In x, In weight, In bias, bool activate, In conv, In pages, In starts, In saved);
  void (*mamba2)(at::Tensor out, In mixed, In dt, In rates, In biases, In skip, double least, double most,
      int64_t groups, In state, In pages, In starts, In saved);
  void (*mamba1)(at::Tensor out, In x, In dt, In matrices, In rates, In biases, In skip, In state, In pages, In starts,
      In saved);

  std::string (*tile_unit)();
  int64_t (*units_taken)();
  bool (*use_amx)(bool wanted);
};

extern const Operators operators;

}  // namespace millrace
