"""A server of the scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness.server import RunningServer, serving
from tests.ecosystem import prepare
from tests.ecosystem.agents.scripts import SCRIPTS

from millrace_testing.models.scripted import write_scripted_model

FLAGS = ["--dtype=float32", "--responses-store=16"]


@contextmanager
def scripted_server(folder: Path) -> Iterator[RunningServer]:
    """Serve the scripted model, whose files and log are in `folder`, for the length of the block."""
    tokenizer = prepare.ROOT / "demo" / "model" / "tokenizer.json"
    write_scripted_model(folder / "model", SCRIPTS, tokenizer=tokenizer, end="<|end|>")
    with serving(folder / "model", log=folder / "launcher.log", flags=FLAGS) as running:
        yield running
