"""A decoder on the Triton kernels gives the tokens of transformers: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_testing.models.models import (
    assert_generates_as,
    prompt_of,
    read_driver,
    save_tiny,
)

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda.operators import CudaKernels

pytestmark = pytest.mark.long
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOKENS = 3


@pytest.mark.parametrize(("deterministic", "chunk"), [(False, None), (True, 7)])
@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_greedy_output_equals_generate(
    model_type: str, deterministic: bool, chunk: int | None, tmp_path: Path
) -> None:
    windows: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    if model_type == "gpt_oss":
        windows = {"num_hidden_layers": 2}
    reference = save_tiny(tmp_path, model_type, head_dim=24, **windows)
    kernels = CudaKernels(deterministic=deterministic)
    prompts = [prompt_of(length, seed=length) for length in (5, 18)]
    driver = read_driver(tmp_path, kernels, device=DEVICE)
    assert_generates_as(reference, prompts, driver.generate(prompts, NUM_TOKENS, chunk=chunk))


@pytest.mark.parametrize(
    "model_type", ["qwen3_5_text", "falcon_h1", "lfm2", "kimi_linear", "deepseek_v3"]
)
def test_recurrent_layers_and_latents_generate_as_in_transformers(
    model_type: str, tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, model_type)
    prompts = [prompt_of(length, seed=length) for length in (5, 18)]
    driver = read_driver(tmp_path, CudaKernels(deterministic=True), device=DEVICE)
    assert_generates_as(reference, prompts, driver.generate(prompts, NUM_TOKENS, chunk=7))
