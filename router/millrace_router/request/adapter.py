"""LoRA adapters: as a client names one, and as a request that passed validation has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

ADAPTER_TOKEN_HEADER = "x-adapter-token"  # noqa: S105
"""Header with the client's own token for the hub."""
PAGE_BYTES = 1 << 16
RANKS_PER_SLICE = 16


class AdapterSource(StrEnum):
    """Where the files of an adapter are, in LoRAX's words."""

    HUB = "hub"
    LOCAL = "local"


class MergeStrategy(StrEnum):
    """How several adapters become one: `cat` is their exact weighted sum, the others are as PEFT defines them."""

    CAT = "cat"
    LINEAR = "linear"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"


class SignMethod(StrEnum):
    """How `ties` and `dare_ties` elect the sign of a parameter."""

    TOTAL = "total"
    FREQUENCY = "frequency"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRecipe:
    """The adapters that a request merges."""

    ids: tuple[str, ...]
    weights: tuple[float, ...]
    strategy: MergeStrategy = MergeStrategy.LINEAR
    density: float = 1.0
    """The share of parameters that pruning keeps, in (0, 1]; `cat` and `linear` prune none."""
    majority_sign_method: SignMethod = SignMethod.TOTAL


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReference:
    """An adapter as a client names it."""

    name: str = ""
    """A registered name, `name@sha256:…` for one version, or, with `source`, an id with an optional `@revision`."""
    source: AdapterSource | None = None
    """None: a registered name is meant first, and an id on the hub second."""
    merged: MergeRecipe | None = None
    token: str | None = field(default=None, repr=False)
    """The client's own token for the hub. Only the fetching process gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """A linear layer of the served model that adapters may change, over all ranks."""

    name: str
    """Its name in the class of `transformers`, such as `model.layers.0.self_attn.q_proj`."""
    inputs: int
    outputs: int
    bytes_per_slice: int = field(compare=False)
    """Memory on a rank for 16 ranks of an adapter, or for a bias; the most of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """The checked weights and settings of an adapter; their digest is its identity everywhere but in names."""

    digest: str
    """SHA-256 of the canonical file, in hex."""
    name: str
    """The name for logs, metrics and answers."""
    num_slices: tuple[tuple[str, int], ...]
    """(module, slices of 16 ranks, and one more for a bias), in the order of the model."""
    num_bytes: int = 0
    """Size of the canonical file."""

    def num_pages(self, bytes_per_slice: Mapping[str, int]) -> int:
        """Return the pages that a rank needs, from the bytes that each module takes there for one slice."""
        size = sum(count * bytes_per_slice[module] for module, count in self.num_slices)
        return -(-size // PAGE_BYTES)
