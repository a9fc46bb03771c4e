"""Steps whose work between attentions is replayed in pieces, against the same steps run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_shard.batch.step import Forward, StepResult
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import (
    AttentionBlock,
    Kernels,
    Layer,
    Layers,
    Reduce,
)
from millrace_shard.kernels.layer_weights import AttentionWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.model_runner import decode_graphs, piecewise_layers
from millrace_shard.model_runner.graph_capture import (
    CudaCapture,
    GraphSettings,
    launches_outlast,
)
from millrace_shard.model_runner.piecewise_layers import PiecewiseLayers, with_pieces
from millrace_shard.models.interface import CausalModel
from millrace_testing.engines.graphs import Recorder, out_of_memory
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.steps import NUM_BLOCKS, SAMPLING, Stepper, beside, ints, tiny_llama
from millrace_testing.models.models import prompt_of, read_model, save_tiny

TOKEN_COUNTS = (16, 8)
NUM_PIECES = 3
"""Pieces of a model of two layers."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise_layers, "TOKEN_COUNTS", TOKEN_COUNTS)


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalModel, Kernels]:
    kernels = make_kernels("plain", deterministic=request.param)
    return tiny_llama(tmp_path_factory.mktemp("llama"), kernels, torch.float32), kernels


def stepper(
    setup: tuple[CausalModel, Kernels],
    recorder: Recorder | None = None,
    device: torch.device = CPU,
) -> Stepper:
    """With pieces, if there is a recorder."""
    pieces = None if recorder is None else GraphSettings(None, recorder.new_capture)
    return Stepper(*setup, dtype=torch.float32, pieces=pieces, device=device)


def play(stepper: Stepper) -> Iterator[StepResult]:
    """Prompts of 5, 12, 30, and 3 tokens together with decodes, and decodes alone."""
    fields = SAMPLING["filters"]
    yield stepper.run(stepper.admission(0, prompt_of(5), top_n_tokens=2))
    yield stepper.run(beside(stepper.admission(1, prompt_of(11, seed=1), **fields), [0]))
    yield stepper.run(stepper.admission(2, prompt_of(30, seed=2), prefill_logprobs=True))
    yield stepper.run(beside(stepper.admission(3, prompt_of(3, seed=3)), [2, 0, 1]))
    yield stepper.run(Forward(decode_slots=ints([3, 1, 0])))


def check_same(
    ours: Iterator[StepResult], theirs: Iterator[StepResult], *, tolerance: float
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.slots.tolist() == other.slots.tolist()
        assert not len(mine.failed_slots)
        assert mine.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=tolerance, rtol=0)


def test_pieces_yield_the_results_of_eager_steps(setup: tuple[CausalModel, Kernels]) -> None:
    recorder = Recorder()
    tolerance = 0.0 if setup[1].deterministic else 1e-5
    check_same(play(stepper(setup, recorder)), play(stepper(setup)), tolerance=tolerance)
    assert recorder.sizes == [size for size in TOKEN_COUNTS for _ in range(NUM_PIECES)]
    # The steps of 5, 6 and 3 tokens, and the one of 12; the step of 30 runs eagerly.
    assert recorder.replays() == {8: 3, 16: 1}
    assert all(r.replays == (3 if len(r.output) == 8 else 1) for r in recorder.recordings)


class Measured:
    """Answers whether launches take longer than the work, for one number of tokens after the other."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def __call__(self, compute: Callable[[], None]) -> bool:
        """Run the work, too."""
        compute()
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "sizes"), [((True, True), (64, 32)), ((False, True), (32,)), ((False, False), ())]
)
def test_large_steps_have_pieces_if_their_launches_outlast_them(
    setup: tuple[CausalModel, Kernels],
    answers: tuple[bool, bool],
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is measured once: a second warm-up captures the same graphs."""
    monkeypatch.setattr(piecewise_layers, "LARGE_TOKEN_COUNTS", (64, 32))
    recorder, measured = Recorder(), Measured(*answers)
    settings = GraphSettings(None, recorder.new_capture, measured)
    _, by_pieces = (Stepper(*setup, dtype=torch.float32, pieces=settings) for _ in range(2))
    captured = [size for size in (*sizes, *TOKEN_COUNTS) for _ in range(NUM_PIECES)]
    assert recorder.sizes == captured * 2
    tolerance = 0.0 if setup[1].deterministic else 1e-5
    check_same(play(by_pieces), play(stepper(setup)), tolerance=tolerance)
    # Of the second warm-up: the step of 30 tokens.
    later = recorder.recordings[len(captured) :]
    replays = {len(each.output): each.replays for each in later if each.replays > 0}
    assert replays == {8: 3, 16: 1} | ({32: 1} if 32 in sizes else {})


