"""Decodes with adapters by graphs that are replayed, against the same steps run eagerly: in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.model_runner.adapter_graphs import AdapterGraphs
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.steps import Stepper, ints
from millrace_testing.models.adapters import (
    AdaptedModel,
    load_adapted,
    make_adapter,
    write_canonical,
)
from millrace_testing.models.models import prompt_of, save_tiny

SIZES = (1, 3)
RANKS = (6, 20, 11, 70)
"""The graphs have programs for ranks up to 64."""
RUNS_ON_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(RUNS_ON_CUDA, reason="the steps are a CPU's")


class Bench:
    """A tiny model with adapters in slots 1 and 2, and two batches over it: with graphs and without."""

    def __init__(self, root: Path, kernels: Kernels) -> None:
        base = save_tiny(root / "model", "llama", num_hidden_layers=1)
        targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
        self.digests = [
            write_canonical(
                make_adapter(base, seed=rank, r=rank, target_modules=targets), root / "cache"
            )
            for rank in RANKS
        ]
        self.adapted: AdaptedModel = load_adapted(
            root / "model", root / "cache", kernels, digests=self.digests[:2]
        )
        self.recorder = Recorder()
        settings = GraphSettings(SIZES, self.recorder.new_capture)
        self.by_graph, self.eager = (
            Stepper(
                self.adapted.driver.model,
                kernels,
                dtype=torch.float32,
                graphs=graphs,
                adapters=self.adapted.store.table,
            )
            for graphs in (settings, None)
        )

    def admit(self, slot: int, adapter_slot: int) -> None:
        for stepper in (self.by_graph, self.eager):
            stepper.run(
                stepper.admission(slot, prompt_of(3 + slot, seed=slot), adapter_slot=adapter_slot)
            )

    def leave(self, slot: int) -> None:
        for stepper in (self.by_graph, self.eager):
            stepper.run(Forward(change=BatchChange(dropped_slots=ints([slot]))))

    def decodes_alike(self, *slots: int) -> bool:
        ours, theirs = (each.decode(slots) for each in (self.by_graph, self.eager))
        return ours.ids.tolist() == theirs.ids.tolist() and np.array_equal(
            ours.logprobs, theirs.logprobs
        )

    def replays(self) -> list[int]:
        """Steps of each graph: those without adapters, then those with adapters, large before small."""
        return [recording.replays for recording in self.recorder.recordings]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, CudaKernels(deterministic=True))


def test_graphs_yield_the_results_of_eager_steps(bench: Bench) -> None:
    for slot, adapter_slot in enumerate((1, 0, 2)):
        bench.admit(slot, adapter_slot)
    for slots in ((0, 1, 2), (0, 1, 2), (2, 0), (1,), (2,), (0,), (1, 0, 2)):
        assert bench.decodes_alike(*slots)
    assert bench.replays() == [0, 1, 4, 2]


@pytest.mark.long
def test_graphs_hold_for_adapters_that_are_loaded_later(bench: Bench) -> None:
    bench.admit(0, 1)
    bench.admit(1, 2)
    assert bench.decodes_alike(0, 1)
    bench.leave(0)
    bench.adapted.put(1, bench.digests[2])
    bench.admit(0, 1)
    assert bench.decodes_alike(0, 1)
    assert bench.replays() == [0, 0, 2, 0]


@pytest.mark.long
def test_more_ranks_than_a_graph_has_programs_for_run_eagerly(bench: Bench) -> None:
    bench.adapted.put(3, bench.digests[3])
    bench.admit(0, 3)
    bench.admit(1, 1)
    assert bench.decodes_alike(0, 1)
    assert bench.replays() == [0, 0, 0, 0]
    assert bench.decodes_alike(1), "the other adapter has graphs"
    assert bench.replays() == [0, 0, 0, 1]


def test_adapters_of_an_earlier_step_are_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the buffer keeps the adapters of the first step."""
    replay = AdapterGraphs.replay

    def stale(self: AdapterGraphs, size: int, rows: AdapterRows) -> Tensor:
        self._rows = rows if self._rows is not None else None
        return replay(self, size, rows)

    monkeypatch.setattr(AdapterGraphs, "replay", stale)
    bench.admit(0, 1)
    bench.admit(1, 2)
    assert bench.decodes_alike(0, 1)
    assert not bench.decodes_alike(1, 0)


def test_linears_that_read_adapters_on_the_host_have_no_graphs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_kernels("cpu", deterministic=True))
    assert len(bench.replays()) == len(SIZES)
    bench.admit(0, 1)
    bench.admit(1, 0)
    assert bench.decodes_alike(0, 1)
    assert bench.replays() == [0, 0]
