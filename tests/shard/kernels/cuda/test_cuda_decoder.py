"""A decoder on the Triton kernels gives the tokens of transformers: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.models.load import load_model
from millrace_testing.models.models import Driver, greedy, logprobs, prompt_of, save_tiny

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda.operators import CudaKernels

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
    model = load_model(
        tmp_path,
        dtype=torch.float32,
        kernels=kernels,
        group=ProcessGroup.single(),
        device=DEVICE,
        max_total_tokens=None,
    )
    prompts = [prompt_of(length, seed=length) for length in (5, 18)]
    driver = Driver(model, kernels, dtype=torch.float32, device=DEVICE)
    runs = driver.generate(prompts, NUM_TOKENS, chunk=chunk)
    for prompt, run in zip(prompts, runs, strict=True):
        tokens, expected = greedy(reference, prompt, NUM_TOKENS)
        assert run.ids[len(prompt) :] == tokens
        torch.testing.assert_close(logprobs(run).cpu(), expected, atol=1e-4, rtol=0)
