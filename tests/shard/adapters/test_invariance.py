"""Rows with adapters, bit for bit, in any company: other adapters, ranks, slots, chunks, evictions.

Each sequence alone, in a model whose only adapter is its own, is the oracle of its row; for rows of the base it is a
model without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cpu.int8_linear import with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.lora import adapted_linear
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.adapters import (
    MAX_ADAPTERS,
    AdaptedModel,
    load_adapted,
    make_adapter,
    write_canonical,
)
from millrace_testing.models.models import Driver, Run, prompt_of, read_model, save_tiny

CPU = torch.device("cpu")
RANKS = (1, 4, 16, 33)
LENGTHS = (3, 12, 37, 40)
NUM_TOKENS = 3

CASES = {
    "plain-fp32": ("plain", torch.float32, "llama"),
    "plain-bf16": ("plain", torch.bfloat16, "llama"),
    "cpu-fp32": ("cpu", torch.float32, "llama"),
    "cpu-bf16": ("cpu", torch.bfloat16, "llama"),
    "cpu-bf16-without-tiles": ("cpu-without-tiles", torch.bfloat16, "llama"),
    "cpu-int8": ("cpu-int8", torch.bfloat16, "llama"),
    "transformers-fp32": ("cpu", torch.float32, "gpt2"),
    "transformers-bf16": ("cpu", torch.bfloat16, "gpt2"),
    "mixture-bf16": ("cpu", torch.bfloat16, "qwen2_moe"),
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "intermediate_size": 96},
    "gpt2": {},
    "qwen2_moe": {},
}


def kernels_of(name: str, dtype: torch.dtype) -> Kernels:
    made = make_kernels(name.split("-", maxsplit=1)[0], deterministic=True)
    if name == "cpu-without-tiles":
        made = CpuKernels(deterministic=True, tiles=False)
    return with_int8(made) if name == "cpu-int8" else made


@dataclass
class Bench:
    """A model, adapters of all ranks, and what each sequence yields alone."""

    adapted: AdaptedModel
    digests: list[str]
    alone: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Logits of a prompt with an adapter, by their numbers; adapter 0 is none."""

    def fill(self, base: Driver) -> None:
        """Compute every prompt alone, by `base`, a model without adapters, and with every adapter."""
        for adapter in range(len(RANKS) + 1):
            if adapter:
                self.adapted.put(1, self.digests[adapter - 1])
            driver = self.adapted.driver if adapter else base
            for which, length in enumerate(LENGTHS):
                (run,) = driver.generate(
                    [prompt_of(length, seed=length)], NUM_TOKENS, adapters=[min(adapter, 1)]
                )
                driver.free += run.blocks
                self.alone[which, adapter] = torch.stack(run.logits)
        self.adapted.store.remove(1)


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name, marks=[pytest.mark.long] * (name not in ("cpu-bf16", "plain-fp32", "cpu-fp32"))
        )
        for name in CASES
    ],
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    name, dtype, model_type = CASES[request.param]
    root: Path = tmp_path_factory.mktemp("bench")
    kernels = kernels_of(name, dtype)
    base = save_tiny(root / "model", model_type, **SIZES[model_type])
    digests = [
        write_canonical(
            make_adapter(base, seed=rank, r=rank, target_modules="all-linear", lora_bias=rank == 4),
            root / "cache",
        )
        for rank in RANKS
    ]
    group = ProcessGroup.single()
    model = read_model(root / "model", kernels, dtype=dtype, group=group)
    adapted = load_adapted(root / "model", root / "cache", kernels, dtype=dtype)
    made = Bench(adapted, digests)
    made.fill(Driver(model, kernels, dtype=dtype))
    return made


row = st.tuples(st.integers(0, len(LENGTHS) - 1), st.integers(0, len(RANKS)))
slots = st.permutations(range(1, MAX_ADAPTERS + 1))
schedule = st.tuples(
    st.lists(row, min_size=1, max_size=6), slots, slots, st.sampled_from([1, 5, 33, None])
)


def generate(
    bench: Bench,
    rows: list[tuple[int, int]],
    places: tuple[list[int], list[int]],
    chunk: int | None,
) -> list[Run]:
    """All rows together; after the first token every adapter moves from its first to its second slot."""
    driver, store = bench.adapted.driver, bench.adapted.store
    runs = [Run(prompt_of(LENGTHS[which], seed=LENGTHS[which])) for which, _ in rows]
    for slots in places:
        for slot, digest in zip(slots, bench.digests, strict=False):
            bench.adapted.put(slot, digest)
        for run, (_, adapter) in zip(runs, rows, strict=True):
            run.adapter = slots[adapter - 1] if adapter else 0
        while live := [run for run in runs if len(run.logits) < NUM_TOKENS]:
            driver.step(
                [(run, min(len(run.ids) - run.computed, chunk or len(run.ids))) for run in live]
            )
            if slots is places[0] and any(run.logits for run in runs):
                break
        for slot in slots[: len(RANKS)]:
            store.remove(slot)
    for run in runs:
        driver.free += run.blocks
    return runs


@settings(
    max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(drawn=schedule)
def test_a_row_with_an_adapter_has_the_same_bits_in_any_batch(
    bench: Bench, drawn: tuple[list[tuple[int, int]], list[int], list[int], int | None]
) -> None:
    rows, before, after, chunk = drawn
    runs = generate(bench, rows, (before, after), chunk)
    for run, key in zip(runs, rows, strict=True):
        assert torch.equal(torch.stack(run.logits), bench.alone[key])


def test_adapters_differ_from_the_base_and_from_each_other(bench: Bench) -> None:
    for which in range(len(LENGTHS)):
        result = [bench.alone[which, adapter] for adapter in range(len(RANKS) + 1)]
        assert not any(torch.equal(a, b) for n, a in enumerate(result) for b in result[:n])


COMPANY = [(which, adapter) for which in range(len(LENGTHS)) for adapter in (1, 2, 3)]
NUMBERS = list(range(1, MAX_ADAPTERS + 1))


def all_equal(bench: Bench) -> bool:
    """Whether the rows of COMPANY have the bits that they have alone."""
    runs = generate(bench, COMPANY, (NUMBERS, NUMBERS[::-1]), None)
    return all(
        torch.equal(torch.stack(run.logits), bench.alone[key])
        for run, key in zip(runs, COMPANY, strict=True)
    )


@pytest.mark.parametrize("bench", ["plain-fp32", "cpu-fp32"], indirect=True)
def test_a_product_of_another_number_of_rows_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the library chooses another order of summation."""
    assert all_equal(bench)
    monkeypatch.setattr(adapted_linear, "ROWS", 1)
    assert not all_equal(bench)


def test_the_adapter_of_a_neighbour_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: each row has the adapter of the row before."""
    of = AdapterRows.of

    def shifted(host: Ints, device: torch.device, **options: Any) -> AdapterRows | None:
        return of(np.roll(host, 1), device, **options)

    monkeypatch.setattr(AdapterRows, "of", staticmethod(shifted))
    assert not all_equal(bench)
