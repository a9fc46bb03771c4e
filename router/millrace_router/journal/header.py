"""The header of a journal file: the deployment, with everything that a warm-up of equal shards needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from millrace_router.journal.frames import JournalUnusable
from millrace_router.shards.wire import Capacity, ShardInfo

FORMAT = 1
"""Increased by changes that older readers cannot interpret."""

Setting = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first record of each file."""

    format: int = FORMAT
    life: str
    """Id of the router process: the same in all files that it wrote."""
    part: int = 0
    """Number of the file among the process's files."""
    version: str
    """Version of Millrace."""
    model_id: str
    model_sha: str | None
    keeps_tokens: bool
    """Whether the journal holds token ids, log probabilities and grammars."""
    shard: ShardInfo
    warmup: Mapping[str, int]
    """Fields of the WarmupRequest that were set."""
    capacity: Capacity
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Flags of the router that affect the schedule, resolved."""


_adapter = TypeAdapter(Header)
_OPTIONAL = (
    *("adapter_modules", "quantization", "kv_cache_dtype", "quantize_activations", "int8_gain"),
    *("hidden_size", "headless", "has_states", "vision", "operators"),
)
"""Fields of the shards that are left out at their default."""


def header_to_json(header: Header) -> bytes:
    """Write a header as JSON; without optional fields at their default."""
    left_out = {name for name in _OPTIONAL if not getattr(header.shard, name)}
    # Where KV is kept changes no step.
    exclude = {"shard": left_out, "capacity": {"has_kv_store"}}
    if "adapter_modules" in left_out:
        exclude["capacity"].add("adapter_pages")
    if "has_states" in left_out:
        exclude["capacity"] |= {"state_pages", "state_page_bytes"}
    if not header.capacity.window_groups:
        exclude["capacity"].add("window_groups")
    if "vision" in left_out:
        exclude["capacity"] |= {"feature_rows", "image_slots"}
    return _adapter.dump_json(header, by_alias=True, exclude=exclude)


def header_from_json(data: bytes) -> Header:
    """Read a header; raises JournalUnusable."""
    try:
        header = _adapter.validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise JournalUnusable(
            f"has a header of another version: {where}: {problem['msg']}"
        ) from None
    if header.format != FORMAT:
        raise JournalUnusable(f"has format {header.format}; this version reads format {FORMAT}")
    return header
