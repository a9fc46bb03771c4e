"""The shard's engine without its queue: decoder, warm-up, graphs and step runner, driven as by the router.

Entry point: `opened`, a model of random weights whose sessions are engines; `distance` compares two of them.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from bench.gpu.engine.clock import Clock
from bench.gpu.engine.kernels import graphs_for, kernels_for
from bench.gpu.engine.random_weights import RandomWeights, read_description
from bench.gpu.engine.scale import Scale
from bench.harness.checkpoints import Shape
from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits, warm_up
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.model_runner.runner import StepRunner
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.layer_loader import LayerLoader
from millrace_shard.models.rope import RopeTables

STEPS_IN_FLIGHT = 2
"""Steps in flight, as in the router."""
DTYPE = torch.bfloat16
GREEDY = Sampling()
SEED = 0


class BadStepError(Exception):
    """A step dropped sequences, because of infinite logits or an inconsistent batch."""


@dataclass(slots=True)
class StepTimes:
    """Milliseconds of each step."""

    step: list[float] = field(default_factory=list)
    """From the end of one step to the end of the next, on the device, with one step submitted ahead."""
    forward: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    """For its submission."""


@torch.inference_mode()
def load(
    shape: Shape,
    config: ShardConfig,
    device: torch.device,
    max_tokens: int,
    *,
    is_checked: bool = True,
) -> LoadedModel:
    """Random weights behind the kernels for CUDA, which run the check of a start if it `is_checked`."""
    read_description(config.model_folder, shape)
    described = ModelDescription.read(config.model_folder)
    assert described.spec is not None
    layers = described.layer_shape(world_size=1)
    kernels = kernels_for(config, device, DTYPE, layers, is_checked=is_checked)
    torch.manual_seed(0)
    group = ProcessGroup.single()
    loader = LayerLoader(
        described.spec,
        RopeTables(max_tokens, device),
        RandomWeights(shape, dtype=DTYPE, device=device),
        kernels,
        group,
    )
    model = Decoder(described.spec, described.info(), loader, kernels, group)
    return LoadedModel(model=model, kernels=kernels, group=group, device=device, dtype=DTYPE)


@torch.inference_mode()
def start(
    loaded: LoadedModel,
    scale: Scale,
    *,
    max_rows: int,
    graphs: GraphSettings | None,
    profile: bool | None = None,
    fill: bool = False,
) -> Session:
    """Warm up as the shard does, with room for `max_rows` sequences of every measured length.

    With `fill` the KV cache takes the memory that a server's would, within `scale.memory_tokens`. `profile` is that of
    `warm_up`.
    """
    tokens = max(max_rows * scale.longest, scale.max_prefill_tokens)
    tokens = max(tokens + 2 * max_rows * loaded.kernels.block_size, scale.max_tokens)
    request = WarmupRequest(
        max_batch_prefill_tokens=scale.max_prefill_tokens,
        max_batch_size=max_rows,
        max_concurrent_requests=max_rows,
        max_total_tokens=scale.max_tokens,
        max_batch_total_tokens=scale.memory_tokens if fill else tokens,
    )
    warmed = warm_up(loaded, request, MemoryLimits(), graphs=graphs, profile=profile)
    return Session(warmed.runner, loaded.device, scale.max_prefill_tokens)


class Session:
    """Sequences of random tokens in slots 0, 1, … of one runner."""

    def __init__(self, runner: StepRunner, device: torch.device, max_prefill_tokens: int) -> None:
        self._runner = runner
        runner.times_device = True
        self._device = device
        self._max_prefill_tokens = max_prefill_tokens
        self._random = np.random.default_rng(SEED)
        self._next_block = 1
        self._lengths: list[int] = []

    def context(self, rows: int) -> int:
        """Tokens of the first `rows` sequences together."""
        return sum(self._lengths[:rows])

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that sequences may own."""
        return self._runner.batch.limits.num_blocks - 1

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._runner.batch.limits.block_size

    def clear(self) -> None:
        """Drop every sequence; the next ones get the tokens of the first ones."""
        self._runner.clear()
        self._random = np.random.default_rng(SEED)
        self._next_block = 1
        self._lengths.clear()

    @torch.inference_mode()
    def admit(
        self,
        rows: int,
        length: int,
        *,
        room: int,
        parameters: Sampling = GREEDY,
    ) -> list[StepResult]:
        """Compute `rows` more prompts of `length` in as few steps as allowed, with room for `room` more tokens each."""
        at_once = max(1, self._max_prefill_tokens // length)
        flying: deque[LaunchedStep] = deque()
        results: list[StepResult] = []
        for first in range(0, rows, at_once):
            step = self._admission(min(at_once, rows - first), length, room, parameters)
            flying.append(self._runner.launch(step))
            if len(flying) == STEPS_IN_FLIGHT:
                results.append(_finished(flying.popleft()))
        return results + [_finished(step) for step in flying]

    @torch.inference_mode()
    def admit_beside(self, rows: int, length: int, *, room: int) -> StepResult:
        """Compute `rows` more prompts of `length` in one step in which all other sequences decode."""
        decoding = len(self._lengths)
        step = self._admission(rows, length, room, GREEDY)
        result = _finished(self._runner.launch(replace(step, decode_slots=np.arange(decoding))))
        for slot in range(decoding):
            self._lengths[slot] += 1
        return result

    @torch.inference_mode()
    def play(self, rows: int, num_steps: int) -> list[StepResult]:
        """Decode the first `rows` sequences `num_steps` times, one step after the other."""
        step = Forward(decode_slots=np.arange(rows))
        results = [_finished(self._runner.launch(step)) for _ in range(num_steps)]
        for slot in range(rows):
            self._lengths[slot] += num_steps
        return results

    @torch.inference_mode()
    def decode(self, rows: int, num_steps: int) -> StepTimes:
        """Decode the first `rows` sequences `num_steps` times, with one step always submitted ahead."""
        step = Forward(decode_slots=np.arange(rows))
        clock, times = Clock(self._device), StepTimes()
        flying: deque[LaunchedStep] = deque()
        for _ in range(num_steps):
            began = time.perf_counter()
            flying.append(self._runner.launch(step))
            times.host.append(1000 * (time.perf_counter() - began))
            clock.mark()
            if len(flying) == STEPS_IN_FLIGHT:
                self._record(flying.popleft(), times)
        while flying:
            self._record(flying.popleft(), times)
        times.step = clock.gaps_ms()
        for slot in range(rows):
            self._lengths[slot] += num_steps
        return times

    def _record(self, step: LaunchedStep, times: StepTimes) -> None:
        timings = _finished(step).timings
        times.forward.append(timings.forward_ns / 1e6)
        times.sampling.append(timings.decode_ns / 1e6)

    def _admission(self, rows: int, length: int, room: int, parameters: Sampling) -> Forward:
        slots = np.arange(rows) + len(self._lengths)
        vocab_size = self._runner.batch.limits.vocab_size
        # One of the tokens submitted ahead may be stored past the reserved room.
        blocks = -(-(length + room + 1) // self._runner.batch.limits.block_size)
        change = BatchChange(
            admitted=tuple(
                Sequence(
                    slot=int(slot),
                    request_id=int(slot),
                    input_ids=self._random.integers(1, vocab_size, length),
                    parameters=parameters,
                )
                for slot in slots
            ),
            grown_slots=np.repeat(slots, blocks),
            grown_blocks=np.arange(rows * blocks) + self._next_block,
        )
        self._next_block += rows * blocks
        self._lengths += [length] * rows
        chunks = np.full(rows, length, dtype=np.int64)
        return Forward(change=change, chunk_slots=slots, chunk_tokens=chunks)


def _finished(step: LaunchedStep) -> StepResult:
    result = step.finish()
    if len(result.failed_slots):
        raise BadStepError(f"sequences failed in slots {result.failed_slots.tolist()}")
    return result


def distance(a: StepResult, b: StepResult) -> float:
    """The largest difference of a log probability; infinite for other rows and for NaN, 0 without tokens."""
    if a.slots.tolist() != b.slots.tolist() or len(a.ids) != len(b.ids):
        return float("inf")
    if not len(a.ids):
        return 0.0
    return float(np.nan_to_num(np.abs(a.logprobs - b.logprobs), nan=np.inf).max())


def other_tokens(a: StepResult, b: StepResult) -> int:
    """The number of tokens that differ or that one run lacks."""
    if len(a.ids) != len(b.ids):
        return max(len(a.ids), len(b.ids))
    return int((a.ids != b.ids).sum())


def largest_distance(ours: Items[StepResult], theirs: Items[StepResult]) -> float:
    """The largest `distance` of any step."""
    return max(distance(a, b) for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Opened:
    """A loaded model and its config."""

    loaded: LoadedModel
    config: ShardConfig
    scale: Scale

    def session(self, *, max_rows: int, fill: bool = False) -> Session:
        """An engine as it serves: profiled, with the graphs of its flags. On CPU it runs without graphs."""
        device = self.loaded.device
        graphs = graphs_for(self.config, device) if device.type == "cuda" else None
        return start(self.loaded, self.scale, max_rows=max_rows, graphs=graphs, fill=fill)


@contextmanager
def opened(
    shape: Shape,
    scale: Scale,
    device: torch.device,
    flags: Items[str],
    *,
    is_checked: bool = True,
) -> Iterator[Opened]:
    """Random weights of `shape` for the length of the block; see `load`."""
    with tempfile.TemporaryDirectory() as folder:
        config = ShardConfig.from_args([*flags, folder])
        loaded = load(shape, config, device, scale.max_tokens, is_checked=is_checked)
        print(f"weights made, {loaded.kernels.name} kernels", flush=True)
        yield Opened(loaded, config, scale)
