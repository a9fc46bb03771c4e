"""The canonical file of an adapter, as the router writes it and as this shard reads it once, into its own memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from millrace_shard.errors import AdapterInvalid

FILE = "adapter.safetensors"
FORMAT = "millrace-adapter-1"
HEADER_LENGTH = 8
"""Bytes before the header of a safetensors file, which hold its length."""
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanonicalModule:
    """The summand of an adapter for one module over all ranks: `((x Aᵀ) * scales) Bᵀ + bias`."""

    a: Tensor
    """[rank, inputs] in the dtype of the file, as is `b`."""
    b: Tensor
    """[outputs, rank]."""
    scales: Tensor
    """[rank] float32."""
    bias: Tensor | None
    """[outputs] float32."""

    @property
    def rank(self) -> int:
        """Ranks of this module."""
        return self.a.shape[0]


def read_canonical(cache: Path, digest: str) -> dict[str, CanonicalModule]:
    """The modules of the adapter `digest` below the folder `cache`, by PEFT's names. Raises AdapterInvalid."""
    if not DIGEST.fullmatch(digest):
        raise AdapterInvalid(f"{digest!r} is not the SHA-256 of an adapter")
    try:
        content = (cache / digest / FILE).read_bytes()
    except OSError as error:
        raise AdapterInvalid(f"adapter {digest} cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise AdapterInvalid(f"adapter {digest} is damaged: its file has another SHA-256")
    try:
        modules = _modules(content)
        tensors = load(content)
        return {name: _module(tensors, name, bool(each["bias"])) for name, each in modules.items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterInvalid(f"adapter {digest} is not in the format {FORMAT}: {error}") from error


def _modules(content: bytes) -> Mapping[str, Any]:
    length = int.from_bytes(content[:HEADER_LENGTH], "little")
    header = json.loads(content[HEADER_LENGTH : HEADER_LENGTH + length])["__metadata__"]
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}")
    modules: Mapping[str, Any] = json.loads(header["modules"])
    return modules


def _module(tensors: Mapping[str, Tensor], name: str, has_bias: bool) -> CanonicalModule:  # noqa: FBT001
    module = CanonicalModule(
        a=tensors[f"{name}.lora_A"],
        b=tensors[f"{name}.lora_B"],
        scales=tensors[f"{name}.scales"].float(),
        bias=tensors[f"{name}.bias"].float() if has_bias else None,
    )
    fits = module.a.ndim == module.b.ndim == 2 and module.b.shape[1] == module.rank
    if not fits or module.scales.shape != (module.rank,) or not module.rank:
        raise ValueError(f"the tensors of {name} do not fit together")
    return module
