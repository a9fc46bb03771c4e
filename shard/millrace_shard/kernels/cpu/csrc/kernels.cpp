// The kernels of one variant: one translation unit, since torch's headers and the shared templates dominate its build.
#include "attend.h"
#include "delta_rule.h"
#include "experts.h"
#include "greedy.h"
#include "heads_linear.h"
#include "layers.h"
#include "lora_weights.h"
#include "mamba1.h"
#include "mamba2.h"
#include "masks.h"
#include "norms.h"
#include "operators.h"
#include "pack_codes.h"
#include "pages.h"
#include "panel_linear.h"

namespace millrace {

const Operators operators{
    .rms_norm = rms_norm,
    .add_rms_norm = add_rms_norm,
    .silu_mul = silu_mul,
    .store = store,
    .rope_store = rope_store,
    .attend = attend,
    .greedy = greedy,
    .forbid = forbid,
    .pack_panels = pack_panels,
    .expert_table = expert_table,
    .experts = experts,
    .panel_linear = panel_linear,
    .heads_linear = heads_linear,
    .mlp_block = mlp_block,
    .attention_block = attention_block,
    .decoder_layers = decoder_layers,
    .pack_lora_a = pack_lora_a,
    .pack_lora_b = pack_lora_b,
    .pack_codes = pack_codes,
    .join_codes = join_codes,
    .delta_rule = delta_rule,
    .causal_conv = causal_conv,
    .mamba2 = mamba2,
    .mamba1 = mamba1,
    .tile_unit = tiles::name,
    .units_taken = UnitsTaken::sum,
    .use_amx = tiles::use_amx,
};

}  // namespace millrace