@pytest.mark.parametrize(
    ("wait", "outlast"), [(0.0, True), (2.4, True), (2.6, False), (90.0, False)]
)
def test_launches_outlast_work_that_is_done_soon_after_them(wait: float, outlast: bool) -> None:
    times = iter((100.0, 110.0, 110.0 + wait))
    events: list[str] = []
    assert (
        launches_outlast(
            lambda: events.append("launch"),
            lambda: events.append("wait"),
            lambda: next(times),
        )
        is outlast
    )
    assert events == ["launch", "wait", "launch", "wait"]


def test_padding_writes_no_block_but_its_own(setup: tuple[CausalModel, Kernels]) -> None:
    by_pieces = stepper(setup, Recorder())
    before = [layer.keys.clone() for layer in by_pieces.cache]
    by_pieces.run(by_pieces.admission(0, prompt_of(5)))
    own = [int(b) for b in by_pieces.batch.blocks.of(0)]
    for layer, old in zip(by_pieces.cache, before, strict=True):
        changed = (layer.keys.view(torch.uint8) != old.view(torch.uint8)).flatten(1).any(1)
        assert set(changed.nonzero().flatten().tolist()) <= {*own, NUM_BLOCKS}
        assert layer.keys[own[0], :5].any(-1).all()
        assert not layer.keys[0].any()


def test_a_failed_row_fails_no_other_row_of_this_or_a_later_step(
    setup: tuple[CausalModel, Kernels],
) -> None:
    """NaN of an earlier step in the buffers reaches no later step."""
    by_pieces, eager = stepper(setup, Recorder()), stepper(setup)
    for each in (by_pieces, eager):
        each.run(each.admission(0, prompt_of(14)))
        for layer in each.cache:
            layer.values[int(each.batch.blocks.of(0)[0])] = torch.nan
        result = each.run(beside(each.admission(1, prompt_of(13, seed=1)), [0]))
        assert result.failed_slots.tolist() == [0]
    results = [each.run(each.admission(2, prompt_of(4, seed=2))) for each in (by_pieces, eager)]
    assert results[0].ids.tolist() == results[1].ids.tolist()
    assert not len(results[0].failed_slots)


