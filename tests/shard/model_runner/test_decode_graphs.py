"""Steps of decodes by graphs that are replayed, against the same steps run eagerly."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace_shard.batch.step import Forward, StepResult
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner import graph_capture, piecewise_layers
from millrace_shard.model_runner.decode_graphs import KIND
from millrace_shard.model_runner.graph_capture import CudaCapture, GraphSettings
from millrace_shard.model_runner.trial_sequence import TrialSequence
from millrace_shard.models.interface import CausalModel
from millrace_shard.models.transformers_backend.supported import SUPPORTED
from millrace_shard.models.transformers_backend.transformers_model import CAPTURED
from millrace_testing.engines.graphs import Recorder, out_of_memory
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.multi_token import PlannedProposer
from millrace_testing.engines.steps import (
    MAX_BATCH_SIZE,
    MAX_TOKENS,
    NUM_BLOCKS,
    SAMPLING,
    Stepper,
    beside,
    ints,
    tiny_llama,
)
from millrace_testing.models.models import prompt_of, read_model, save_tiny

SIZES = (1, 2, 4)
Setup = tuple[CausalModel, Kernels, torch.dtype]
KERNELS = {
    "plain": ("plain", False, torch.float32),
    "cpu-float32": ("cpu", False, torch.float32),
    "cpu-deterministic": ("cpu", True, torch.bfloat16),
}


@pytest.fixture(scope="module", params=KERNELS)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    name, deterministic, dtype = KERNELS[request.param]
    kernels = make_kernels(name, deterministic=deterministic)
    return tiny_llama(tmp_path_factory.mktemp("llama"), kernels, dtype), kernels, dtype


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def steppers(setup: Setup, recorder: Recorder, sizes: tuple[int, ...] = SIZES) -> list[Stepper]:
    """A stepper that decodes by graphs, and one that does not."""
    model, kernels, dtype = setup
    settings = GraphSettings(sizes, recorder.new_capture)
    return [
        Stepper(model, kernels, dtype=dtype, graphs=settings),
        Stepper(model, kernels, dtype=dtype),
    ]


def story() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Admissions of slot 0, 1, … together with decodes, then decodes in changing batches."""
    yield "greedy", ()
    yield "temperature", (0,)
    yield "filters", (1, 0)
    yield "penalised", (2, 0, 1)
    for slots in ((0,), (3, 1), (2, 0, 1), (0, 1, 2, 3), (1, 2, 3), (2,), (3, 2, 1, 0)):
        yield "", slots


def play(stepper: Stepper) -> list[StepResult]:
    results = []
    admitted = 0
    for kind, decodes in story():
        step = Forward(decode_slots=ints(decodes))
        if kind:
            fields = SAMPLING[kind] | {"top_n_tokens": admitted}
            prompt = prompt_of(5 + 7 * admitted, seed=admitted)
            step = beside(stepper.admission(admitted, prompt, **fields), decodes)
            admitted += 1
        results.append(stepper.run(step))
    return results


def test_graphs_yield_the_results_of_eager_steps(setup: Setup, recorder: Recorder) -> None:
    by_graph, eager = steppers(setup, recorder)
    exact = setup[1].name == "cpu"
    for ours, theirs in zip(play(by_graph), play(eager), strict=True):
        assert ours.slots.tolist() == theirs.slots.tolist()
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert not len(ours.failed_slots)
        assert ours.top_counts.tolist() == theirs.top_counts.tolist()
        tolerance = 0 if exact and setup[2] is torch.bfloat16 else 1e-5
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=tolerance, rtol=0)
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=tolerance, rtol=0)
    assert recorder.replays() == {1: 2, 2: 1, 4: 4}


def test_padding_writes_no_block_but_its_own(setup: Setup, recorder: Recorder) -> None:
    by_graph, _ = steppers(setup, recorder)
    for slot in range(3):
        by_graph.run(by_graph.admission(slot, prompt_of(9, seed=slot)))
    own = [int(b) for slot in range(3) for b in by_graph.batch.blocks.of(slot)]
    before = [layer.keys.clone() for layer in by_graph.cache]
    by_graph.decode([0, 1, 2])
    assert recorder.replays() == {4: 1}
    for layer, old in zip(by_graph.cache, before, strict=True):
        changed = (layer.keys.view(torch.uint8) != old.view(torch.uint8)).flatten(1).any(1)
        assert set(changed.nonzero().flatten().tolist()) <= {*own, NUM_BLOCKS}
        assert layer.keys[NUM_BLOCKS].any()
        assert not layer.keys[0].any()


