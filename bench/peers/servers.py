"""The servers that are compared over HTTP, and how each starts on one of our checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.machine import CAPABILITY
from bench.harness.paths import PEERS_FOLDER
from bench.harness.server import RunningServer, free_port, running, serving
from bench.peers.dialects import LLAMA, VLLM
from bench.peers.engines import OURS, gguf_model, vllm_environment
from bench.peers.worker import Limits

OUR_FLAGS = ("--prefix-caching=off",)
"""The launcher's defaults without the prefix cache, because each repetition sends the same prompts."""

Start = Callable[[Path, Limits, Path, Sequence[str]], AbstractContextManager[RunningServer]]
"""Starts a server from a checkpoint, its limits, a log and more flags for ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server."""

    name: str
    program: Path | None
    """The program that must exist; None for ours."""
    start: Start

    @property
    def is_installed(self) -> bool:
        """Whether its program exists."""
        return self.program is None or self.program.exists()


HELD = {"avx2": {CAPABILITY: "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}
"""By instruction set: the environment that holds torch, our kernels and oneDNN to it."""


def hold_to(instruction_set: str | None) -> None:
    """Start this program again, with the same arguments, in the environment that holds it to an instruction set.

    torch reads its environment once. Returns where there is nothing to change.
    """
    held = HELD.get(instruction_set or "", {})
    if held.items() - os.environ.items():
        os.execve(sys.executable, sys.orig_argv, os.environ | held)


HELP = "hold our server and llama.cpp (`bench/peers/install.sh llama-avx2`) to it"


def start_ours(
    model: Path,
    limits: Limits,
    log: Path,
    flags: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[RunningServer]:
    """The launcher."""
    del limits
    return serving(model, log=log, flags=(*OUR_FLAGS, *flags), environment=environment)


def start_vllm(
    model: Path, limits: Limits, log: Path, flags: Sequence[str]
) -> AbstractContextManager[RunningServer]:
    """The OpenAI server of vLLM as a module, because its command fails: it looks for a package of another name."""
    del flags
    port = free_port()
    command = [
        str(PEERS_FOLDER / "vllm" / "bin" / "python"),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model.absolute()}",
        "--served-model-name=bench",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=bfloat16",
        f"--max-model-len={limits.max_tokens}",
        f"--max-num-seqs={limits.max_streams}",
        f"--max-num-batched-tokens={max(4096, limits.max_tokens)}",
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--disable-uvicorn-access-log",
    ]
    environment = {**vllm_environment(), "HF_HUB_OFFLINE": "1"}
    return running(command, port=port, log=log, environment=environment, dialect=VLLM)


def start_llama(
    model: Path,
    limits: Limits,
    log: Path,
    flags: Sequence[str],
    *,
    folder: Path = PEERS_FOLDER / "llama",
) -> AbstractContextManager[RunningServer]:
    """llama.cpp's server, of the build in `folder`, with a slot for each stream."""
    del flags
    port = free_port()
    command = [
        str(folder / "build" / "bin" / "llama-server"),
        f"--model={gguf_model(model)}",
        "--host",
        "127.0.0.1",
        f"--port={port}",
        f"--threads={limits.threads}",
        f"--threads-batch={limits.threads}",
        f"--parallel={limits.max_streams}",
        f"--ctx-size={limits.max_streams * limits.max_tokens}",
        "--cache-ram",
        "0",
        "--no-webui",
    ]
    command = [part for flag in command for part in flag.split("=", 1)]
    return running(command, port=port, log=log, environment={}, dialect=LLAMA)


SERVERS = (
    Server(name=OURS, program=None, start=start_ours),
    Server(name="vllm", program=PEERS_FOLDER / "vllm" / ".installed", start=start_vllm),
    Server(name="llama.cpp", program=PEERS_FOLDER / "llama" / ".installed", start=start_llama),
)


def servers_held_to(instruction_set: str | None) -> tuple[Server, ...]:
    """Our server and llama.cpp's, which can be held to an instruction set; with None, every server as it is."""
    if instruction_set is None:
        return SERVERS
    folder = PEERS_FOLDER / f"llama-{instruction_set}"
    return (
        Server(
            name=OURS,
            program=None,
            start=partial(start_ours, environment=HELD[instruction_set]),
        ),
        Server(
            name="llama.cpp",
            program=folder / ".installed",
            start=partial(start_llama, folder=folder),
        ),
    )
