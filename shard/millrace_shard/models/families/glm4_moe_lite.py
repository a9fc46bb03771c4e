"""GLM-4.7-Flash: attention over latents, and the experts of GLM-4.5."""

from __future__ import annotations

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.deepseek_v3 import DERIVED, latent_mixture
from millrace_shard.models.families.expert_fields import OF_TRAINING
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.glm4_moe import grouped_rule
from millrace_shard.models.spec import DecoderSpec, RouterSpec

KINDS = {"dense": False, "sparse": True}


def _spec(config: ConfigReader) -> DecoderSpec:
    count = config.count("n_routed_experts")
    router = RouterSpec(num_experts=count, rule=grouped_rule(config, count), correction=True)
    is_interleaved = config.flag("rope_interleave")
    return latent_mixture(config, router, is_sparse_by_kind(config), interleaved=is_interleaved)


def is_sparse_by_kind(config: ConfigReader) -> list[bool]:
    """Whether each layer has experts, by `mlp_layer_types`."""
    count, kinds = config.count("num_hidden_layers"), config.value("mlp_layer_types")
    if kinds is None:
        # As the class has it, whatever first_k_dense_replace says.
        config.check("first_k_dense_replace", (1,))
        return [layer > 0 for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(k in KINDS for k in kinds):
        raise UnsupportedModel(
            f"mlp_layer_types={kinds!r} must name dense or sparse for each of {count} layers"
        )
    return [KINDS[kind] for kind in kinds]


FAMILY = Family(
    model_type="glm4_moe_lite",
    classes=("Glm4MoeLiteForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "eos_token_id": 1,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    without_effect=(*OF_TRAINING, *DERIVED),
)
