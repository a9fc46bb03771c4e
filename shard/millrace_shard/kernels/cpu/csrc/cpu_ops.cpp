// The operators of namespace millrace on CPU. They are one translation unit, since torch's headers dominate the build.
#include <torch/library.h>

#include "attend.h"
#include "experts.h"
#include "greedy.h"
#include "layers.h"
#include "linear.h"
#include "lora_weights.h"
#include "masks.h"
#include "norms.h"
#include "pack_codes.h"
#include "pages.h"
#include "panel_linear.h"

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
      "Tensor contexts, float scale, int window, float softcap, bool by_tiles, Tensor? sinks=None) -> ()");
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("packed_linear(Tensor(a!) y, Tensor x, Tensor packed, Tensor bias) -> ()");
  library.def("greedy(Tensor logits) -> (Tensor, Tensor, Tensor)");
  library.def("forbid(Tensor(a!) scores, Tensor rows, Tensor bits) -> ()");
  library.def("tile_unit() -> str", millrace::tiles::name);
  library.def("use_amx(bool wanted) -> bool", millrace::tiles::use_amx);
  library.def("pack_panels(Tensor[] parts, bool gated) -> Tensor");
  library.def("expert_table(Tensor[] packed, int inputs, int outputs) -> Tensor");
  library.def(
      "experts(Tensor(a!) y, Tensor x, Tensor router, Tensor router_bias, Tensor correction, int[] rule, float scale, "
      "Tensor gate_up, Tensor gate_up_bias, Tensor down, Tensor down_bias, float alpha, float limit) -> ()");
  library.def(
      "panel_linear(Tensor(a!) y, Tensor x, Tensor packed, Tensor bias, Tensor? lora_rows=None, Tensor? lora_table=None, int lora_first=0, "
      "int[] lora_starts=[0]) -> ()");
  library.def(
      "mlp_block(Tensor(a!) y, Tensor x, Tensor(b!) residual, Tensor norm, float eps, Tensor gate_up, "
      "Tensor gate_up_bias, Tensor down, Tensor down_bias, Tensor? lora_rows=None, Tensor? lora_table=None, int lora_first=0) "
      "-> ()");
  library.def(
      "attention_block(Tensor(a!) y, Tensor x, Tensor(b!) residual, Tensor norm, float eps, Tensor qkv, "
      "Tensor qkv_bias, Tensor query_norm, Tensor key_norm, Tensor out, Tensor out_bias, Tensor rope, "
      "Tensor positions, Tensor cache_rows, Tensor(c!)[] cache, Tensor tables, Tensor starts, "
      "Tensor contexts, int num_heads, float scale, int window, Tensor? lora_rows=None, Tensor? lora_table=None, "
      "int lora_first=0, Tensor? sinks=None, bool wide=False) -> ()");
  library.def(
      "decoder_layers(Tensor(a!) y, Tensor(b!) residual, Tensor[] weights, Tensor(c!)[] caches, float eps, "
      "Tensor rope, Tensor positions, Tensor cache_rows, Tensor tables, Tensor starts, Tensor contexts, "
      "int num_heads, float scale, int[] windows, Tensor? lora_rows=None, Tensor? lora_table=None, int lora_first=0) "
      "-> ()");
  library.def("pack_lora_a(Tensor a) -> Tensor");
  library.def("pack_lora_b(Tensor b) -> Tensor");
  library.def(
      "pack_codes(Tensor[] codes, Tensor values, Tensor[] scales, Tensor[] offsets, int group, Tensor order, bool gated, "
      "bool integer) -> Tensor");
}

TORCH_LIBRARY_IMPL(millrace, CPU, library) {
  library.impl("rms_norm", millrace::rms_norm);
  library.impl("add_rms_norm", millrace::add_rms_norm);
  library.impl("silu_mul", millrace::silu_mul);
  library.impl("store", millrace::store);
  library.impl("rope_store", millrace::rope_store);
  library.impl("attend", millrace::attend);
  library.impl("pack_linear", millrace::pack_linear);
  library.impl("packed_linear", millrace::packed_linear);
  library.impl("greedy", millrace::greedy);
  library.impl("forbid", millrace::forbid);
  library.impl("pack_panels", millrace::pack_panels);
  library.impl("expert_table", millrace::expert_table);
  library.impl("experts", millrace::experts);
  library.impl("panel_linear", millrace::panel_linear);
  library.impl("mlp_block", millrace::mlp_block);
  library.impl("attention_block", millrace::attention_block);
  library.impl("decoder_layers", millrace::decoder_layers);
  library.impl("pack_lora_a", millrace::pack_lora_a);
  library.impl("pack_lora_b", millrace::pack_lora_b);
  library.impl("pack_codes", millrace::pack_codes);
}
