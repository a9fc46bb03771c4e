"""`transformers`' continuous batching on the GPU with its own defaults, over random weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.gpu.engine.random_weights import fill, read_description
from bench.gpu.engine.scale import Load
from bench.harness.checkpoints import Shape
from bench.peers.transformers_engine import NO_TOKEN, Manager, TransformersEngine
from bench.peers.worker import Moments, Request

CPU_BLOCKS = 64


def load(
    folder: Path, shape: Shape, device: torch.device, running: ExitStack
) -> TransformersEngine:
    """A manager that runs until `running` ends; it chooses block sizes, graphs and memory on a GPU."""
    logging.disable(logging.WARNING)
    config = read_description(folder, shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name)
    chosen: dict[str, Any] = {"allow_block_sharing": False}
    if device.type == "cpu":
        chosen |= {"num_blocks": CPU_BLOCKS, "max_batch_tokens": 1024}
    manager: Manager = running.enter_context(
        model.eval().continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**chosen),
        )
    )
    return TransformersEngine(running, manager)


def requests(shape: Shape, load: Load) -> list[Request]:
    """Requests of random tokens."""
    ids = torch.randint(1, shape.vocab_size, (load.streams, load.prompt_tokens)).tolist()
    return [Request(each, load.new_tokens) for each in ids]


def rate(moments: Sequence[Moments]) -> float:
    """Output tokens a second, from the first submission to the last token."""
    num_tokens = sum(len(each.arrivals) for each in moments)
    start = min(each.due for each in moments)
    return num_tokens / (max(each.arrivals[-1] for each in moments) - start)
