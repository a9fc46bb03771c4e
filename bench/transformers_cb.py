"""The peer: `transformers`' continuous batching on the same checkpoint, prompts and lengths.

Runs as a program of its own (`python -m bench.transformers_cb`), so that its threads and its
memory are gone when our server is measured. Tokens are stamped where the manager hands them over,
without HTTP: what the peer would lose to a server in front of it is not counted against it.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import psutil
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.levels import Level
from bench.machine import CpuMeter
from bench.measurement import Measurement, Timeline, summarise
from bench.serve import WARM_UP

NAME = "transformers"
PAGE_SIZE = 64
NO_TOKEN = -1
STEP_SECONDS = 120.0


class PeerError(Exception):
    """The peer failed; the message is its own."""


class Output(Protocol):
    """What the peer's manager says of one request after a step."""

    request_id: str
    generated_tokens: list[int]
    error: str | None

    def is_finished(self) -> bool:
        """Whether this is the request's last output."""


class Manager(Protocol):
    """The part of the peer's manager that a level uses."""

    def add_request(
        self,
        input_ids: list[int],
        request_id: str,
        max_new_tokens: int,
        *,
        streaming: bool,
        eos_token_id: int,
    ) -> str:
        """Queue a request; its name comes back."""

    def get_result(self, *, timeout: float) -> Output | None:
        """The next output of any request, None after the timeout."""


def measure_levels(model: Path, levels: Sequence[Level], *, log: Path) -> list[Measurement]:
    """Run the peer in a subprocess through the closed-loop levels; raises PeerError."""
    wanted = [asdict(level) for level in levels if level.concurrency is not None]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        answer = subprocess.run(
            [sys.executable, "-m", "bench.transformers_cb", str(model), json.dumps(wanted)],
            stdout=subprocess.PIPE,
            stderr=output,
            check=False,
        )
    if answer.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise PeerError(f"ended with {answer.returncode}:\n{end}")
    last_line = answer.stdout.decode().strip().splitlines()[-1]
    return [Measurement.from_json(value) for value in json.loads(last_line)]


def _blocks_for(levels: Sequence[Level]) -> int:
    """Enough pages for the largest level to run whole, with slack for growth."""
    pages = [
        (level.concurrency or 1) * (-(-(level.prompt_tokens + level.new_tokens) // PAGE_SIZE) + 1)
        for level in levels
    ]
    return max(pages) + 16


def run_levels(model: Path, levels: Sequence[Level]) -> Iterator[Measurement]:
    """One manager for all levels, after the same warm-up as our own server."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=_blocks_for([WARM_UP, *levels]),
        max_batch_tokens=4096,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    with loaded.eval().continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        _run_level(manager, tokenizer, WARM_UP)
        for level in levels:
            meter = CpuMeter(list[psutil.Process])
            timelines = _run_level(manager, tokenizer, level)
            use = meter.stop()
            yield replace(summarise(NAME, level, timelines), other_cores=use.other_cores)


def _run_level(manager: Manager, tokenizer: Tokenizer, level: Level) -> list[Timeline]:
    """Keep `concurrency` requests in flight until all have ended."""
    prompts = [tokenizer.encode(text).ids for text in level.prompts()]
    timelines: dict[str, Timeline] = {}

    def submit() -> None:
        due = time.perf_counter()
        name = manager.add_request(
            prompts[len(timelines)],
            f"{level.name}/{len(timelines)}",
            level.new_tokens,
            streaming=True,
            eos_token_id=NO_TOKEN,
        )
        timelines[name] = Timeline(due)

    for _ in range(min(level.concurrency or 1, len(prompts))):
        submit()
    num_running = len(timelines)
    while num_running:
        output = manager.get_result(timeout=STEP_SECONDS)
        if output is None:
            raise PeerError(f"level {level.name}: no token within {STEP_SECONDS:.0f} s")
        if output.error:
            raise PeerError(f"level {level.name}: {output.error}")
        timeline = timelines[output.request_id]
        arrived = len(output.generated_tokens) - len(timeline.arrivals)
        timeline.arrivals += [time.perf_counter()] * arrived
        if output.is_finished():
            num_running -= 1
            if len(timelines) < len(prompts):
                submit()
                num_running += 1
    wrong = [len(t.arrivals) for t in timelines.values() if len(t.arrivals) != level.new_tokens]
    if wrong:
        raise PeerError(f"level {level.name}: asked for {level.new_tokens} tokens, got {wrong}")
    return list(timelines.values())


def main() -> None:
    """`MODEL LEVELS-AS-JSON`; prints the measurements as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("levels", type=json.loads)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    levels = [Level(**value) for value in options.levels]
    print(json.dumps([m.as_json() for m in run_levels(options.model, levels)]))


if __name__ == "__main__":
    main()
