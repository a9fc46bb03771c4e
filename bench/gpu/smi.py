"""What `nvidia-smi` reports: the state of each GPU, its processes and links, and samples of its clocks.

This module imports the standard library only.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import IO

PROGRAM = "nvidia-smi"
FORMAT = "--format=csv,noheader,nounits"
QUERY_SECONDS = 20.0
SAMPLE_MILLISECONDS = 500
STATE = (
    *("index", "uuid", "name", "driver_version", "memory.total", "memory.free"),
    *("persistence_mode", "ecc.mode.current", "compute_mode", "mig.mode.current"),
    *("pcie.link.gen.current", "pcie.link.gen.max"),
    *("pcie.link.width.current", "pcie.link.width.max"),
    *("clocks.max.sm", "clocks.max.memory", "power.limit"),
)
"""Fields of a GPU's state; memory in MiB, clocks in MHz, power in W."""
PROCESS = ("gpu_uuid", "pid", "used_memory", "process_name")
"""Fields of a process. Its name is last, since it may have commas."""
CLOCKS = ("timestamp", "uuid", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field of the reasons for a clock below the highest one: in drivers from 535 on, and before."""
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "power brake",
}
"""Reasons that lower a figure, by their bit. The others are idleness, and clocks that somebody has set."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def query(*arguments: str, program: str = PROGRAM) -> str | None:
    """The output of `nvidia-smi` with these arguments; None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=QUERY_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def states(program: str = PROGRAM) -> list[dict[str, str | None]]:
    """The STATE of each GPU; None for a field that the driver does not know. Empty without an answer."""
    text = query(f"--query-gpu={','.join(STATE)}", FORMAT, program=program)
    if text is not None:
        return read_rows(text, STATE)
    # One unknown field fails the whole query.
    columns = {}
    for field in STATE:
        text = query(f"--query-gpu={field}", FORMAT, program=program)
        columns[field] = [row[field] for row in read_rows(text or "", (field,))]
    count = len(columns["uuid"])
    return [
        {field: values[gpu] if len(values) == count else None for field, values in columns.items()}
        for gpu in range(count)
    ]


def read_rows(text: str, fields: Sequence[str]) -> list[dict[str, str | None]]:
    """A row of each line of FORMAT; None for "[N/A]" and other values in brackets. The last field may have commas.

    Lines with fewer fields are messages, and are left out.
    """
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
        if len(cells) == len(fields):
            values = (None if cell.startswith("[") or cell == "N/A" else cell for cell in cells)
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def read_links(text: str, index: int) -> dict[str, str]:
    """From the matrix of `nvidia-smi topo -m`: what connects GPU `index` with each other one, such as NV18 or PHB."""
    lines = [_STYLE.sub("", line).split() for line in text.splitlines()]
    gpus = next(([word for word in words if re.fullmatch(r"GPU\d+", word)] for words in lines), [])
    own = f"GPU{index}"
    row = next((words[1:] for words in lines[1:] if words and words[0] == own), [])
    return {gpu: link for gpu, link in zip(gpus, row, strict=False) if gpu != own}


@dataclass(frozen=True, slots=True)
class Sample:
    """The clocks of a GPU at a moment; None for what it does not report."""

    moment: float
    """Seconds since the epoch."""
    uuid: str
    sm_mhz: float | None
    memory_mhz: float | None
    celsius: float | None
    watts: float | None
    throttles: tuple[str, ...]


def read_sample(line: str) -> Sample | None:
    """The sample in a line of CLOCKS and REASONS; None for another line."""
    rows = read_rows(line, (*CLOCKS, "reasons"))
    if not rows or None in (rows[0]["timestamp"], rows[0]["uuid"]):
        return None
    moment, uuid, *numbers, reasons = rows[0].values()
    assert moment is not None
    assert uuid is not None
    try:
        when = datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f")
        sm, memory, celsius, watts = (None if n is None else float(n) for n in numbers)
        bits = 0 if reasons is None else int(reasons, 16)
    except ValueError:
        return None
    throttles = tuple(name for bit, name in THROTTLES.items() if bits & bit)
    return Sample(when.timestamp(), uuid, sm, memory, celsius, watts, throttles)


def throttled(samples: Iterable[Sample]) -> str:
    """How many samples were throttled and why, such as "power cap in 3 of 12 samples"; empty if none was."""
    seen = list(samples)
    counts = Counter(name for sample in seen for name in sample.throttles)
    return ", ".join(f"{name} in {count} of {len(seen)} samples" for name, count in counts.items())


class Sampler:
    """Samples of all GPUs in the background for the length of a `with` block; none where `nvidia-smi` is missing."""

    def __init__(self, program: str = PROGRAM) -> None:
        self._program = program
        self._samples: list[Sample] = []
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampler:
        fields = next((name for name in REASONS if self._query(name) is not None), None)
        if fields is not None:
            self._child = subprocess.Popen(
                [
                    self._program,
                    f"--query-gpu={','.join((*CLOCKS, fields))}",
                    FORMAT,
                    f"--loop-ms={SAMPLE_MILLISECONDS}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
            assert self._child.stdout is not None
            threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def between(self, began: float, ended: float) -> list[Sample]:
        """The samples from one moment to another, in seconds since the epoch."""
        return [sample for sample in self._samples if began <= sample.moment <= ended]

    def _query(self, field: str) -> str | None:
        return query(f"--query-gpu={field}", FORMAT, program=self._program)

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                if (sample := read_sample(line)) is not None:
                    self._samples.append(sample)
