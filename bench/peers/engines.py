"""The compared engines: where each is installed, how it starts, and how it converts a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.paths import PEERS_FOLDER
from bench.peers.process import EngineProcess
from millrace_launcher.host.threads import find_intel_openmp, plan_threads
from millrace_proto.cores import usable_cores

OURS = "millrace"
VLLM_KV_GIGABYTES = 4
SHARD_FLAGS = "MILLRACE_BENCH_SHARD_FLAGS"
"""Environment variable of our engine: more flags for the shard, separated by spaces."""


class ConversionError(Exception):
    """A checkpoint could not be converted for a peer; the message is the end of the converter's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """An engine that runs without HTTP."""

    name: str
    module: str
    python: Path
    environment: Callable[[], Mapping[str, str]]
    convert: Callable[[Path], Path]
    """Maps our checkpoint's folder to the path that this engine loads."""

    @property
    def is_installed(self) -> bool:
        """Whether its interpreter is there."""
        return self.python.exists()

    def start(self, *, log: Path, extra: Mapping[str, str] | None = None) -> EngineProcess:
        """Start its process; no model is loaded yet."""
        return EngineProcess(
            self.name,
            python=self.python,
            module=self.module,
            environment={**self.environment(), **(extra or {})},
            log=log,
        )


def launch_environment() -> dict[str, str]:
    """The environment of a shard as the launcher sets it: OpenMP runtime, threads, huge pages."""
    plan = plan_threads(
        cores=usable_cores(),
        shards=1,
        requested=None,
        intel_openmp=find_intel_openmp(),
        environ=os.environ,
    )
    return dict(plan.environment)


def vllm_environment() -> dict[str, str]:
    """The environment of vLLM's CPU build: Intel's OpenMP and tcmalloc preloaded, threads bound."""
    folder = PEERS_FOLDER / "vllm"
    preloaded = [
        *folder.glob("lib/libiomp5.so"),
        *folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4"),
    ]
    return {
        "LD_PRELOAD": ":".join(str(path.resolve()) for path in preloaded[:2]),
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIGABYTES),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def as_it_is(model: Path) -> Path:
    """No conversion."""
    return model


def openvino_model(model: Path, weights: Sequence[str] = ("fp16",)) -> Path:
    """The checkpoint in OpenVINO's intermediate representation, converted once.

    `weights` are the format of weights and further options of `optimum-cli`.
    """
    target = model.with_name(f"{model.name}-openvino-{weights[0]}")
    if not (target / "openvino_model.xml").exists():
        optimum = PEERS_FOLDER / "openvino" / "bin" / "optimum-cli"
        _convert(
            [
                str(optimum),
                "export",
                "openvino",
                f"--model={model}",
                "--task=text-generation-with-past",
                f"--weight-format={weights[0]}",
                *weights[1:],
                str(target),
            ]
        )
    return target


def gguf_model(model: Path) -> Path:
    """The checkpoint as GGUF in bfloat16, converted once; a GGUF file is taken as it is."""
    if model.suffix == ".gguf":
        return model
    target = model.with_name(f"{model.name}-bf16.gguf")
    if not target.exists():
        folder = PEERS_FOLDER / "llama"
        module = ["-m", "bench.peers.to_gguf"]
        _convert([str(folder / "bin" / "python"), *module, str(model), str(target)])
    return target


def quantized_gguf(model: Path, target: Path, kind: str) -> None:
    """Write the checkpoint in llama.cpp's mixture of block formats `kind`, such as Q4_K_M; raises ConversionError."""
    program = PEERS_FOLDER / "llama" / "build" / "bin" / "llama-quantize"
    _convert([str(program), str(gguf_model(model)), str(target), kind])


def _convert(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ConversionError(f"{command[0]} ended with {done.returncode}:\n{end}")


OFFLINE = (
    Offline(
        name=OURS,
        module="bench.peers.millrace_engine",
        python=Path(sys.executable),
        environment=launch_environment,
        convert=as_it_is,
    ),
    Offline(
        name="vllm",
        module="bench.peers.vllm_engine",
        python=PEERS_FOLDER / "vllm" / "bin" / "python",
        environment=vllm_environment,
        convert=as_it_is,
    ),
    Offline(
        name="openvino",
        module="bench.peers.openvino_engine",
        python=PEERS_FOLDER / "openvino" / "bin" / "python",
        environment=dict,
        convert=openvino_model,
    ),
    Offline(
        name="transformers",
        module="bench.peers.transformers_engine",
        python=Path(sys.executable),
        environment=dict,
        convert=as_it_is,
    ),
)
