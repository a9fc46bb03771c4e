"""The stages that check, on plain torch: each finds what it is for, and nothing where nothing is wrong."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.checks import (
    agreement,
    bits,
    capture,
    compilation,
    faults,
    memory,
    reference,
    steps,
    verify,
)
from bench.gpu.children import Ended
from bench.gpu.engine.kernels import kernels_for
from bench.gpu.engine.random_steps import RandomSteps
from bench.gpu.engine.scale import SCALES, TINY
from bench.gpu.engine.session import Session, opened
from bench.gpu.figures import CHECK, Figure
from bench.gpu.page import Results
from bench.gpu.plan import Stage
from bench.gpu.programs import mixed_step
from bench.gpu.setting import Setting
from bench.harness.checkpoints import write_checkpoint
from bench.harness.paths import DEMO
from torch import Tensor

from millrace_shard.batch.step import Forward
from millrace_shard.config import ShardConfig
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.agreement import TOLERANCE
from millrace_shard.kernels.base import LayerCache, Linear
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
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


def test_rows_whose_bits_depend_on_the_batch_are_detected(tmp_path: Path) -> None:
    right, wrong = PlainKernels(deterministic=True), CompanyKernels(deterministic=True)
    given = setting(tmp_path)
    assert bits.differing_arrangements(right, CASE, given) == []
    assert bits.differing_arrangements(wrong, CASE, given) == [
        "in company",
        "in a chunk in company",
    ]
    assert bits.differing_operators(right, torch.float32, CPU) == []
    assert bits.differing_operators(wrong, torch.float32, CPU) == ["activation"]


class BrokenParts(PlainKernels):
    """What models have in addition to Llama, wrong in rows that have company, and in fast mode in all rows."""

    def _wrong(self, out: Tensor, *, is_alone: bool) -> Tensor:
        if self.deterministic:
            return out if is_alone else out * (1 + 1e-6)
        return out * 1.1

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, **rule: Any) -> Tensor:
        out = super().attend(queries, batch, cache, **rule)
        return self._wrong(out, is_alone=batch.num_queries in ((1,), (230, 40)))

    def attend_whole(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float
    ) -> Tensor:
        out = PlainKernels.attend_whole(queries, keys, values, scale=scale)
        return self._wrong(out, is_alone=queries.shape[1] == 1)

    def delta_rule(self, inputs: Any, heads: Any, batch: RaggedBatch, state: Any) -> Tensor:
        out = PlainKernels.delta_rule(inputs, heads, batch, state)
        return self._wrong(out, is_alone=len(batch.num_queries) == 1)

    def mamba2(
        self, mixed: Tensor, dt: Tensor, heads: Any, batch: RaggedBatch, state: Any
    ) -> Tensor:
        out = PlainKernels.mamba2(mixed, dt, heads, batch, state)
        return self._wrong(out, is_alone=len(batch.num_queries) == 1)

    def linear_from(self, weights: LinearWeights) -> Linear:
        linear = super().linear_from(weights)
        return lambda x: self._wrong(linear(x), is_alone=len(x) == 1)


def test_each_part_of_served_models_is_checked(tmp_path: Path) -> None:
    given, parts = setting(tmp_path), SCALE.parts
    right, broken = PlainKernels(deterministic=True), BrokenParts(deterministic=True)
    with torch.inference_mode():
        assert not any(case() for case in bits.parts(right, given).values())
        wrong = {name: case() for name, case in bits.parts(broken, given).items()}
    assert all(wrong.values()), wrong
    kinds = (
        "latents",
        "fp8_e4m3fn",
        "int8",
        "window",
        "pictures",
        "encoder",
        "delta",
        "Mamba",
        "e4m3",
    )
    assert all(any(kind in name for name in wrong) for kind in kinds)
    most = TOLERANCE[parts.dtype]
    for kernels, is_right in ((right, True), (BrokenParts(deterministic=False), False)):
        with torch.inference_mode():
            found = {n: of() for n, of in parts.differences(kernels, agreement.PLAIN, CPU)}
        assert [name for name, each in found.items() if (each <= most) != is_right] == []
        assert all(any(kind in name for name in found) for kind in kinds)


@pytest.fixture(scope="module")
def session() -> Session:
    with opened(TINY, SCALE, CPU, ["--device=cpu", "--disable-custom-kernels"]) as model:
        return model.session(max_rows=2)


def random_steps(seed: int, block_size: int = 16) -> RandomSteps:
    return RandomSteps(
        seed,
        max_rows=steps.MAX_ROWS,
        vocab_size=TINY.vocab_size,
        block_size=block_size,
        longest_prompt=steps.LONGEST_PROMPT,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, TINY, seed=0)
    return folder


@torch.inference_mode()
def test_random_steps_with_other_tokens_are_detected(checkpoint: Path) -> None:
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


def test_tokens_are_judged_by_transformers(tmp_path: Path) -> None:
    demo, checkpoint = figures_of(reference.run, setting(tmp_path))
    assert (demo.kind, demo.detail["tokens"]) == (CHECK, 4 * reference.INTERPRETED_TOKENS)
    assert demo.value <= demo.most
    assert checkpoint.text().endswith("not checked, --checkpoint names none")
    folder = replace(setting(tmp_path), checkpoint=DEMO)
    assert figures_of(reference.run, folder)[1].value <= reference.TOLERANCE[torch.bfloat16]


def test_a_token_that_is_not_the_likeliest_is_behind() -> None:
    expected = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]).log()
    logprobs = expected[[0, 1], [0, 1]].tolist()
    difference, behind = reference.judged(expected, [0, 1], logprobs)
    assert difference == 0
    assert behind == pytest.approx(math.log(2))
    assert reference.judged(expected, [0, 0], [math.log(0.7), math.log(0.25)])[0] == pytest.approx(
        math.log(2)
    )


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


def test_each_case_of_the_checks_is_compiled_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ((compilation, "starts"), (agreement, "cases"), (bits, "cases"))
    for number, (stage, name) in enumerate(names):
        calls = [partial(str, f"{number} {case}") for case in range(5)]
        monkeypatch.setattr(stage, name, lambda _, calls=calls: iter(calls))
    parts = [
        [str(case()) for case in compilation.cases_of(index, 3, setting(tmp_path))]
        for index in range(3)
    ]
    assert sorted(itertools.chain(*parts)) == [
        f"{n} {case}" for n in (0, 1, 2) for case in range(5)
    ]
    assert [part[0] for part in parts] == ["0 0", "0 1", "0 2"]


def test_the_cases_are_those_that_the_stages_run(tmp_path: Path) -> None:
    scale = SCALE
    dtypes, sizes = len(scale.checked_dtypes), len(scale.checked_head_dims)
    kernels, given = PlainKernels(deterministic=True), setting(tmp_path)
    parts = len(list(scale.parts.differences(kernels, kernels, CPU)))
    assert len(list(agreement.cases(given))) == 2 * (dtypes * sizes + parts)
    attended = sizes * len(scale.checked_groups) * len(scale.contexts)
    assert len(list(bits.cases(given))) == dtypes * (1 + attended) + len(bits.parts(kernels, given))


def test_what_there_is_no_time_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lambda *, deterministic: PlainKernels(deterministic=deterministic)  # noqa: E731
    monkeypatch.setattr(agreement, "cuda_kernels", plain)
    first, *others = figures_of(agreement.run, replace(setting(tmp_path), deadline=0.0))
    assert (first.kind, list(first.detail)) == (CHECK, ["head size 64"])
    assert len(others) == 3
    assert all(other.text().endswith("not checked, no time was left") for other in others)


def test_the_check_of_a_start_is_run_for_each_model_in_both_modes(tmp_path: Path) -> None:
    """Here without comparing, as servers of these stages do on CPU."""
    without_flags = replace(setting(tmp_path), shard_flags=())
    kernels = [start() for start in compilation.starts(without_flags)]
    assert [(each.name, each.deterministic) for each in kernels] == [
        ("cuda", False),
        ("cuda", True),
    ] * 2


RESOURCES = """
Fatbin elf code:
 Function _multiply:
  REG:188 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:612 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_the_table_of_kernels_has_the_largest_variant_of_each(tmp_path: Path) -> None:
    for name, shared in (("fold", 0), ("multiply", 100), ("multiply", 70), ("multiply", 99)):
        folder = tmp_path / "cache" / f"{name}{shared}"
        folder.mkdir(parents=True)
        (folder / f"{name}.cubin").write_bytes(b"")
        (folder / f"{name}.json").write_text(json.dumps({"shared": shared}))
    looked_at: list[str] = []

    def usage(code: Path) -> tuple[int, int]:
        looked_at.append(code.parent.name)
        return compilation.read_usage(RESOURCES)

    figures = list(compilation.table(tmp_path / "cache", usage))
    assert looked_at == ["fold0", "multiply100"]
    stage = Stage("bench.gpu.checks.compilation", "?", 1, 1)
    results = Results(tmp_path, device="cuda", shape="8b")
    results.add(stage, Ended("ok", 1.0, ()), figures)
    row = next(line for line in results.text().splitlines() if "multiply" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "multiply",
        "3",
        "188",
        "8",
        "100",
    ]


