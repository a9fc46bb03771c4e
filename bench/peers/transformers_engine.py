"""`transformers`' continuous batching. Runs in our own environment, with torch's own threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.peers.worker import Limits, Moments, Request, drive, main

PAGE_SIZE = 64
MAX_BATCHED_TOKENS = 4096
NO_TOKEN = -1
STEP_SECONDS = 120.0


class Output(Protocol):
    """The manager's output for one request after a step."""

    request_id: str
    generated_tokens: list[int]
    error: str | None

    def is_finished(self) -> bool:
        """Whether this is the request's last output."""


class Manager(Protocol):
    """The used part of the manager."""

    def add_request(
        self,
        input_ids: list[int],
        request_id: str,
        max_new_tokens: int,
        *,
        streaming: bool,
        eos_token_id: int,
    ) -> str:
        """Queue a request; returns its name."""

    def get_result(self, *, timeout: float) -> Output | None:
        """The next output of any request, None after the timeout."""


class TransformersEngine:
    """Feeds the manager, which runs the steps in its own thread, and reads its queue of outputs."""

    def __init__(self, running: ExitStack, manager: Manager) -> None:
        """`running` is a reference that keeps the manager's thread running."""
        self._running = running
        self._manager = manager
        self._num_seen: dict[str, int] = {}
        self._run = 0

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        """See `Engine.run`."""
        self._run += 1
        return drive(self, requests, concurrency)

    def add(self, number: int, request: Request) -> None:
        """See `Stepping.add`."""
        name = f"{self._run}/{number}"
        self._num_seen[name] = 0
        self._manager.add_request(
            request.ids, name, request.new_tokens, streaming=True, eos_token_id=NO_TOKEN
        )

    def step(self) -> Iterator[tuple[int, int, bool]]:
        """See `Stepping.step`; RuntimeError when a request failed or nothing came in time."""
        output = self._manager.get_result(timeout=STEP_SECONDS)
        if output is None:
            raise RuntimeError(f"no token within {STEP_SECONDS:.0f} s")
        if output.error:
            raise RuntimeError(output.error)
        num_new = len(output.generated_tokens) - self._num_seen[output.request_id]
        self._num_seen[output.request_id] += num_new
        has_ended = output.is_finished()
        if has_ended:
            del self._num_seen[output.request_id]
        yield int(output.request_id.partition("/")[2]), num_new, has_ended


def load(model: Path, limits: Limits) -> TransformersEngine:
    """A manager that runs until the process ends."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(limits.threads)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=limits.kv_tokens // PAGE_SIZE + 2 * limits.max_streams + 16,
        max_batch_tokens=max(MAX_BATCHED_TOKENS, limits.max_tokens),
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    running = ExitStack()
    manager: Manager = running.enter_context(
        loaded.eval().continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        )
    )
    return TransformersEngine(running, manager)


if __name__ == "__main__":
    main(load)
