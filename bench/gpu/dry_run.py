"""The plan of `make bench-gpu` on a GPU, stage by stage, with estimated seconds: `python -m bench.gpu.dry_run`.

It needs no GPU: the checks of the first stages, and of a start, run on the CPU without any kernel, and each launch is
noted as what Triton would compile for it. The other stages follow from bytes and rates of a GPU of the size of an H100.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bench.gpu.checks import agreement, compilation
from bench.gpu.engine.checkpoint import num_bytes
from bench.gpu.engine.clock import WARM_UP_SECONDS
from bench.gpu.engine.kernels import cuda_kernels
from bench.gpu.engine.measure import decode_bytes, prefill_flops
from bench.gpu.engine.scale import SCALES, TINY, Load, Scale
from bench.gpu.plan import STAGES, TOTAL_SECONDS, Stage, limit_seconds
from bench.gpu.setting import Setting
from bench.harness.checkpoints import Shape
from bench.harness.tables import markdown
from millrace_shard.kernels.cuda.served_agreement import differing_bits, served_difference
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.model_runner.graph_capture import SIZES
from millrace_shard.model_runner.piecewise_layers import TOKEN_COUNTS

WITH_A_COLD_START = "server"
"""The stage in which a server compiles its kernels again."""
DEMO_SHAPE = Shape(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=704,
    vocab_size=2048,
)
IN_FLOAT32 = {"steps": TINY, "reference": DEMO_SHAPE}
"""The models of stages with a type that no other one has."""
CORES = 16
SECONDS_OF_KERNEL = {
    "attend_tiles": 3.1,
    "attend_spans": 1.2,
    "attend_latent_tiles": 5.0,
    "attend_latent_spans": 2.0,
    "fold_spans": 0.7,
    "delta": 0.9,
    "scan": 0.9,
    "scan_channels": 0.9,
    "_multiply": 0.6,
    "_multiply_codes": 0.9,
    "multiply_expert_codes": 0.8,
    "multiply_experts": 0.7,
    "_rope_store": 0.9,
    "_shrink": 0.75,
    "_expand": 0.75,
}
"""Seconds that Triton 3.7.1 takes for a kernel on one core of a Zen 4: the mean of a few shapes for sm_90, in lines of
`tests/support/millrace_testing/engines/compile_kernels.py`."""
OTHER_KERNEL = 0.4
LAUNCHER_SECONDS = 0.3
"""To build the launcher of a signature, by the host's C compiler."""
IMPORTS = 8.0
"""Seconds until a process has torch and a context of the GPU."""
SERVER_START = 14.0
"""Seconds until launcher, router and shard are ready, without weights."""
READ_RATE, MATRIX_RATE, DISK_RATE = 2.6e12, 600e12, 1.2e9
"""Bytes, operations and bytes a second that are reached: memory, products, a checkpoint that is written or read."""
RANDOM_RATE = 5e9
"""Random weights a second."""
LAUNCHES = 10e-6
"""Seconds of the host for a kernel without a graph."""
LAUNCHES_PER_LAYER = 11
CHECKED_LAUNCH = 1e-3
"""Seconds of a launch in the checks of bits, with the random numbers and copies before it."""
CASE_SECONDS = 0.2
"""Seconds for a case of the kernels' checks, whose expectation plain torch computes in some hundred launches."""
TRACE_SECONDS = 4.0
"""To write a trace, and compress it."""
VLLM_START = 75.0
"""Seconds in which vLLM compiles layers and captures graphs, without weights."""
PEER_RATE, SERVED_SHARE = 0.45, 0.9
"""`transformers`' rate, and the server's, as parts of the engine's."""
SANITIZER_SLOWDOWN = 5.0

OPTIONS = {"num_warps", "num_stages"}
Kernel = tuple[str, tuple[tuple[str, object], ...]]
"""A kernel's name, and what its code depends on."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The work of a stage, and its estimated seconds."""

    stage: Stage
    kernels: int
    """That it is the first to launch."""
    compiling: float
    """Seconds."""
    working: float

    @property
    def seconds(self) -> float:
        """Of the whole stage."""
        return self.compiling + self.working


@contextmanager
def launches_noted() -> Iterator[Counter[Kernel]]:
    """Count the launches in the block by what Triton would compile for them; no kernel runs."""
    noted: Counter[Kernel] = Counter()
    kind: Any = InterpretedFunction if knobs.runtime.interpret else JITFunction
    run = kind.run

    def note(
        self: object,
        *args: object,
        grid: object,  # noqa: ARG001
        warmup: bool,  # noqa: ARG001
        **kwargs: object,
    ) -> None:
        facts = vars(self)
        arguments = dict(zip(facts["arg_names"], args, strict=False)) | kwargs
        noted[_kernel(facts["fn"], facts.get("kwargs", facts), arguments)] += 1

    kind.run = note
    try:
        yield noted
    finally:
        kind.run = run


