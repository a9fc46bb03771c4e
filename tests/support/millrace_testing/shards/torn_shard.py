"""`python -m millrace_shard`, which kills itself in a chosen place.

While the file MILLRACE_TEST_TORN exists, which names the place, a shard that comes there removes the file and dies:
`hand-out`, after blocks were given to their requests and before they are cleared; `clear`, after that; `forward`, at
some moment within a forward pass; `answer`, when a step is computed and not answered; `nan`, there too, with NaN at all
positions behind the computed ones; `seal`, when a block has a key and not the state that says so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence, Sized
from random import Random

import numpy as np
import torch

from millrace_shard.__main__ import main
from millrace_shard.arrays import Ints
from millrace_shard.engine.engine import Engine
from millrace_shard.kernels import kv_store
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.model_runner.runner import StepRunner
from millrace_testing.places import die, wrap

LONGEST_SECONDS = 0.004
"""Within which a `forward` is killed, about the length of a step of the demo model."""


def install() -> None:
    """Let the methods of this process come by their places."""
    wrap(KVStore, "hand_out", "hand-out", has_blocks, die, is_after=True)
    wrap(StepRunner, "_clear_blocks", "clear", has_blocks, die, is_after=True)
    wrap(StepRunner, "_forward", "forward", lambda *_: True, die_soon)
    wrap(Engine, "_answer", "answer", computes, die)
    wrap(Engine, "_answer", "nan", computes, spoil)
    wrap(KVStore, "seal", "seal", has_blocks, seal_in_part)


def has_blocks(_: object, blocks: Sized, *__: object) -> bool:
    """Whether the method is called for any block."""
    return len(blocks) > 0


def computes(engine: Engine, *_: object) -> bool:
    """Whether there are sequences, so that the next answer is that of a step."""
    return engine._warmed_up is not None and len(engine._warmed_up.runner.batch) > 0


def spoil(engine: Engine, *_: object) -> None:
    """Write NaN to the rest of the last block of every sequence, and die."""
    assert engine._warmed_up is not None
    runner = engine._warmed_up.runner
    batch, size = runner.batch, runner.batch.limits.block_size
    for slot in np.flatnonzero(batch.slots._in_use).tolist():
        computed = int(batch.sequences.num_computed(np.array([slot]))[0])
        positions = np.arange(computed, len(batch.blocks.of(slot)) * size)
        rows = torch.from_numpy(batch.blocks.cache_rows(np.full_like(positions, slot), positions))
        for layer in runner._cache:
            shape = (len(rows), layer.keys.shape[1], layer.keys.shape[3])
            nan = torch.full(shape, torch.nan, dtype=runner._dtype)
            torch.ops.millrace.store(nan, nan, rows, layer.tensors)
    die()


def seal_in_part(store: KVStore, blocks: Ints, keys: Sequence[bytes]) -> None:
    """Write the keys and die, as if between them and the states."""
    raw = np.frombuffer(b"".join(keys), np.uint8)
    store._entries["key"][blocks] = raw.reshape(-1, kv_store.KEY_BYTES)
    die()


def die_soon(*_: object) -> None:
    """Die within the forward pass that begins now."""
    threading.Thread(target=_die_after, args=(Random().uniform(0, LONGEST_SECONDS),)).start()


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    die()


if __name__ == "__main__":
    install()
    sys.exit(main())
