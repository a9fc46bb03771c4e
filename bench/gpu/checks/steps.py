"""Random steps in float32: their tokens on the device against a shard's with plain torch on CPU."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from bench.gpu.engine.kernels import graphs_for, kernels_for
from bench.gpu.engine.random_steps import RandomSteps
from bench.gpu.engine.scale import TINY
from bench.gpu.engine.session import distance, other_tokens
from bench.gpu.figures import Figure, check
from bench.gpu.setting import Emit, Setting
from bench.harness.checkpoints import write_checkpoint
from millrace_shard.batch.step import Forward
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits, warm_up
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.model_runner.runner import StepRunner
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.load import load_model

MAX_ROWS = 6
LONGEST_PROMPT = 70
MAX_TOKENS = 128
CPU = torch.device("cpu")
TOLERANCE = 1e-3
"""Largest difference of a log probability; two tokens that are closer may change places."""
SECONDS = 1.0


@torch.inference_mode()
def run(setting: Setting, emit: Emit) -> None:
    """Emit the number of tokens that differ, and the largest difference of a log probability."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_checkpoint(folder, TINY, seed=0)
        config = ShardConfig.from_args([*setting.flags, path])
        layers = ModelDescription.read(folder).layer_shape(1)
        kernels = kernels_for(config, setting.device, torch.float32, layers)
        ours = runner(folder, kernels, setting.device, config)
        theirs = runner(folder, PlainKernels(deterministic=True), CPU, None)
        steps = (
            RandomSteps(
                0,
                max_rows=MAX_ROWS,
                vocab_size=TINY.vocab_size,
                block_size=each.batch.limits.block_size,
                longest_prompt=LONGEST_PROMPT,
            )
            for each in (ours, theirs)
        )
        pairs = zip(*steps, strict=True)
        enough = itertools.takewhile(lambda _: setting.has_time_for(SECONDS), pairs)
        emit(compared(ours, theirs, itertools.islice(enough, setting.scale.random_steps)))


def compared(
    ours: StepRunner, theirs: StepRunner, steps: Iterable[tuple[Forward, Forward]]
) -> Figure:
    """Run every pair of steps, up to the first with another token."""
    num_steps = num_tokens = 0
    largest, problem = 0.0, ""
    for mine, other in steps:
        a, b = ours.launch(mine).finish(), theirs.launch(other).finish()
        num_steps += 1
        num_tokens += len(b.ids)
        largest = max(largest, distance(a, b))
        if len(a.failed_slots) or other_tokens(a, b):
            problem = f"step {num_steps} has other tokens"
            # Later steps continue from other tokens.
            break
    return check(
        "random steps against a shard on CPU, float32",
        float("inf") if problem else largest,
        "largest difference of a log probability",
        {"steps": num_steps, "tokens": num_tokens, **({"problem": problem} if problem else {})},
        most=TOLERANCE,
    )


def runner(
    folder: Path,
    kernels: Kernels,
    device: torch.device,
    config: ShardConfig | None,
    *,
    dtype: torch.dtype = torch.float32,
) -> StepRunner:
    """A warmed up runner of the checkpoint, with graphs if there is a `config` and a GPU.

    It has room for MAX_ROWS sequences of MAX_TOKENS.
    """
    group = ProcessGroup.single()
    model = load_model(
        folder,
        dtype=dtype,
        kernels=kernels,
        group=group,
        device=device,
        max_total_tokens=MAX_TOKENS,
    )
    loaded = LoadedModel(model=model, kernels=kernels, group=group, device=device, dtype=dtype)
    blocks = -(-MAX_TOKENS // kernels.block_size)
    request = WarmupRequest(
        max_batch_prefill_tokens=MAX_TOKENS,
        max_batch_size=MAX_ROWS,
        max_concurrent_requests=MAX_ROWS,
        max_total_tokens=MAX_TOKENS,
        max_batch_total_tokens=MAX_ROWS * blocks * kernels.block_size,
    )
    graphs = graphs_for(config, device) if config and device.type == "cuda" else None
    return warm_up(loaded, request, MemoryLimits(), graphs=graphs, profile=False).runner
