"""DeepSeek V2 and V2-Lite: attention over latents, and experts chosen by softmax, perhaps in groups."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.kernels.expert_weights import RoutingRule
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.deepseek_v3 import DERIVED, latent_mixture, sparse_after
from millrace_shard.models.families.expert_fields import OF_TRAINING, softmax_rule
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.glm4_moe import check_groups
from millrace_shard.models.spec import DecoderSpec, RouterSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("scoring_func", ("softmax",))
    config.check("mlp_bias", (False,))
    count = config.count("n_routed_experts")
    router = RouterSpec(num_experts=count, rule=_rule(config, count))
    return latent_mixture(config, router, sparse_after(config), interleaved=True)


def _rule(config: ConfigReader, count: int) -> RoutingRule:
    # transformers takes the shares as they are.
    config.check("norm_topk_prob", (False,))
    config.check("topk_method", ("greedy", "group_limited_greedy"))
    plain = softmax_rule(config, count, renormalise=False)
    rule = replace(plain, scale=config.number("routed_scaling_factor"))
    if config.value("topk_method") == "greedy":
        config.value("n_group"), config.value("topk_group")
        return rule
    groups, top_groups = config.count("n_group"), config.count("topk_group")
    check_groups(count, groups, top_groups, rule.top_k)
    return replace(rule, num_groups=groups, top_groups=top_groups, group_members=1)


FAMILY = Family(
    model_type="deepseek_v2",
    classes=("DeepseekV2ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "eos_token_id": 2,
    },
    aliases={"num_experts": "n_routed_experts"},
    without_effect=(*OF_TRAINING, *DERIVED),
)
