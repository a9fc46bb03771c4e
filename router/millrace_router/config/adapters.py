"""Flags of LoRA adapters: names, sources, memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from millrace_router.config.adapter_specs import (
    READERS,
    AdapterSpec,
    sglang_adapter,
    split_adapters,
    tgi_adapter,
    vllm_adapter,
)
from millrace_router.config.values import split_commas


class AdapterFlags(BaseModel):
    """Which adapters there are, where they come from, and how many are in the shards."""

    lora_adapters: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapters that requests may name: ID, ID@REVISION, NAME=PATH or NAME=PATH@REVISION, or a JSON"
        " object with `name`, `path` and `revision`; separated by commas. A path is a folder or an id on the hub.",
    )
    lora_modules: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapters in vLLM's form: NAME=PATH, or a JSON object with `name`, `path` and"
        " `base_model_name`; repeatable.",
    )
    lora_paths: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapters in SGLang's form: PATH, NAME=PATH, or a JSON object with `lora_name`, `lora_path`"
        " and `pinned`, which has no effect; repeatable.",
    )
    adapter_id: str | None = Field(
        default=None,
        description="LoRA adapter of requests that name no model; it is fetched at the start.",
    )
    adapter_source: Literal["hub", "local"] = Field(
        default="hub",
        description="Where an id of an adapter is looked up when nothing else decides it: on the hub, or below"
        " --adapter-root.",
    )
    preloaded_adapter_ids: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapter to fetch at the start; repeatable. Others are fetched at their first use.",
    )
    adapter_root: Path | None = Field(
        default=None,
        description="Folder below which clients may name folders of adapters, with `adapter_source` local.",
    )
    adapter_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Pattern of ids on the hub that clients may name, such as hub:org/*; repeatable. Without any,"
        " clients may only name registered adapters.",
    )
    adapter_cache: Path | None = Field(
        default=None,
        description="Folder for checked copies of adapters, which router and shards share; adapters in MILLRACE_CACHE"
        " or the user's cache folder when absent.",
    )
    adapter_cache_size: ByteSize = Field(
        default=ByteSize(20 << 30),
        description="Bytes that those copies may take, such as 20GiB; copies that nothing uses are removed.",
    )
    max_loras: int | None = Field(
        default=None,
        ge=1,
        description="Most LoRA adapters in the shards at a time, if their memory has room;"
        " --max-loras-per-batch or --max-active-adapters when absent.",
    )
    max_loras_per_batch: int | None = Field(
        default=None, ge=1, description="SGLang's name of --max-loras, which beats it."
    )
    max_active_adapters: int = Field(
        default=1024, ge=1, description="LoRAX's name of --max-loras, which beats it."
    )
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="No effect: --adapter-cache-size bounds what is kept."
    )
    max_lora_rank: int = Field(
        default=64, ge=1, description="Highest rank of a LoRA adapter; higher ones are refused."
    )
    adapter_cycle_time_s: float = Field(
        default=2.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a LoRA adapter is served before it makes room for waiting ones, when all are busy.",
    )
    unknown_model: Literal["base", "refuse"] | None = Field(
        default=None,
        description="Answer requests for a `model` that is not served with the base model (base) or with 404 (refuse);"
        " refuse with --enable-lora, else base.",
    )

    @property
    def registered_adapters(self) -> tuple[AdapterSpec, ...]:
        """The adapters of --lora-adapters, --lora-modules and --lora-paths."""
        return (
            *(tgi_adapter(text) for text in self.lora_adapters),
            *(vllm_adapter(text) for text in self.lora_modules),
            *(sglang_adapter(text) for text in self.lora_paths),
        )

    @property
    def adapter_cache_folder(self) -> Path:
        """The folder of --adapter-cache, or its default."""
        if self.adapter_cache is not None:
            return self.adapter_cache
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.environ.get("MILLRACE_CACHE") or f"{home}/millrace"
        return Path(folder).expanduser() / "adapters"

    @property
    def max_adapters(self) -> int:
        """The most adapters in the shards at a time."""
        return self.max_loras or self.max_loras_per_batch or self.max_active_adapters

    @field_validator("preloaded_adapter_ids", "adapter_allow", mode="before")
    @classmethod
    def _split_ids(cls, value: object) -> object:
        return split_commas(value)

    @field_validator("lora_adapters", "lora_modules", "lora_paths", mode="before")
    @classmethod
    def _split_adapters(cls, value: object) -> object:
        return split_adapters(value)

    @field_validator("lora_adapters", "lora_modules", "lora_paths")
    @classmethod
    def _check_adapters(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in value:
            READERS[str(info.field_name)](text)
        return value

    @field_validator("adapter_allow")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if re.fullmatch(r"hub:[^/:]+/[^/:]+", pattern) is None:
                raise ValueError(f"must be patterns such as hub:org/*. Given: {pattern}")
        return value
