"""What a shard computes on, and how much memory it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, field_validator
from pydantic_settings import NoDecode


class DeviceFlags(BaseModel):
    """The device, its numbers, its memory and its graphs."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto takes CUDA when there is any."
    )
    dtype: Literal["float16", "bfloat16", "float32"] | None = Field(
        default=None,
        description="Type of activations, and of weights and KV that are not quantized; the model's own, where the"
        " device has it.",
    )
    max_total_tokens: int | None = Field(
        None, ge=2, description="Longest sequence that will be asked for; RoPE is laid out for it."
    )
    deterministic: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="on: output never depends on batch mates; off: faster; auto: the device's default.",
    )
    disable_custom_kernels: bool = Field(
        default=False,
        description="Run on plain PyTorch operators only; on CUDA several times slower, and without CUDA graphs.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of a forward pass on CPU; chosen by cores when absent.",
    )
    kv_memory: ByteSize | None = Field(
        default=None,
        description="Bytes for the KV cache on this shard, such as 2G or 512MiB; when absent, on CPU a quarter of the"
        " memory that is free at the start and no more than all requests can use, on CUDA 96 % of what is left after"
        " the largest step was rehearsed.",
    )
    cuda_memory_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Part of the GPU's memory that may be used."
    )
    cuda_graphs: Annotated[tuple[int, ...] | None, NoDecode] = Field(
        default=None,
        description="Batch sizes whose decodes are captured as CUDA graphs, separated by commas; 0 for no graphs. When"
        " absent 1, 2, 4, 8, then every 8 to 64 and every 16 to 256, up to --max-batch-size. A batch between two"
        " sizes is padded. Graphs of other steps, up to 512 tokens, have no attention in them. No effect on CPU.",
    )
    one_shot_all_reduce: bool = Field(
        default=False,
        description="Sum small tensors between GPUs through memory they share in place of NCCL.",
    )
    enable_prefill_logprobs: bool = Field(
        default=False,
        description="Let `decoder_input_details` tell the log probabilities of a prompt, as it does in TGI.",
    )

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Split sizes at commas and drop zeros, which mean no graphs."""
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            parts = [part.strip() for item in value for part in str(item).split(",")]
            return tuple(part for part in parts if part not in ("", "0"))
        return value

    @field_validator("deterministic", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        """Accept boolean words for on and off too."""
        if not isinstance(value, str):
            return value
        word = value.strip().lower()
        return {"true": "on", "1": "on", "false": "off", "0": "off"}.get(word, word)
