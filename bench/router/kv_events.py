"""The router's CPU time a prompt token with and without KV-cache events, in turn."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from threading import Thread

import zmq
from tokenizers import Tokenizer

from bench.router.event_counter import count_streams
from bench.router.rig import Rig, request, rig

NUM_WORDS = 900
OUTPUT_TOKENS = 2
VARIANTS = ("no events", "events", "with a subscriber")


def kv_events(options: argparse.Namespace) -> None:
    """Compare prompts that share nothing, with no events, with events, and with events that somebody reads."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    num_tokens = options.rounds * sum(
        len(tokenizer.encode(text).ids) for text in prompts(options.streams, first=options.streams)
    )
    runs: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.repeats):
        for name in VARIANTS:
            with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
                address = f"ipc://{folder}/events"
                flags = [f"--max-batch-size={options.streams}"]
                flags += [] if name == VARIANTS[0] else [f"--kv-events={address}"]
                reader = subscriber(address) if name == VARIANTS[2] else nullcontext()
                with rig(options, flags=flags) as at, reader:
                    runs[name].append(1e6 * cpu_seconds(at, options) / num_tokens)
    base = runs[VARIANTS[0]]
    print(f"\nrouter CPU, {num_tokens} prompt tokens a run, blocks of 16")
    print("| router | µs a prompt token (each run) | more than without |\n|---|---|--:|")
    for name, each in runs.items():
        more = median(
            with_events - without for with_events, without in zip(each, base, strict=True)
        )
        shown = " ".join(f"{run:.2f}" for run in each)
        print(f"| {name} | **{median(each):.2f}** ({shown}) | {more:+.2f} |", flush=True)


def cpu_seconds(at: Rig, options: argparse.Namespace) -> float:
    """Return the CPU seconds that the router spends on prompts whose blocks are not cached."""
    send(at, prompts(options.streams, first=0))
    before = at.cpu_seconds()
    for turn in range(1, options.rounds + 1):
        send(at, prompts(options.streams, first=turn * options.streams))
    return at.cpu_seconds() - before


def prompts(count: int, *, first: int) -> list[str]:
    """Prompts that differ from their beginning on, numbered from `first`."""
    return [f"{number} " + "water " * NUM_WORDS for number in range(first, first + count)]


def send(at: Rig, texts: Sequence[str]) -> None:
    """Have all of them computed at once."""
    asked = [request("generate_stream", OUTPUT_TOKENS, prompt=text) for text in texts]
    counted = asyncio.run(count_streams(at.port, asked, rounds=1))
    if counted.events != OUTPUT_TOKENS * len(texts):
        raise SystemExit(f"{counted.events} events, expected {OUTPUT_TOKENS * len(texts)}")


@contextmanager
def subscriber(address: str) -> Iterator[None]:
    """Read all events in a thread of this process."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.SUBSCRIBE, b"")
        socket.set(zmq.RCVTIMEO, 100)
        socket.connect(address)
        ended = False

        def read() -> None:
            while not ended:
                try:
                    socket.recv_multipart()
                except zmq.Again:
                    continue

        thread = Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            ended = True
            thread.join()
