"""The stages that check, on plain torch: each finds what it is for, and nothing where nothing is wrong."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.gpu.checks import bits, capture, faults, memory, sanitizer, steps, tests, verify
from bench.gpu.engine.random_steps import RandomSteps
from bench.gpu.engine.scale import SCALES, TINY
from bench.gpu.engine.session import Session, distance, largest_distance, opened, other_tokens
from bench.gpu.figures import CHECK, UNCHECKED, Figure
from bench.gpu.setting import Setting
from bench.harness.checkpoints import write_checkpoint
from torch import Tensor

from millrace_shard.batch.step import Forward, StepResult
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch

CPU = torch.device("cpu")
SCALE = SCALES["tiny"]
LIMIT_SECONDS = 300.0
CASE = bits.Case(torch.float32, 16, 2, 70)


def setting(folder: Path) -> Setting:
    """On plain torch, which is faster than the interpreter."""
    deadline = time.monotonic() + LIMIT_SECONDS
    return Setting(CPU, SCALE, folder, deadline, ("--disable-custom-kernels",))


def figures_of(run: Callable[..., None], given: Setting) -> list[Figure]:
    found: list[Figure] = []
    run(given, found.append)
    return found


class CompanyKernels(PlainKernels):
    """Attention and linears whose last bits depend on the number of rows."""

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, **rule: Any) -> Tensor:
        out = super().attend(queries, batch, cache, **rule)
        return out if len(batch.num_queries) == 1 else out * (1 + 1e-6)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up) + 1e-6 * (len(gate_up) > 64)


def test_rows_with_other_bits_in_company_are_found(tmp_path: Path) -> None:
    right, wrong = PlainKernels(deterministic=True), CompanyKernels(deterministic=True)
    given = setting(tmp_path)
    assert bits.differing_arrangements(right, CASE, given) == []
    assert bits.differing_arrangements(wrong, CASE, given) == [
        "in company",
        "in a chunk in company",
    ]
    assert bits.differing_operators(right, torch.float32, CPU) == []
    assert bits.differing_operators(wrong, torch.float32, CPU) == ["activation"]


def test_the_attended_row_is_the_last_query_of_its_sequence() -> None:
    """Against softmax attention from its definition."""
    row, other = (bits.Row.random(CASE, length, length, CPU) for length in (70, 33))
    found = bits.attended(PlainKernels(deterministic=True), [other, row], [1, 9], 1)
    keys, values = (
        each.repeat_interleave(CASE.group, dim=1).double() for each in (row.keys, row.values)
    )
    scores = torch.einsum("hd,khd->hk", row.queries[-1].double(), keys) / 16**0.5
    expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def session() -> Session:
    with opened(TINY, SCALE, CPU, ["--device=cpu", "--disable-custom-kernels"]) as model:
        return model.session(max_rows=2)


@pytest.fixture(scope="module")
def played(session: Session) -> list[StepResult]:
    session.clear()
    return session.admit(2, 5, room=2) + session.play(2, 1)


def test_the_distance_of_results_is_that_of_their_log_probabilities(
    played: list[StepResult],
) -> None:
    result = played[-1]
    moved = replace(result, logprobs=result.logprobs + np.float32(0.25))
    assert distance(result, result) == 0
    assert distance(result, moved) == pytest.approx(0.25)
    unknown = replace(result, logprobs=result.logprobs * np.nan)
    assert distance(result, unknown) == float("inf")
    assert distance(result, replace(result, slots=result.slots + 1)) == float("inf")
    assert other_tokens(result, replace(result, ids=result.ids + np.array([0, 1]))) == 1
    assert largest_distance([result, result], [result, moved]) == pytest.approx(0.25)


def test_a_session_that_is_cleared_plays_the_same_again(
    session: Session, played: list[StepResult]
) -> None:
    session.clear()
    again = session.admit(2, 5, room=2) + session.play(2, 1)
    assert largest_distance(played, again) == 0
    assert sum(map(other_tokens, played, again)) == 0


def test_a_prompt_beside_decodes_leaves_their_tokens(session: Session) -> None:
    session.clear()
    session.admit(1, 5, room=3)
    (alone,) = session.play(1, 1)
    session.clear()
    session.admit(1, 5, room=3)
    beside = session.admit_beside(1, 7, room=3)
    assert sorted(beside.slots) == [0, 1]
    assert beside.ids[beside.slots.tolist().index(0)] == alone.ids[0]


def random_steps(seed: int, block_size: int = 16) -> RandomSteps:
    return RandomSteps(
        seed,
        max_rows=steps.MAX_ROWS,
        vocab_size=TINY.vocab_size,
        block_size=block_size,
        longest_prompt=steps.LONGEST_PROMPT,
    )


def test_random_steps_are_the_same_for_a_seed_whatever_the_blocks() -> None:
    def first(seed: int, block_size: int) -> list[tuple[list[int], list[int]]]:
        found = itertools.islice(random_steps(seed, block_size), 60)
        return [(s.chunk_tokens.tolist(), s.decode_slots.tolist()) for s in found]

    assert first(1, 16) == first(1, 32)
    assert first(1, 16) != first(2, 16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, TINY, seed=0)
    return folder


@torch.inference_mode()
def test_random_steps_with_other_tokens_are_found(checkpoint: Path) -> None:
    def pairs(change: int) -> list[tuple[Forward, Forward]]:
        return [
            (step if number < change else moved(step), step)
            for number, step in enumerate(itertools.islice(random_steps(3), 30))
        ]

    def moved(step: Forward) -> Forward:
        admitted = tuple(
            replace(each, input_ids=each.input_ids % 100 + 1) for each in step.change.admitted
        )
        return replace(step, change=replace(step.change, admitted=admitted))

    def run(change: int) -> Figure:
        ours, theirs = (
            steps.runner(checkpoint, PlainKernels(deterministic=mode), CPU, None)
            for mode in (True, False)
        )
        try:
            return steps.compared(ours, theirs, pairs(change))
        except StepInvalid as error:  # A random step that is not valid is an error of the steps.
            pytest.fail(str(error))

    same = run(30)
    assert same.detail["steps"] == 30
    assert same.detail["tokens"] > 30
    assert same.value <= same.most
    other = run(0)
    assert "other tokens" in other.detail["problem"]
    assert other.value > other.most


REPORT = {
    "server": {"dtype": "bfloat16", "device": "cuda"},
    "passed": False,
    "rows": [
        {"title": "solo / batched", "verdict": "equal", "passed": True},
        {"title": "solo / unrelated traffic", "verdict": "different", "passed": False},
    ],
}


def test_a_comparison_of_verify_that_fails_is_a_missed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printing = [sys.executable, "-c", f"print({json.dumps(json.dumps(REPORT))})"]
    monkeypatch.setattr(verify, "command", lambda *_: printing)
    first, second = figures_of(verify.run, setting(tmp_path))
    assert (first.kind, first.value, first.most) == (CHECK, 1, 0)
    assert first.detail["rows"]["solo / unrelated traffic"] == "different"
    assert second.name == "millrace-verify, deterministic off"


def test_verify_that_starts_no_server_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "command", lambda *_: [sys.executable, "-c", "exit(2)"])
    with pytest.raises(RuntimeError, match="ended with 2"):
        verify.run(setting(tmp_path), print)


def test_verify_that_takes_too_long_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(*_: object) -> None:
        raise subprocess.TimeoutExpired("verify", 9)

    monkeypatch.setattr(verify, "report", report)
    assert {f.kind for f in figures_of(verify.run, setting(tmp_path))} == {UNCHECKED}


def test_the_flags_of_verify_are_those_of_its_command_line(tmp_path: Path) -> None:
    on_gpu = replace(setting(tmp_path), device=torch.device("cuda"), shard_flags=())
    words = verify.command(on_gpu, tmp_path, "on")
    assert words[1:3] == ["-m", "millrace.verify"]
    assert words[words.index("--") + 1 :] == ["--device=cuda", "--deterministic=on"]
    without = verify.command(setting(tmp_path), tmp_path, "off")
    assert "--deterministic=off" in without[without.index("--") :]


class CapturableKernels(PlainKernels):
    """Plain torch that a capture accepts."""

    capturable = True


def test_an_engine_whose_capture_fails_decodes_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(TINY, SCALE, CPU, setting(tmp_path).flags) as model:
        kernels = CapturableKernels(deterministic=True)
        loaded = replace(model.loaded, kernels=kernels)
        found = capture.survived(replace(model, loaded=loaded), setting(tmp_path))
    assert (found.kind, found.value) == (CHECK, 0)
    assert "reason" not in found.detail
    assert "CUDA graphs" in caplog.text


def test_a_full_cache_holds_as_many_of_the_longest_sequences_as_fit(tmp_path: Path) -> None:
    (found,) = figures_of(memory.run, setting(tmp_path))
    assert (found.kind, found.value) == (CHECK, 0)
    assert SCALE.memory_tokens is not None
    used = found.detail["rows"] * (found.detail["length"] + memory.NUM_STEPS + 1)
    assert used <= found.detail["cache_tokens"] < used + SCALE.max_tokens + 16
    assert found.detail["cache_tokens"] <= SCALE.memory_tokens + 16


def test_a_rank_that_is_killed_ends_the_collective_of_the_other() -> None:
    found = faults.rank_killed("cpu")
    assert (found.kind, found.value) == (CHECK, 0)
    assert found.detail["said"].startswith("CollectiveError")


def test_a_fault_that_needs_a_gpu_is_not_checked_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "rank_killed", lambda _: Figure(name="rank", value=0, unit=""))
    found = figures_of(faults.run, setting(tmp_path))
    assert [(f.name, f.kind) for f in found] == [
        ("illegal access", UNCHECKED),
        ("memory taken", UNCHECKED),
        ("rank", ""),
    ]


def test_the_program_of_the_sanitizer_runs(tmp_path: Path) -> None:
    status, *tools = figures_of(sanitizer.run, setting(tmp_path))
    assert (status.kind, status.value) == (CHECK, 0)
    assert [(tool.name, tool.kind) for tool in tools] == [
        ("memcheck", UNCHECKED),
        ("racecheck", UNCHECKED),
    ]


def test_outcomes_of_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    scale = replace(SCALE, tests=("test_*.py",))
    given = replace(setting(tmp_path), scale=scale)
    (found,) = figures_of(tests.run, given)
    assert found.detail == {"summary": "1 failed, 1 passed, 1 skipped", "failed": 1, "skipped": 1}
    assert found.value == 1
