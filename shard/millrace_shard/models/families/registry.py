"""The families that our own decoder computes."""

from __future__ import annotations

from millrace_shard.models.families.family import Family
from millrace_shard.models.families.pre_norm import llama, mistral, qwen2, qwen3

_PAGES = (llama, mistral, qwen2, qwen3)

FAMILIES: dict[str, Family] = {page.FAMILY.model_type: page.FAMILY for page in _PAGES}
"""By `model_type`."""
