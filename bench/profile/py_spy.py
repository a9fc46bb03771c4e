"""Samples of the router's main thread by py-spy, as a flame graph in microseconds a token."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.charts.flames import Frame, flame_graph

RATE = 500
MAIN_THREAD = "MainThread"
WAITING = ("epoll_wait", "epoll_pwait", "pthread_cond_wait")
"""Calls of the C library in which a thread uses no CPU."""
START_OF_LOOP = "run_forever"
"""The function of the event loop; frames above it belong to the start of the process."""
PARTS = {
    "kernel: write to the sockets": ("write (libc", "writev (libc", "send (libc"),
    "kernel and gRPC core: send a step": ("sendmsg (libc",),
    "garbage collection": ("gc_collect_main",),
    "metrics of a token": ("RequestRecord.token", "Histogram.observe"),
    "token to text": ("IncrementalDetokenizer",),
    "text to JSON": ("plain_frame", "ChunkTemplate.fill", "ChoiceText.push", "stream_json"),
    "frame to transport": ("StreamWriter.token",),
    "token, event, end of generation": ("Entry.accept", "Batcher._deliver"),
    "plan a step": ("Planner.plan",),
    "message and call of a step": ("StepChannel.send", "InFlight.send", "Batcher._send"),
    "answer of a step": ("StepChannel.receive", "InFlight.receive", "result_from_pb"),
    "begin and end requests": ("RequestHandler.", "access_log", "Infer.", "respond"),
    "event loop and the rest": ("",),
}
"""Parts by prefixes of functions; the innermost matching function of a sample decides."""


@dataclass(slots=True)
class Recorded:
    """Stacks of the main thread with their counts."""

    root: Frame = field(default_factory=lambda: Frame("event loop"))
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add_line(self, line: str) -> None:
        """Add a line of py-spy's raw output: `frame;frame;frame count`."""
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        names = [name for frame in frames if (name := _name(frame))]
        if MAIN_THREAD not in thread or not names or names[-1].startswith(WAITING):
            return
        starts = [i for i, name in enumerate(names) if name.startswith(START_OF_LOOP)]
        self.parts[_part(names)] += float(count)
        node = self.root
        node.total += float(count)
        for name in names[starts[-1] + 1 :] if starts else names:
            is_native = ".py)" not in name
            node = node.children.setdefault(name, Frame(name, is_operator=is_native))
            node.total += float(count)

    def graph(self, main: float, others: float) -> Frame:
        """The flame graph of the router; `main` and `others` are microseconds a token of its main and other threads."""
        loop = self.root.scaled(main / max(self.root.total, 1.0))
        rest = Frame("threads of gRPC and of the tokenizer", others)
        return Frame("router", main + others, children={loop.name: loop, rest.name: rest})

    def write(self, path: Path, *, main: float, others: float, routes: Sequence[str]) -> None:
        """Write the SVG and print the cost of each part."""
        graph = self.graph(main, others)
        note = f"{main + others:.1f} µs of CPU a token; {', '.join(routes)}; py-spy"
        path.write_text(flame_graph("The router at 128 streams", graph, [note]))
        print("| part | µs a token |\n|---|--:|")
        for name, samples in self.parts.items():
            print(f"| {name} | {main * samples / max(self.root.total, 1.0):.2f} |")
        print(f"| threads of gRPC and of the tokenizer | {others:.2f} |")
        print(f"| together | {main + others:.2f} |")


def _part(names: Sequence[str]) -> str:
    """The part of a stack."""
    for name in reversed(names):
        for part, prefixes in PARTS.items():
            if any(prefix and name.startswith(prefix) for prefix in prefixes):
                return part
    return list(PARTS)[-1]


def _name(frame: str) -> str:
    """Shorten a frame to `function (file)`; "" for an address without a name."""
    function, _, place = frame.partition(" (")
    if function.startswith("0x"):
        return ""
    file = place.rstrip(")").split(":")[0].rpartition("/")[2]
    return f"{function} ({file})" if file else function


def thread_seconds(process: psutil.Process) -> tuple[float, float]:
    """CPU time of the main thread, and of all the others."""
    times = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    main = times.pop(process.pid)
    return main, sum(times.values())


@contextmanager
def record_profile(process: psutil.Process, program: str) -> Iterator[Recorded]:
    """Sample `process` for the length of the block."""
    recorded = Recorded()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "stacks"
        command = [program, "record", f"--pid={process.pid}", "--format=raw", f"--output={output}"]
        command += [f"--rate={RATE}", "--native", "--threads"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as sampler:
            try:
                yield recorded
            finally:
                sampler.send_signal(signal.SIGINT)
                sampler.wait()
        for line in output.read_text().splitlines():
            recorded.add_line(line)