def _kernel(
    function: Callable[..., object], flags: Mapping[str, Any], arguments: Mapping[str, object]
) -> Kernel:
    kinds = function.__annotations__
    constants = {name for name, kind in kinds.items() if "constexpr" in str(kind)} | OPTIONS
    unaligned = flags.get("do_not_specialize_on_alignment") or ()
    general = flags.get("do_not_specialize") or ()
    facts = (
        (name, value if name in constants else _specialisation(name, value, unaligned, general))
        for name, value in arguments.items()
    )
    return function.__name__, tuple(sorted(facts, key=lambda fact: fact[0]))


def _specialisation(
    name: str, value: object, unaligned: Iterable[str], general: Iterable[str]
) -> object:
    """What code depends on: a tensor's dtype and alignment, whether an integer is 1 or a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), name in unaligned or value.data_ptr() % 16 == 0
    if isinstance(value, int) and name not in general:
        return "one" if value == 1 else value % 16 == 0
    return type(value).__name__


def compiling_seconds(kernels: Iterable[Kernel], cores: int) -> float:
    """Of kernels that so many processes compile; the last one ends later than the mean by about one kernel."""
    each = [SECONDS_OF_KERNEL.get(name, OTHER_KERNEL) + LAUNCHER_SECONDS for name, _ in kernels]
    return sum(each) / cores + (max(each, default=0.0) if cores > 1 else 0.0)


def estimates(scale: Scale) -> list[Estimate]:
    """One for each stage, in their order."""
    setting = Setting(torch.device("cpu"), scale, Path(), float("inf"))
    with launches_noted() as checked:
        for case in compilation.cases_of(0, 1, setting):
            case()
    with launches_noted() as served:
        for case in starts((scale.model, scale.small), torch.bfloat16):
            case()
    with launches_noted() as cold:
        next(starts((scale.model,), torch.bfloat16))()
    in_float32 = {}
    for name, shape in IN_FLOAT32.items():
        with launches_noted() as in_float32[name]:
            for case in starts((shape,), torch.float32):
                case()
    first = {*checked, *served}
    work = _work(scale, checked.total(), sum(1 for _ in agreement.cases(setting)))
    result = []
    for stage in STAGES:
        kernels, cores = set[Kernel](), 1
        if stage.name == "compilation":
            kernels, cores = first, CORES
        elif stage.name == WITH_A_COLD_START:
            kernels = set(cold)
        elif stage.name in IN_FLOAT32:
            # One process compiles what is left.
            kernels = set(in_float32[stage.name]) - first
            first |= kernels
        compiling = compiling_seconds(kernels, cores)
        result.append(Estimate(stage, len(kernels), compiling, work[stage.name]))
    return result


def starts(shapes: Iterable[Shape], dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """The checks of kernels at the starts of `shapes`, without the expectations, in both modes."""
    for shape in shapes:
        layers = layer_shape(shape)
        for deterministic in agreement.MODES.values():
            kernels = cuda_kernels(deterministic=deterministic)
            yield partial(served_difference, kernels, kernels, dtype=dtype, shape=layers)
            if deterministic:
                yield partial(differing_bits, kernels, dtype=dtype, shape=layers)


def layer_shape(shape: Shape) -> LayerShape:
    """Its attention and experts; its linears take seconds on a CPU, and no kernels of their own."""
    return LayerShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.hidden_size // shape.num_heads,
    )


def _work(scale: Scale, launches: int, num_agreement: int) -> dict[str, float]:
    """Seconds of each stage, compilation apart.

    `launches` is the number of launches of the first stages, and `num_agreement` of the cases of `agreement`.
    """
    return {
        "preflight": IMPORTS + 4.0,
        "compilation": IMPORTS + launches * CHECKED_LAUNCH / CORES,
        "agreement": IMPORTS + num_agreement * CASE_SECONDS,
        "bits": IMPORTS + launches * CHECKED_LAUNCH,
        "capture": IMPORTS + _capture(scale),
        "verify": 2 * (2 * SERVER_START + 8.0),
        "reference": IMPORTS + 4.0,
        "steps": IMPORTS + scale.random_steps * 0.012,
        "sanitizer": 2 * SANITIZER_SLOWDOWN * 3.0,
        "decode": IMPORTS + _opened(scale) + _decode(scale) + TRACE_SECONDS,
        "prefill": IMPORTS + _weights(scale) + (scale.repeats + 2) * _prefill(scale),
        # Both modes; about 15 cases of each, with a warm-up.
        "rates": IMPORTS + 2 * 15 * (WARM_UP_SECONDS + 0.1),
        "small": IMPORTS + _graphs(scale.small.num_layers, scale.small_batch) + 1.0,
        "server": IMPORTS + _server(scale),
        "transformers": IMPORTS + 10.0 + 2 * _load(scale, scale.load) / PEER_RATE,
        "vllm": IMPORTS + (_vllm(scale) if find_spec("vllm") else 0.0),
        "memory": IMPORTS + _opened(scale) + _memory(scale),
        "faults": 2 * IMPORTS + 4.0,
        "tests": IMPORTS + 7.0,
    }


def _weights(scale: Scale) -> float:
    """To make the model's."""
    return float(num_bytes(scale.model) / 2 / RANDOM_RATE)