def test_the_interpreter_has_nothing_to_compile(tmp_path: Path) -> None:
    (figure,) = figures_of(compilation.run, setting(tmp_path))
    assert figure.text().startswith("kernels compiled first: not checked, needs a GPU")


@pytest.mark.parametrize(
    ("status", "device", "missed"),
    [(0, "cuda", 0), (-6, "cuda", 0), (-6, "cpu", -6), (1, "cuda", 1), (-11, "cuda", -11)],
)
def test_nccls_watchdog_may_abort_the_rank_that_is_left(
    status: int, device: str, missed: int
) -> None:
    assert faults.missed_by(status, device) == missed


def test_a_rank_that_is_killed_ends_the_collective_of_the_other() -> None:
    found = faults.rank_killed("cpu")
    assert (found.kind, found.value) == (CHECK, 0)
    assert found.detail["said"].startswith("CollectiveError")


def test_a_model_under_a_sanitizer_is_opened_without_the_checks_of_a_start() -> None:
    """With them, CUDA's kernels would be launched here, where there is no GPU or the sanitizer's time is short."""
    config = ShardConfig.from_args(["model"])
    kernels = kernels_for(
        config, torch.device("cuda"), torch.bfloat16, LayerShape.small(64), is_checked=False
    )
    assert kernels.name == "cuda"
    assert "is_checked=False" in inspect.getsource(mixed_step.main)


def test_the_program_of_an_illegal_access_ends_before_torch_shuts_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which may abort on a lost device."""

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def ended(status: int) -> None:
        raise ProcessEnded(status)

    class ProcessEnded(BaseException):
        pass

    monkeypatch.setattr(torch, "zeros", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(ProcessEnded) as end:
        runpy.run_module("bench.gpu.programs.illegal_access", run_name="__main__")
    assert end.value.args == (0,)
    assert capsys.readouterr().out == "RuntimeError, lost: True, out of memory: False\n"
