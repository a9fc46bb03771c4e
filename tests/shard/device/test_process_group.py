from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from millrace_shard.device.one_shot import MAX_BYTES
from millrace_shard.device.process_group import GroupError, ProcessGroup
from millrace_testing.models.models import VOCAB, Run, greedy, logprobs, prompt_of, save_tiny
from millrace_testing.shards.rank_processes import part_of, run_ranks, sums_by_rows
from millrace_testing.shards.rank_samples import sample_on_a_rank
from millrace_testing.shards.ranks import GlooMemory, Job, NoMemory, generate, work_of_a_rank


def test_a_group_of_one_returns_what_it_is_given() -> None:
    group = ProcessGroup.single()
    t = torch.arange(6.0).view(2, 3)
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce(t) is t
    assert group.all_gather(t) is t
    assert group.minimum(5) == 5
    group.close()


def test_a_group_of_one_connects_to_no_address() -> None:
    group = ProcessGroup.connect(
        0, 1, master_addr="nowhere.invalid", master_port=1, device=torch.device("cpu")
    )
    assert group.world_size == 1


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(GroupError, match="rank 2 is outside a group of 2"):
        ProcessGroup(2, 2, torch.device("cpu"))


def test_missing_ranks_are_reported() -> None:
    with pytest.raises(GroupError, match=r"rank 1 of 2 found no group at 127\.0\.0\.1:9"):
        ProcessGroup.connect(
            1,
            2,
            master_addr="127.0.0.1",
            master_port=9,
            device=torch.device("cpu"),
            timeout=timedelta(seconds=1),
        )


ROWS = (1, 2, 7, 64)
NUM_TOKENS = 6
CHUNKS = (None, 8)
TENSOR_PARALLEL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one-kv-head-for-two-ranks": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied-even-vocabulary": ("llama", {"vocab_size": 200, "tie_word_embeddings": True}),
    "window": ("mistral", {"sliding_window": 9, "head_dim": 24}),
    "qkv-bias": ("qwen2", {}),
    "qk-norm": ("qwen3", {"attention_bias": True}),
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


def test_collectives_of_two_ranks(two_ranks: TwoRanks) -> None:
    for results, _ in two_ranks.by_rank:
        assert results["sum"].tolist() == [[10, 12], [14, 16]]
        assert results["gathered"].tolist() == [[0, 2, 10, 12], [1, 3, 11, 13]]
        assert results["bf16"].tolist() == [2, 2, 2]
        assert results["minimum"] == 6


def test_small_sums_go_through_shared_memory_and_others_do_not(two_ranks: TwoRanks) -> None:
    total = torch.arange(8.0) * 2 + 10
    for results, _ in two_ranks.by_rank:
        found = results["one_shot"]
        assert torch.equal(found["small"], total)
        assert torch.equal(found["again"], total.view(2, 4) * 2)
        assert found["bf16"].dtype is torch.bfloat16
        assert found["bf16"].tolist() == total.tolist()
        assert found["odd"].tolist() == total[:3].tolist()
        assert found["int"].tolist() == total.tolist()
        assert found["large"].tolist() == found["limit"].tolist() == total.tolist()
        assert found["sizes"] == [32, 32, 16, MAX_BYTES]


def test_no_rank_shares_memory_unless_all_can(two_ranks: TwoRanks) -> None:
    for results, _ in two_ranks.by_rank:
        summed, sizes = results["one_shot"]["refused"]
        assert summed.tolist() == (torch.arange(8.0) * 2 + 10).tolist()
        assert sizes == []


def test_a_group_of_one_shares_nothing() -> None:
    group = ProcessGroup.single()
    group.use_one_shot(NoMemory())
    t = torch.ones(4)
    assert group.all_reduce(t) is t


@pytest.mark.parametrize("world_size", [3, 4])
def test_in_rank_order_no_memory_is_shared_and_a_message_says_so(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    group = ProcessGroup(0, world_size, torch.device("cpu"))
    group.add_in_rank_order()
    memory = GlooMemory()
    with caplog.at_level(logging.INFO):
        group.use_one_shot(memory)
    (told,) = (record.message for record in caplog.records)
    assert told.startswith("--one-shot-all-reduce has no effect: with --deterministic on")


def test_in_rank_order_a_row_is_summed_alike_whatever_is_beside_it(tmp_path: Path) -> None:
    """With three parts, the order of addition affects the last bits, and rings begin each chunk at another rank."""
    by_rank = run_ranks(tmp_path, 3, sums_by_rows, ROWS)
    parts = [part_of(rank) for rank in range(3)]
    expected = (parts[0] + parts[1]) + parts[2]
    rounded = (parts[0].bfloat16().float() + parts[1].bfloat16()) + parts[2].bfloat16()
    for found in by_rank:
        for num_rows in ROWS:
            assert torch.equal(found["float32"][num_rows], expected[:num_rows])
            assert torch.equal(found["bfloat16"][num_rows], rounded[:num_rows].bfloat16())
        assert found["integers"].tolist() == [3, 3]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_two_ranks_generate_what_transformers_does(
    name: str, chunk: int | None, two_ranks: TwoRanks
) -> None:
    job = two_ranks.jobs[name, chunk]
    first, _ = (
        generated[list(two_ranks.jobs).index((name, chunk))] for _, generated in two_ranks.by_rank
    )
    for prompt, run in zip(job.prompts, first, strict=True):
        tokens, expected = greedy(two_ranks.references[name], prompt, NUM_TOKENS)
        assert run.ids[len(prompt) :] == tokens
        torch.testing.assert_close(logprobs(run), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_two_ranks_generate_what_one_does(name: str, two_ranks: TwoRanks) -> None:
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


def test_a_rank_that_is_left_alone_gets_an_error(two_ranks: TwoRanks) -> None:
    """Rank 1 leaves when its work is done; the collectives of rank 0 then fail as errors of the group."""
    results, _ = two_ranks.by_rank[0]
    assert results["failed"] == ["all_reduce", "all_gather", "minimum"]
