"""How many times as fast linears are with activations in int8 as with exact ones, measured once and kept in a file.

A request that is computed again must be rounded as before, so the file decides: a shard that starts again reads it, and
without a place for the file nothing is measured. The name of the file is a digest of what the gain depends on.

Measured are passes over a small model: panels of the linears' formats and inputs, in the proportions of the model, and
with more bytes than most caches have.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from millrace_proto.cores import cpu_fact
from millrace_shard.kernels.build import cache_folder, load_operators
from millrace_shard.kernels.cpu.packed_weight import has_integer_products, or_empty, packed_codes
from millrace_shard.kernels.layer_shape import CodedLinears
from millrace_shard.kernels.toolchain import BuildError, check_owners

FORMAT_VERSION = 3
"""Changes with what is measured."""
ROWS = (1, 8, 32)
"""Rows of the measured decodes."""
PROMPT_ROWS = 128
SAMPLE_CODES = 1 << 26
"""Weights of the small model."""
PANEL_CODES = 1 << 24
"""Weights of one of its linears; in smaller ones the rounding of inputs takes a larger part of the time."""
LEAST_STEP = 0.9
"""A step that becomes slower than this rules rounding out."""
PANEL_OUTPUTS = 32
"""Outputs of a linear are a multiple of this."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 11
SECONDS = 0.2
"""After so long no further round begins, for each number of rows."""
CPU_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")

Clock = Callable[[], float]
Call = Callable[[], object]

logger = logging.getLogger(__name__)


class GainUnknown(Exception):  # noqa: N818
    """There is no gain to rely on; the message names the reason."""


def kept_gain(linears: Sequence[CodedLinears], *, clock: Clock = time.perf_counter) -> float:
    """The gain on this CPU with the present number of threads, measured only if no file has it. Raises GainUnknown.

    Operators must be loaded.
    """
    facts = _facts(linears)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    try:
        folder = cache_folder("gains")
        path = folder / f"{digest[:32]}.json"
        gain = _read(path)
        if gain is None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_owners(folder)
            with path.with_suffix(".lock").open("w") as lock:
                # A process that starts at the same time waits and reads.
                fcntl.flock(lock, fcntl.LOCK_EX)
                gain = _read(path)
                if gain is None:
                    gain = _measured(linears, clock)
                    _write(path, {"gain": gain, "of": facts})
    except (OSError, BuildError) as error:
        raise GainUnknown(f"the gain by int8 cannot be kept: {error}") from error
    return gain


def _facts(linears: Sequence[CodedLinears]) -> list[object]:
    """What the gain depends on."""
    return [
        FORMAT_VERSION,
        [cpu_fact(name) for name in CPU_FACTS],
        torch.backends.cpu.get_cpu_capability(),
        load_operators(),
        torch.get_num_threads(),
        [[repr(each.format), each.inputs, each.outputs] for each in linears],
    ]


def _read(path: Path) -> float | None:
    try:
        check_owners(path.parent, path)
        gain = json.loads(path.read_bytes())["gain"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        gain = None
    if isinstance(gain, float) and 0 < gain < math.inf:
        return gain
    logger.warning("%s is damaged, and the gain by int8 activations is measured again", path)
    return None


def _write(path: Path, content: dict[str, object]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _measured(linears: Sequence[CodedLinears], clock: Clock) -> float:
    begin = clock()
    exact, rounded = (_passes(linears, integer=integer) for integer in (False, True))
    gains = {rows: ratio(exact[rows], rounded[rows], clock=clock) for rows in exact}
    logger.info(
        "activations in int8 are %s times as fast as exact ones in steps of %s rows; measured once, in %.2f s",
        ", ".join(f"{gain:.2f}" for gain in gains.values()),
        ", ".join(map(str, gains)),
        clock() - begin,
    )
    prompt = gains.pop(PROMPT_ROWS)
    return round(overall(gains.values(), prompt), 3)


def overall(decodes: Collection[float], prompt: float) -> float:
    """The larger of the gain of prompts and the mean of decodes'; the least one if a step is slower by over a tenth."""
    least = min(prompt, *decodes)
    return least if least < LEAST_STEP else max(prompt, statistics.geometric_mean(decodes))


def ratio(slow: Call, fast: Call, *, clock: Clock, seconds: float = SECONDS) -> float:
    """The seconds of `slow` over the seconds of `fast`, lower quartiles of rounds in which each is first in turn.

    Other processes start at the same time, and take some rounds' time. A first round is not counted. After `seconds` no
    round begins, but the least number is always run.
    """
    samples: dict[Call, list[float]] = {slow: [], fast: []}
    begin = clock()
    for number in range(MOST_ROUNDS + 1):
        if number > LEAST_ROUNDS and clock() - begin > seconds:
            break
        for call in (slow, fast) if number % 2 else (fast, slow):
            start = clock()
            call()
            if number:
                samples[call].append(clock() - start)
    quartiles = (sorted(samples[call])[len(samples[call]) // 4] for call in (slow, fast))
    return next(quartiles) / next(quartiles)


def _passes(linears: Sequence[CodedLinears], *, integer: bool) -> dict[int, Call]:
    """A pass over the small model for each number of rows. Raises GainUnknown if no weights stand for integers."""
    total = sum(each.inputs * each.outputs for each in linears)
    weights = list[tuple[int, int, torch.Tensor]]()
    has_integers = False
    for each in linears:
        share = SAMPLE_CODES * each.outputs // total
        most = min(share, PANEL_CODES // each.inputs, each.outputs)
        outputs = max(PANEL_OUTPUTS, most // PANEL_OUTPUTS * PANEL_OUTPUTS)
        weight = each.format.random(outputs, each.inputs, torch.device("cpu"))
        has_integers |= has_integer_products(weight)
        packed = packed_codes([weight], integer=integer)
        if packed is not None:
            copies = max(1, round(share / outputs))
            weights += [(each.inputs, outputs, packed.clone()) for _ in range(copies)]
    if not has_integers:
        raise GainUnknown("no weights of the model stand for integers")
    return {rows: _pass(weights, rows) for rows in (*ROWS, PROMPT_ROWS)}


def _pass(weights: Sequence[tuple[int, int, torch.Tensor]], rows: int) -> Call:
    generator, bias = torch.Generator().manual_seed(0), or_empty(None)
    x = {
        inputs: torch.randn(rows, inputs, generator=generator).bfloat16()
        for inputs in {inputs for inputs, _, _ in weights}
    }
    y = {outputs: torch.empty(rows, outputs).bfloat16() for _, outputs, _ in weights}

    def run() -> None:
        for inputs, outputs, packed in weights:
            torch.ops.millrace.panel_linear(y[outputs], x[inputs], packed, bias)

    return run
