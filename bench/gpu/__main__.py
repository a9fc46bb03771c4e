"""`make bench-gpu`: the stages of `plan`, each in its own process, and a page of results, in at most ten minutes.

Without a GPU the stages run on the CPU with a tiny model, kernels in Triton's interpreter, and the page says so. This
program needs only the standard library. A stage needs torch and Millrace's dependencies, and reports missing ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.children import Ended, find_device, run
from bench.gpu.figures import read
from bench.gpu.page import Results
from bench.gpu.plan import LEAST_SECONDS, STAGES, TOTAL_SECONDS, Stage, limit_seconds
from bench.gpu.smi import Sampler
from bench.harness.paths import ROOT

SOURCES = ("proto", "router", "shard", "launcher", "package", "tests/support", ".")
DEFAULT_SHAPE = {"cuda": "8b", "cpu": "tiny"}
STOP_SECONDS = 5.0
"""A stage must end this long before its limit, so that it can end its children and keep its figures."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command line."""

    stages: tuple[Stage, ...]
    device: str
    """ "auto", "cuda" or "cpu"."""
    shape: str | None
    """None: the default of the device."""
    seconds: float
    out: Path
    shard_flags: tuple[str, ...]
    checkpoint: Path | None
    """A published checkpoint's folder."""

    @classmethod
    def read(cls, argv: Sequence[str], stages: Sequence[Stage] = STAGES) -> Command:
        """Parse `argv`; exits with 2 and a message for a bad one."""
        names = [stage.name for stage in stages]
        parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
        parser.add_argument("--stages", default=",".join(names), help="some of them")
        parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
        parser.add_argument("--shape", choices=tuple(DEFAULT_SHAPE.values()))
        parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all stages")
        parser.add_argument("--out", type=Path, default=default_out(os.environ))
        parser.add_argument(
            "--shard-flag", action="append", default=[], help="one more, repeatable"
        )
        parser.add_argument("--checkpoint", type=Path, help="folder of a published checkpoint")
        args = parser.parse_args(argv)
        wanted = args.stages.split(",")
        if unknown := sorted(set(wanted) - set(names)):
            parser.error(f"no stages {unknown}; there are: {', '.join(names)}")
        # The first stage measures the limits of the device, which figures are shares of.
        chosen = tuple(stage for stage in stages if stage.name in (names[0], *wanted))
        checkpoint: Path | None = args.checkpoint
        if checkpoint is not None and not (checkpoint / "config.json").is_file():
            parser.error(f"--checkpoint: {checkpoint} has no config.json")
        return cls(
            stages=chosen,
            device=args.device,
            shape=args.shape,
            seconds=args.seconds,
            out=args.out.absolute(),
            shard_flags=tuple(args.shard_flag),
            checkpoint=checkpoint and checkpoint.absolute(),
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """The device and the environment of all stages."""

    device: str
    shape: str
    environment: Mapping[str, str]
    scratch: Path

    @property
    def figures(self) -> Path:
        """The file to which stages append their figures."""
        return self.scratch / "figures.jsonl"


def default_out(environ: Mapping[str, str]) -> Path:
    """`$OUT`, else bench/out."""
    return Path(environ.get("OUT") or ROOT / "bench" / "out")


def main(argv: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Exit status: 0 when every stage succeeded and every check held, else 1; results are written either way."""
    began = time.monotonic()
    command = Command.read(sys.argv[1:] if argv is None else argv, stages)
    deadline = began + command.seconds
    command.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        setup = _prepare(command, Path(scratch))
        results = Results(command.out, device=setup.device, shape=setup.shape)
        with Sampler() as sampler:
            for stage, ended in _stages(command, setup, deadline):
                now = time.time()
                samples = sampler.between(now - ended.seconds, now)
                results.add(stage, ended, read(setup.figures), samples)
                print(f"{stage.name}: {ended.status} after {ended.seconds:.0f} s\n", flush=True)
                if ended.status == "unusable":
                    print(f"stopped: {ended.reason}; --device=cpu runs on the CPU", flush=True)
                    break
    print(results.text(), flush=True)
    print(f"written to {results.json_path} and {results.page_path}", flush=True)
    return 0 if results.is_whole else 1


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Our environment with the sources before installed packages."""
    path = [str(ROOT / source) for source in SOURCES]
    if environ.get("PYTHONPATH"):
        path.append(environ["PYTHONPATH"])
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _prepare(command: Command, scratch: Path) -> Setup:
    environment = child_environment(os.environ)
    device = command.device
    if device == "auto":
        device = find_device(environment, ROOT)
    if device == "cpu":
        print("no GPU: every stage runs on the CPU, kernels in Triton's interpreter", flush=True)
        environment["TRITON_INTERPRET"] = "1"
    # One cache for all stages, their servers and the tests.
    environment.setdefault("TRITON_CACHE_DIR", str(scratch / "triton"))
    return Setup(device, command.shape or DEFAULT_SHAPE[device], environment, scratch)


def _stages(command: Command, setup: Setup, deadline: float) -> Iterator[tuple[Stage, Ended]]:
    """Run each stage within its limit."""
    shares = [stage.share_on(setup.device) for stage in command.stages]
    for place, stage in enumerate(command.stages):
        limit = limit_seconds(shares[place:], deadline - time.monotonic())
        print(f"{stage.name}, at most {limit:.0f} s: {stage.question}", flush=True)
        yield stage, _run(command, setup, stage, limit)


def _run(command: Command, setup: Setup, stage: Stage, limit: float) -> Ended:
    if limit < LEAST_SECONDS:
        return Ended("skipped", 0.0, ("no time was left",))
    arguments = [
        f"--device={setup.device}",
        f"--shape={setup.shape}",
        f"--figures={setup.figures}",
        f"--out={command.out}",
        f"--until={time.monotonic() + max(LEAST_SECONDS, limit - STOP_SECONDS):.1f}",
        *(f"--shard-flag={flag}" for flag in command.shard_flags),
        *([f"--checkpoint={command.checkpoint}"] if command.checkpoint else []),
    ]
    module = [sys.executable, "-m", "bench.gpu.stage", stage.module]
    return run([*module, *arguments], environment=setup.environment, cwd=ROOT, limit_seconds=limit)


if __name__ == "__main__":
    sys.exit(main())
