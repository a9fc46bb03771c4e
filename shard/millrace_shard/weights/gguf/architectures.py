"""The architectures of GGUF files: fields of config.json other than sizes, and names of tensors.

Sources are llama.cpp's converters and the graphs that it computes; values that a file lacks are those that llama.cpp
takes then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.metadata import Metadata

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """The metadata and tensors of a file, with keys relative to its architecture."""

    header: GgufHeader
    metadata: Metadata
    arch: str

    def count(self, name: str) -> int | None:
        return self.metadata.count(f"{self.arch}.{name}")

    def needed(self, name: str) -> int:
        return self.metadata.needed(f"{self.arch}.{name}")

    def number(self, name: str) -> float | None:
        return self.metadata.number(f"{self.arch}.{name}")

    @property
    def num_layers(self) -> int:
        return self.needed("block_count")

    @property
    def head_dim(self) -> int:
        plain = self.needed("embedding_length") // self.needed("attention.head_count")
        return self.count("attention.key_length") or plain

    def layer_types(self, period: int) -> list[str]:
        """The kind of each layer, by the file or with full attention on every `period`-th one."""
        key = f"{self.arch}.attention.sliding_window_pattern"
        flags = self.metadata.flags(key)
        if flags is None:
            period = self.metadata.count(key) or period
            flags = [(layer + 1) % period != 0 for layer in range(self.num_layers)]
        if len(flags) != self.num_layers:
            raise UnsupportedModel(f"{self.metadata.describe(key)} must have a flag for each layer")
        return ["sliding_attention" if each else "full_attention" for each in flags]


MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
FUSED_MLP = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ROUTED = {
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
EXPERTS = ROUTED | {"mlp.gate": "ffn_gate_inp"}
MIXTRAL = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
SHARED = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
LLAMA = NORMS | ATTENTION | MLP
GEMMA2 = (
    ATTENTION
    | MLP
    | {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)
COHERE = ATTENTION | MLP | {"input_layernorm": "attn_norm"}
OLMO2 = (
    ATTENTION
    | HEAD_NORMS
    | MLP
    | {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)
DELTA_NET = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
"""Of layers in which it takes the place of attention."""
QWEN35 = (
    ATTENTION
    | HEAD_NORMS
    | DELTA_NET
    | {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
)
QKV = ("attn_q", "attn_k", "attn_v")
ALL_LINEARS = (*QKV, "attn_output")
DENSE = ("ffn_gate", "ffn_up", "ffn_down")
OPTIONAL = {"attention_bias": ALL_LINEARS, "mlp_bias": DENSE}


def _no_fields(_: Source) -> Fields:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How files of an architecture hold a family of transformers."""

    model_type: str
    fields: Callable[[Source], Fields] = _no_fields
    """Fields of config.json other than sizes, which may replace `model_type`. Raises ModelError."""
    modules: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    """Names in the file by the names in transformers, relative to a layer and without numbers of experts."""
    biases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Linears with biases by the field of config.json that says whether there are any."""
    always_biased: Sequence[str] = ()
    has_head_dim: bool = True
    """Whether config.json has the width of a head; otherwise it follows from other sizes."""
    may_be_partial: bool = False
    """Whether only a part of the channels of a head may be rotated."""
    is_rotated: bool = False
    """Whether the rows of queries and keys are in the order of interleaved rotary embeddings."""
    norms_plus_one: bool = False
    """Whether the file has the weights of norms plus 1."""
    is_hybrid: bool = False
    """Whether layers of some kinds have DELTA_NET in place of attention."""
    has_axes: bool = False
    """Whether images have rows and columns as positions."""
    whole_head_norms: bool = False
    """Whether norms of queries and keys cover all heads."""
    epsilon: str = "rms_norm_eps"
    """The field of config.json."""


def _llama(source: Source) -> Fields:
    window = source.count("attention.sliding_window") or None
    if source.count("expert_count"):
        return {"model_type": "mixtral", "sliding_window": window} | _experts(
            source, "num_local_experts"
        )
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _mistral3(source: Source) -> Fields:
    return {"sliding_window": source.count("attention.sliding_window") or None}


def _experts(source: Source, field_name: str = "num_experts") -> Fields:
    return {
        field_name: source.needed("expert_count"),
        "num_experts_per_tok": source.needed("expert_used_count"),
    }


def _without_window(_: Source) -> Fields:
    return {"use_sliding_window": False}


def _qwen3_vl(source: Source) -> Fields:
    # The file with the encoder says which layers add features.
    source.count("n_deepstack_layers")
    return {}


def _qwen3_vl_moe(source: Source) -> Fields:
    return _qwen3_vl(source) | _routed(source)


def _qwen2_moe(source: Source) -> Fields:
    shared = source.count("expert_shared_feed_forward_length")
    return {
        **_qwen3_moe(source),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": shared or source.needed("feed_forward_length"),
    }


def _routed(source: Source) -> Fields:
    """The experts of Qwen's models: how many, how many a token has, and their width."""
    experts = _experts(source)
    width = source.count("expert_feed_forward_length")
    share = source.needed("feed_forward_length") // experts["num_experts_per_tok"]
    return {**experts, "moe_intermediate_size": width or share}


