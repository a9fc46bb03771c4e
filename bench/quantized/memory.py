"""`python -m bench.quantized.memory`: the shard's memory over time while it loads a checkpoint in each format.

Memory that the kernel cannot take back is anonymous and shared memory; pages of mapped files are shown apart. The
bound is the file, the KV cache and 700 MB. `--record` writes the figures to bench/results and the chart to docs/images.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import IMAGES_FOLDER
from bench.harness.record import Record
from bench.harness.server import ServerError, free_port, serving
from bench.harness.tables import markdown
from bench.quantized.formats import FORMATS, ensure_format, file_bytes
from bench.startup import KV_TOKENS, kv_bytes
from millrace.charts.lines import Panel, curves

MB = 1_000_000
ALLOWED_BYTES = 700 * MB
"""Above the file and the KV cache."""
SAMPLE_SECONDS = 0.02
SHARD = "millrace_shard"


@dataclass(slots=True)
class Memory:
    """Samples of one process."""

    seconds: list[float] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    """Anonymous and shared memory."""
    file_bytes: list[int] = field(default_factory=list)
    """Pages of mapped files, which the kernel can take back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One start."""

    format: str
    stored_bytes: int
    kv_bytes: int
    memory: Memory

    @property
    def peak(self) -> int:
        """The most memory of its own."""
        return max(self.memory.own_bytes)

    @property
    def bound(self) -> int:
        """The most that it may be."""
        return self.stored_bytes + self.kv_bytes + ALLOWED_BYTES

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        sizes = (self.stored_bytes, self.kv_bytes, self.peak, self.memory.own_bytes[-1], self.bound)
        whole = max(map(sum, zip(self.memory.own_bytes, self.memory.file_bytes, strict=True)))
        return self.format, *(f"{size / MB:.0f}" for size in (*sizes, whole))


TITLES = ("format", "file, MB", "KV", "peak", "when ready", "bound", "peak with mapped files")


def parts_of_memory(pid: int) -> tuple[int, int]:
    """Bytes of a process's own memory, and of the files that it has mapped and touched."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {
        name: int(size) * 1024
        for name, size in re.findall(r"^Rss(\w+):\s+(\d+) kB$", status, re.MULTILINE)
    }
    return found["Anon"] + found["Shmem"], found["File"]


@contextmanager
def sampled(is_shard: str) -> Iterator[Memory]:
    """Sample the one process whose command line has `is_shard`, from its start to the end of the block."""
    memory, ended = Memory(), threading.Event()

    def sample() -> None:
        process, began = None, 0.0
        while not ended.is_set():
            if process is None:
                process = _find(is_shard)
                began = time.monotonic()
            else:
                try:
                    own, mapped = parts_of_memory(process.pid)
                except (OSError, KeyError):
                    return
                memory.seconds.append(time.monotonic() - began)
                memory.own_bytes.append(own)
                memory.file_bytes.append(mapped)
            ended.wait(SAMPLE_SECONDS)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        ended.set()
        thread.join()


def _find(text: str) -> psutil.Process | None:
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if SHARD in line and any(text in part for part in line):
            return process
    return None


def load(model: str, name: str, options: argparse.Namespace) -> Load:
    """Start a server on one format, with KV for KV_TOKENS tokens. Raises ServerError."""
    path = ensure_format(model, name)
    limits = (f"--max-batch-total-tokens={KV_TOKENS}", f"--max-batch-prefill-tokens={KV_TOKENS}")
    # The port of the ranks tells this server's shard from all others.
    mark = f"--master-port={free_port()}"
    flags = (*limits, mark, *options.flags)
    with (
        sampled(mark.partition("=")[2]) as memory,
        serving(path, log=options.out / f"memory-{name}.log", flags=flags),
    ):
        pass
    if not memory.seconds:
        raise ServerError(f"no shard was found while {name} was loaded")
    found = Load(
        format=name,
        stored_bytes=file_bytes(path),
        kv_bytes=kv_bytes(ensure_checkpoint(model), tokens=KV_TOKENS),
        memory=memory,
    )
    say(f"{name}: peak {found.peak / MB:.0f} MB, bound {found.bound / MB:.0f} MB")
    return found


def chart(loads: Sequence[Load]) -> str:
    """An SVG of each load's own memory over time."""
    points = {
        each.format: [
            (second, own / MB)
            for second, own in zip(each.memory.seconds, each.memory.own_bytes, strict=True)
        ]
        for each in loads
    }
    title = "Memory of a shard while it loads, MB"
    panel = Panel(title=title, points=points, x_title="seconds", rounds=True)
    return curves("Memory while loading", [panel])


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("quantized.memory", __doc__)
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--flags", type=shlex.split, default=[], help="more for the launcher")
    return parser.parse_args(arguments)


def main() -> int:
    """1 where a server does not start, or needs more memory than the bound."""
    options = parse_arguments(sys.argv[1:])
    try:
        loads = [load(options.model, name, options) for name in options.formats]
    except ServerError as error:
        say(str(error))
        return 1
    record = Record(
        bench="quantized",
        title=f"Memory while loading, {options.model}",
        command=command("quantized.memory"),
        figures=[{**asdict(each), "peak": each.peak, "bound": each.bound} for each in loads],
    )
    print("\n" + record.text(markdown(TITLES, [each.row for each in loads])), flush=True)
    image = (IMAGES_FOLDER if options.record else options.out) / "memory-while-loading.svg"
    image.write_text(chart(loads))
    if options.record:
        record.write()
    return int(any(each.peak > each.bound for each in loads))


if __name__ == "__main__":
    sys.exit(main())