def test_the_largest_size_is_captured_first_and_only_sizes_of_batches(
    setup: Setup, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    by_graph, _ = steppers(setup, recorder, (4, 1, 32, 2, 2))
    assert recorder.sizes == [4, 2, 1]
    assert by_graph.graphs is not None
    assert by_graph.graphs.sizes == (1, 2, 4)
    lines = [record.message for record in caplog.records if record.message.startswith(KIND)]
    assert lines[:-1] == [f"{KIND}: captured {i}/3, size {s}" for i, s in ((1, 4), (2, 2), (3, 1))]
    assert re.fullmatch(rf"{KIND}: 3 sizes captured in \d+\.\d s", lines[-1])


def test_more_rows_than_the_largest_run_eagerly(setup: Setup, recorder: Recorder) -> None:
    by_graph, eager = steppers(setup, recorder, (2,))
    for stepper in (by_graph, eager):
        for slot in range(3):
            stepper.run(stepper.admission(slot, prompt_of(4, seed=slot)))
    assert by_graph.decode([0, 1, 2]).ids.tolist() == eager.decode([0, 1, 2]).ids.tolist()
    assert recorder.replays() == {}
    assert by_graph.decode([2]).ids.tolist() == eager.decode([2]).ids.tolist()
    assert recorder.replays() == {2: 1}


def test_a_row_without_its_forced_tokens_lets_the_step_use_the_graph(
    setup: Setup, recorder: Recorder
) -> None:
    """A row with a grammar may lack its forced tokens."""
    by_graph, eager = steppers(setup, recorder)
    for stepper in (by_graph, eager):
        for slot in range(2):
            stepper.run(stepper.admission(slot, prompt_of(4, seed=slot)))
    step = Forward(decode_slots=ints([0, 1]), decode_tokens=ints([1, 3]))
    assert by_graph.run(step).ids.tolist() == eager.run(step).ids.tolist()
    assert recorder.replays() == {2: 1}


def test_a_prompt_of_one_token_is_not_a_decode(setup: Setup, recorder: Recorder) -> None:
    by_graph, eager = steppers(setup, recorder)
    results = [s.run(s.admission(0, [7], prefill_logprobs=True)) for s in (by_graph, eager)]
    assert results[0].ids.tolist() == results[1].ids.tolist()
    assert recorder.replays() == {}


@pytest.mark.parametrize(("failing", "left"), [(0, (1, 2)), (1, (1,)), (2, ())])
def test_a_size_without_memory_drops_itself_and_the_larger_ones(
    setup: Setup, caplog: pytest.LogCaptureFixture, failing: int, left: tuple[int, ...]
) -> None:
    """Memory runs out in the warm-up, outside a capture."""
    failed: list[int] = []

    def fail(number: int) -> None:
        if number == failing and not failed:
            failed.append(number)
            out_of_memory()

    recorder = Recorder(fail_warm_up=fail)
    by_graph, eager = steppers(setup, recorder)
    assert by_graph.graphs is not None
    assert by_graph.graphs.sizes == left
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    size = (4, 2, 1)[failing]
    assert warning.startswith(f"no {KIND} from size {size} on, out of memory")
    assert recorder.num_captures == 2
    for ours, theirs in zip(play(by_graph), play(eager), strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()


def raising_second(error: Exception) -> Callable[[int], None]:
    def fail(number: int) -> None:
        if number == 1:
            raise error

    return fail


@dataclass(frozen=True)
class Obstacle:
    """The reasons to run without graphs, each with the settings that follow from it."""

    recorder: Callable[[], Recorder]
    words: str
    capture_failed: bool = False


OBSTACLES = {
    "a wait": Obstacle(
        lambda: Recorder(fail_warm_up=raising_second(RuntimeError("a synchronizing operation"))),
        "a synchronizing operation",
    ),
    "a capture": Obstacle(
        lambda: Recorder(raising_second(RuntimeError("not permitted when stream is capturing"))),
        "a capture has failed: not permitted when stream is capturing",
        capture_failed=True,
    ),
    "a capture without memory": Obstacle(
        lambda: Recorder(raising_second(torch.OutOfMemoryError("CUDA out of memory"))),
        "a capture has failed: CUDA out of memory",
        capture_failed=True,
    ),
    "a collective in a capture": Obstacle(
        lambda: Recorder(raising_second(CollectiveError("invalid usage"))),
        "a capture has failed: invalid usage",
        capture_failed=True,
    ),
    "a stale replay": Obstacle(
        lambda: Recorder(stale=(1,)), "with 2 rows, a replay differs from the eager pass by"
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_steps_that_cannot_be_captured_run_eagerly(
    setup: Setup, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    obstacle = OBSTACLES[name]
    recorder = obstacle.recorder()
    model, kernels, dtype = setup
    settings = GraphSettings(SIZES, recorder.new_capture)
    by_graph = Stepper(model, kernels, dtype=dtype, graphs=settings)
    assert by_graph.graphs is not None
    assert by_graph.graphs.sizes == ()
    assert not settings.may_capture(KIND)
    assert settings.capture_failed == obstacle.capture_failed
    assert recorder.num_captures == 1
    assert 1 not in recorder.sizes
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert obstacle.words in warning
    eager = Stepper(model, kernels, dtype=dtype)
    for ours, theirs in zip(play(by_graph), play(eager), strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()


def test_a_lost_group_is_not_blamed_on_graphs(setup: Setup) -> None:
    recorder = Recorder(fail_warm_up=raising_second(CollectiveError("rank 1 is gone")))
    with pytest.raises(CollectiveError, match="rank 1 is gone"):
        steppers(setup, recorder)


class OtherRank(ProcessGroup):
    """A group of two, whose other rank has these outcomes."""

    def __init__(self, outcomes: list[int]) -> None:
        super().__init__(0, 2, torch.device("cpu"))
        self.outcomes = outcomes

    def minimum(self, value: int) -> int:
        return min(value, self.outcomes.pop(0))


FAILED, NOT_CAPTURABLE, NO_MEMORY, GOOD = range(4)


@pytest.mark.parametrize(
    ("outcomes", "left", "failed", "recorded"),
    [
        ([GOOD] * 3 + [NO_MEMORY] + [GOOD] * 3, (1,), False, [4, 1]),
        ([GOOD] * 3 + [NOT_CAPTURABLE], (), False, [4]),
        ([GOOD] * 3 + [GOOD, FAILED], (), True, [4, 2]),
        ([GOOD] * 2 + [NOT_CAPTURABLE], (), False, [4]),
    ],
)
def test_all_ranks_drop_the_sizes_that_one_cannot_capture(
    setup: Setup,
    outcomes: list[int],
    left: tuple[int, ...],
    failed: bool,
    recorded: list[int],
) -> None:
    """They agree after each stage: no rank records or replays what another one does not."""
    by_graph, _ = steppers(setup, Recorder(), ())
    assert by_graph.graphs is not None
    recorder = Recorder()
    settings = GraphSettings(SIZES, recorder.new_capture)
    other = OtherRank(list(outcomes))
    with torch.inference_mode():
        by_graph.graphs.capture(settings, other)
    assert by_graph.graphs.sizes == left
    assert settings.may_capture(KIND) == bool(left)
    assert settings.capture_failed == failed
    assert recorder.sizes == recorded
    assert other.outcomes == []


def test_the_comparison_leaves_an_empty_batch(setup: Setup, recorder: Recorder) -> None:
    by_graph, _ = steppers(setup, recorder)
    assert len(by_graph.batch) == 0
    assert not len(by_graph.batch.blocks.of(0))
    by_graph.run(by_graph.admission(0, prompt_of(4)))
    assert len(by_graph.batch) == 1


def test_a_graph_is_compared_over_another_context_in_each_row(setup: Setup) -> None:
    by_graph, _ = steppers(setup, Recorder(), ())
    trial = TrialSequence(by_graph.batch)
    for size in range(1, MAX_BATCH_SIZE + 1):
        slots, positions = trial.rows(size)
        assert slots.tolist() == [0] * size
        assert positions[0] == MAX_TOKENS - 1
        assert len(set(positions.tolist())) == size
        assert positions.min() >= 0


def test_a_failed_row_among_good_ones_fails_no_other_by_graph(
    setup: Setup, recorder: Recorder
) -> None:
    """NaN in one sequence's pages reaches neither its mates nor the padding."""
    by_graph, eager = steppers(setup, recorder)
    for stepper in (by_graph, eager):
        for slot in range(3):
            stepper.run(stepper.admission(slot, prompt_of(6, seed=slot)))
        for layer in stepper.cache:
            block = int(stepper.batch.blocks.of(1)[0])
            layer.keys[block] = torch.nan
            layer.values[block] = torch.nan
        result = stepper.decode([0, 1, 2])
        assert result.failed_slots.tolist() == [1]
        assert result.slots.tolist() == [0, 2]
    assert by_graph.decode([0, 2]).ids.tolist() == eager.decode([0, 2]).ids.tolist()
    assert recorder.replays() == {2: 1, 4: 1}


def test_the_kernels_of_cuda_take_nothing_from_the_host_copies(
    recorder: Recorder, tmp_path: Path
) -> None:
    """In Triton's interpreter without a GPU; a captured step gives them the longest contexts that may occur."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which the next test runs")
    cuda = pytest.importorskip("millrace_shard.kernels.cuda.operators", reason="no Triton")
    kernels = cuda.CudaKernels(deterministic=True)
    model = tiny_llama(tmp_path, kernels, torch.float32)
    results = []
    for stepper in steppers((model, kernels, torch.float32), recorder, (2,)):
        stepper.run(stepper.admission(0, prompt_of(3)))
        stepper.run(stepper.admission(1, prompt_of(18, seed=1)))
        results.append([stepper.decode(slots) for slots in ([1, 0], [1])])
    for ours, theirs in zip(*results, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    assert recorder.replays() == {2: 2}


@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_graphs_yield_the_results_of_eager_steps(
    gpu: torch.device, deterministic: bool, tmp_path: Path
) -> None:
    cuda = import_module("millrace_shard.kernels.cuda.operators")
    kernels = cuda.CudaKernels(deterministic=deterministic)
    model = tiny_llama(tmp_path, kernels, torch.float32, gpu)
    settings = GraphSettings(SIZES, CudaCapture)
    by_graph = Stepper(model, kernels, dtype=torch.float32, graphs=settings, device=gpu)
    eager = Stepper(model, kernels, dtype=torch.float32, device=gpu)
    assert by_graph.graphs is not None
    assert by_graph.graphs.sizes == SIZES
    for ours, theirs in zip(play(by_graph), play(eager), strict=True):
        assert ours.slots.tolist() == theirs.slots.tolist()
        assert not len(ours.failed_slots)
        if deterministic:
            assert ours.ids.tolist() == theirs.ids.tolist()
        tolerance = 0 if deterministic else 1e-2
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", SUPPORTED)
def test_listed_classes_of_transformers_are_captured(
    gpu: torch.device, name: str, tmp_path: Path
) -> None:
    """A class that passes belongs into CAPTURED."""
    cuda = import_module("millrace_shard.kernels.cuda.operators")
    kernels = cuda.CudaKernels(deterministic=False)
    save_tiny(tmp_path, name)
    with torch.inference_mode():
        model = read_model(tmp_path, kernels, device=gpu)
    settings = GraphSettings(SIZES, CudaCapture)
    by_graph = Stepper(model, kernels, dtype=torch.float32, graphs=settings, device=gpu)
    assert by_graph.graphs is not None
    if name not in CAPTURED and by_graph.graphs.sizes != SIZES:
        pytest.skip(f"decodes of {name} cannot be captured")
    assert by_graph.graphs.sizes == SIZES
    eager = Stepper(model, kernels, dtype=torch.float32, device=gpu)
    for ours, theirs in zip(play(by_graph), play(eager), strict=True):
        assert ours.slots.tolist() == theirs.slots.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-2, rtol=0)
    if name not in CAPTURED:
        pytest.skip(f"decodes of {name} are captured with the results of eager steps: list it")


FP32 = torch.float32
TOKEN_COUNTS = (16, 8)
NUM_DRAFTS = 2


@dataclass(frozen=True)
class Steppers:
    """One stepper with all kinds of graphs and one with none, with the same proposer and sequences."""

    by_graph: Stepper
    eager: Stepper
    whole: Recorder
    pieces: Recorder

    def run(self, step: Forward) -> tuple[dict[int, int], dict[int, int]]:
        """Run a step in both; the replays of graphs of whole steps and of pieces in it, by size."""
        recorders = (self.whole, self.pieces)
        before = [Counter(recorder.replays()) for recorder in recorders]
        ours, theirs = self.by_graph.run(step), self.eager.run(step)
        assert len(ours.ids)
        assert ours.slots.tolist() == theirs.slots.tolist()
        assert ours.counts.tolist() == theirs.counts.tolist()
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=0)
        whole, pieces = (
            dict(Counter(recorder.replays()) - old)
            for recorder, old in zip(recorders, before, strict=True)
        )
        return whole, pieces


@pytest.fixture
def patched_steppers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steppers:
    monkeypatch.setattr(graph_capture, "SIZES", SIZES)
    monkeypatch.setattr(piecewise_layers, "TOKEN_COUNTS", TOKEN_COUNTS)
    kernels = make_kernels("plain", deterministic=False)
    model = tiny_llama(tmp_path, kernels, FP32)
    whole, pieces = Recorder(), Recorder()
    by_graph = Stepper(
        model,
        kernels,
        dtype=FP32,
        graphs=GraphSettings(None, whole.new_capture),
        pieces=GraphSettings(None, pieces.new_capture),
        max_draft_tokens=NUM_DRAFTS,
    )
    eager = Stepper(model, kernels, dtype=FP32, max_draft_tokens=NUM_DRAFTS)
    for stepper in (by_graph, eager):
        futures = {slot: [1] * 99 for slot in range(MAX_BATCH_SIZE)}
        stepper.use(PlannedProposer(futures, error_rate=0.0))
        for slot in range(MAX_BATCH_SIZE):
            stepper.run(stepper.admission(slot, prompt_of(3 + slot, seed=slot)))
    return Steppers(by_graph, eager, whole, pieces)


def decodes(num_rows: int) -> Forward:
    return Forward(decode_slots=ints(range(num_rows)))


def drafts(num_rows: int) -> Forward:
    return Forward(
        decode_slots=ints(range(num_rows)),
        decode_tokens=ints([1 + NUM_DRAFTS] * num_rows),
        draft_tokens=ints([NUM_DRAFTS] * num_rows),
    )


def test_graphs_of_whole_steps_end_at_256_rows_and_pieces_at_512_tokens() -> None:
    assert GraphSettings(None, Recorder).sizes_up_to(1000)[0] == 256
    assert max(piecewise_layers.TOKEN_COUNTS) == 512


@pytest.mark.parametrize(
    ("step", "whole", "size"),
    [
        (decodes(4), {4: 1}, None),
        (decodes(5), {}, 8),
        (drafts(2), {}, 8),
        (drafts(4), {}, 16),
        (drafts(MAX_BATCH_SIZE), {}, None),
    ],
    ids=["decodes", "many-decodes", "drafts", "more-drafts", "most-drafts"],
)
def test_steps_without_a_whole_graph_run_in_pieces_or_eagerly(
    patched_steppers: Steppers, step: Forward, whole: dict[int, int], size: int | None
) -> None:
    """Each size of pieces is counted once, although a step replays all pieces of a size."""
    replayed = patched_steppers.run(step)
    assert replayed == (whole, {} if size is None else {size: 1})
    # Sequences go on from what the step stored.
    assert patched_steppers.run(decodes(MAX_BATCH_SIZE)) == ({}, {8: 1})
