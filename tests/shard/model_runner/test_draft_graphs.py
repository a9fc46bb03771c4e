"""Chains of draft tokens by graphs that are replayed, against the same chains run eagerly."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits, warm_up
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner import decode_graphs, draft_graphs, trial_sequence
from millrace_shard.model_runner.draft_graphs import KIND
from millrace_shard.model_runner.graph_capture import CudaCapture, GraphSettings
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.hidden_state_heads import ChainRows, HeadProposer
from millrace_shard.speculation.loading import Speculation, SpeculationLoader
from millrace_testing.engines.graphs import Recorder, out_of_memory
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.multi_token import Generation, Want
from millrace_testing.engines.steps import MAX_BATCH_SIZE, NUM_BLOCKS, Stepper, ints
from millrace_testing.models.eagle_heads import EagleHead
from millrace_testing.models.models import prompt_of, read_model, save_tiny

MOST, NUM_TOKENS = 4, 20
SIZES = (4, 2)
WANTS = {
    0: Want(prompt_of(19)),
    1: Want(prompt_of(30, seed=1), {"do_sample": True, "seed": 5, "temperature": 0.7}),
    2: Want(prompt_of(3, seed=2)),
}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"is_third": True, "draft_vocab": 120},
    "eagle": {"is_third": False},
}
CPU = torch.device("cpu")
Drafts = list[tuple[int, int, tuple[int, ...]]]


@dataclass(frozen=True)
class Setup:
    """A model with a head, and the kernels of both."""

    model: CausalModel
    speculation: Speculation
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def stepper(self, graphs: GraphSettings | None = None) -> Stepper:
        return Stepper(
            self.model,
            self.kernels,
            dtype=self.dtype,
            speculation=self.speculation,
            graphs=graphs,
            device=self.device,
        )


def load(
    folder: Path,
    kernels: Kernels,
    kind: str = "eagle3",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Setup:
    reference = save_tiny(folder, "llama", num_hidden_layers=4)
    head = EagleHead(reference, **KINDS[kind]).save(folder / "head")
    with torch.inference_mode():
        model = read_model(folder, kernels, dtype=dtype, device=device)
        loader = SpeculationLoader(
            folder=folder, dtype=dtype, kernels=kernels, group=ProcessGroup.single(), device=device
        )
        model, speculation = loader.load(model, draft_folder=head, max_draft_tokens=MOST)
    assert speculation is not None
    return Setup(model, speculation, kernels, dtype, device)


@pytest.fixture(scope="module", params=KINDS)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """The bits of these kernels do not depend on the number of rows."""
    kernels = make_kernels("cpu", deterministic=True)
    return load(tmp_path_factory.mktemp("llama"), kernels, request.param)


def proposer_of(stepper: Stepper) -> HeadProposer:
    proposer = stepper.runner._proposer
    assert isinstance(proposer, HeadProposer)
    return proposer


def record(stepper: Stepper, patch: pytest.MonkeyPatch) -> Drafts:
    """Slot, length and draft tokens of each row that drafts from now on."""
    proposer, drafts = proposer_of(stepper), Drafts()
    propose = proposer.propose

    def recorded(rows: object) -> object:
        result = propose(rows)  # type: ignore[arg-type]
        for row, slot in enumerate(rows.slots.tolist()):  # type: ignore[attr-defined]
            if result.counts[row]:
                length = int(rows.num_tokens[row])  # type: ignore[attr-defined]
                drafts.append((slot, length, result.of_row(row)))
        return result

    patch.setattr(proposer, "propose", recorded)
    return drafts


def _allowed(random: np.random.Generator, _: int) -> tuple[int, int]:
    return int(random.integers(1, 7)), int(random.integers(0, 6))


def play(stepper: Stepper, patch: pytest.MonkeyPatch, *, depth: int = 2) -> tuple[object, Drafts]:
    """What the wants yield, and their draft tokens; the numbers of these differ between rows and steps."""
    drafts = record(stepper, patch)
    allow = partial(_allowed, np.random.default_rng(3))
    run = Generation(stepper, WANTS, NUM_TOKENS, allow=allow, chunk=7, depth=depth)
    return run.yielded, drafts


def replays(recorder: Recorder) -> dict[tuple[int, ...], int]:
    """The number of replays by steps of each chain, by its rows and length."""
    shapes = {tuple(r.output.shape): r.replays for r in recorder.recordings}
    return {s: count for s, count in shapes.items() if len(s) == 2 and s[1] <= MOST and count > 0}


def test_chains_by_graphs_draft_the_tokens_of_eager_ones(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    by_graph = play(setup.stepper(GraphSettings(SIZES, recorder.new_capture)), monkeypatch)
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert len(by_graph[1]) > 20
    assert {length for _, length in replays(recorder)} == {1, 2, 3, 4}
    assert {size for size, _ in replays(recorder)} == set(SIZES)


def test_rows_that_draft_less_write_to_no_block_of_others(setup: Setup) -> None:
    """The blocks of a sequence may end with its last draft token."""
    stepper = setup.stepper(GraphSettings(SIZES, Recorder().new_capture))
    for slot in range(3):
        stepper.run(stepper.admission(slot, prompt_of(9 + slot, seed=slot)))
    (layer,) = stepper.draft_cache
    before = layer.keys.clone()
    proposer, ends = proposer_of(stepper), ints([10, 11, 12])
    rows = ChainRows(ints([0, 1, 2]), ints([0, 0, 0]), ends, ints([1, 4, 2]))
    with torch.inference_mode():
        assert proposer.chains is not None
        assert proposer.chains.drafts(rows) is not None
    changed = (layer.keys.view(torch.uint8) != before.view(torch.uint8)).flatten(1).any(1)
    own = {int(stepper.batch.blocks.of(slot)[0]) for slot in (1, 2)}
    assert own <= set(changed.nonzero().flatten().tolist()) <= {*own, NUM_BLOCKS}


@pytest.mark.usefixtures("as_on_cuda")
def test_chains_on_a_device_that_is_not_waited_for_draft_the_same(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    by_graph = play(setup.stepper(GraphSettings(SIZES, recorder.new_capture)), monkeypatch)
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert replays(recorder)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_chain_reads_the_tables_with_the_blocks_of_its_own_step(setup: Setup) -> None:
    stored = []
    for graphs in (GraphSettings(SIZES, Recorder().new_capture), None):
        stepper = setup.stepper(graphs)
        step = stepper.admission(0, prompt_of(stepper.block_size - 2))
        first, second = step.change.grown_blocks.tolist()
        change = replace(step.change, grown_slots=ints([0]), grown_blocks=ints([first]))
        stepper.run(replace(step, change=change))
        grown = BatchChange(grown_slots=ints([0]), grown_blocks=ints([second]))
        step = Forward(
            decode_slots=ints([0]), decode_tokens=ints([5]), draft_tokens=ints([4]), change=grown
        )
        stepper.run(step)
        (layer,) = stepper.draft_cache
        stored.append(layer.keys[[0, first, second]].view(torch.uint8))
    assert torch.equal(*stored)


def test_the_largest_batch_is_captured_first_and_with_each_length(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_graphs, "LENGTHS", (1, 3, 8))
    caplog.set_level(logging.INFO)
    recorder = Recorder()
    stepper = setup.stepper(GraphSettings((2, 4, 99), recorder.new_capture))
    shapes = [tuple(r.output.shape) for r in recorder.recordings if r.chooses_tokens]
    assert shapes == [(size, length) for size in (4, 2) for length in (1, 3, 4)]
    lines = [record.message for record in caplog.records if record.message.startswith(KIND)]
    assert lines[:-1] == [f"{KIND}: captured {i}/2, size {s}" for i, s in ((1, 4), (2, 2))]
    by_graph = play(stepper, monkeypatch)
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert {length for _, length in replays(recorder)} == {1, 3, 4}


def test_longer_chains_and_larger_batches_run_eagerly(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_graphs, "LENGTHS", (1, 2))
    recorder = Recorder()
    by_graph = play(setup.stepper(GraphSettings((2,), recorder.new_capture)), monkeypatch)
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert set(replays(recorder)) == {(2, 1), (2, 2)}


@pytest.mark.parametrize("number", range(len(SIZES), len(SIZES) + MOST))
def test_a_stale_chain_is_not_used_and_leaves_other_graphs(
    setup: Setup, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(stale=(number,))
    settings = GraphSettings(SIZES, recorder.new_capture)
    by_graph = play(setup.stepper(settings), monkeypatch)
    length = 1 + number - len(SIZES)
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"running without {KIND}: with 4 rows and {length} draft tokens, a replay drafts other tokens"
    ]
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert not replays(recorder)
    assert not settings.may_capture(KIND)
    assert settings.may_capture(decode_graphs.KIND)


def test_chains_without_memory_match_large_batches(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        if number == len(SIZES) and recorder.num_captures == 2:
            out_of_memory()

    recorder = Recorder(fail_warm_up=fail)
    by_graph = play(setup.stepper(GraphSettings(SIZES, recorder.new_capture)), monkeypatch)
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert {size for size, _ in replays(recorder)} == {2}
    assert f"no {KIND} from size 4 on, out of memory" in caplog.text


def test_chains_that_cannot_be_captured_run_eagerly(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        if number == len(SIZES):
            raise RuntimeError("called a synchronizing CUDA operation")

    recorder = Recorder(fail_warm_up=fail)
    by_graph = play(setup.stepper(GraphSettings(SIZES, recorder.new_capture)), monkeypatch)
    assert by_graph == play(setup.stepper(), monkeypatch)
    assert f"running without {KIND}: called a synchronizing CUDA operation" in caplog.text


def test_kernels_that_round_otherwise_in_a_capture_may_draft_other_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of which one token in twenty differs is used, one that is always stale is not."""
    setup = load(tmp_path, make_kernels("cpu", deterministic=False))
    chain = HeadProposer.chain

    def other(proposer: HeadProposer, rows: torch.Tensor, length: int) -> torch.Tensor:
        ids = chain(proposer, rows, length)
        ids[0, -1] += 1
        return ids

    monkeypatch.setattr(HeadProposer, "chain", other)
    monkeypatch.setattr(draft_graphs, "LENGTHS", (4,))
    recorder = Recorder()
    settings = GraphSettings((MAX_BATCH_SIZE,), recorder.new_capture)
    setup.stepper(settings)
    assert settings.may_capture(KIND)
    setup.stepper(GraphSettings((MAX_BATCH_SIZE,), Recorder(stale=(1,)).new_capture))
    assert f"running without {KIND}" in caplog.text


