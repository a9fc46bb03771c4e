"""`make bench-gpu`: every stage in a process of its own, the table of goals at the end, under ten minutes.

It needs the standard library alone. A stage needs torch and the packages of `.gpu-bundle`, and reports missing ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.bundle.files import BundleError, use_bundle
from bench.gpu.children import Ended, run
from bench.gpu.figures import read
from bench.gpu.report import Run
from bench.harness.paths import ROOT

SOURCES = ("proto", "router", "shard", "launcher", "tests/support", ".")
BUDGET_SECONDS = {
    "machine": 60,
    "decode": 150,
    "prefill": 70,
    "small": 60,
    "server": 170,
    "transformers": 100,
    "tests": 150,
}
"""The time limit of each stage, in the order in which they run; `--seconds` limits their sum."""
TOTAL_SECONDS = 540.0
LEAST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """The command line."""

    stages: tuple[str, ...]
    device: str
    shape: str
    seconds: float
    out: Path
    shard_flags: tuple[str, ...]

    @classmethod
    def read(cls, argv: Sequence[str]) -> Command:
        """Parse `argv`; exits with 2 and a message for a bad one."""
        parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
        parser.add_argument("--stages", default=",".join(BUDGET_SECONDS), help="some of them")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        parser.add_argument("--shape", choices=("8b", "tiny"), default="8b")
        parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all stages")
        parser.add_argument("--out", type=Path, default=default_out(os.environ))
        parser.add_argument(
            "--shard-flag", action="append", default=[], help="one more, repeatable"
        )
        args = parser.parse_args(argv)
        wanted = args.stages.split(",")
        if unknown := sorted(set(wanted) - BUDGET_SECONDS.keys()):
            parser.error(f"no stages {unknown}; there are: {', '.join(BUDGET_SECONDS)}")
        # Shares of the machine's limits need those limits.
        stages = tuple(name for name in BUDGET_SECONDS if name == "machine" or name in wanted)
        flags = tuple(args.shard_flag)
        return cls(stages, args.device, args.shape, args.seconds, args.out.absolute(), flags)


def default_out(environ: Mapping[str, str]) -> Path:
    """`$OUT`, else bench/out."""
    return Path(environ.get("OUT") or ROOT / "bench" / "out")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when every stage succeeded, else 1; results are written either way."""
    command = Command.read(sys.argv[1:] if argv is None else argv)
    deadline = time.monotonic() + command.seconds
    command.out.mkdir(parents=True, exist_ok=True)
    report = Run(command.out, device=command.device, shape=command.shape)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        try:
            added = use_bundle(ROOT, Path(scratch) / "site")
        except BundleError as error:
            # Stages whose packages are installed can run without the bundle.
            print(f"without the bundle: {error}", flush=True)
            added = ()
        environment = child_environment(os.environ, added)
        figures = Path(scratch) / "figures.jsonl"
        for name in command.stages:
            limit = min(BUDGET_SECONDS[name], deadline - time.monotonic())
            print(f"{name}, at most {limit:.0f} s", flush=True)
            ended = _run(command, name, environment, figures, limit)
            report.add(name, ended, read(figures))
            print(f"{name}: {ended.status} after {ended.seconds:.0f} s\n", flush=True)
            if ended.status == "no device":
                break
    print(report.text(), flush=True)
    print(f"written to {report.path}", flush=True)
    return 0 if report.is_whole else 1


def child_environment(environ: Mapping[str, str], added: Sequence[Path]) -> dict[str, str]:
    """Our environment with the bundle and the sources before installed packages."""
    path = [*map(str, added), *(str(ROOT / source) for source in SOURCES)]
    if environ.get("PYTHONPATH"):
        path.append(environ["PYTHONPATH"])
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _run(
    command: Command, name: str, environment: Mapping[str, str], figures: Path, limit: float
) -> Ended:
    if limit < LEAST_SECONDS:
        return Ended("skipped", 0.0, ("no time was left",))
    arguments = [
        f"--device={command.device}",
        f"--shape={command.shape}",
        f"--figures={figures}",
        f"--out={command.out}",
        *(f"--shard-flag={flag}" for flag in command.shard_flags),
    ]
    module = [sys.executable, "-m", "bench.gpu.stage", name]
    return run([*module, *arguments], environment=environment, cwd=ROOT, limit_seconds=limit)


if __name__ == "__main__":
    sys.exit(main())
