"""Warm-up: the largest step that may come is tried once, and what does not fit is said in words."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine import warmup
from millrace_shard.engine.kv_capacity import (
    CacheShape,
    Capacity,
    CapacityError,
    KVMemory,
    WarmupRequest,
    WindowShape,
    longest_in,
)
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import LongestDecode, MemoryLimits, WarmedUp, run_largest, warm_up
from millrace_shard.kernels import kept_results
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.build import warn_of_compilations
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.models.interface import KVGeometry, KVLayer
from millrace_testing.engines.fake_engine import BLOCK_SIZE, FakeKernels, FakeModel, fake_kernels
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.steps import tiny_llama

BYTES_PER_TOKEN = 8
REQUEST = WarmupRequest(
    max_batch_prefill_tokens=150, max_batch_size=4, max_concurrent_requests=8, max_total_tokens=50
)


class SmallerPeer(ProcessGroup):
    """A group whose other rank has room for 20 blocks."""

    def minimum(self, value: int) -> int:
        """The answer of the collective."""
        return min(value, 20)


class UnknowingPeer(ProcessGroup):
    """A group whose other rank starts for the first time."""

    def minimum(self, value: int) -> int:
        """The answer of the collective."""
        return value if value > 1 else 0


@dataclass
class Setup:
    """A model on CPU with kernels that remember."""

    model: FakeModel = field(default_factory=FakeModel)
    kernels: FakeKernels = field(default_factory=FakeKernels)
    group: ProcessGroup = field(default_factory=ProcessGroup.single)
    identity: str = ""
    adapters: AdapterStore | None = None

    def warm_up(
        self,
        request: WarmupRequest = REQUEST,
        *,
        num_blocks: int = 101,
        profile: bool | None = None,
        graphs: GraphSettings | None = None,
    ) -> WarmedUp:
        loaded = LoadedModel(
            model=self.model,
            kernels=fake_kernels(self.kernels),
            group=self.group,
            device=torch.device("cpu"),
            dtype=torch.float32,
            identity=self.identity,
            adapters=self.adapters,
        )
        # The rows of the longest decode share a block.
        self.model.reads_cache = not profile
        limits = MemoryLimits(kv_memory=num_blocks * BLOCK_SIZE * BYTES_PER_TOKEN)
        with torch.inference_mode():
            return warm_up(loaded, request, limits, profile=profile, graphs=graphs)


def test_the_largest_prefill_runs_once_and_leaves_nothing() -> None:
    setup = Setup()
    warmed_up = setup.warm_up()
    (batch,) = setup.model.batches
    assert batch.num_queries == (49, 49, 49, 3)
    assert len(warmed_up.runner.batch) == 0
    assert warmed_up.capacity.num_blocks == 101
    assert warmed_up.capacity.kv_bytes_per_token == BYTES_PER_TOKEN


class ThreeLayers(FakeModel):
    """Its first layers are a separate model."""

    def __init__(self) -> None:
        super().__init__()
        self.geometry = KVGeometry((KVLayer(1, 1),) * 3)
        self.first = FakeModel()

    def first_layers(self, count: int) -> FakeModel:
        self.first.geometry = KVGeometry(self.geometry.layers[:count])
        return self.first


def test_on_cpu_the_largest_prefill_is_tried_on_the_first_layers() -> None:
    model = ThreeLayers()
    warmed_up = Setup(model).warm_up(num_blocks=3 * 101)
    (batch,) = model.first.batches
    assert batch.num_queries == (49, 49, 49, 3)
    assert model.first.geometry.layers == (KVLayer(1, 1),) * 2
    assert model.batches == []
    assert warmed_up.capacity.kv_bytes_per_token == 3 * BYTES_PER_TOKEN


def test_a_rank_that_replaces_another_one_tries_nothing_on_cpu() -> None:
    model = ThreeLayers()
    setup = Setup(model)
    before = setup.warm_up(num_blocks=3 * 101)
    model.first.batches.clear()
    request = replace(REQUEST, num_blocks=before.capacity.num_blocks)
    after = setup.warm_up(request=request, num_blocks=3 * 101)
    assert after.capacity == before.capacity
    assert model.first.batches == model.batches == []


@pytest.mark.parametrize(
    ("total", "flag"), [(30, "--max-batch-prefill-tokens"), (4000, "--max-total-tokens")]
)
def test_out_of_memory_before_a_step_names_the_larger_part(
    total: int, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has 8 bytes for each position of 4 slots, and prompts have 24 bytes for each token."""

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(warmup, "_new_runner", fail)
    setup, request = Setup(ThreeLayers()), replace(REQUEST, max_total_tokens=total)
    setup.model.info = replace(setup.model.info, max_position_embeddings=5000)
    with pytest.raises(CapacityError, match=flag):
        setup.warm_up(request, num_blocks=5000, profile=True)


