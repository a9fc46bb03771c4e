"""Paged attention as an attention implementation of transformers, for models that run transformers' code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from millrace_shard.device.pulse import PULSE
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.ragged import RaggedBatch

NAME = "millrace_paged"

_HONOURED = frozenset(("scaling", "sliding_window", "softcap"))
# Arguments that transformers passes, and that have no effect in a causal forward pass without dropout.
_WITHOUT_EFFECT = frozenset(
    (
        "dropout",
        "is_causal",
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
        "layer_head_mask",
        "output_router_logits",
    )
)


class Attention(Protocol):
    """Computes the attention of the layers during one forward pass."""

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attend with queries [T, H, D], keys and values [T, K, D]; returns [T, H * D]."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Scale, window and soft cap of a layer's attention."""

    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class PagedAttention:
    """Stores keys and values of a step in the paged cache, then attends over it."""

    kernels: Kernels
    batch: RaggedBatch
    cache: Sequence[LayerCache]

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        PULSE.advance()
        self.kernels.store(keys, values, self.batch, self.cache[layer])
        return self.kernels.attend(
            queries,
            self.batch,
            self.cache[layer],
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
        )


_current: ContextVar[Attention] = ContextVar("millrace_attention")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Use `attention` in all forward passes inside."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """The function that transformers calls: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    is_causal = arguments.get("is_causal", getattr(module, "is_causal", None))
    _refuse_unknown(arguments | {"attention_mask": attention_mask}, is_causal=is_causal)
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{type(module).__name__} does not number its layers")
    queries, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
    scaling = arguments.get("scaling")
    rule = AttentionRule(
        scale=queries.shape[2] ** -0.5 if scaling is None else float(scaling),
        # Some classes pass the window only in the mask, which is not built here.
        window=arguments.get("sliding_window", getattr(module, "sliding_window", None)),
        softcap=arguments.get("softcap"),
    )
    attended = _current.get()(layer, queries, keys, values, rule)
    return attended.view(1, *queries.shape), None


def _refuse_unknown(arguments: dict[str, object], *, is_causal: bool | None) -> None:
    """Raise UnsupportedModel for arguments that the kernels do not support, such as attention sinks (`s_aux`)."""
    supported = _WITHOUT_EFFECT | _HONOURED
    unknown = sorted(
        name for name, value in arguments.items() if value is not None and name not in supported
    )
    if is_causal is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModel(f"attention with {', '.join(unknown)} is not supported")


def _no_mask(*_: object, **__: object) -> None:
    """Build no mask: the ragged batch determines which keys a token sees."""


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _no_mask)
