from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore
from transformers import PreTrainedModel

from millrace_shard.device import one_shot, process_group
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.one_shot import MAX_BYTES
from millrace_shard.device.process_group import (
    COLLECTIVE_TIMEOUT,
    VARIABLES,
    CollectiveError,
    GroupError,
    ProcessGroup,
    as_collective_errors,
    interface_to,
    limits_of_waits,
    meet,
    refuse_shared_gpus,
    use_interface_to,
)
from millrace_shard.models.families.registry import FAMILIES
from millrace_testing.launcher.deployment import kept_port
from millrace_testing.models.models import (
    VOCAB,
    Run,
    assert_generates_as,
    logprobs,
    prompt_of,
    save_tiny,
)
from millrace_testing.project import ROOT
from millrace_testing.shards.ranks import (
    GlooMemory,
    Job,
    NoMemory,
    generate,
    part_of,
    run_ranks,
    sample_on_a_rank,
    sums_by_rows,
    work_of_a_rank,
)


def test_decodes_that_wait_for_a_rank_end_by_the_routers_flag() -> None:
    """Since NCCL's watchdog does not see them; the page of failures says the same."""
    seconds = COLLECTIVE_TIMEOUT.total_seconds()
    said = limits_of_waits(COLLECTIVE_TIMEOUT)
    assert f"more than {seconds:.0f} s" in said
    assert said.endswith("decodes, which replay graphs, end by the router's --step-timeout")
    page = (ROOT / "docs/fault-tolerance.md").read_text()
    assert f"NCCL after {seconds:.0f} s, but not in decodes" in page


def test_collectives_of_a_group_of_one_return_their_input() -> None:
    group = ProcessGroup.single()
    t = torch.arange(6.0).view(2, 3)
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce(t) is t
    assert group.all_gather(t) is t
    assert group.all_gather_logits(t, 3).data_ptr() == t.data_ptr()
    assert group.minimum(5) == 5
    group.close()


def test_a_group_of_one_connects_to_no_address() -> None:
    group = ProcessGroup(0, 1, torch.device("cpu"))
    group.join("nowhere.invalid", 1)
    assert group.world_size == 1


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(GroupError, match="rank 2 is outside a group of 2"):
        ProcessGroup(2, 2, torch.device("cpu"))


