"""The host's share of a decode: copies to the device, and operations that are submitted to it.

The device is a CPU that must not be waited for, so that the path of CUDA runs; a replay counts as one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.device import transfers
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.models.interface import CausalModel
from millrace_testing.engines.graphs import Recorder, Recording
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.steps import SAMPLING, Stepper, ints, tiny_llama
from millrace_testing.models.models import prompt_of

NUM_ROWS = 32
WITHOUT_WORK = {
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_unsafe_view",
}
"""Operations that submit nothing: views, allocations, and tensors over arrays of the host."""


class Costs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and copies to the device while it is active, but not the work inside a replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[str] = []
        self.uploads = 0
        self.is_paused = True
        replay = Recording.replay

        def replay_as_one(recording: Recording) -> Tensor:
            was_paused, self.is_paused = self.is_paused, True
            output = replay(recording)
            self.is_paused = was_paused
            if not was_paused:
                self.launches.append("replay")
            return output

        def pinned(host: Tensor, device: torch.device) -> Tensor:
            assert device.type == "cpu"
            self.uploads += not self.is_paused
            return host

        monkeypatch.setattr(Recording, "replay", replay_as_one)
        monkeypatch.setattr(transfers, "pinned", pinned)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the operation."""
        name = func.overloadpacket.__name__
        if not self.is_paused and name not in WITHOUT_WORK:
            self.launches.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count from zero."""
        self.launches, self.uploads, self.is_paused = [], 0, False
        try:
            with self:
                yield
        finally:
            self.is_paused = True


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, Kernels]:
    kernels = make_kernels("cpu", deterministic=False)
    return tiny_llama(tmp_path_factory.mktemp("llama"), kernels, torch.float32), kernels


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    monkeypatch.setattr(transfers, "is_synchronous", lambda _: False)
    return Costs(monkeypatch)


def running(llama: tuple[CausalModel, Kernels], kinds: Sequence[str], *, by_graph: bool) -> Stepper:
    """NUM_ROWS sequences, of the sampling `kinds` in turn, after a decode."""
    graphs = GraphSettings((NUM_ROWS,), Recorder().new_capture) if by_graph else None
    stepper = Stepper(*llama, dtype=torch.float32, graphs=graphs, max_batch_size=NUM_ROWS)
    for slot in range(NUM_ROWS):
        kind = kinds[slot % len(kinds)]
        stepper.run(stepper.admission(slot, prompt_of(3, seed=slot), **SAMPLING[kind]))
    stepper.decode(range(NUM_ROWS))
    return stepper


def growing(stepper: Stepper, step: Forward) -> Forward:
    """The same step, with a new block for each of two rows."""
    blocks = [stepper.free.pop(0) for _ in range(2)]
    return replace(step, change=BatchChange(grown_slots=ints([4, 9]), grown_blocks=ints(blocks)))


def cost_of(stepper: Stepper, costs: Costs, step: Forward) -> None:
    with torch.inference_mode():
        with costs.counted():
            launched = stepper.runner.launch(step)
        assert len(launched.finish().slots) == NUM_ROWS


@pytest.mark.parametrize(
    "kinds", [["greedy"], ["temperature"], ["greedy", "temperature"]], ids="-".join
)
def test_a_decode_by_graph_is_one_copy_and_two_replays(
    llama: tuple[CausalModel, Kernels], costs: Costs, kinds: list[str]
) -> None:
    stepper = running(llama, kinds, by_graph=True)
    step = Forward(decode_slots=ints(range(NUM_ROWS)))
    cost_of(stepper, costs, step)
    assert costs.uploads == 1
    assert costs.launches == ["copy_", "replay", "replay", "clone"], "up, model, tokens, down"


@pytest.mark.parametrize("by_graph", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "temperature", "filters", "penalised"])
def test_new_blocks_go_up_with_the_rows(
    llama: tuple[CausalModel, Kernels], costs: Costs, kind: str, by_graph: bool
) -> None:
    """A step of rows of one kind is one copy, whatever it clears and grows."""
    stepper = running(llama, [kind], by_graph=by_graph)
    step = growing(stepper, Forward(decode_slots=ints(range(NUM_ROWS))))
    cost_of(stepper, costs, step)
    assert costs.uploads == 1
    tables = stepper.batch.blocks.tables
    for slot in (4, 9):
        own = stepper.batch.blocks.of(slot)
        assert tables[slot, : len(own)].tolist() == own.tolist()
    for layer in stepper.cache:
        assert not layer.keys[int(stepper.batch.blocks.of(4)[-1])].any(), "cleared"


@pytest.mark.parametrize("by_graph", [False, True])
def test_rows_of_all_kinds_go_up_at_once(
    llama: tuple[CausalModel, Kernels], costs: Costs, by_graph: bool
) -> None:
    """Their groups went up with the first such step."""
    stepper = running(llama, list(SAMPLING), by_graph=by_graph)
    cost_of(stepper, costs, Forward(decode_slots=ints(range(NUM_ROWS))))
    assert costs.uploads == 1
