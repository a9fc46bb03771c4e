"""Greedy tokens of a trained checkpoint on the device, against `transformers` on the same device.

The demo model is in this repository; `--checkpoint` names one more, such as a published one. The engine generates, then
`transformers` computes each whole sequence at once and judges every token.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.gpu.checks.steps import MAX_ROWS, MAX_TOKENS, runner
from bench.gpu.engine.kernels import kernels_for
from bench.gpu.figures import Figure, check, unchecked
from bench.gpu.setting import Emit, Setting
from bench.harness.paths import DEMO
from millrace_shard.batch.sequence import Ids, Sequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.config import ShardConfig
from millrace_shard.model_runner.runner import StepRunner
from millrace_shard.models.description import ModelDescription

LENGTHS = (5, 17, 40, 64)
NEW_TOKENS, INTERPRETED_TOKENS = 32, 4
"""Tokens of each answer on a GPU, and in the interpreter."""
assert len(LENGTHS) <= MAX_ROWS
assert max(LENGTHS) + NEW_TOKENS < MAX_TOKENS
DTYPES = {"demo model": torch.float32, "checkpoint": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log probability. Two tokens that are closer may change places."""


@torch.inference_mode()
def run(setting: Setting, emit: Emit) -> None:
    """Emit a check for each checkpoint: the largest difference of a log probability."""
    for name, folder in (("demo model", DEMO), ("checkpoint", setting.checkpoint)):
        if folder is None:
            emit(unchecked(f"{name} against transformers", "--checkpoint names none"))
        else:
            emit(compared(name, folder, setting))


def compared(name: str, folder: Path, setting: Setting) -> Figure:
    """The difference of one checkpoint; infinite where a token is less likely than the best one."""
    dtype, device = DTYPES[name], setting.device
    config = ShardConfig.from_args([*setting.flags, str(folder)])
    layers = ModelDescription.read(folder).layer_shape(1)
    kernels = kernels_for(config, device, dtype, layers)
    ours = runner(folder, kernels, device, config, dtype=dtype)
    random = np.random.default_rng(0)
    prompts = [random.integers(1, ours.batch.limits.vocab_size, length) for length in LENGTHS]
    count = NEW_TOKENS if setting.is_cuda else INTERPRETED_TOKENS
    answers = generated(ours, prompts, count)
    del ours
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    largest, least = 0.0, 0.0
    for prompt, (ids, logprobs) in zip(prompts, answers, strict=True):
        whole = torch.tensor([[*prompt, *ids[:-1]]], device=device)
        expected = model(whole).logits[0, len(prompt) - 1 :].float().log_softmax(-1).cpu()
        difference, behind = judged(expected, ids, logprobs)
        largest, least = max(largest, difference), max(least, behind)
    return check(
        f"{name} against transformers, {str(dtype).removeprefix('torch.')}",
        max(largest, least),
        "largest difference of a log probability",
        {"model": folder.name, "tokens": len(LENGTHS) * count, "behind the best": least},
        most=TOLERANCE[dtype],
    )


def generated(
    ours: StepRunner, prompts: Items[Ids], count: int
) -> list[tuple[list[int], list[float]]]:
    """The ids and log probabilities of `count` greedy tokens after each prompt, all of them in one batch."""
    block_size = ours.batch.limits.block_size
    slots = np.arange(len(prompts))
    blocks = -(-(max(map(len, prompts)) + count + 1) // block_size)
    change = BatchChange(
        admitted=tuple(
            Sequence(slot=slot, request_id=slot, input_ids=ids) for slot, ids in enumerate(prompts)
        ),
        grown_slots=np.repeat(slots, blocks),
        grown_blocks=np.arange(len(prompts) * blocks) + 1,
    )
    lengths = np.array([len(ids) for ids in prompts])
    steps = [Forward(change=change, chunk_slots=slots, chunk_tokens=lengths)]
    steps += [Forward(decode_slots=slots)] * (count - 1)
    results = [ours.launch(step).finish() for step in steps]
    ids, logprobs = (
        np.stack(each) for each in zip(*((r.ids, r.logprobs) for r in results), strict=True)
    )
    return list(zip(ids.T.tolist(), logprobs.T.tolist(), strict=True))


def judged(expected: Tensor, ids: Items[int], logprobs: Items[float]) -> tuple[float, float]:
    """For the log probabilities [n, vocabulary] of `transformers`: how far ours differ, and how far tokens are behind.

    A token is behind by the log probability that the likeliest one has more.
    """
    chosen = expected.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    difference = (chosen - torch.tensor(logprobs)).abs().max()
    return float(difference), float((expected.amax(1) - chosen).max())
