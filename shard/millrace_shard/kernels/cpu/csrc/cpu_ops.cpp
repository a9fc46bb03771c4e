// The operators of namespace millrace on CPU: their schemas, and their registration.
#include <torch/library.h>

#include "operators.h"

TORCH_LIBRARY(millrace, library) {
  library.def("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  library.def("add_rms_norm(Tensor(a!) out, Tensor x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  library.def("silu_mul(Tensor(a!) out, Tensor gate_up) -> ()");
  library.def("store(Tensor key, Tensor value, Tensor cache_rows, Tensor(a!)[] cache) -> ()");
  library.def(
      "rope_store(Tensor(a!) qkv, Tensor rope, Tensor positions, Tensor cache_rows, Tensor(b!)[] cache, "
      "int num_heads) -> ()");
  library.def(
      "attend(Tensor(a!) out, Tensor queries, Tensor[] cache, Tensor tables, Tensor starts, "
      "Tensor contexts, float scale, int window, float softcap, bool by_tiles, Tensor? sinks=None, "
      "Tensor? key_ends=None) -> ()");
  library.def("greedy(Tensor logits) -> (Tensor, Tensor, Tensor)");
  library.def("forbid(Tensor(a!) scores, Tensor rows, Tensor bits) -> ()");
  library.def("tile_unit() -> str", millrace::operators.tile_unit);
  library.def("units_taken() -> int", millrace::operators.units_taken);
  library.def("use_amx(bool wanted) -> bool", millrace::operators.use_amx);
  library.def("pack_panels(Tensor[] parts, bool gated) -> Tensor");
  library.def("expert_table(Tensor[] packed, int inputs, int outputs) -> Tensor");
  library.def(
      "experts(Tensor(a!) y, Tensor x, Tensor router, Tensor router_bias, Tensor correction, int[] rule, float scale, "
      "Tensor gate_up, Tensor gate_up_bias, Tensor down, Tensor down_bias, float alpha, float limit) -> ()");
  library.def(
      "panel_linear(Tensor(a!) y, Tensor x, Tensor packed, Tensor bias, Tensor? lora_rows=None, Tensor? lora_table=None, int lora_first=0, "
      "int[] lora_starts=[0]) -> ()");
  library.def("heads_linear(Tensor(a!) y, Tensor x, Tensor packed) -> ()");
  library.def(
      "mlp_block(Tensor(a!) y, Tensor x, Tensor(b!) residual, Tensor norm, float eps, Tensor gate_up, "
      "Tensor gate_up_bias, Tensor down, Tensor down_bias, Tensor? lora_rows=None, Tensor? lora_table=None, int lora_first=0) "
      "-> ()");
  library.def(
      "attention_block(Tensor(a!) y, Tensor x, Tensor(b!) residual, Tensor norm, float eps, Tensor qkv, "
      "Tensor qkv_bias, Tensor query_norm, Tensor key_norm, Tensor out, Tensor out_bias, Tensor rope, "
      "Tensor positions, Tensor cache_rows, Tensor(c!)[] cache, Tensor tables, Tensor starts, "
      "Tensor contexts, int num_heads, float scale, int window, Tensor? lora_rows=None, Tensor? lora_table=None, "
      "int lora_first=0, Tensor? sinks=None, Tensor? key_ends=None) -> ()");
  library.def(
      "decoder_layers(Tensor(a!) y, Tensor(b!) residual, Tensor[] weights, Tensor(c!)[] caches, float eps, "
      "Tensor rope, Tensor positions, Tensor cache_rows, Tensor tables, Tensor starts, Tensor contexts, "
      "int num_heads, float scale, int[] windows, Tensor? lora_rows=None, Tensor? lora_table=None, int lora_first=0) "
      "-> ()");
  library.def("pack_lora_a(Tensor a) -> Tensor");
  library.def("pack_lora_b(Tensor b) -> Tensor");
  library.def(
      "pack_codes(Tensor[] codes, Tensor values, Tensor[] scales, Tensor[] offsets, int group, Tensor order, bool gated, "
      "int input_parts, Tensor[] scale_units, Tensor[] offset_units) -> Tensor");
  library.def("join_codes(Tensor[] packed) -> Tensor");
  library.def(
      "delta_rule(Tensor(a!) out, Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor weight, Tensor rates, Tensor biases, "
      "Tensor norm, float eps, Tensor(b!) conv, Tensor(c!) state, Tensor pages, Tensor starts, Tensor saved) -> ()");
  library.def(
      "causal_conv(Tensor(a!) out, Tensor x, Tensor weight, Tensor bias, bool activate, Tensor(b!) conv, Tensor pages, "
      "Tensor starts, Tensor saved) -> ()");
  library.def(
      "mamba2(Tensor(a!) out, Tensor mixed, Tensor dt, Tensor rates, Tensor biases, Tensor skip, float least, "
      "float most, int groups, Tensor(b!) state, Tensor pages, Tensor starts, Tensor saved) -> ()");
  library.def(
      "mamba1(Tensor(a!) out, Tensor x, Tensor dt, Tensor matrices, Tensor rates, Tensor biases, Tensor skip, "
      "Tensor(b!) state, Tensor pages, Tensor starts, Tensor saved) -> ()");
}

TORCH_LIBRARY_IMPL(millrace, CPU, library) {
  library.impl("rms_norm", millrace::operators.rms_norm);
  library.impl("add_rms_norm", millrace::operators.add_rms_norm);
  library.impl("silu_mul", millrace::operators.silu_mul);
  library.impl("store", millrace::operators.store);
  library.impl("rope_store", millrace::operators.rope_store);
  library.impl("attend", millrace::operators.attend);
  library.impl("greedy", millrace::operators.greedy);
  library.impl("forbid", millrace::operators.forbid);
  library.impl("pack_panels", millrace::operators.pack_panels);
  library.impl("expert_table", millrace::operators.expert_table);
  library.impl("experts", millrace::operators.experts);
  library.impl("panel_linear", millrace::operators.panel_linear);
  library.impl("heads_linear", millrace::operators.heads_linear);
  library.impl("mlp_block", millrace::operators.mlp_block);
  library.impl("attention_block", millrace::operators.attention_block);
  library.impl("decoder_layers", millrace::operators.decoder_layers);
  library.impl("pack_lora_a", millrace::operators.pack_lora_a);
  library.impl("pack_lora_b", millrace::operators.pack_lora_b);
  library.impl("pack_codes", millrace::operators.pack_codes);
  library.impl("join_codes", millrace::operators.join_codes);
  library.impl("delta_rule", millrace::operators.delta_rule);
  library.impl("causal_conv", millrace::operators.causal_conv);
  library.impl("mamba2", millrace::operators.mamba2);
  library.impl("mamba1", millrace::operators.mamba1);
}