def _graphs(layers: int, rows: int) -> float:
    """To capture the graphs of decodes twice, and the pieces of layers, each with a warm-up and a comparison."""
    sizes = sum(size <= rows for size in SIZES)
    kernels = layers * LAUNCHES_PER_LAYER
    num_runs = 2 * (3 * sizes + 3 * len(TOKEN_COUNTS))
    return float(num_runs * kernels * LAUNCHES)


def _opened(scale: Scale) -> float:
    """To make the model and warm it up for the largest batch."""
    return _weights(scale) + _graphs(scale.model.num_layers, max(scale.batches))


def _prefill(scale: Scale) -> float:
    rows, length = scale.prefill
    return prefill_flops(scale.model, [length] * rows) / MATRIX_RATE


def _decode_step(scale: Scale, rows: int, context: int) -> float:
    return decode_bytes(scale.model, rows * context) / READ_RATE


def _load(scale: Scale, load: Load) -> float:
    """A whole load on the engine."""
    context = load.prompt_tokens + load.new_tokens // 2
    prompts = prefill_flops(scale.model, [load.prompt_tokens] * load.streams) / MATRIX_RATE
    return prompts + load.new_tokens * _decode_step(scale, load.streams, context)


def _decode(scale: Scale) -> float:
    steps = scale.num_steps + scale.num_warm_ups + scale.num_profiled
    decodes = steps * sum(_decode_step(scale, rows, scale.context) for rows in scale.batches)
    prompts = prefill_flops(scale.model, [scale.context] * max(scale.batches)) / MATRIX_RATE
    return decodes + prompts + (scale.repeats + 1) * _load(scale, scale.load)


def _capture(scale: Scale) -> float:
    """Both models, each in two modes, by graphs and eagerly; then the capture that fails."""
    rows = max(scale.batches)
    steps = len(scale.batches) * 2 * 2
    eager = steps * scale.model.num_layers * LAUNCHES_PER_LAYER * LAUNCHES
    large = _weights(scale) + _graphs(scale.model.num_layers, rows) + eager
    return 2 * large + 3 * _graphs(scale.small.num_layers, rows)


def _server(scale: Scale) -> float:
    """Written once and read by two starts, of which the second ends when it is ready, and the load over HTTP."""
    files = 3 * num_bytes(scale.model) / DISK_RATE / 4
    start = SERVER_START + _graphs(scale.model.num_layers, max(scale.batches))
    return files + 2 * start + 3 * _load(scale, scale.load) / SERVED_SHARE


def _vllm(scale: Scale) -> float:
    """Written and read once, compiled, and the load three times."""
    files = 2 * num_bytes(scale.model) / DISK_RATE / 4
    return files + VLLM_START + 3 * _load(scale, scale.load)


def _memory(scale: Scale) -> float:
    """Prompts that fill the cache: as many as an H100's 80 GB have room for beside the weights."""
    kv = decode_bytes(scale.model, 1) - decode_bytes(scale.model, 0)
    tokens = min(scale.memory_rows * scale.max_tokens, (72e9 - num_bytes(scale.model)) / kv)
    prompt = prefill_flops(scale.model, [scale.max_tokens]) / MATRIX_RATE
    return tokens / scale.max_tokens * prompt + 2.0


HEADINGS = ("stage", "question", "kernels", "compiling", "working", "in all", "limit")


def limits(found: Sequence[Estimate]) -> list[float]:
    """The seconds that each stage may take, when the ones before it take their estimates."""
    result, left = list[float](), TOTAL_SECONDS
    for place, each in enumerate(found):
        result.append(limit_seconds([later.stage.share for later in found[place:]], left))
        left -= each.seconds
    return result


def table(found: Sequence[Estimate]) -> str:
    """The plan in Markdown, in seconds."""
    rows = [
        (
            each.stage.name,
            each.stage.question,
            str(each.kernels),
            *(f"{seconds:.0f}" for seconds in (each.compiling, each.working, each.seconds, limit)),
        )
        for each, limit in zip(found, limits(found), strict=True)
    ]
    return markdown(HEADINGS, rows)


def main(scale: Scale, say: Callable[[str], object] = print) -> int:
    """Exit status: 1 where a stage would not end within its limit, or all of them within the run's time."""
    found = estimates(scale)
    say(table(found))
    total = sum(each.seconds for each in found)
    say(f"\n{total:.0f} s of {TOTAL_SECONDS:.0f} s, estimated for {CORES} cores and an H100")
    late = [
        each.stage.name
        for each, limit in zip(found, limits(found), strict=True)
        if each.seconds > limit
    ]
    if late:
        say(f"longer than their limits: {', '.join(late)}")
    return int(bool(late) or total > TOTAL_SECONDS)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m bench.gpu.dry_run", description=__doc__).parse_args()
    sys.exit(main(SCALES["8b"]))