def test_a_rank_that_comes_first_waits_until_rank_0_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its store would wait half a second after a refused connection."""
    events = list[str]()
    stores = list[TCPStore]()

    def store(*arguments: Any, **options: Any) -> TCPStore:
        events.append("store")
        return TCPStore(*arguments, **options)

    def sleep(_: float) -> None:
        events.append("refused")
        stores.append(TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False))

    monkeypatch.setattr(process_group, "TCPStore", store)
    monkeypatch.setattr(
        process_group, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    )
    with kept_port() as port:
        meet(1, 2, master_addr="127.0.0.1", master_port=port, timeout=timedelta(seconds=10))
    assert events == ["refused", "store"]


def test_missing_ranks_are_reported() -> None:
    group = ProcessGroup(1, 2, torch.device("cpu"))
    with pytest.raises(GroupError, match=r"rank 1 of 2 found no group at 127\.0\.0\.1:9"):
        group.join("127.0.0.1", 9, timeout=timedelta(seconds=1))


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error, NCCL version 2.28.9\n"
NCCL_NO_MEMORY = (
    f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc 608 bytes"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77\nncclInvalidUsage: invalid usage"),
        dist.DistBackendError(
            f"{NCCL}Cuda failure 900 'operation not permitted when stream is capturing'"
        ),
    ],
    ids=["memory", "capture", "host-memory", "usage", "nccl-in-a-capture"],
)
def test_an_error_of_the_device_within_a_collective_is_not_the_end_of_the_group(
    error: RuntimeError,
) -> None:
    with pytest.raises(RuntimeError) as raised, as_collective_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "no_memory"),
    [
        (dist.DistBackendError(f"{NCCL}ncclRemoteError: the remote process has exited"), False),
        (dist.DistBackendError(NCCL_NO_MEMORY), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), False),
        (RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:534] closed"), False),
    ],
    ids=["remote", "memory", "network", "gloo"],
)
def test_an_error_that_leaves_the_ranks_out_of_step_is_a_collective_error(
    error: RuntimeError, *, no_memory: bool
) -> None:
    with pytest.raises(CollectiveError) as raised, as_collective_errors():
        raise error
    assert is_out_of_memory(raised.value) is no_memory


def test_ranks_of_their_own_gpus_meet_and_ranks_of_one_are_named() -> None:
    store = HashStore()
    store.set("gpu-1", "b")
    refuse_shared_gpus(store, 0, 2, "a")
    store.set("gpu-2", "a")
    with pytest.raises(GroupError, match="ranks 0 and 2 have the same GPU, a"):
        refuse_shared_gpus(store, 0, 3, "a")
    refuse_shared_gpus(store, 1, 3, "b")


@pytest.mark.parametrize(("vocab_size", "world_size"), [(6, 2), (5, 2), (3, 3)])
def test_logits_are_gathered_in_one_buffer_of_their_dtype(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, world_size: int
) -> None:
    """The parts of the last ranks may extend past the last id, or lie past it."""
    share = -(-vocab_size // 2)
    sent: list[tuple[torch.dtype, int]] = []

    def gather(gathered: Tensor, own: Tensor) -> None:
        sent.append((gathered.dtype, gathered.numel()))
        for rank in range(world_size):
            gathered.view(world_size, *own.shape)[rank] = own + 10 * rank

    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, gather, raising=False)
    part = torch.arange(2.0 * share, dtype=torch.bfloat16).view(2, share)
    group = ProcessGroup(0, world_size, torch.device("cpu"))
    logits = group.all_gather_logits(part, vocab_size)
    parts = [part.float() + 10 * rank for rank in range(world_size)]
    assert torch.equal(logits, torch.cat(parts, dim=1)[:, :vocab_size])
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    assert sent == [(torch.bfloat16, world_size * part.numel())]


ROWS = (1, 2, 7, 64)
NUM_TOKENS = 6
CHUNKS = (None, 8)
TENSOR_PARALLEL: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "experts-beside-mlps": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "one-kv-head-for-two-ranks": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied-even-vocabulary": ("llama", {"vocab_size": 200, "tie_word_embeddings": True}),
    "window": ("mistral", {"sliding_window": 9, "head_dim": 24}),
    "qk-norm": ("qwen3", {"attention_bias": True}),
    "weights-per-head": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "one-key-norm-for-two-ranks": ("olmo2", {"num_key_value_heads": 1}),
    "fused-one-kv-head": ("phi3", {"num_key_value_heads": 1}),
}


@dataclass(frozen=True)
class TwoRanks:
    """The results of two ranks, which start once for all tests of this file."""

    jobs: dict[tuple[str, int | None], Job]
    references: dict[str, PreTrainedModel]
    by_rank: list[tuple[dict[str, Any], list[list[Run]]]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("ranks")
    jobs, references = {}, {}
    for name, (model_type, overrides) in TENSOR_PARALLEL.items():
        references[name] = save_tiny(folder / name, model_type, **overrides)
        prompts = [prompt_of(length, seed=length) for length in (3, 21)]
        for chunk in CHUNKS:
            jobs[name, chunk] = Job(folder / name, prompts, num_tokens=NUM_TOKENS, chunk=chunk)
    return TwoRanks(jobs, references, run_ranks(folder, 2, work_of_a_rank, list(jobs.values())))


def test_collectives_of_two_ranks_return_exact_results(two_ranks: TwoRanks) -> None:
    for results, _ in two_ranks.by_rank:
        assert results["sum"].tolist() == [[10, 12], [14, 16]]
        assert results["gathered"].tolist() == [[0, 2, 10, 12], [1, 3, 11, 13]]
        assert results["logits"].tolist() == [[0, 2, 10], [1, 3, 11]]
        assert results["bf16"].tolist() == [2, 2, 2]
        assert results["minimum"] == 6


def test_small_sums_go_through_shared_memory_and_others_do_not(two_ranks: TwoRanks) -> None:
    total = torch.arange(8.0) * 2 + 10
    for results, _ in two_ranks.by_rank:
        result = results["one_shot"]
        assert torch.equal(result["small"], total)
        assert torch.equal(result["again"], total.view(2, 4) * 2)
        assert result["bf16"].dtype is torch.bfloat16
        assert result["bf16"].tolist() == total.tolist()
        assert result["odd"].tolist() == total[:3].tolist()
        assert result["int"].tolist() == total.tolist()
        assert result["large"].tolist() == result["limit"].tolist() == total.tolist()
        # A tensor that has no part of 16 bytes for each rank.
        assert result["uneven"].tolist() == total[4:].tolist()
        assert result["sizes"] == [32, 32, 16, MAX_BYTES]
        assert result["trial"] == [16, MAX_BYTES] * 2


def test_no_rank_shares_memory_unless_all_can(two_ranks: TwoRanks) -> None:
    for results, _ in two_ranks.by_rank:
        summed, sizes = results["one_shot"]["refused"]
        assert summed.tolist() == (torch.arange(8.0) * 2 + 10).tolist()
        assert sizes == []


def test_ranks_of_several_hosts_share_no_memory(two_ranks: TwoRanks) -> None:
    for results, _ in two_ranks.by_rank:
        summed, sizes = results["one_shot"]["far"]
        assert summed.tolist() == (torch.arange(8.0) * 2 + 10).tolist()
        assert sizes == []


def test_sums_that_are_wrong_on_one_rank_go_through_the_library(two_ranks: TwoRanks) -> None:
    for results, _ in two_ranks.by_rank:
        summed, sizes = results["one_shot"]["wrong"]
        assert summed.tolist() == (torch.arange(8.0) * 2 + 10).tolist()
        assert sizes == []


@pytest.mark.parametrize(
    ("num_bytes", "multicast", "operator"),
    [
        (1 << 17, 0, "one_shot_all_reduce"),
        (1 << 18, 0, "two_shot_all_reduce_"),
        (1 << 18, 7, "multimem_all_reduce_"),
    ],
)
def test_the_size_of_a_sum_and_the_switch_choose_torchs_operator(
    num_bytes: int, multicast: int, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight GPUs; sums of more than 128 KiB are computed in place."""
    called: list[str] = []

    class Operators:
        def __getattr__(self, name: str) -> Callable[..., Tensor]:
            def call(part: Tensor, op: str, group: str) -> Tensor:
                called.append(name)
                assert (op, group) == ("sum", "group")
                return part.add_(1) if name.endswith("_") else part + 1

            return call

    monkeypatch.setattr(torch.ops, "symm_mem", Operators())
    world = SimpleNamespace(group_name="group", size=lambda: 8)
    group = SimpleNamespace(group=SimpleNamespace(WORLD=world))
    monkeypatch.setattr(one_shot, "dist", group)
    zeros = torch.zeros(MAX_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(symmetric_memory, "empty", lambda size, **_: zeros[:size])
    handle = SimpleNamespace(multicast_ptr=multicast)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *_: handle)
    shared = one_shot.SymmetricMemory(torch.device("cpu"))
    part = shared.buffer(MAX_BYTES).view(torch.float32)[: num_bytes // 4]
    total = shared.all_reduce(part)
    assert called == [operator]
    assert total.data_ptr() != part.data_ptr()
    assert total.eq(1).all()


def test_a_group_of_one_shares_nothing() -> None:
    group = ProcessGroup.single()
    group.use_one_shot(NoMemory())
    t = torch.ones(4)
    assert group.all_reduce(t) is t


@pytest.mark.parametrize("world_size", [3, 4])
def test_rank_order_shares_no_memory_and_logs_it(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    group = ProcessGroup(0, world_size, torch.device("cpu"))
    group.add_in_rank_order()
    memory = GlooMemory()
    with caplog.at_level(logging.INFO):
        group.use_one_shot(memory)
    (told,) = (record.message for record in caplog.records)
    assert told.startswith("--one-shot-all-reduce has no effect: with --deterministic on")


def test_in_rank_order_the_sum_of_a_row_is_the_same_in_any_batch(tmp_path: Path) -> None:
    """With three parts, the order of addition affects the last bits, and rings begin each chunk at another rank."""
    by_rank = run_ranks(tmp_path, 3, sums_by_rows, ROWS)
    parts = [part_of(rank) for rank in range(3)]
    expected = (parts[0] + parts[1]) + parts[2]
    rounded = (parts[0].bfloat16().float() + parts[1].bfloat16()) + parts[2].bfloat16()
    for result in by_rank:
        for num_rows in ROWS:
            assert torch.equal(result["float32"][num_rows], expected[:num_rows])
            assert torch.equal(result["bfloat16"][num_rows], rounded[:num_rows].bfloat16())
        assert result["integers"].tolist() == [3, 3]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_two_ranks_generate_the_tokens_of_transformers(
    name: str, chunk: int | None, two_ranks: TwoRanks
) -> None:
    job = two_ranks.jobs[name, chunk]
    first, _ = (
        generated[list(two_ranks.jobs).index((name, chunk))] for _, generated in two_ranks.by_rank
    )
    assert_generates_as(two_ranks.references[name], job.prompts, first)


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_two_ranks_generate_the_tokens_of_one(name: str, two_ranks: TwoRanks) -> None:
    index = list(two_ranks.jobs).index((name, 8))
    alone = generate(two_ranks.jobs[name, 8], ProcessGroup.single())
    first, second = (generated[index] for _, generated in two_ranks.by_rank)
    for expected, run, other in zip(alone, first, second, strict=True):
        assert run.ids == expected.ids
        torch.testing.assert_close(logprobs(run), logprobs(expected), atol=1e-4, rtol=0)
        # Ranks sample by themselves: a bit of difference would let them drift apart.
        assert torch.equal(torch.stack(run.logits), torch.stack(other.logits))


def test_two_ranks_sample_a_vocabulary_that_cannot_be_halved(tmp_path: Path) -> None:
    """The part of the second rank then extends past the vocabulary, and the logits must not."""
    assert VOCAB % 2
    save_tiny(tmp_path / "model", "llama")
    ids, scores = sample_on_a_rank(ProcessGroup.single(), tmp_path / "model")
    first, second = run_ranks(tmp_path, 2, sample_on_a_rank, tmp_path / "model")
    assert first == second
    assert first[0] == ids
    assert first[1] == pytest.approx(scores, abs=1e-4)


def test_a_rank_whose_peers_have_left_gets_an_error(two_ranks: TwoRanks) -> None:
    """Rank 1 leaves when its work is done; the collectives of rank 0 then fail as errors of the group."""
    results, _ = two_ranks.by_rank[0]
    assert results["failed"] == ["all_reduce", "all_gather", "minimum"]


CODE = """
import sys
from datetime import timedelta
from threading import Event
from millrace_shard.device.process_group import ProcessGroup
import torch

rank, port = map(int, sys.argv[1:])
broken = Event()

def when_broken(reason):
    print(reason, flush=True)
    broken.set()

group = ProcessGroup(rank, 2, torch.device("cpu"))
group.join("127.0.0.1", port, timeout=timedelta(seconds=60), when_broken=when_broken)
print(group.id, flush=True)
broken.wait()
import os
os._exit(75)
"""
SECONDS = 60


class Rank:
    """A process of a rank, and what it says."""

    def __init__(self, rank: int, port: int) -> None:
        command = [sys.executable, "-c", CODE, str(rank), str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def says(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def ranks() -> Iterator[ExitStack]:
    """Kills what is left."""
    with ExitStack() as stack:
        yield stack


def started(ranks: ExitStack, rank: int, port: int) -> Rank:
    result = Rank(rank, port)
    # It waits for the process and closes its pipe.
    ranks.enter_context(result.process)
    ranks.callback(result.process.kill)
    return result


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_comes_back_ends_the_group_that_it_left(ranks: ExitStack, gone: int) -> None:
    with kept_port() as port:
        both = [started(ranks, rank, port) for rank in range(2)]
        first = {each.says() for each in both}
        assert len(first) == 1
        stays = both[1 - gone]
        both[gone].process.kill()
        both[gone].process.wait()
        back = started(ranks, gone, port)
        reason = "rank 0 has ended" if gone == 0 else "rank 1 has left its group"
        assert stays.says() == reason
        assert stays.process.wait(SECONDS) == 75
        other = started(ranks, 1 - gone, port)
        again = {back.says(), other.says()}
        assert len(again) == 1
        assert again != first


def test_the_interface_that_leads_to_an_address_is_identified() -> None:
    assert interface_to("127.0.0.1") == interface_to("localhost") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET" and not each.address.startswith("127."):
                # The kernel sends to its own addresses by the loopback interface, from the address itself.
                assert interface_to(each.address) == name


def test_a_name_that_does_not_resolve_leads_nowhere() -> None:
    assert interface_to("nowhere.invalid") is None


def test_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = VARIABLES
    monkeypatch.setenv(gloo, "eth9")
    monkeypatch.setenv(nccl, "")
    monkeypatch.delenv(nccl)
    use_interface_to("127.0.0.1")
    import os

    assert (os.environ[gloo], os.environ[nccl]) == ("eth9", "lo")
