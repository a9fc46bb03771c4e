"""The kernels of the stages that follow, compiled in as many processes as there are cores, into one cache.

A process runs the check of a start of some models, and some of the cases of `agreement` and `bits`, so that Triton
compiles what they launch; their results are judged by those stages and by servers, which then find nothing to compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.gpu.checks import agreement, bits
from bench.gpu.engine.kernels import served_kernels
from bench.gpu.engine.scale import SCALES
from bench.gpu.figures import KERNEL, Figure, unchecked
from bench.gpu.setting import Emit, Setting
from millrace_proto.cores import usable_cores
from millrace_shard.kernels.base import Kernels

NAME = "kernels compiled first"
MOST_PROCESSES = 16
"""Each has a context of several hundred MB on the GPU."""
CACHE = "TRITON_CACHE_DIR"
CODE = ".cubin"
_USAGE = re.compile(r"REG:(\d+).*?STACK:(\d+)")

Usage = Callable[[Path], tuple[int, int]]
"""Registers of a thread, and bytes of those that it spills, of a kernel's machine code."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit how many kernels are in the cache once all cases have run, or the time is up, and what each takes."""
    if not setting.is_cuda:
        emit(unchecked(NAME, "needs a GPU; the interpreter compiles nothing"))
        return
    began, count = time.monotonic(), min(usable_cores(), MOST_PROCESSES)
    shape = next(name for name, scale in SCALES.items() if scale is setting.scale)
    program = [sys.executable, "-m", "bench.gpu.programs.some_cases", shape, str(count)]
    children = [subprocess.Popen([*program, str(index)]) for index in range(count)]
    has_all = True
    try:
        for child in children:
            has_all &= child.wait(timeout=setting.seconds_left()) == 0
    except subprocess.TimeoutExpired:
        has_all = False
    finally:
        for child in children:
            child.kill()
            child.wait()
    cache, seconds = Path(os.environ[CACHE]), time.monotonic() - began
    kernels = sum(1 for _ in cache.rglob(f"*{CODE}"))
    detail = {"processes": count, "seconds": seconds, "all cases": has_all}
    emit(Figure(name=NAME, value=kernels, unit="kernels", detail=detail))
    for figure in table(cache, usage):
        emit(figure)


def table(cache: Path, usage: Usage) -> Iterator[Figure]:
    """For each kernel in Triton's `cache` its variants, and what the one with the most shared memory takes."""
    variants: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for code in cache.rglob(f"*{CODE}"):
        facts = json.loads(code.with_suffix(".json").read_text())
        variants[code.stem].append((int(facts["shared"]), code))
    for name, sizes in sorted(variants.items()):
        shared, code = max(sizes)
        registers, spilled = usage(code)
        yield Figure(
            name=f"kernel {name}",
            value=len(sizes),
            unit="variants",
            kind=KERNEL,
            detail={"registers": registers, "spilled": spilled, "shared": shared},
        )


def usage(code: Path) -> tuple[int, int]:
    """By the program that comes with Triton."""
    from triton import knobs  # noqa: PLC0415

    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(code)]
    return read_usage(subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True))


def read_usage(text: str) -> tuple[int, int]:
    """The most registers and bytes of stack of any function in the text of `cuobjdump`."""
    functions = [(int(registers), int(stack)) for registers, stack in _USAGE.findall(text)]
    registers, stacks = zip(*functions, strict=True) if functions else ((0,), (0,))
    return max(registers), max(stacks)


def starts(setting: Setting) -> Iterator[Callable[[], Kernels]]:
    """The check of a start of each model of the stages in both modes, longest first."""
    for shape in (setting.scale.model, setting.scale.small):
        for mode in ("off", "on"):
            yield partial(served_kernels, setting.flags, setting.device, shape, mode)


def cases_of(index: int, count: int, setting: Setting) -> Iterator[Callable[[], object]]:
    """The cases of process `index` of `count`; the first ones of each process are the first that stages run."""
    cases = [*starts(setting), *agreement.cases(setting), *bits.cases(setting)]
    yield from cases[index::count]
