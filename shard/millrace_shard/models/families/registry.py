"""The families that our own decoder computes."""

from __future__ import annotations

from millrace_shard.models.families.family import Family
from millrace_shard.models.families.other_norms import cohere, gemma2, glm4, olmo2
from millrace_shard.models.families.pre_norm import (
    granite,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)

_PAGES = (llama, mistral, qwen2, qwen3, phi3, granite, smollm3, gemma2, olmo2, cohere, glm4)

FAMILIES: dict[str, Family] = {page.FAMILY.model_type: page.FAMILY for page in _PAGES}
"""By `model_type`."""
