"""Pages of adapters that are read on several threads while slots change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.adapters.arena import AdapterArena, PageRuns, Run, run_of
from millrace_shard.errors import AdapterMemoryFull
from millrace_shard.kernels.lora.adapter_table import AdapterTable, LoraPart, PackedPart, Packing
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.models.adapters import load_adapted, make_adapter, write_canonical, write_file
from millrace_testing.models.models import save_tiny

CPU = torch.device("cpu")
SHAPES = ((70, 33), (512, 1000), (1, 7))
"""Outputs and inputs of the modules."""
RANKS = (8, 40, 16, 70, 1)
PAGES = 24
PACKINGS: tuple[Packing, ...] = ("plain", "slices")


@given(st.lists(st.one_of(st.integers(0, 9), st.none(), st.integers(-5, -1)), max_size=60))
def test_runs_hold_each_page_once_and_move_together(actions: list[int | None]) -> None:
    """Allocate a number of pages, compact, or free one of the runs."""
    runs, held, memory = PageRuns(30), dict[int, Run](), [-1] * 30
    for number, action in enumerate(actions):
        if action is None:
            moves = runs.compact()
            for source, target in moves.items():
                assert target.first < source.first
                memory[target.first : target.end] = memory[source.first : source.end]
            held = {holder: moves.get(run, run) for holder, run in held.items()}
            free = runs.num_free
            whole = runs.allocate(free)
            assert whole is not None, "free pages are consecutive"
            runs.free(whole)
        elif action < 0 and held:
            runs.free(held.pop(list(held)[action % len(held)]))
        elif action > 0:
            run = runs.allocate(action)
            if run is not None:
                held[number] = run
                memory[run.first : run.end] = [number] * run.size
        assert runs.num_free == 30 - sum(run.size for run in held.values())
        for holder, run in held.items():
            assert memory[run.first : run.end] == [holder] * run.size


class Bench:
    """Files of adapters, and stores over tables with the same modules."""

    def __init__(self, root: Path, packing: Packing, dtype: torch.dtype) -> None:
        self.cache, self.packing, self.dtype = root, packing, dtype
        self.digests = [self._write(rank) for rank in RANKS]
        self.reserved = self._store(reserves=True)
        self.single = self._store(reserves=False)

    def load(self, slot: int, which: int) -> None:
        """Into both stores."""
        for store in (self.reserved, self.single):
            with store.loading():
                store.put(slot, store.read(slot, self.digests[which]))

    def remove(self, slot: int) -> None:
        """From both stores."""
        for store in (self.reserved, self.single):
            store.remove(slot)

    def is_right(self) -> bool:
        """Whether both stores hold the same numbers, at the addresses in the table."""
        reserved, single = self.reserved.table, self.single.table
        adapters, expected = reserved.adapters(), single.adapters()
        assert adapters.keys() == expected.keys()
        return all(
            same(tensors_of(part), tensors_of(expected[slot].parts[index]))
            and self._is_entry(reserved.lora_table[slot, index], tensors_of(part))
            for slot, adapter in adapters.items()
            for index, part in adapter.parts.items()
        )

    def _is_entry(self, entry: Tensor, tensors: tuple[Tensor | None, ...]) -> bool:
        if self.packing == "plain":
            return not entry.any()
        return entry[:4].tolist() == [0 if t is None else t.data_ptr() for t in tensors]

    def _store(self, *, reserves: bool) -> AdapterStore:
        table = AdapterTable(CPU)
        for number, (outputs, inputs) in enumerate(SHAPES):
            part = LoraPart(
                name=f"m{number}",
                inputs=inputs,
                outputs=outputs,
                input_range=(0, inputs),
                output_range=(0, outputs),
            )
            table.add_site([part]).packing = self.packing
        store = AdapterStore(table, self.cache, self.dtype, reserves=reserves)
        store.resize(len(RANKS), PAGES)
        return store

    def _write(self, rank: int) -> str:
        generator = torch.Generator().manual_seed(rank)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tensors, modules = dict[str, Tensor](), {}
        for number, (outputs, inputs) in enumerate(SHAPES):
            name, bias = f"m{number}", number != 1
            tensors |= {
                f"{name}.lora_A": normal(rank, inputs),
                f"{name}.lora_B": normal(outputs, rank),
                f"{name}.scales": normal(rank),
            }
            if bias:
                tensors[f"{name}.bias"] = normal(outputs)
            modules[name] = {"rank": rank, "inputs": inputs, "outputs": outputs, "bias": bias}
        return write_file(self.cache, tensors, modules)


Tensors = tuple[Tensor | None, ...]


def tensors_of(part: PackedPart) -> Tensors:
    return part.a, part.b, part.factors, part.bias


def same(ours: Tensors, theirs: Tensors) -> bool:
    return all(
        torch.equal(a, b) if a is not None and b is not None else a is b
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(params=[(p, d) for p in PACKINGS for d in (torch.bfloat16, torch.float32)], ids=str)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    packing, dtype = request.param
    return Bench(tmp_path, packing, dtype)


def fragment(bench: Bench) -> None:
    """Leave too few pages behind the last adapter, and enough in all, for the one of rank 40."""
    for slot in (1, 2, 3):
        bench.load(slot, 0 if slot == 2 else 2)
    bench.reserved.num_pages = bench.single.num_pages = (
        sum(adapter.num_pages for adapter in bench.single.table.adapters().values()) + 1
    )
    # The rest of the memory is not there.
    runs = bench.reserved._arena.runs if bench.reserved._arena else None
    assert runs is not None
    runs.num_pages = bench.reserved.num_pages
    bench.remove(2)


def test_an_adapter_of_its_own_lies_in_one_piece_in_the_order_of_modules(bench: Bench) -> None:
    bench.load(1, 1)
    adapter = bench.single.table.get(1)
    assert adapter is not None
    in_order = [part for _, part in sorted(adapter.parts.items())]
    placed = [each for part in in_order for each in tensors_of(part) if each is not None]
    assert len(placed) >= 3 * len(SHAPES)
    for one, following in pairwise(placed):
        assert 0 <= following.data_ptr() - one.data_ptr() - one.nbytes < 64


def test_adapters_are_moved_together_for_one_that_fits_in_all(bench: Bench) -> None:
    fragment(bench)
    before = bench.reserved.table.versions.copy()
    bench.load(2, 0)
    assert bench.is_right()
    bench.remove(2)
    bench.remove(1)
    bench.load(2, 2)
    bench.load(4, 4)
    assert bench.is_right()
    places = [run_of(each) for each in bench.reserved.table.adapters().values()]
    assert len({page for run in places for page in range(run.first, run.end)}) == sum(
        run.size for run in places
    )
    assert bench.reserved.table.versions[3] == before[3], "its sequences go on"


def test_an_adapter_leaves_its_pages_to_the_next_one_in_its_slot(bench: Bench) -> None:
    bench.load(1, 3)
    bench.load(2, 0)
    pages = sum(each.num_pages for each in bench.single.table.adapters().values())
    for store in (bench.reserved, bench.single):
        store.num_pages = pages
    arena = bench.reserved._arena
    assert arena is not None
    arena.runs.num_pages = pages
    with pytest.raises(AdapterMemoryFull):
        bench.reserved.read(3, bench.digests[4])
    bench.load(1, 1)
    assert bench.is_right()
    bench.load(1, 3)
    assert bench.is_right()


def test_pages_of_a_discarded_adapter_are_free_again(bench: Bench) -> None:
    store = bench.reserved
    assert store._arena is not None
    free = store._arena.runs.num_free
    store.discard(1, store.read(1, bench.digests[3]))
    assert store._arena.runs.num_free == free
    bench.load(1, 3)
    assert bench.is_right()


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (AdapterTable, "move", None),
        (AdapterArena, "_move", lambda self, source, target: None),
    ],
)
def test_a_forgotten_move_is_detected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fault: Callable[..., None] | None,
) -> None:
    bench = Bench(tmp_path, "slices", torch.float32)
    for slot in (1, 2, 3):
        bench.load(slot, slot)
    bench.remove(1)
    assert bench.is_right()
    arena = bench.reserved._arena
    assert arena is not None
    moved: list[int] = []
    monkeypatch.setattr(owner, name, fault or (lambda self, slot, adapter: moved.append(slot)))
    bench.reserved._make_room(arena, 4, 1)
    if fault is None:
        # The addresses of before hold what has moved over them.
        assert moved == [2, 3]
    assert not bench.is_right()


def test_a_discarded_load_does_not_free_the_pages_of_the_next_one(tmp_path: Path) -> None:
    base, cache = save_tiny(tmp_path / "model", "llama"), tmp_path / "cache"
    digests = [
        write_canonical(make_adapter(base, seed=seed, r=8, target_modules=["q_proj"]), cache)
        for seed in range(3)
    ]
    store = load_adapted(tmp_path / "model", cache, PlainKernels(deterministic=True)).store
    store.resize(2, 1)
    given_up = store.read(1, digests[0])
    following = store.read(1, digests[1])
    store.discard(1, given_up)
    store.put(1, following)
    with pytest.raises(AdapterMemoryFull):
        store.read(2, digests[2])
    store.clear()
    assert not store.holds(1, digests[1])
    store.put(2, store.read(2, digests[2]))
    assert store.holds(2, digests[2])