def test_chains_are_captured_before_memory_is_measured_and_over_the_final_cache(
    setup: Setup,
) -> None:
    loaded = LoadedModel(
        model=setup.model,
        kernels=setup.kernels,
        group=ProcessGroup.single(),
        device=CPU,
        dtype=setup.dtype,
        speculation=setup.speculation,
    )
    request = WarmupRequest(
        max_batch_prefill_tokens=64,
        max_batch_size=2,
        max_concurrent_requests=2,
        max_total_tokens=60,
    )
    recorder = Recorder()
    graphs = GraphSettings((2,), recorder.new_capture, large_pieces=())
    limits = MemoryLimits(kv_memory=1 << 22)
    with torch.inference_mode():
        warmed_up = warm_up(loaded, request, limits, profile=True, graphs=graphs)
    chains = [r for r in recorder.recordings if tuple(r.output.shape) == (2, MOST)]
    before, final = chains
    assert before.replays > 0, "the longest decode drafts"
    assert final.replays == 0
    proposer = warmed_up.runner._proposer
    assert isinstance(proposer, HeadProposer)
    assert proposer.chains is not None


def check_same_drafts(setup: Setup, settings: GraphSettings) -> None:
    """Drafts of two sequences after their prompts, by graphs and eagerly."""
    drafts = []
    for stepper in (setup.stepper(settings), setup.stepper()):
        for slot in range(2):
            stepper.run(stepper.admission(slot, prompt_of(5 + 4 * slot, seed=slot)))
        step = Forward(
            decode_slots=ints([0, 1]), decode_tokens=ints([4, 3]), draft_tokens=ints([3, 2])
        )
        with torch.inference_mode():
            rows = stepper.batch.sequences.rows(step)
            drafts.append(proposer_of(stepper).propose(rows).ids.tolist())
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 5
    assert settings.may_capture(KIND)


def test_the_kernels_of_cuda_draft_the_same_tokens_in_chains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter where there is no GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which the next test runs")
    cuda = pytest.importorskip("millrace_shard.kernels.cuda.operators", reason="no Triton")
    monkeypatch.setattr(trial_sequence, "NUM_TOKENS", 20)
    monkeypatch.setattr(draft_graphs, "LENGTHS", (3,))
    setup = load(tmp_path, cuda.CudaKernels(deterministic=True))
    recorder = Recorder()
    check_same_drafts(setup, GraphSettings((2,), recorder.new_capture))
    assert replays(recorder)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_graphs_draft_the_tokens_of_eager_chains(deterministic: bool, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    gpu = torch.device("cuda", 0)
    cuda = import_module("millrace_shard.kernels.cuda.operators")
    setup = load(tmp_path, cuda.CudaKernels(deterministic=deterministic), device=gpu)
    check_same_drafts(setup, GraphSettings(None, CudaCapture))
