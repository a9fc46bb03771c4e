"""The shipped EAGLE-3 head is small, and at its best more than doubles the tokens of a step on chats."""

from __future__ import annotations

import pytest
import torch
from demo import corpus, measure, vocabulary
from demo.train_head import HEAD
from tokenizers import Tokenizer

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.speculation.loading import SpeculationLoader
from millrace_testing.engines.multi_token import Generation, Want
from millrace_testing.engines.steps import MAX_TOKENS, Stepper
from millrace_testing.models.models import CPU, read_model

LARGEST = 2_500_000
NUM_QUESTIONS, MOST_PROMPT, MOST = 24, 48, 4


def prompts() -> list[list[int]]:
    """Held-back questions of chats, in tokens."""
    tokenizer = Tokenizer.from_file(str(measure.MODEL / "tokenizer.json"))
    held_back = corpus.generate(measure.SEED, size=0).held_back
    texts = [vocabulary.prompt(each) for each in measure.sample(held_back, 200)]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [each for each in ids if len(each) <= MOST_PROMPT][:NUM_QUESTIONS]


def test_the_head_is_small() -> None:
    assert sum(path.stat().st_size for path in HEAD.iterdir()) <= LARGEST


@pytest.mark.long
def test_the_head_yields_two_tokens_a_step_on_chats_and_changes_none() -> None:
    kernels = PlainKernels(deterministic=True)
    with torch.inference_mode():
        model = read_model(measure.MODEL, kernels)
        loader = SpeculationLoader(
            folder=measure.MODEL,
            dtype=torch.float32,
            kernels=kernels,
            group=ProcessGroup.single(),
            device=CPU,
        )
        tapped, speculation = loader.load(model, draft_folder=HEAD, max_draft_tokens=MOST)
    plain = Stepper(model, kernels, dtype=torch.float32)
    drafting = Stepper(tapped, kernels, dtype=torch.float32, speculation=speculation)
    (end,) = model.info.eos_token_ids
    num_tokens = num_steps = 0
    for prompt in prompts():
        most = MAX_TOKENS - len(prompt) - 1
        expected = Generation(plain, {0: Want(prompt)}, most).yielded[0].ids
        length = expected.index(end) + 1 if end in expected else most
        run = Generation(drafting, {0: Want(prompt)}, length, allow=lambda _: (1 + MOST, MOST))
        assert run.yielded[0].ids == expected[:length]
        num_tokens += length - 1
        # The first step computes the prompt.
        num_steps += run.steps - 1
    assert num_tokens >= 2 * num_steps
