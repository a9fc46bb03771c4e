"""A few thousand mutated files; `make test-all SUITE=fuzz` tries more."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from millrace_testing.adapters.fuzz_files import WEIGHTS, AdapterFuzz, check_header
from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_llama
from millrace_testing.mutations import mutated_file


@pytest.mark.parametrize("seed", range(4))
def test_mutated_headers(seed: int, tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["q_proj"], r=2)
    data, random_ = (tmp_path / WEIGHTS).read_bytes(), random.Random(seed)
    taken = Counter(check_header(mutated_file(data, random_)) for _ in range(1000))
    assert taken[True] > 20
    assert taken[False] > 500


@pytest.mark.parametrize("seed", range(2))
def test_mutated_adapters(seed: int, tmp_path: Path) -> None:
    save_adapter(tmp_path / "good", target_modules=["q_proj"], r=2)
    fuzz = AdapterFuzz(tmp_path / "good", modules_of(tiny_llama()), tmp_path)
    random_ = random.Random(seed)
    for check, count in ((fuzz.check, 1000), (fuzz.fetch, 100)):
        kinds = Counter(check(random_) for _ in range(count))
        assert kinds["taken"] > count / 20
        assert kinds["invalid"] > count / 10
