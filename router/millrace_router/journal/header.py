"""What a journal file says of the deployment before anything else: all that is needed to warm up equal shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from millrace_router.journal.errors import JournalUnusable
from millrace_router.shards.wire import Capacity, ShardInfo

FORMAT = 1
"""Grows when older readers would misunderstand."""

Setting = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first record of each file."""

    format: int = FORMAT
    life: str
    """Of the router: the same in all files that one process wrote."""
    part: int = 0
    """Which of them this is."""
    version: str
    """Of Millrace."""
    model_id: str
    model_sha: str | None
    keeps_tokens: bool
    """Whether token ids, log probabilities and grammars are in it."""
    shard: ShardInfo
    warmup: Mapping[str, int]
    """Fields of the WarmupRequest."""
    capacity: Capacity
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Flags of the router that shape the schedule, resolved."""


_adapter = TypeAdapter(Header)


def header_to_json(header: Header) -> bytes:
    """Write it."""
    return _adapter.dump_json(header, by_alias=True)


def header_from_json(data: bytes) -> Header:
    """Read it; raises JournalUnusable."""
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
