"""The families that our own decoder computes."""

from __future__ import annotations

from millrace_shard.models.families import (
    cohere,
    cohere2,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan_v1_dense,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from millrace_shard.models.families.family import Family

_PRE_NORM = (
    *(llama, mistral, ministral3, qwen2, qwen3, phi3, granite, smollm3),
    *(seed_oss, ernie4_5, hunyuan_v1_dense),
)
_OTHER_NORMS = (gemma2, gemma3, olmo2, olmo3, cohere, cohere2, glm4, exaone4)
_MIXTURES = (mixtral, qwen2_moe, qwen3_moe, glm4_moe, gpt_oss, olmoe)

FAMILIES: dict[str, Family] = {
    page.FAMILY.model_type: page.FAMILY for page in (*_PRE_NORM, *_OTHER_NORMS, *_MIXTURES)
}
"""By `model_type`."""
