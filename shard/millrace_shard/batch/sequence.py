"""A sequence as it joins the batch, with its sampling parameters."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace_proto.sampling import SCALARS, Sampling
from millrace_proto.sequence import Grammar, Pooling
from millrace_shard.errors import StepInvalid

Ids = NDArray[np.int64]


def _dtype(scalar: Field[Any]) -> type[np.generic]:
    # Seeds are unsigned.
    return np.uint64 if scalar.name == "seed" else _DTYPES[type(scalar.default)]


_DTYPES: dict[type, type[np.generic]] = {float: np.float32, int: np.int64, bool: np.bool_}
PARAMETERS = np.dtype(
    [
        *((scalar.name, _dtype(scalar)) for scalar in SCALARS),
        ("top_n_tokens", np.int64),
        ("min_new_tokens", np.int64),
        ("num_prompt", np.int64),
        ("is_biased", np.bool_),
        ("has_rules", np.bool_),
        ("is_guided", np.bool_),
    ],
    align=True,
)
"""The sampling parameters of a sequence as a row; `num_prompt` is the position of its first generated token."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Placeholder tokens at `position` and following, whose embeddings are replaced by rows of features."""

    position: int
    tokens: int
    first_row: int
    """Of the first token; the rows of the others follow."""


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The features of an image from `position` on, row by row."""

    position: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """A sequence as it joins the batch, with the fields of the message `Sequence`."""

    slot: int
    request_id: int
    input_ids: Ids
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Positions with KV, which need not fill their last block."""
    parameters: Sampling = field(default_factory=Sampling)
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    prefill_top_n_tokens: int = 0
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    close_within: int = 0
    """Generated tokens within which the text of `grammar` is closed; 0: never."""
    adapter_slot: int = 0
    """0: no adapter."""
    pooling: Pooling | None = None
    """None: the sequence yields tokens."""
    window_starts: tuple[int, ...] = ()
    """Blocks at the beginning of its table in each window group that do not exist."""
    state_page: int = 0
    """The page of its state; 0 without recurrent layers."""
    restored_page: int = 0
    """The page with its state after `cached_tokens` tokens; 0: there is none."""
    images: tuple[ImageSpan, ...] = ()
    """In the order of their positions."""
    image_grids: tuple[ImageGrid, ...] = ()
    """Of all images of any size, in the order of their positions."""

    @property
    def num_inputs(self) -> int:
        """Tokens to compute before the first sample."""
        return len(self.input_ids)

    def check(self, *, vocab_size: int, max_tokens: int) -> None:
        """Raise StepInvalid unless the sequence is consistent and within the limits."""
        if not 0 < self.num_inputs <= max_tokens:
            raise StepInvalid(
                f"request {self.request_id} has {self.num_inputs} tokens; 1 to {max_tokens} fit"
            )
        if self.input_ids.min() < 0 or self.input_ids.max() >= vocab_size:
            raise StepInvalid(
                f"request {self.request_id} has token ids beyond the vocabulary of {vocab_size}"
            )
        if not 0 <= self.cached_tokens < self.num_inputs:
            raise StepInvalid(f"request {self.request_id} leaves no token to compute")
        if not 0 <= self.generated_tokens < self.num_inputs:
            raise StepInvalid(
                f"request {self.request_id} lacks a prompt before its generated tokens"
            )
        if any(not 0 <= id_ < vocab_size for id_, _ in self.parameters.bias):
            raise StepInvalid(f"request {self.request_id} biases ids beyond {vocab_size}")
        if any(not 0 <= id_ < vocab_size for id_ in self.parameters.rules.ids()):
            raise StepInvalid(f"request {self.request_id} has rules for ids beyond {vocab_size}")
        if self.pooling and any(not 0 <= id_ < vocab_size for id_ in self.pooling.logit_ids):
            raise StepInvalid(f"request {self.request_id} requests logits beyond {vocab_size}")
        if (refusal := self.parameters.refusal()) is not None:
            raise StepInvalid(f"request {self.request_id}: {refusal}")

    def columns(self) -> NDArray[np.void]:
        """A row of PARAMETERS, an array without dimensions."""
        p = self.parameters
        row: NDArray[np.void] = np.zeros((), dtype=PARAMETERS)
        for scalar in SCALARS:
            row[scalar.name] = p.stored(scalar.name)
        row["top_n_tokens"] = self.top_n_tokens
        row["min_new_tokens"] = self.min_new_tokens
        row["is_biased"] = bool(p.bias)
        row["has_rules"] = bool(p.rules)
        row["is_guided"] = self.grammar is not None
        row["num_prompt"] = self.num_inputs - self.generated_tokens
        return row
