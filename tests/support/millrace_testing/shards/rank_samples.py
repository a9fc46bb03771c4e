"""Samples of a rank with every kind of parameters in one batch."""

from __future__ import annotations

from pathlib import Path

import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_testing.engines.steps import SAMPLING, Stepper, beside
from millrace_testing.models.models import prompt_of

NUM_STEPS = 6
Outcome = tuple[list[int], list[float]]


def sample_on_a_rank(group: ProcessGroup, folder: Path) -> Outcome:
    """Ids and log probabilities of the checkpoint in `folder`; one row per entry of `SAMPLING`, admitted one by one."""
    kernels = PlainKernels(deterministic=True)
    with torch.inference_mode():
        model = load_model(
            folder, dtype=torch.float32, kernels=kernels, group=group, device=torch.device("cpu")
        )
    stepper = Stepper(model, kernels, dtype=torch.float32)
    results = [
        stepper.run(beside(stepper.admission(slot, prompt_of(9, seed=slot), **fields), range(slot)))
        for slot, fields in enumerate(SAMPLING.values())
    ]
    results += [stepper.decode(range(len(SAMPLING))) for _ in range(NUM_STEPS)]
    ids = [id_ for result in results for id_ in result.ids.tolist()]
    return ids, [score for result in results for score in result.logprobs.tolist()]
