"""The families that our own decoder computes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.families import (
    baichuan,
    bamba,
    bloom,
    cohere,
    cohere2,
    dbrx,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
    mamba,
    mamba2,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    mpt,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
)
from millrace_shard.models.families.family import Family

_PRE_NORM = (
    *(llama, mistral, ministral3, qwen2, qwen3, phi3, granite, smollm3),
    *(seed_oss, ernie4_5, hunyuan_v1_dense),
)
_OTHER_NORMS = (gemma, gemma2, gemma3, gemma4, olmo2, olmo3, cohere, cohere2, glm4, exaone4)
_WITHOUT_GATES = (gptj, falcon, bloom, mpt)
_MIXTURES = (
    *(mixtral, qwen2_moe, qwen3_moe, glm4_moe, gpt_oss, olmoe),
    *(minimax_m2, granitemoe, hunyuan_v1_moe, ernie4_5_moe, llama4, phimoe, dbrx),
)
_HYBRIDS = (
    *(qwen3_next, qwen3_5, qwen3_5_moe, lfm2, lfm2_moe, mamba2, mamba),
    *(bamba, granitemoehybrid, falcon_h1, nemotron_h, kimi_linear),
)
_LATENT = (deepseek_v2, deepseek_v3, glm4_moe_lite)

FAMILIES: dict[str, Family] = {
    page.FAMILY.model_type: page.FAMILY
    for page in (*_PRE_NORM, *_OTHER_NORMS, *_WITHOUT_GATES, *_MIXTURES, *_HYBRIDS, *_LATENT)
}
FAMILIES[mamba.FALCON.model_type] = mamba.FALCON
"""By `model_type`."""
SAME_TYPES = {other: family for family in FAMILIES.values() for other in family.same_types}
"""By other values of `model_type`."""
_OF_OTHER_TYPES = (baichuan, qwen2_vl, qwen3_vl, qwen3_vl_moe)
"""Families with the layers of another one."""
for _page in _OF_OTHER_TYPES:
    _names = (_page.FAMILY.model_type, *_page.FAMILY.same_types)
    SAME_TYPES |= dict.fromkeys(_names, _page.FAMILY)


def nearest_family(raw: Mapping[str, Any]) -> str:
    """The name of the family that is most like the object of a config.json, by its `model_type`, else by its fields."""
    names = difflib.get_close_matches(str(raw.get("model_type")), FAMILIES, n=1)
    if names:
        return names[0]
    unnamed = {**raw, "architectures": None}

    def fields_read(name: str) -> int:
        try:
            return len(FAMILIES[name].fields(unnamed) & raw.keys())
        except UnsupportedModel:
            return 0

    return max(FAMILIES, key=fields_read)
