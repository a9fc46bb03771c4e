"""`python -m bench.quantized.products`: what the products of one thread with weights of codes spend their time on.

Each format is multiplied in a weight that fits into the cache, then in one that does not. Linux' `perf` samples the
instructions of the first, which `objdump` names by kind; the second takes longer by the time that memory costs. Printed
are ns for 32 inputs of 32 outputs, of all rows together.
"""

from __future__ import annotations

import argparse
import re
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from bench.harness.tables import markdown
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.packed_weight import or_empty, packed_codes
from millrace_shard.kernels.quantized import CodeFormat

FOUR_BITS, EIGHT_BITS = tuple(range(-8, 8)), tuple(range(-128, 128))
FORMATS = {
    "int4": CodeFormat(values=FOUR_BITS, group_size=128),
    "Q4_0": CodeFormat(values=FOUR_BITS, group_size=32),
    "Q4_K": CodeFormat(values=tuple(range(16)), group_size=32, has_offsets=True, has_units=True),
    "Q6_K": CodeFormat(values=tuple(range(-32, 224)), group_size=16, has_units=True),
    "Q8_0": CodeFormat(values=EIGHT_BITS, group_size=32),
    "int8": CodeFormat(values=EIGHT_BITS, group_size=None),
}
SIZES = {"cache": (2048, 512), "memory": (8192, 8192)}
"""Outputs and inputs."""
SECONDS = 1.5
SAMPLES_A_SECOND = 4000
KINDS = {
    "product": r"vpdp|vpmadd|vdpbf16|tdp",
    "scale": r"vcvt|v(mul|add|fn?m(add|sub)\d*)p|vpmul",
    "unpack": r"vp(and|or|s[rl]|ternlog|shuf|perm|unpck|sub|add|abs|sign|multishift|mov[sz]x|blend|insr|extr)"
    r"|vperm|vgf2p8|vshuf|vunpck|vxor|v(ext|ins)r",
    "load": r"v?mov|vbroadcast|vpbroadcast|prefetch",
}
"""Regular expressions of instructions, by what they do; the first that fits counts."""
COLUMNS = (*KINDS, "other")


def run(name: str, rows: int, size: str, *, integer: bool) -> None:
    """Print the library's path, multiply until a line or the end of stdin, and print ns for 32 inputs of 32 outputs."""
    torch.set_num_threads(1)
    name_of_library = load_operators()
    outputs, inputs = SIZES[size]
    weight = FORMATS[name].random(outputs, inputs, torch.device("cpu"))
    packed = packed_codes([weight], integer=integer)
    assert packed is not None
    x = torch.randn(rows, inputs).bfloat16()
    y, bias = torch.empty(rows, outputs).bfloat16(), or_empty(None)
    torch.ops.millrace.panel_linear(y, x, packed, bias)
    maps = Path("/proc/self/maps").read_text().splitlines()
    print(next(line.split()[-1] for line in maps if name_of_library in line), flush=True)
    fastest = float("inf")
    while not select.select([sys.stdin], [], [], 0)[0]:
        begin = time.thread_time()
        for _ in range(8):
            torch.ops.millrace.panel_linear(y, x, packed, bias)
        fastest = min(fastest, (time.thread_time() - begin) / 8)
    print(fastest / (outputs * inputs / 1024) * 1e9, flush=True)


class Library:
    """The kinds of the instructions of a library, by address."""

    def __init__(self, path: str) -> None:
        self._path = path
        text = subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", path], text=True)
        pattern = re.compile(r"^ +([0-9a-f]+):\t(?:\{vex\} )?(\S+)", re.MULTILINE)
        self._names = {int(at, 16): name for at, name in pattern.findall(text)}

    def base(self, pid: int) -> int:
        """Where the process has the library in its memory."""
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if line.endswith(self._path):
                return int(line.split("-")[0], 16)
        raise SystemExit(f"{self._path} is not in the memory of the process that was measured")

    def kind(self, address: int) -> str | None:
        """The kind of the instruction at `address`, which the CPU waited for; None outside the library."""
        name = self._names.get(address)
        if name is None:
            return None
        return next((kind for kind, pattern in KINDS.items() if re.match(pattern, name)), "other")


_libraries: dict[str, Library] = {}


def measure(name: str, rows: int, size: str, *, integer: bool) -> tuple[float, Counter[str]]:
    """Nanoseconds for 32 inputs of 32 outputs, and the samples of each kind."""
    route = [] if integer else ["--exact"]
    command = [sys.executable, "-m", "bench.quantized.products", "--run", size]
    command += ["--formats", name, "--rows", str(rows), *route]
    with (
        tempfile.NamedTemporaryFile() as file,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        library = _libraries.setdefault(path, Library(path))
        base = library.base(process.pid)
        record = ["perf", "record", "-q", "-e", "cpu-clock:u", "-F", str(SAMPLES_A_SECOND)]
        record += ["-p", str(process.pid), "-o", file.name, "--", "sleep", str(SECONDS)]
        subprocess.run(record, check=True, capture_output=True)
        process.stdin.close()
        nanoseconds = float(process.stdout.readline())
        script = ["perf", "script", "-i", file.name, "-F", "ip"]
        addresses = subprocess.check_output(script, text=True, stderr=subprocess.DEVNULL).split()
    kinds = (library.kind(int(each, 16) - base) for each in addresses)
    return nanoseconds, Counter(kind for kind in kinds if kind is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 256])
    parser.add_argument("--exact", action="store_true", help="exact activations, not int8")
    parser.add_argument("--run", choices=SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        integer = not arguments.exact
        run(arguments.formats[0], arguments.rows[0], arguments.run, integer=integer)
        return
    table = []
    for name in arguments.formats:
        for rows in arguments.rows:
            cache, kinds = measure(name, rows, "cache", integer=not arguments.exact)
            memory, _ = measure(name, rows, "memory", integer=not arguments.exact)
            shares = [f"{cache * kinds[kind] / kinds.total():.1f}" for kind in COLUMNS]
            table.append([name, str(rows), *shares, f"{cache:.1f}", f"{memory:.1f}"])
    print(markdown(["format", "rows", *COLUMNS, "in the cache", "in memory"], table))


if __name__ == "__main__":
    main()
