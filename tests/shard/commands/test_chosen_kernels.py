"""What the log says of the flags that choose kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from millrace_shard.commands.chosen_kernels import chosen_kernels
from millrace_shard.commands.device_settings import choose_dtype
from millrace_shard.config import ShardConfig
from millrace_testing.models.models import CPU, save_tiny

INT8 = "--quantize-activations=int8"
ROUNDED = "activations are rounded to int8 where the weights are quantised to integers"
NO_EFFECT = "--quantize-activations int8 has no effect"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((INT8, "--quantize=int4"), ROUNDED),
        ((INT8, "--dtype=float32"), NO_EFFECT),
        ((INT8, "--disable-custom-kernels"), NO_EFFECT),
        (("--quantize=int4",), ROUNDED),
        (("--quantize=int8",), "int8, and activations are too"),
        (("--quantize=int8", "--quantize-activations=exact"), "activations keep the model's dtype"),
    ],
)
def test_what_activations_are(
    flags: tuple[str, ...], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama")
    dtype = () if any("dtype" in flag for flag in flags) else ("--dtype=bfloat16",)
    config = ShardConfig.from_args([str(tmp_path), *dtype, *flags])
    with caplog.at_level(logging.INFO):
        chosen_kernels(config, CPU, choose_dtype(config, CPU))
    assert sum(told in record.message for record in caplog.records) == 1
