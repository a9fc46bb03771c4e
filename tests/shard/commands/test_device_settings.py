"""Settings that follow from the checkpoint and the flags."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from millrace_shard.commands.device_settings import choose_dtype
from millrace_shard.config import ShardConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def checkpoint(folder: Path, model_type: str, dtype: torch.dtype) -> Path:
    """A folder with the config of a checkpoint in `dtype`."""
    config = AutoConfig.for_model(model_type)
    config.dtype = dtype
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "dtype", "device", "flags", "chosen", "is_warned"),
    [
        ("gemma2", torch.float16, CUDA, (), torch.float16, True),
        ("gemma2", torch.bfloat16, CUDA, ("--dtype=float16",), torch.float16, True),
        ("glm4", torch.float16, CUDA, (), torch.float16, True),
        ("gemma2", torch.float16, CPU, (), torch.bfloat16, False),
        ("gemma2", torch.float16, CUDA, ("--dtype=bfloat16",), torch.bfloat16, False),
        ("llama", torch.float16, CUDA, (), torch.float16, False),
    ],
)
def test_float16_is_warned_of_where_activations_exceed_it(
    model_type: str,
    dtype: torch.dtype,
    device: torch.device,
    flags: tuple[str, ...],
    chosen: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    is_warned: bool,
) -> None:
    folder = checkpoint(tmp_path / "model", model_type, dtype)
    config = ShardConfig.from_args([str(folder), *flags])
    with caplog.at_level(logging.WARNING):
        assert choose_dtype(config, device) is chosen
    told = [model_type in record.message for record in caplog.records]
    assert told == ([True] if is_warned else [])
