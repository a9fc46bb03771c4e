"""Grammars, adapters and watermarks of requests."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ByteSize, Field


class RequestFlags(BaseModel):
    """What requests may ask for beside tokens."""

    grammar_timeout: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="Seconds of CPU time a grammar may take to compile before it is refused.",
    )
    max_grammar_bytes: ByteSize = Field(
        default=ByteSize(1 << 17), description="Longest grammar or JSON schema, such as 64KiB."
    )
    enable_lora: bool = Field(
        default=False,
        description="Let requests have LoRA adapters; every other flag about adapters implies it.",
    )
    adapter_cache: Path | None = Field(
        default=None,
        description="Folder of the adapters that the router has checked, which both share.",
    )
    adapter_memory: ByteSize | None = Field(
        default=None, description="Bytes for adapters on this shard, such as 512MiB."
    )
    adapter_memory_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Part of the free memory of the device that adapters may fill, without --adapter-memory.",
    )
    watermark_gamma: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the vocabulary that the watermark of requests with `watermark` favours.",
    )
    watermark_delta: float = Field(
        default=2.0,
        ge=-1000,
        le=1000,
        description="What the watermark adds to the scores of the tokens it favours.",
    )
