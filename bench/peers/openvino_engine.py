"""OpenVINO GenAI's continuous batching on a converted model. Runs in bench/.peers/openvino."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import openvino as ov
from openvino_genai import (
    ContinuousBatchingPipeline,
    GenerationConfig,
    GenerationStatus,
    SchedulerConfig,
)
from openvino_genai.py_openvino_genai import GenerationHandle

from bench.peers.worker import Limits, Moments, Request, drive, main

MAX_BATCHED_TOKENS = 4096
GIGABYTE = 2**30
BYTES_PER_TOKEN = 128 * 1024
"""An upper bound of the bytes of a token's keys and values, for both shapes."""


class OpenvinoEngine:
    """Steps the pipeline and reads every handle."""

    def __init__(self, pipeline: ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._handles: dict[int, GenerationHandle] = {}
        self._next_id = 0

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        """See `Engine.run`."""
        return drive(self, requests, concurrency)

    def add(self, number: int, request: Request) -> None:
        """See `Stepping.add`."""
        config = GenerationConfig()
        config.max_new_tokens = request.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.array([request.ids], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(self._next_id, ids, config)
        self._next_id += 1

    def step(self) -> Iterator[tuple[int, int, bool]]:
        """See `Stepping.step`."""
        self._pipeline.step()
        for number, handle in list(self._handles.items()):
            num_new = 0
            while handle.can_read():
                num_new += sum(len(o.generated_ids) for o in handle.read().values())
            has_ended = handle.get_status() == GenerationStatus.FINISHED
            if has_ended:
                del self._handles[number]
            if num_new or has_ended:
                yield number, num_new, has_ended


def load(model: Path, limits: Limits) -> OpenvinoEngine:
    """The model, keys and values included, in bfloat16 where the CPU has it, without a prefix cache."""
    has_bfloat16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if has_bfloat16 else "f32"
    scheduler = SchedulerConfig()
    scheduler.max_num_seqs = limits.max_streams
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    scheduler.cache_size = max(1, -(-limits.kv_tokens * BYTES_PER_TOKEN // GIGABYTE))
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": limits.threads,
    }
    return OpenvinoEngine(ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties))


if __name__ == "__main__":
    main(load)
