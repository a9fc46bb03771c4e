"""A model of random weights with the flags of a stage, and sessions of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.gpu.engine.kernels import graphs_for
from bench.gpu.engine.scale import Scale
from bench.gpu.engine.session import Session, load, start
from bench.harness.checkpoints import Shape
from millrace_shard.config import ShardConfig
from millrace_shard.engine.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class Opened:
    """A loaded model and its config."""

    loaded: LoadedModel
    config: ShardConfig
    scale: Scale

    def session(self, *, max_rows: int, fill: bool = False) -> Session:
        """An engine as it serves: profiled, with the graphs of its flags. On CPU there are no graphs."""
        device = self.loaded.device
        graphs = graphs_for(self.config, device) if device.type == "cuda" else None
        return start(self.loaded, self.scale, max_rows=max_rows, graphs=graphs, fill=fill)


@contextmanager
def opened(
    shape: Shape, scale: Scale, device: torch.device, flags: Sequence[str]
) -> Iterator[Opened]:
    """Random weights of `shape` for the length of the block."""
    with tempfile.TemporaryDirectory() as folder:
        config = ShardConfig.from_args([*flags, folder])
        loaded = load(shape, config, device, scale.max_tokens)
        print(f"weights made, {loaded.kernels.name} kernels", flush=True)
        yield Opened(loaded, config, scale)
