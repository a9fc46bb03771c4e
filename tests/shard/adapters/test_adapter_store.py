"""Pages of adapters that are read on several threads while slots change."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_shard.errors import AdapterMemoryFull
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.models.adapters import load_adapted, make_adapter, write_canonical
from millrace_testing.models.models import save_tiny


def test_a_load_that_was_given_up_does_not_free_the_pages_of_the_next_one(tmp_path: Path) -> None:
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