@pytest.mark.parametrize("number", range(2 * NUM_PIECES))
def test_stale_pieces_are_not_used_and_leave_other_graphs(
    setup: tuple[CausalModel, Kernels], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(stale=(number,))
    settings = GraphSettings(None, recorder.new_capture)
    by_pieces = Stepper(*setup, dtype=torch.float32, pieces=settings)
    assert "a replay differs from the eager pass" in caplog.text
    assert not settings.may_capture(piecewise_layers.KIND)
    assert settings.may_capture(decode_graphs.KIND)
    check_same(play(by_pieces), play(stepper(setup)), tolerance=0.0)
    assert recorder.replays() == {}


def test_pieces_without_memory_match_large_steps(
    setup: tuple[CausalModel, Kernels], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> None:
        if not number and recorder.num_captures == 1:
            out_of_memory()

    recorder = Recorder(fail_warm_up=fail)
    check_same(play(stepper(setup, recorder)), play(stepper(setup)), tolerance=1e-5)
    assert recorder.replays() == {8: 3}
    assert f"no {piecewise_layers.KIND} from size 16 on, out of memory" in caplog.text


def test_sums_over_ranks_are_part_of_a_piece(setup: tuple[CausalModel, Kernels]) -> None:
    model, kernels = setup
    result: list[Layer] = []

    def keep(layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        result.extend(layers)
        return kernels.layers(layers, reduce)

    def double(x: Tensor) -> Tensor:
        return x * 2

    model.with_layers(keep)
    sequences = stepper(setup)
    sequences.run(sequences.admission(0, prompt_of(6)))
    tokens = sequences.batch.ragged(ints([0]), ints([0]), ints([6]), ints(range(6)))
    layers = PiecewiseLayers(result, double, kernels.layers(result, double))
    residual = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    residuals = [residual.clone(), residual]
    with torch.inference_mode():
        expected = layers(residuals[0], tokens, sequences.cache).clone()
        padding_row = NUM_BLOCKS * kernels.block_size
        layers.allocate(8, sequences.cache, [padding_row])
        recorder = Recorder()
        layers.use({8: [recorder.record(partial(layers.piece, i, 8)) for i in range(NUM_PIECES)]})
        replayed = layers(residuals[1], tokens, sequences.cache)
    torch.testing.assert_close(replayed, expected)
    torch.testing.assert_close(*residuals)
    assert all(recording.replays == 0 for recording in recorder.recordings)


def test_layers_of_another_kind_have_no_pieces(tmp_path: Path) -> None:
    """One operator computes half a layer, for example."""

    class WholeHalves(PlainKernels):
        def attention(self, weights: AttentionWeights) -> AttentionBlock:
            return super().attention(weights).__call__

    kernels = WholeHalves(deterministic=False)
    model = tiny_llama(tmp_path, kernels, torch.float32)
    sequences = Stepper(model, kernels, dtype=torch.float32)
    recorder = Recorder()
    settings = GraphSettings(None, recorder.new_capture)
    single = ProcessGroup.single()
    result = with_pieces(model, kernels, sequences.cache, sequences.batch, settings, single)
    assert result is model
    assert recorder.recordings == []


def test_layers_over_latents_have_pieces_of_the_same_bits(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4_moe_lite", num_hidden_layers=2)
    kernels = make_kernels("plain", deterministic=True)
    setup = read_model(tmp_path, kernels), kernels
    recorder = Recorder()
    check_same(play(stepper(setup, recorder)), play(stepper(setup)), tolerance=0.0)
    assert recorder.replays() == {8: 3, 16: 1}


def test_the_kernels_of_cuda_yield_the_same_bits_in_pieces(tmp_path: Path) -> None:
    """In Triton's interpreter where there is no GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which the next test runs")
    cuda = pytest.importorskip("millrace_shard.kernels.cuda.operators", reason="no Triton")
    kernels = cuda.CudaKernels(deterministic=True)
    setup = tiny_llama(tmp_path, kernels, torch.float32), kernels
    recorder = Recorder()
    results = []
    for each in (stepper(setup, recorder), stepper(setup)):
        each.run(each.admission(0, prompt_of(3)))
        results.append(each.run(beside(each.admission(1, prompt_of(9, seed=1)), [0])))
    assert results[0].ids.tolist() == results[1].ids.tolist()
    assert results[0].logprobs.tolist() == results[1].logprobs.tolist()
    assert recorder.replays() == {8: 1, 16: 1}


@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_graphs_yield_the_results_of_eager_steps(deterministic: bool, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    gpu = torch.device("cuda", 0)
    cuda = import_module("millrace_shard.kernels.cuda.operators")
    kernels = cuda.CudaKernels(deterministic=deterministic)
    model = tiny_llama(tmp_path, kernels, torch.float32, gpu)
    settings = GraphSettings(None, CudaCapture)
    by_pieces = Stepper(model, kernels, dtype=torch.float32, pieces=settings, device=gpu)
    assert settings.may_capture(piecewise_layers.KIND)
    eager = stepper((model, kernels), device=gpu)
    tolerance = 0.0 if deterministic else 1e-2
    for ours, theirs in zip(play(by_pieces), play(eager), strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=tolerance, rtol=0)
