"""A pass of two tokens that finds the shapes of a class's attention, since a class may differ from its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from millrace_shard.device.process_group import GroupError
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.models.transformers_backend.class_of import skeleton
from millrace_shard.models.transformers_backend.paged_attention import AttentionRule, attending

_OF_CLASSES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""Errors by which the code of a class shows that it cannot take a step of ours."""


@dataclass(slots=True)
class ShapeProbe:
    """Records the heads and windows of every layer; its outputs are zeros."""

    layers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Key-value heads and their width."""
    num_heads: dict[int, int] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See Attention. Raises UnsupportedModel for shapes that the paged cache cannot hold."""
        if keys.shape != values.shape or queries.shape[1] % keys.shape[1]:
            shapes = ", ".join(str(list(t.shape[1:])) for t in (queries, keys, values))
            raise UnsupportedModel(
                f"attention with queries, keys and values of {shapes} is not supported"
            )
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} attends more than once")
        self.layers[layer] = (keys.shape[1], keys.shape[2])
        self.num_heads[layer] = queries.shape[1]
        self.windows[layer] = rule.window
        return torch.zeros_like(queries).flatten(1)


def probed(model: PreTrainedModel) -> ShapeProbe:
    """The shapes of a loaded model. Raises UnsupportedModel, and GroupError if another rank is gone."""
    probe, kind = ShapeProbe(), type(model).__name__
    with refusing_errors_of(f"{kind} does not run on paged attention"):
        _run(model, probe)
    if not probe.layers or sorted(probe.layers) != list(range(len(probe.layers))):
        raise UnsupportedModel(f"{kind} does not attend in every layer")
    return probe


def probe_skeleton(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for attention that is not supported, as far as a class without weights shows it."""
    model = skeleton(config)
    # Code that reads values, such as a mixture's routing, fails without them: the loaded model is probed again.
    with (
        refusing_errors_of(f"{type(model).__name__} does not run on paged attention"),
        suppress(RuntimeError),
    ):
        _run(model, ShapeProbe())


@contextmanager
def refusing_errors_of(failure: str) -> Iterator[None]:
    """Turn errors of a class's code into UnsupportedModel with a text that begins with `failure`."""
    try:
        yield
    except (ModelError, GroupError):
        raise
    except _OF_CLASSES as error:
        raise UnsupportedModel(f"{failure}: {error}") from error


@torch.inference_mode()
def _run(model: PreTrainedModel, probe: ShapeProbe) -> None:
    tokens = torch.arange(2, device=model.device).unsqueeze(0)
    with attending(probe):
        model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=0)
