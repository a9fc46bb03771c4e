"""gpt-oss with experts in MXFP4, against the class of transformers with the numbers that the codes stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_experts import TiledExperts
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import (
    Run,
    assert_scores_as,
    logprobs,
    prompt_of,
    read_driver,
    save_tiny,
)
from millrace_testing.quantized.checkpoints import save_mxfp4
from millrace_testing.shards.ranks import run_ranks

PROMPTS = [prompt_of(length, seed=length) for length in (5, 40)]
NUM_TOKENS = 3


def generate(
    folder: Path, group: ProcessGroup | None = None, *, quantize: str | None = None
) -> list[Run]:
    with torch.inference_mode():
        driver = read_driver(folder, group=group, quantize=quantize)
        return driver.generate(PROMPTS, NUM_TOKENS, chunk=16)


def on_a_rank(group: ProcessGroup, folder: Path) -> list[Run]:
    torch.set_num_threads(1)
    return generate(folder, group)


def test_logits_match_transformers(tmp_path: Path) -> None:
    assert_scores_as(save_mxfp4(tmp_path), PROMPTS, generate(tmp_path))


def test_two_ranks_cut_the_channels_of_experts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference = save_mxfp4(folder)
    for runs in run_ranks(tmp_path, 2, on_a_rank, folder):
        assert_scores_as(reference, PROMPTS, runs)


@pytest.mark.parametrize("integer", [False, True])
def test_the_compiled_operator_of_experts_multiplies_the_codes(
    integer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    save_mxfp4(quantized).save_pretrained(plain)
    kernels = make_kernels("cpu", deterministic=True)
    assert isinstance(kernels, CpuKernels)
    kernels.integer = integer
    packed_bytes = []
    init = TiledExperts.__init__

    def counting(self: TiledExperts, weights: ExpertsWeights, *, integer: bool = False) -> None:
        init(self, weights, integer=integer)
        packed_bytes.append(sum(each.nbytes for each in self._weights))

    result = []
    for folder in (quantized, plain):
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(TiledExperts, "__init__", counting)
            driver = read_driver(folder, kernels, dtype=torch.bfloat16)
            runs = driver.generate(PROMPTS, NUM_TOKENS)
        result.append([logprobs(run)[0] for run in runs])
    # The numbers of the codes are exact in bfloat16, so only the order of sums differs, and what int8 rounds.
    for ours, theirs in zip(*result, strict=True):
        assert (ours - theirs).square().mean().sqrt() < (0.1 if integer else 0.02)
    headers = 2 * 8 * 1216
    layers = 6
    for coded, dense in zip(
        packed_bytes[-2 * layers : -layers], packed_bytes[-layers:], strict=True
    ):
        assert coded - headers < dense * 4.5 / 16 + 1


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_are_quantised_at_load(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, hidden_size=64, intermediate_size=64)
    plain, quantized = (
        logprobs(generate(tmp_path, quantize=quantize)[1])[0] for quantize in (None, "eetq")
    )
    distance = (plain - quantized).square().mean().sqrt()
    assert 0 < distance < 0.5