def test_the_profile_run_has_adapters_for_many_rows_and_for_few(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    setup = Setup(adapters=AdapterStore(AdapterTable(cpu), tmp_path, torch.float32))
    request = replace(REQUEST, max_adapters=2, adapter_pages=0)
    setup.warm_up(request, profile=True)
    adapted = [
        batch.adapters.host.tolist() for batch in setup.model.batches if batch.adapters is not None
    ]
    assert adapted == [[1] * 150, [1]]
    assert setup.adapters is not None
    assert setup.adapters.table.adapters() == {}


def test_a_kernel_that_is_compiled_after_the_warm_up_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    knobs = pytest.importorskip("triton.knobs", reason="no Triton for this platform")
    Setup().warm_up()
    listener = knobs.compilation.listener
    for cache_hit in (True, False):
        listener(
            src=SimpleNamespace(name="_shrink"),
            metadata={},
            metadata_group={},
            times=None,
            cache_hit=cache_hit,
        )
    assert [record.getMessage().split(" while")[0] for record in caplog.records] == [
        "Triton has compiled _shrink"
    ]
    warn_of_compilations(active=False)
    assert knobs.compilation.listener is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are kept."""
    monkeypatch.setattr(kept_results, "cache_folder", lambda _: tmp_path)
    return tmp_path


def test_a_second_start_does_not_try_the_largest_prefill_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_trials(identity: str = "m", request: WarmupRequest = REQUEST, **group: Any) -> int:
        setup = Setup(identity=identity, **group)
        capacities.append(setup.warm_up(request).capacity)
        return len(setup.model.batches)

    capacities: list[Capacity] = []
    assert [num_trials(), num_trials()] == [1, 0]
    assert capacities[0] == capacities[1]
    assert num_trials("other files or flags") == 1
    assert num_trials(request=replace(REQUEST, max_batch_prefill_tokens=151)) == 1
    assert [num_trials(""), num_trials("")] == [1, 1]
    # All ranks try it if one does.
    assert num_trials(group=UnknowingPeer(0, 2, torch.device("cpu"))) == 1
    assert num_trials() == 0
    monkeypatch.setattr(warmup, "available_memory", lambda: 10)
    assert num_trials() == 1


def test_where_memory_is_measured_all_layers_are_tried() -> None:
    model = ThreeLayers()
    Setup(model).warm_up(profile=True)
    assert model.batches
    assert model.first.batches == []


def test_a_prefill_larger_than_the_cache_is_tried_as_far_as_it_fits() -> None:
    setup = Setup()
    setup.warm_up(num_blocks=21)
    (batch,) = setup.model.batches
    assert batch.num_queries == (49, 28)


def test_the_rank_with_least_room_decides() -> None:
    setup = Setup(group=SmallerPeer(0, 2, torch.device("cpu")))
    assert setup.warm_up().capacity.num_blocks == 21


def test_a_prefill_that_does_not_fit_names_the_flag() -> None:
    setup = Setup()

    def run_out(_: RaggedBatch) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    setup.model.before_forward = run_out
    with pytest.raises(CapacityError) as caught:
        setup.warm_up()
    assert str(caught.value) == (
        "Not enough memory to handle 150 prefill tokens. "
        "You need to decrease `--max-batch-prefill-tokens`"
    )


def test_other_errors_of_the_model_are_not_taken_for_memory() -> None:
    setup = Setup()

    def fail(_: RaggedBatch) -> None:
        raise RuntimeError("shapes differ")

    setup.model.before_forward = fail
    with pytest.raises(RuntimeError, match="shapes differ"):
        setup.warm_up()


def test_a_cache_that_cannot_be_allocated_is_an_error_of_capacity() -> None:
    setup = Setup()

    def refuse(**_: object) -> None:
        raise MemoryError

    setup.kernels.new_cache = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(CapacityError, match="KV cache of 400 tokens"):
        setup.warm_up()


def test_a_trial_that_cannot_have_its_cache_is_an_error_of_capacity() -> None:
    setup = Setup()
    new_cache = setup.kernels.new_cache
    cache_of_its_own = iter([False, True])

    def refuse(**shape: Any) -> LayerCache:
        if next(cache_of_its_own):
            raise MemoryError
        return new_cache(**shape)

    setup.kernels.new_cache = refuse  # type: ignore[method-assign]
    with pytest.raises(CapacityError, match="150 prefill tokens"):
        setup.warm_up()


def test_the_reserved_block_is_cleared() -> None:
    setup = Setup()
    setup.warm_up()
    assert setup.kernels.zeroed[0] == [0]


def test_the_profile_run_has_the_largest_prefill_and_the_largest_decode() -> None:
    """The decode has more rows than the prefill has blocks, and all of them are sampled."""
    setup = Setup()
    request = replace(REQUEST, max_batch_size=45)
    warmed_up = setup.warm_up(request, profile=True)
    prefill, decode, *_ = setup.model.batches
    assert prefill.num_queries == (49, 49, 49, 3)
    assert decode.num_queries == (1,) * 45
    assert decode.logit_rows.tolist() == list(range(45))
    assert warmed_up.capacity.num_blocks == 101


def test_the_profile_run_has_a_decode_of_the_longest_sequences() -> None:
    """Without their prompts: all positions of a sequence but the last few are in one block that all share."""
    setup = Setup()
    setup.warm_up(replace(REQUEST, max_batch_size=45), profile=True)
    *_, last_tokens, decode = setup.model.batches
    assert last_tokens.num_queries == decode.num_queries == (1,) * 45
    assert last_tokens.num_context == (49,) * 45
    assert decode.num_context == (50,) * 45
    tables = decode.block_tables
    assert (tables[:, :12] == 1).all()
    assert len({1, *tables[:, 12].tolist()}) == 46
    assert int(tables.max()) < 2 + 45


@pytest.mark.parametrize(
    ("total", "num_blocks", "longest"),
    [(None, None, 96), (400, None, 96), (70, None, 70), (None, 9, 128)],
)
def test_the_profile_run_has_no_longer_sequences_than_the_memory_holds(
    total: int | None, num_blocks: int | None, longest: int
) -> None:
    """Where the model has more positions, and no limit is set; an earlier group held longer ones then."""
    shape = CacheShape(
        block_size=16,
        bytes_per_token=100,
        max_position_embeddings=1_000_000,
        windows=(WindowShape(window=8, reach=8, num_layers=1, bytes_per_token=40),),
    )
    memory = KVMemory(bytes=1, is_budget=True, max_bytes=96 * 60 + 59)
    request = replace(REQUEST, max_total_tokens=total, num_blocks=num_blocks)
    assert longest_in(memory, request, shape) == longest
    assert longest_in(memory, request, replace(shape, max_position_embeddings=90)) == min(
        90, total or 90
    )


def test_a_model_with_more_positions_than_memory_is_profiled_with_fewer() -> None:
    setup = Setup()
    setup.model.info = replace(setup.model.info, max_position_embeddings=1_000_000)
    warmed_up = setup.warm_up(replace(REQUEST, max_total_tokens=None), profile=True)
    longest = max(end for batch in setup.model.batches for end in batch.num_context)
    assert longest < 10_000
    assert warmed_up.capacity.max_total_tokens <= longest


def test_a_length_beyond_the_memory_is_refused_before_a_step_of_that_length() -> None:
    setup = Setup()
    setup.model.info = replace(setup.model.info, max_position_embeddings=1_000_000)
    with pytest.raises(CapacityError, match="memory to handle `max_total_tokens`=900000: they"):
        setup.warm_up(replace(REQUEST, max_total_tokens=900_000), profile=True)
    assert not any(max(batch.num_context) > 10_000 for batch in setup.model.batches)


def test_sequences_that_do_not_fit_at_their_full_length_name_the_flags() -> None:
    setup = Setup()

    def run_out(batch: RaggedBatch) -> None:
        if batch.num_context == (50,) * 4:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    setup.model.before_forward = run_out
    with pytest.raises(CapacityError, match=r"4 sequences of 50 tokens.*or `--max-total-tokens`"):
        setup.warm_up(profile=True)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_drafts", [0, 3, 20])
@pytest.mark.parametrize("max_tokens", [2, 16, 17, 18, 100, 131072])
def test_the_longest_decode_ends_in_the_last_block(
    block_size: int, max_drafts: int, max_tokens: int
) -> None:
    longest = LongestDecode(
        num_rows=3, max_tokens=max_tokens, block_size=block_size, max_drafts=max_drafts
    )
    end = longest.num_cached + 2 + max_drafts
    room = longest.num_cached + longest.num_own_blocks * block_size
    assert longest.num_cached % block_size == 0
    assert end <= room
    assert end <= max(max_tokens, 2 + max_drafts)
    assert max_tokens - end < block_size


def test_a_batch_that_does_not_fit_names_its_flag() -> None:
    setup = Setup()

    def run_out(batch: RaggedBatch) -> None:
        if len(batch.num_queries) == 45:
            raise torch.OutOfMemoryError("CUDA out of memory")

    setup.model.before_forward = run_out
    with pytest.raises(CapacityError, match=r"tokens of 45 sequences at once.*--max-batch-size"):
        setup.warm_up(replace(REQUEST, max_batch_size=45), profile=True)


def test_graphs_run_before_memory_is_measured_and_are_captured_again_over_the_final_cache() -> None:
    setup, recorder = Setup(), Recorder()
    graphs = GraphSettings((1, 2, 8), recorder.new_capture)
    warmed_up = setup.warm_up(profile=True, graphs=graphs)
    shapes = [batch.num_queries for batch in setup.model.batches]
    trial = (50,)
    captures = [trial, *[(1, 1)] * 4, *[(1,)] * 4]
    assert shapes == [*captures, (49, 49, 49, 3), *[(1, 1, 1, 1)] * 3, *captures]
    assert recorder.num_captures == 2
    assert warmed_up.capacity.num_blocks == 101
    longest = [batch.num_context[0] for batch in setup.model.batches[-4:]]
    warm_up, record, eager, replay = longest
    assert {warm_up, record, replay} == {52}, "as many keys as the tables have room for"
    assert eager == 50


def test_graphs_pad_with_a_block_that_the_router_does_not_know() -> None:
    setup, recorder = Setup(), Recorder()
    warmed_up = setup.warm_up(graphs=GraphSettings((4,), recorder.new_capture))
    assert setup.kernels.zeroed[0] == [0, 101]
    assert warmed_up.runner.batch.limits.num_blocks == 101
    assert setup.model.batches[1].cache_rows.tolist() == [101 * BLOCK_SIZE] * 4


def test_kernels_that_read_lengths_on_the_host_get_no_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup, recorder = Setup(), Recorder()
    setup.kernels.capturable = False
    setup.warm_up(graphs=GraphSettings((4,), recorder.new_capture))
    assert recorder.recordings == []
    assert setup.kernels.zeroed[0] == [0]
    assert "plain torch kernels do not support" in caplog.text


def test_a_model_that_may_read_values_on_the_host_gets_no_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup, recorder = Setup(), Recorder()
    setup.model.info = replace(setup.model.info, capturable=False)
    setup.warm_up(graphs=GraphSettings((4,), recorder.new_capture))
    assert recorder.recordings == []
    assert setup.kernels.zeroed[0] == [0]
    assert "not been tested with the class of fake" in caplog.text


def test_steps_with_prompts_replay_pieces_over_the_final_cache(tmp_path: Path) -> None:
    class Capturable(PlainKernels):
        capturable = True

    kernels = Capturable(deterministic=False)
    loaded = LoadedModel(
        model=tiny_llama(tmp_path, kernels, torch.float32),
        kernels=kernels,
        group=ProcessGroup.single(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    recorder = Recorder()
    limits = MemoryLimits(kv_memory=1 << 22)
    graphs = GraphSettings((2,), recorder.new_capture)
    with torch.inference_mode():
        warmed_up = warm_up(loaded, REQUEST, limits, profile=True, graphs=graphs)
        once = [2, *(size for size in (512, 256, 128, 64) for _ in range(3))]
        assert recorder.sizes == once * 2
        replays = [recording.replays for recording in recorder.recordings[len(once) :]]
        assert replays == [0] * len(once)
        run_largest(warmed_up.runner, [5, 6])
    pieces_of_64 = [1, 1, 1]
    replays = [recording.replays for recording in recorder.recordings[len(once) :]]
    assert replays == [*[0] * (len(once) - 3), *pieces_of_64]


def test_no_capture_follows_one_that_has_failed() -> None:
    def fail(number: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    setup, recorder = Setup(), Recorder(fail)
    graphs = GraphSettings((1, 2), recorder.new_capture)
    for _ in range(2):
        warmed_up = setup.warm_up(profile=True, graphs=graphs)
        assert recorder.num_captures == 1
        assert warmed_up.capacity.num_blocks == 101


@pytest.mark.parametrize(("version", "reused"), [("2.12.1", 0), ("2.13.0", 1)])
def test_memory_that_torch_cannot_release_does_not_count_as_free(
    monkeypatch: pytest.MonkeyPatch, version: str, reused: int
) -> None:
    """A failed capture holds all cached memory, including the profile run's KV cache, until torch 2.13."""

    def fail(number: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    counted = []
    kv_memory = warmup._kv_memory

    def remember(device: torch.device, limits: MemoryLimits, trial_bytes: int) -> KVMemory:
        counted.append(trial_bytes)
        return kv_memory(device, limits, trial_bytes)

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(warmup, "_kv_memory", remember)
    setup, recorder = Setup(), Recorder(fail)
    setup.warm_up(profile=True, graphs=GraphSettings((1, 2), recorder.new_capture))
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in (49, 49, 49, 3))
    before, after = counted
    assert before == 0
    assert after == reused * (1 + num_blocks) * BLOCK_SIZE * BYTES_PER_TOKEN
