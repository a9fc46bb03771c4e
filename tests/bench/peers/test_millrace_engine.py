"""Our engine without HTTP and gRPC: the tokens are those of transformers on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench.harness.checkpoints import Shape, write_checkpoint
from bench.peers.engines import SHARD_FLAGS
from bench.peers.millrace_engine import MillraceEngine, load
from bench.peers.worker import Limits, Request
from transformers import AutoModelForCausalLM

SHAPE = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=18_600,
)
LIMITS = Limits(max_streams=4, max_tokens=64, kv_tokens=256, threads=1)
REQUESTS = [Request(list(range(500 + 7 * n, 505 + 9 * n)), 3 + n) for n in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, SHAPE, seed=3)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[MillraceEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARD_FLAGS, "--disable-custom-kernels --dtype float32 --kv-memory 16MiB")
        engine = load(checkpoint, LIMITS)
    yield engine
    engine.close()


@pytest.mark.parametrize("concurrency", [1, 3, 5])
def test_every_request_gets_its_tokens_in_order(engine: MillraceEngine, concurrency: int) -> None:
    moments = engine.run(REQUESTS, concurrency)
    assert [len(m.arrivals) for m in moments] == [3, 4, 5, 6, 7]
    assert all(m.due < m.arrivals[0] and m.arrivals == sorted(m.arrivals) for m in moments)


def test_the_tokens_are_the_models(engine: MillraceEngine, checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = []
    for request in REQUESTS:
        ids = torch.tensor([request.ids])
        tokens = model.generate(
            ids,
            max_new_tokens=request.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(tokens[0, len(request.ids) :].tolist())
    assert engine.generate(REQUESTS, 5) == expected