def _qwen3_moe(source: Source) -> Fields:
    return {**_routed(source), "norm_topk_prob": True, "use_sliding_window": False}


def _qwen35(source: Source) -> Fields:
    predicted = source.count("nextn_predict_layers") or 0
    num_layers, period = source.num_layers - predicted, source.needed("full_attention_interval")
    if num_layers <= 0:
        raise WeightsError(
            f"nextn_predict_layers={predicted} of {source.num_layers} layers leave none to the model"
        )
    values = source.needed("ssm.time_step_rank")
    kinds = ["linear_attention", "full_attention"]
    return {
        # Layers that predict further tokens follow.
        "num_hidden_layers": num_layers,
        "layer_types": [kinds[(layer + 1) % period == 0] for layer in range(num_layers)],
        "linear_num_key_heads": source.needed("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": source.needed("ssm.state_size"),
        "linear_value_head_dim": source.needed("ssm.inner_size") // values,
        "linear_conv_kernel_dim": source.needed("ssm.conv_kernel"),
    }


def _qwen35_moe(source: Source) -> Fields:
    shared = source.needed("expert_shared_feed_forward_length")
    routed = {"moe_intermediate_size": source.needed("expert_feed_forward_length")}
    return _qwen35(source) | _experts(source) | routed | {"shared_expert_intermediate_size": shared}


def _gpt_oss(source: Source) -> Fields:
    width = source.count("expert_feed_forward_length") or source.needed("feed_forward_length")
    return {
        **_experts(source, "num_local_experts"),
        "intermediate_size": width,
        "sliding_window": source.needed("attention.sliding_window"),
        "layer_types": source.layer_types(2),
    }


GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion parameters, whose scale of scores follows from the width of the model."""


def _gemma(_: Source) -> Fields:
    return dict(GELU)


def _gemma_scale(source: Source) -> Fields:
    is_largest = source.num_layers == LARGEST_GEMMA[source.arch]
    width = source.needed("embedding_length") // source.needed("attention.head_count")
    return {**GELU, "query_pre_attn_scalar": width if is_largest else source.head_dim}


def _gemma2(source: Source) -> Fields:
    return {
        **_gemma_scale(source),
        "sliding_window": source.count("attention.sliding_window") or 4096,
        "layer_types": source.layer_types(2),
        "attn_logit_softcapping": source.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": source.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(source: Source) -> Fields:
    window = source.count("attention.sliding_window")
    return {
        **_gemma_scale(source),
        "sliding_window": window or 4096,
        "layer_types": source.layer_types(6 if window else 1),
        "final_logit_softcapping": source.number("final_logit_softcapping"),
    }


def _phi3(source: Source) -> Fields:
    original = source.count("rope.scaling.original_context_length")
    return {
        "sliding_window": source.count("attention.sliding_window") or None,
        "original_max_position_embeddings": original or source.needed("context_length"),
    }


def _granite(source: Source) -> Fields:
    if source.metadata.flag(f"{source.arch}.rope.scaling.finetuned") is False:
        raise UnsupportedModel(
            f"{source.arch}.rope.scaling.finetuned=False means no rotary embeddings here, which is not supported"
        )
    return {
        "attention_multiplier": source.number("attention.scale") or source.head_dim**-0.5,
        "embedding_multiplier": source.number("embedding_scale") or 1.0,
        "residual_multiplier": source.number("residual_scale") or 1.0,
        "logits_scaling": source.number("logit_scale") or 1.0,
    }


def _olmoe(source: Source) -> Fields:
    return {**_experts(source), "norm_topk_prob": False}


def _cohere(source: Source) -> Fields:
    return {"logit_scale": source.number("logit_scale") or 1.0}


def _cohere2(source: Source) -> Fields:
    return {
        **_cohere(source),
        "sliding_window": source.needed("attention.sliding_window"),
        "layer_types": source.layer_types(4),
    }


def _olmo2(source: Source) -> Fields:
    window = source.count("attention.sliding_window")
    if not window:
        return {}
    types = source.layer_types(4)
    return {"model_type": "olmo3", "sliding_window": window, "layer_types": types}


def _exaone4(source: Source) -> Fields:
    window = source.count("attention.sliding_window")
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": source.layer_types(4)}


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama", fields=_llama, modules=LLAMA | MIXTRAL, biases=OPTIONAL, is_rotated=True
    ),
    "qwen2": Architecture(
        model_type="qwen2", fields=_without_window, always_biased=QKV, has_head_dim=False
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        fields=_qwen2_moe,
        modules=NORMS | ATTENTION | EXPERTS | SHARED,
        always_biased=QKV,
        has_head_dim=False,
    ),
    "qwen2vl": Architecture(
        model_type="qwen2_vl_text",
        fields=_without_window,
        always_biased=QKV,
        has_head_dim=False,
        has_axes=True,
    ),
    "qwen3vl": Architecture(
        model_type="qwen3_vl_text", fields=_qwen3_vl, modules=LLAMA | HEAD_NORMS, has_axes=True
    ),
    "qwen3vlmoe": Architecture(
        model_type="qwen3_vl_moe_text",
        fields=_qwen3_vl_moe,
        modules=NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
        has_axes=True,
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        fields=_qwen35,
        modules=QWEN35 | MLP,
        may_be_partial=True,
        norms_plus_one=True,
        is_hybrid=True,
        has_axes=True,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        fields=_qwen35_moe,
        modules=QWEN35 | EXPERTS | SHARED,
        may_be_partial=True,
        norms_plus_one=True,
        is_hybrid=True,
        has_axes=True,
    ),
    "qwen3": Architecture(model_type="qwen3", fields=_without_window, modules=LLAMA | HEAD_NORMS),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        fields=_qwen3_moe,
        modules=NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
    ),
    "gemma": Architecture(model_type="gemma", fields=_gemma, norms_plus_one=True),
    "gemma2": Architecture(
        model_type="gemma2", fields=_gemma2, modules=GEMMA2, norms_plus_one=True
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", fields=_gemma3, modules=GEMMA2 | HEAD_NORMS, norms_plus_one=True
    ),
    "phi3": Architecture(
        model_type="phi3",
        fields=_phi3,
        modules=NORMS
        | FUSED_MLP
        | {"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"},
        may_be_partial=True,
    ),
    "mistral3": Architecture(model_type="mistral", fields=_mistral3, is_rotated=True),
    "granite": Architecture(
        model_type="granite", fields=_granite, biases=OPTIONAL, is_rotated=True
    ),
    "smollm3": Architecture(model_type="smollm3", biases=OPTIONAL, is_rotated=True),
    "seed_oss": Architecture(
        model_type="seed_oss",
        modules=LLAMA | {"post_attention_layernorm": "post_attention_norm"},
        biases={
            "attention_bias": QKV,
            "attention_out_bias": ("attn_output",),
            "mlp_bias": DENSE,
        },
    ),
    "ernie4_5": Architecture(model_type="ernie4_5", biases={"use_bias": (*ALL_LINEARS, *DENSE)}),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense",
        modules=LLAMA
        | {
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
        },
        biases={"attention_bias": ALL_LINEARS},
    ),
    "glm4": Architecture(
        model_type="glm4",
        modules=ATTENTION
        | FUSED_MLP
        | {
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        biases={"attention_bias": QKV},
        may_be_partial=True,
    ),
    "command-r": Architecture(
        model_type="cohere", fields=_cohere, modules=COHERE, epsilon="layer_norm_eps"
    ),
    "cohere2": Architecture(
        model_type="cohere2", fields=_cohere2, modules=COHERE, epsilon="layer_norm_eps"
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        fields=_olmoe,
        modules=NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
        whole_head_norms=True,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        fields=_olmo2,
        modules=OLMO2,
        biases={"attention_bias": ALL_LINEARS},
        whole_head_norms=True,
    ),
    "exaone4": Architecture(model_type="exaone4", fields=_exaone4, modules=OLMO2),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        fields=_gpt_oss,
        modules=ATTENTION
        | ROUTED
        | {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
            "self_attn.sinks": "attn_sinks",
        },
        always_biased=(*ALL_LINEARS, *EXPERTS.values()),
    ),
}
"""By `general.architecture`."""
