"""Graphs: replays against eager steps on other contexts, and a capture that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.engine.kernels import RefusingCapture, few_pieces, graphs_for, interpreted_graphs
from bench.gpu.engine.session import Opened, Session, largest_distance, opened, other_tokens, start
from bench.gpu.figures import Figure, check
from bench.gpu.setting import Emit, Setting
from bench.harness.checkpoints import Shape
from millrace_shard.batch.step import StepResult
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.interface import CausalModel, MakeLayers

NUM_STEPS = 2
SECONDS = 15.0
"""Time for the replays of a large model."""


class WaitingModel:
    """A model whose forward pass reads a value from the device, which no capture permits."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.info = model.info
        self.geometry = model.geometry

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """As the model, with a wait."""
        logits = self._model.forward(batch, cache)
        logits.sum().item()
        return logits

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """As the model."""
        return self._model.states(batch, cache)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """As the model."""
        return self._model.logits(states, adapters)

    def first_layers(self, count: int) -> WaitingModel:
        """The same over fewer layers."""
        return WaitingModel(self._model.first_layers(count))

    def with_layers(self, make: MakeLayers) -> WaitingModel:
        """The same over layers that are combined by `make`."""
        return WaitingModel(self._model.with_layers(make))


def run(setting: Setting, emit: Emit) -> None:
    """Replays first, since a capture that fails may leave this process without captures."""
    scale = setting.scale
    with few_pieces(setting.device):
        for mode in ("on", "off"):
            emit(replayed(setting, "small model", scale.small, mode))
        for mode in ("off", "on"):
            if setting.is_cuda and setting.has_time_for(SECONDS):
                emit(replayed(setting, "model", scale.model, mode))
        with opened(scale.small, scale, setting.device, setting.flags) as model:
            emit(survived(model, setting))


def replayed(setting: Setting, name: str, shape: Shape, mode: str) -> Figure:
    """The largest difference of a token's log probability between a session by graphs and an eager one."""
    scale = setting.scale
    flags = (*setting.flags, f"--deterministic={mode}")
    with opened(shape, scale, setting.device, flags) as model:
        rows = max(scale.batches)
        graphs = graphs_for(model.config, setting.device)
        by_graph, eager = (
            play(start(model.loaded, scale, max_rows=rows, graphs=each, profile=False), setting)
            for each in (graphs, None)
        )
    pairs = zip(by_graph, eager, strict=True)
    return check(
        f"replay against eager, {name}, deterministic {mode}",
        largest_distance(by_graph, eager),
        "largest difference of a log probability",
        {"other_tokens": sum(other_tokens(a, b) for a, b in pairs), "rows": rows},
    )


def play(session: Session, setting: Setting) -> list[StepResult]:
    """Prompts, then decodes at every batch size, so that each batch meets contexts that no capture has seen."""
    scale = setting.scale
    rows = max(scale.batches)
    results = session.admit(rows, scale.small_contexts[0], room=NUM_STEPS * len(scale.batches))
    for batch in scale.batches:
        results += session.play(batch, NUM_STEPS)
    return results


def survived(model: Opened, setting: Setting) -> Figure:
    """Whether an engine whose graphs cannot be captured starts and decodes as one without graphs."""
    waiting = replace(model.loaded, model=WaitingModel(model.loaded.model))
    graphs = graphs_for(model.config, setting.device)
    if not setting.is_cuda:
        graphs = interpreted_graphs(model.config.cuda_graphs, RefusingCapture)
    rows = max(setting.scale.batches)
    reason = ""
    distance = float("inf")
    try:
        session = start(waiting, setting.scale, max_rows=rows, graphs=graphs, profile=False)
        if setting.is_cuda:
            torch.cuda.empty_cache()
        found = play(session, setting)
        eager = start(model.loaded, setting.scale, max_rows=rows, graphs=None, profile=False)
        distance = largest_distance(found, play(eager, setting))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    return check(
        "a capture that fails",
        distance,
        "largest difference of a log probability afterwards",
        {"reason": reason} if reason else {},
    )
