"""Tokens that graphs choose, against the same steps with the eager sampler.

The device is a CPU that must not be waited for, so that the path of CUDA runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.device import transfers
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner import decode_graphs, token_graphs
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.models.interface import CausalModel
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.steps import SAMPLING, Stepper, ints, tiny_llama
from millrace_testing.models.models import prompt_of

SIZES = (2, 4)
Setup = tuple[CausalModel, Kernels]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """The bits of these kernels do not depend on the number of rows."""
    kernels = make_kernels("cpu", deterministic=True)
    return tiny_llama(tmp_path_factory.mktemp("llama"), kernels, torch.bfloat16), kernels


def stepper_of(setup: Setup, recorder: Recorder | None) -> Stepper:
    graphs = None if recorder is None else GraphSettings(SIZES, recorder.new_capture)
    return Stepper(*setup, dtype=torch.bfloat16, graphs=graphs)


def play(stepper: Stepper, kinds: Sequence[str], **fields: object) -> list[StepResult]:
    """Decodes in changing batches, after the prompts of one sequence of each kind."""
    count = len(kinds)
    results = [
        stepper.run(stepper.admission(slot, prompt_of(4 + slot), **SAMPLING[kind], **fields))
        for slot, kind in enumerate(kinds)
    ]
    orders = (range(count), range(count), reversed(range(count)), range(count - 1), range(count))
    return results + [stepper.decode(slots) for slots in orders]


def bits(results: Sequence[StepResult]) -> list[tuple[list[int], list[int], list[int]]]:
    return [(r.slots.tolist(), r.ids.tolist(), r.logprobs.view(np.int32).tolist()) for r in results]


@pytest.mark.parametrize(
    ("kinds", "num_choices"),
    [
        (["greedy"] * 3, 5),
        (["temperature"] * 4, 5),
        (["greedy", "temperature", "greedy", "temperature"], 5),
        (["temperature", "greedy", "filters"], 1),
        (["greedy", "penalised"], 1),
        (["marked", "temperature"], 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_graphs_choose_as_the_eager_sampler_does(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, kinds: list[str], num_choices: int
) -> None:
    on_cpu = bits(play(stepper_of(setup, None), kinds))
    monkeypatch.setattr(transfers, "is_synchronous", lambda _: False)
    eager = bits(play(stepper_of(setup, None), kinds))
    recorder = Recorder()
    assert bits(play(stepper_of(setup, recorder), kinds)) == eager
    assert recorder.num_choices() == num_choices
    if not {"filters", "marked"} & set(kinds):
        # With filters, the CPU sums the probabilities of fewer tokens.
        assert eager == on_cpu
    assert [ids for _, ids, _ in eager] == [ids for _, ids, _ in on_cpu]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("tile", [1, 300])
def test_rows_are_chosen_in_tiles(setup: Setup, monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    kinds = ["greedy", "temperature", "temperature"]
    expected = bits(play(stepper_of(setup, None), kinds))
    monkeypatch.setattr(token_graphs, "tile_height", lambda *_: tile)
    recorder = Recorder()
    assert bits(play(stepper_of(setup, recorder), kinds)) == expected
    assert recorder.num_choices()


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("fields", [{"top_n_tokens": 2}, {"temperature": 0.5}])
def test_other_rows_are_left_to_the_sampler(setup: Setup, fields: dict[str, object]) -> None:
    """Top tokens, and the best token at a temperature, whose log probability differs."""
    recorder = Recorder()
    result = play(stepper_of(setup, recorder), ["greedy"] * 2, **fields)
    assert not recorder.num_choices()
    assert bits(result) == bits(play(stepper_of(setup, None), ["greedy"] * 2, **fields))


@pytest.mark.usefixtures("as_on_cuda")
def test_a_slot_takes_over_the_parameters_of_its_next_sequence(setup: Setup) -> None:
    recorder = Recorder()
    result = []
    for stepper in (stepper_of(setup, recorder), stepper_of(setup, None)):
        results = []
        for kind in ("temperature", "greedy", "temperature"):
            results.append(stepper.run(stepper.admission(0, prompt_of(5), **SAMPLING[kind])))
            results.append(stepper.decode([0]))
            stepper.run(Forward(change=BatchChange(dropped_slots=ints([0]))))
        result.append(bits(results))
    assert result[0] == result[1]
    assert recorder.num_choices() == 3


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kind", ["greedy", "temperature"])
def test_a_row_that_fails_in_a_graph_stays_failed_and_fails_no_other(
    setup: Setup, kind: str
) -> None:
    recorder = Recorder()
    stepper = stepper_of(setup, recorder)
    for slot in range(3):
        stepper.run(stepper.admission(slot, prompt_of(6, seed=slot), **SAMPLING[kind]))
    kept = []
    for layer in stepper.cache:
        block = int(stepper.batch.blocks.of(1)[0])
        kept.append((layer, block, layer.keys[block].clone()))
        layer.keys[block] = torch.nan
    result = stepper.decode([0, 1, 2])
    assert (result.failed_slots.tolist(), result.slots.tolist()) == ([1], [0, 2])
    for layer, block, keys in kept:
        layer.keys[block] = keys.nan_to_num(0.0)
    assert stepper.decode([2, 1, 0]).failed_slots.tolist() == [1]
    assert recorder.num_choices() == 2
    stepper.run(Forward(change=BatchChange(dropped_slots=ints([1]))))
    stepper.run(stepper.admission(1, prompt_of(6), **SAMPLING[kind]))
    assert not len(stepper.decode([0, 1, 2]).failed_slots), "another sequence has not failed"


@pytest.mark.usefixtures("as_on_cuda")
def test_a_stale_choice_is_not_used(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(stale=(len(SIZES),))
    kinds = ["greedy"] * 3
    result = play(stepper_of(setup, recorder), kinds)
    assert not recorder.num_choices()
    assert sum(recorder.replays().values()) == 5, "the model's graphs are good"
    assert bits(result) == bits(play(stepper_of(setup, None), kinds))
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning == (
        f"running without {token_graphs.KIND}: with 4 rows, a replay chooses other tokens"
    )


def test_graphs_spare_nothing_on_a_device_that_computes_at_once(setup: Setup) -> None:
    recorder = Recorder()
    play(stepper_of(setup, recorder), ["greedy"] * 2)
    assert not any(recording.chooses_tokens for recording in recorder.recordings)


@pytest.mark.usefixtures("as_on_cuda")
def test_more_new_blocks_than_expected_go_up_apart(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer has no room for them."""
    monkeypatch.setattr(decode_graphs, "OTHERS_PER_ROW", -1)
    result = []
    for stepper in (stepper_of(setup, Recorder()), stepper_of(setup, None)):
        for slot in range(3):
            stepper.run(stepper.admission(slot, prompt_of(40 + slot)))
        blocks = [stepper.free.pop(0) for _ in range(3)]
        change = BatchChange(grown_slots=ints([0, 2, 1]), grown_blocks=ints(blocks))
        results = [stepper.run(Forward(change=change, decode_slots=ints([0, 1, 2])))]
        results += [stepper.decode([0, 1, 2]) for _ in range(30)]
        result.append(bits(results))
    assert result[0] == result[1]
