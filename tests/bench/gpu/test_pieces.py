"""Without a GPU the capture stage has small pieces alone; on a GPU it has those that users get."""

from __future__ import annotations

import pytest
import torch
from bench.gpu.engine.kernels import INTERPRETED_TOKEN_COUNTS, few_pieces

from millrace_shard.model_runner import piecewise_layers


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pieces_are_few_on_cpu_alone(device: str) -> None:
    served = piecewise_layers.TOKEN_COUNTS
    assert len(INTERPRETED_TOKEN_COUNTS) < len(served)
    with few_pieces(torch.device(device)):
        found = piecewise_layers.TOKEN_COUNTS
    assert found == (INTERPRETED_TOKEN_COUNTS if device == "cpu" else served)
    assert served == piecewise_layers.TOKEN_COUNTS
