"""Our KV-cache events in the index of Dynamo's routers."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from tests.ecosystem import prepare

from millrace_router.kv_events.recorder import EventRecorder
from millrace_testing.kv_events.cache_life import BLOCK_SIZE, CacheLife

pytestmark = pytest.mark.ecosystem

PROGRAM = Path(__file__).with_name("radix_tree.py")
NUM_OPERATIONS = 3000


def test_dynamos_radix_tree_agrees_with_our_cache() -> None:
    python = prepare.interpreter("dynamo")
    if python is None:
        pytest.skip(
            "ai-dynamo-runtime is not installed: make test-all SUITE=ecosystem installs it where it may"
        )
    recorder, choose = EventRecorder(BLOCK_SIZE), random.Random(3)
    # The tree does not tell adapters apart: it finds tokens alone.
    life = CacheLife(recorder, seed=3, adapters=(None,))
    with subprocess.Popen(
        [python, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tree:
        assert tree.stdin is not None
        assert tree.stdout is not None
        tree.stdin.write(json.dumps({"block_size": BLOCK_SIZE}) + "\n")
        num_found = 0
        for number in range(NUM_OPERATIONS):
            life.step()
            batch = recorder.take()
            if batch is not None:
                tree.stdin.write(json.dumps({"events": batch[1]}) + "\n")
            if number % 20:
                continue
            known = {tokens for _, tokens in life.contents()}
            asked = [choose.choice((1, 1, 1, 2)) for _ in range(6 * BLOCK_SIZE)]
            if known and number % 40:
                asked = list(choose.choice(sorted(known))) + asked
            tree.stdin.write(json.dumps({"find": asked}) + "\n")
            tree.stdin.flush()
            expected = 0
            while tuple(asked[: (expected + 1) * BLOCK_SIZE]) in known:
                expected += 1
            assert int(tree.stdout.readline()) == expected, number
            num_found += expected
        tree.stdin.close()
    assert num_found > 20
