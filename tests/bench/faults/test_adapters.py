"""The adapters of a campaign: right ones are accepted, every corrupt one is refused, and versions differ."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from bench.faults.adapters import (
    CHANGING,
    CORRUPTIONS,
    LATE,
    NUM_PAGES,
    OVERWRITTEN,
    SHELVED,
    STEADY,
    WHOLE,
    Adapters,
)
from bench.harness.paths import DEMO

from millrace.verify.adapter_files import linears
from millrace_router.request.adapter import PAGE_BYTES, RANKS_PER_SLICE, AdapterModule
from millrace_testing.adapters.fetch_jobs import fetch_folder

MODULES = [
    AdapterModule(
        name=name,
        inputs=inputs,
        outputs=outputs,
        bytes_per_slice=2 * RANKS_PER_SLICE * (inputs + outputs),
    )
    for name, (outputs, inputs) in linears(DEMO).items()
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def fetch(folder: Path) -> dict[str, Any]:
    return fetch_folder(folder, folder.parent / "cache", MODULES)


def folders(adapters: Adapters) -> list[Path]:
    return [
        *(adapters.steady(name) for name in STEADY),
        *(adapters.version(name, version) for name in CHANGING for version in (0, 1)),
        *(adapters.root / name for name in (SHELVED, WHOLE, *LATE)),
    ]


def test_all_are_different(adapters: Adapters) -> None:
    digests = [fetch(folder)["digest"] for folder in folders(adapters)]
    assert len(set(digests)) == len(digests)


def test_memory_has_room_for_some_of_them(adapters: Adapters) -> None:
    slices = {one.name: one.bytes_per_slice for one in MODULES}

    def num_bytes(folder: Path) -> int:
        return sum(
            slices[name] * -(-rank // RANKS_PER_SLICE) for name, rank, _ in fetch(folder)["modules"]
        )

    memory = NUM_PAGES * PAGE_BYTES
    assert sum(map(num_bytes, map(adapters.steady, STEADY))) > memory
    assert memory - 3 * PAGE_BYTES < num_bytes(adapters.root / WHOLE) <= memory


def test_an_overwritten_folder_has_the_version(adapters: Adapters) -> None:
    live = adapters.steady(OVERWRITTEN)
    for version in (1, 0):
        adapters.overwrite(version)
        assert fetch(live)["digest"] == fetch(adapters.version(OVERWRITTEN, version))["digest"]


def test_every_corrupt_adapter_is_refused(adapters: Adapters) -> None:
    drawing, seen = random.Random(0), set()
    for number in range(8 * len(CORRUPTIONS)):
        wrong = adapters.corrupt(f"corrupt-{number}", drawing)
        answer = fetch(adapters.root / f"corrupt-{number}")
        assert answer["error"] == "invalid", wrong
        seen.add(wrong)
    assert seen == set(CORRUPTIONS)
