"""`python -m bench.startup`: time until a server is ready, speed of loading weights, and peak memory.

Each start is a fresh launcher. Before it a fresh process reads the weights' file into new memory, as a lower bound for
a loader that copies weights; both have the file in the page cache. Then the server answers prompts that fill the KV
cache, so that all memory has been touched. `--record` writes the figures to
bench/results.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from bench.harness import machine
from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.machine import CpuMeter
from bench.harness.paths import DEMO
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.record import Record
from bench.harness.repeats import Repeated, Sample, ratio_text
from bench.harness.server import ServerError, serving
from bench.harness.tables import markdown

KV_TOKENS = 4096
MB = 1_000_000
LOADED = re.compile(r"weights loaded in ([\d.]+) s")
READ = """
import sys, time, numpy
start = time.perf_counter()
for path in sys.argv[1:]:
    numpy.fromfile(path, dtype=numpy.uint8)
print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a server."""

    ready_seconds: float
    """From the launcher's start to a `/health` of 200."""
    cpu_seconds: float
    """CPU time in seconds of all processes until then; other work on the machine changes it little."""
    load_seconds: float
    """From the shard's log."""
    read_seconds: float
    """For a plain read of the same files."""
    shard_bytes: int
    """Peak resident memory of the shard."""
    router_bytes: int
    other_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """The starts of one model."""

    model: str
    weights_bytes: int
    kv_bytes: int
    starts: Sequence[Start]

    def column(self, name: str) -> Repeated:
        """One figure of all starts."""
        return Repeated(
            tuple(Sample(float(getattr(each, name)), each.other_cores) for each in self.starts)
        )

    def as_json(self) -> dict[str, object]:
        """Plain containers."""
        names = (each.name for each in fields(Start) if each.name != "other_cores")
        return {
            "model": self.model,
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
            **{name: self.column(name).as_json() for name in names},
        }

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        load, read = self.column("load_seconds"), self.column("read_seconds")
        rest = self.column("shard_bytes").median - self.weights_bytes - self.kv_bytes
        return (
            self.model,
            self.column("ready_seconds").text,
            self.column("cpu_seconds").text,
            load.text,
            read.text,
            ratio_text(read, load),
            f"{self.column('shard_bytes').median / MB:.0f}",
            f"{self.weights_bytes / MB:.0f}",
            f"{self.kv_bytes / MB:.0f}",
            f"{rest / MB:.0f}",
            f"{self.column('router_bytes').median / MB:.0f}",
        )


TITLES = (
    "model",
    "ready, s",
    "CPU, s",
    "loading, s",
    "plain read, s",
    "share of its speed",
    "shard, MB",
    "weights",
    "KV",
    "the rest",
    "router, MB",
)


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


def kv_bytes(folder: Path, *, tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens, in 16 bits."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * 2 * int(config["num_hidden_layers"]) * int(kv_heads) * int(size) * tokens


def loading_seconds(lines: Iterable[str]) -> float:
    """Seconds that the one shard in a launcher's log took to load its weights."""
    (seconds,) = [float(found[1]) for line in lines if (found := LOADED.search(line))]
    return seconds


def read_seconds(files: Sequence[Path]) -> float:
    """Seconds in which a fresh process reads `files` into new memory."""
    reading = [sys.executable, "-c", READ, *map(str, files)]
    return float(subprocess.run(reading, capture_output=True, text=True, check=True).stdout)


def fill(url: str) -> None:
    """Send prompts that fill the whole KV cache."""
    with urllib.request.urlopen(f"{url}/info") as answer:
        info = json.load(answer)
    limit = {"max_new_tokens": 1, "truncate": info["max_input_tokens"]}

    def ask(number: int) -> None:
        body = {"inputs": f"{number} " * KV_TOKENS, "parameters": limit}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request).close()

    count = KV_TOKENS // info["max_total_tokens"]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(ask, range(count)))


def start_once(folder: Path, *, out: Path, flags: Sequence[str]) -> Start:
    """Start a server, and stop it; raises ServerError."""
    log = out / "startup.log"
    plain = read_seconds(sorted(folder.glob("*.safetensors")))
    meter, began = CpuMeter(list), time.perf_counter()
    limits = [f"--max-batch-total-tokens={KV_TOKENS}", f"--max-batch-prefill-tokens={KV_TOKENS}"]
    with serving(folder, log=log, flags=[*limits, *flags]) as server:
        ready = time.perf_counter() - began
        processes = server.processes()
        # The meter counts the server among the other processes; its own CPU time is subtracted.
        own = machine.cpu_seconds(processes, with_ended=True)
        others = max(0.0, meter.stop().other_cores - own / ready)
        fill(server.url)
        peaks = {
            part: max(peak_bytes(each.pid) for each in processes if part in each.cmdline())
            for part in ("millrace_shard", "millrace_router")
        }
    with log.open() as lines:
        loading = loading_seconds(lines)
    return Start(
        ready_seconds=ready,
        cpu_seconds=own,
        load_seconds=loading,
        read_seconds=plain,
        shard_bytes=peaks["millrace_shard"],
        router_bytes=peaks["millrace_router"],
        other_cores=others,
    )


def measure(name: str, options: argparse.Namespace) -> Starts:
    """`options.repeats` starts of one model, after one that does not count; raises ServerError."""
    folder = DEMO if name == "demo" else ensure_checkpoint(name)
    found = []
    for number in range(options.repeats + 1):
        wait_until_quiet(Quiet(patience_seconds=options.patience))
        start = start_once(folder, out=options.out, flags=options.flags)
        say(f"{name}: ready in {start.ready_seconds:.2f} s, weights in {start.load_seconds:.2f} s")
        if number:
            found.append(start)
    return Starts(
        model=name,
        weights_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        kv_bytes=kv_bytes(folder, tokens=KV_TOKENS),
        starts=found,
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("startup", __doc__)
    parser.add_argument("--model", nargs="+", choices=("demo", *SHAPES), default=["demo", *SHAPES])
    parser.add_argument("--repeats", type=int, default=5, help="starts that count, after one")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more for the launcher")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure; 1 where a server does not start."""
    options = parse_arguments(sys.argv[1:])
    try:
        found = [measure(name, options) for name in options.model]
    except ServerError as error:
        say(str(error))
        return 1
    record = Record(
        bench="startup",
        title=f"Start and memory, {' '.join(options.model)}",
        command=command("startup"),
        figures=[each.as_json() for each in found],
    )
    method = (
        f"Medians of {options.repeats} starts, kernels compiled before, files in the page cache. Memory is the peak of"
        f" resident memory until prompts of {KV_TOKENS} tokens, which fill the KV cache, were answered;"
        " weights are the size of their files."
    )
    table = markdown(TITLES, [each.row for each in found])
    print("\n" + record.text(f"{method}\n\n{table}"), flush=True)
    if options.record:
        record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
