"""`transformers`' `generate` on padded batches. Runs in our own environment, with torch's own threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from bench.peers.worker import Limits, Moments, Request, main

NO_TOKEN, PAD_TOKEN = -1, 0


class PaddedBatches:
    """Decodes each batch until its longest answer has ended; a request's tokens all count as arrived then."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        """See `Engine.run`; batches of `concurrency` requests, one after the other."""
        due, moments = time.perf_counter(), []
        for begin in range(0, len(requests), concurrency):
            batch = requests[begin : begin + concurrency]
            self.generate(batch)
            now = time.perf_counter()
            moments += [Moments(due, [now] * request.new_tokens) for request in batch]
        return moments

    def generate(self, batch: Sequence[Request]) -> Tensor:
        """Prompts and answers, (requests, padded prompt + longest answer); RuntimeError for another length."""
        ids, mask = left_padded([request.ids for request in batch])
        longest = max(request.new_tokens for request in batch)
        generation = GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=PAD_TOKEN
        )
        output = self._model.generate(ids, attention_mask=mask, generation_config=generation)
        assert isinstance(output, Tensor)
        if output.shape[1] != ids.shape[1] + longest:
            raise RuntimeError(f"asked for {longest} tokens, got {output.shape[1] - ids.shape[1]}")
        return output


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 (prompts, longest prompt)."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD_TOKEN)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def load(model: Path, limits: Limits) -> PaddedBatches:
    """The model in bfloat16."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(limits.threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return PaddedBatches(loaded.eval())


if __name__ == "__main__":
    main(load)
