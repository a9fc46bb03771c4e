"""`python -m bench.scale windows`: what layers with a window give back, for the shapes of published models.

The first table has the requests of one length that fit into a memory at once: the shards' own division of it, and the
router's block manager, which admits requests and lets each compute its prompt until no more fit. With `--trace`, the
second one has the prompt tokens that the prefix cache finds in that memory: the simulator serves the whole trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.command_line import say
from bench.harness.tables import markdown
from bench.scale.traces import TraceWorkload
from millrace.simulate.deployment import Deployment
from millrace.simulate.metrics import SimulationMetrics
from millrace.simulate.simulation import Simulation, simulate
from millrace_router.scheduler.factory import DEFAULT_PREFILL_TOKENS, blocks_from, spare_slots
from millrace_router.scheduler.window_blocks import WindowGroup
from millrace_shard.engine.kv_capacity import (
    CacheShape,
    Capacity,
    WarmupRequest,
    WindowShape,
    plan_capacity,
)

GIB = 1 << 30
BLOCK_SIZE, MASKED = 64, 192
"""Those of the kernels for CPUs: positions of a block, and those before a window that they read and mask."""
COSTS = {
    "step": 0.004,
    "decode_row": 1e-5,
    "decode_context_token": 0.0,
    "prefill_step": 0.001,
    "prefill_token": 2e-6,
    "prefill_pair": 0.0,
}
"""So low that the cache decides what is found, and not the queue."""


@dataclass(frozen=True, slots=True)
class Model:
    """The KV cache of a model in bfloat16."""

    num_layers: int
    num_windowed: int
    window: int
    num_kv_heads: int
    head_dim: int

    def shape(self, longest: int, *, groups: bool) -> CacheShape:
        """Its shape on one shard, for sequences up to `longest` positions."""
        layer = 2 * self.num_kv_heads * self.head_dim * 2
        group = WindowShape(
            window=self.window,
            reach=self.window - 1 + MASKED,
            num_layers=self.num_windowed,
            bytes_per_token=layer * self.num_windowed,
        )
        return CacheShape(
            block_size=BLOCK_SIZE,
            bytes_per_token=layer * self.num_layers,
            max_position_embeddings=longest,
            windows=(group,) if groups else (),
        )


MODELS = {
    "gemma-3-1b": Model(26, 22, 512, 1, 256),
    "gemma-3-12b": Model(48, 40, 1024, 8, 256),
    "gpt-oss-20b": Model(24, 12, 128, 8, 64),
    "olmo-3-7b": Model(32, 24, 4096, 32, 128),
    "mistral-7b-v0.1": Model(32, 32, 4096, 8, 128),
}


def capacity_of(
    model: Model, options: argparse.Namespace, longest: int, *, groups: bool
) -> Capacity:
    """How the shards divide the memory."""
    shape = model.shape(longest, groups=groups)
    request = WarmupRequest(
        max_batch_prefill_tokens=DEFAULT_PREFILL_TOKENS,
        max_batch_size=options.rows + spare_slots(options.rows),
        max_concurrent_requests=options.rows,
        max_total_tokens=longest,
    )
    fitting = int(options.gib * GIB) // (shape.bytes_per_token * BLOCK_SIZE) - 1
    return plan_capacity(request, shape, fitting_blocks=fitting, is_budget=True)


def windows_of(capacity: Capacity) -> tuple[WindowGroup, ...]:
    """The groups as the router knows them."""
    return tuple(
        WindowGroup(num_blocks=num_blocks, window=shape.window, reach=shape.reach)
        for shape, num_blocks in capacity.windows
    )


def num_fitting(capacity: Capacity, tokens: int, rows: int) -> int:
    """Requests of so many tokens, up to `rows`, that the block manager holds at once, each computed in chunks."""
    blocks = blocks_from(
        capacity.num_blocks, BLOCK_SIZE, prefix_caching=False, windows=windows_of(capacity)
    )
    for slot in range(rows):
        lacks_window = blocks.windows and blocks.window_shortage(tokens) > 0
        if lacks_window or blocks.shortage(tokens) > 0:
            return slot
        blocks.admit(slot, tokens, longest=tokens)
        computed = 0
        while computed < tokens:
            chunk = min(computed + DEFAULT_PREFILL_TOKENS, tokens)
            if blocks.windows:
                chunk = min(chunk, blocks.window_room(slot))
            if blocks.grow(slot, chunk) is None:
                raise AssertionError("a promise of blocks was not kept")
            computed = chunk
            for window in blocks.windows:
                window.advance(slot, computed, ())
    return rows


def served(capacity: Capacity, options: argparse.Namespace, longest: int) -> SimulationMetrics:
    """The simulator's report on the trace."""
    deployment = Deployment(
        cost_model=COSTS,
        num_blocks=capacity.num_blocks,
        window_groups=windows_of(capacity),
        block_size=BLOCK_SIZE,
        max_total_tokens=longest,
        max_batch_size=options.rows,
        max_concurrent_requests=1 << 20,
        max_batch_prefill_tokens=DEFAULT_PREFILL_TOKENS,
    )
    workload = TraceWorkload(trace=options.trace)
    (metrics,) = simulate([Simulation(deployment=deployment, workload=workload)])
    return metrics


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        "python -m bench.scale windows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gib", type=float, default=8.0, help="memory of the KV cache")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--rows", type=int, default=256, help="--max-batch-size")
    parser.add_argument("--trace", type=Path, help="a trace, such as Mooncake's")
    parser.add_argument("--longest", type=int, default=8192, help="--max-total-tokens at least")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models:
        for tokens in options.tokens:
            longest = max(tokens, options.longest)
            fitting = [
                num_fitting(
                    capacity_of(MODELS[name], options, longest, groups=groups), tokens, options.rows
                )
                for groups in (False, True)
            ]
            rows.append(
                [name, str(tokens), *map(str, fitting), f"{fitting[1] / max(1, fitting[0]):.2f}"]
            )
    say(markdown(["model", "tokens", "requests without groups", "with", "ratio"], rows))
    if options.trace is None:
        return 0
    rows = []
    for name in options.models:
        for groups in (False, True):
            capacity = capacity_of(MODELS[name], options, options.longest, groups=groups)
            metrics = served(capacity, options, options.longest)
            share = metrics.cached_tokens / (metrics.cached_tokens + metrics.prefill_tokens)
            sizes = [num_blocks - 1 for _, num_blocks in capacity.windows]
            cells = [str(capacity.num_blocks - 1), ", ".join(map(str, sizes)) or "-"]
            rows.append([name, "on" if groups else "off", *cells, f"{100 * share:.1f} %"])
            say(f"{name}: done")
    say(markdown(["model", "groups", "blocks", "window blocks", "found in the cache"], rows))
    return 0
