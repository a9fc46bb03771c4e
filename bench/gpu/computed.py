"""Decode and prompt times on GPUs as computed from bytes, operations and launches: `python -m bench.gpu.computed`.

Nothing here was measured on a GPU. The rates that kernels reach were estimated from the CUDA code and agree with
an earlier estimate for Llama 3.1 8B within 8 %; what a change does to them follows from counts in compiled
code. A page of `make bench-gpu` replaces these figures.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.gpu.peaks import PEAKS, Peak
from bench.harness.tables import markdown
from millrace_shard.kernels.cuda.linear_tilings import EXPERT_BYTES, EXPERT_ROWS

KB, GB = 1e3, 1e9
CONTEXT = 1024
"""Tokens before a decode."""
LARGEST_PART = 0.85
"""The largest share of a GPU's memory that weights take."""
BF16 = 2.0
"""Bytes of a weight."""
INT4 = 0.5 + 4 / 128
"""With a scale and an offset of 16 bits for 128 inputs."""
MXFP4 = 0.5 + 2 / 32
"""With a scale of 16 bits for 32 inputs."""
FP8 = 1.0
"""With scales of whole rows or of blocks, which are few."""
BYTES_A_CLOCK = {INT4: (5.3, 7.9), MXFP4: (5.8, 5.8), FP8: (8.6, 8.9)}
"""Bytes of codes that a multiprocessor multiplies, before and after: compiled for sm_90, the loop of a decode takes 386
and 260 instructions a warp for 2 048 bytes of int4, and 178 for 1 024 of MXFP4; for sm_80, 461 for 4 096 of e4m3, whose
table in shared memory was bound by conflicts of its banks before."""
CONVERTED = 20.0
"""The same for e4m3 where an instruction converts it, which takes 204 for 4 096 bytes."""
SCALED_SHARE = 0.9
"""Torch's products of e4m3 reach this part of what its products of 16 bits do, of twice their peak."""
READ_RATE, SMALL_RATE = 0.83, 0.8
"""Parts of the memory's rate that decodes reach over weights of 16 bits, and other kernels."""
COPY_LAUNCHES = 2
"""Kernels of an expert's half whose results are in float32: their bytes count twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's data sheet, and the parts of it that kernels reach."""

    name: str
    memory: float
    """Bytes."""
    peak: Peak
    clocks: float
    """A second, of all multiprocessors together."""
    matrix_share: float
    attention_share: float
    launch: float
    """Seconds of a small kernel in a graph."""
    link: float | None
    """Bytes a second between GPUs; None: too slow for tensor parallelism."""
    has_e4m3: bool = True
    """Whether there are instructions for e4m3, of conversion and of the tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer."""

    count: int
    top_k: int
    inter: int
    stored: tuple[float, float]
    """Bytes of a weight on the GPU, before and after."""
    shared: int = 0
    """Experts that every token has in addition."""

    def chosen(self, rows: int) -> float:
        """How many different ones so many rows choose, if they choose evenly."""
        return self.count * (1 - (1 - self.top_k / self.count) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """Channels of attention over latents."""

    latent: int
    rotated: int
    key: int
    """Channels of a head's key that are not rotated."""
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, of which each of `ranks` GPUs has a part."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    stored: float = BF16
    """Bytes of a weight of the layers' linears."""
    experts: Experts | None = None
    window: int | None = None
    """Tokens that every second layer sees, where layers have a window."""
    ranks: int = 1
    plain_launches: int = 0
    """Launches a layer that norms or rotations took before they were fused."""
    latents: Latents | None = None
    """Sizes of attention over latents; None: usual attention. The state before has no kernels for it."""

    @property
    def attention_weights(self) -> float:
        """Number of weights in the attention of one layer."""
        if self.latents is None:
            heads = 2 * self.heads + 2 * self.kv_heads
            return self.hidden * heads * self.head_dim / self.ranks
        each = self.latents
        of_heads = self.hidden * (each.key + each.rotated + each.value)
        of_heads += (each.key + each.value) * each.latent
        return self.hidden * (each.latent + each.rotated) + self.heads * of_heads / self.ranks

    @property
    def cached(self) -> float:
        """Bytes of a token in the cache of a layer; every rank has all latents."""
        if self.latents is not None:
            return BF16 * (self.latents.latent + self.latents.rotated)
        return 2 * BF16 * self.kv_heads * self.head_dim / self.ranks

    @property
    def pair_operations(self) -> float:
        """Operations of all heads for a query and a key with its value."""
        if self.latents is None:
            return 4 * self.heads * self.head_dim / self.ranks
        return 2 * self.heads * (2 * self.latents.latent + self.latents.rotated) / self.ranks

    @property
    def mlp_weights(self) -> float:
        """Number of weights in the MLP of a dense layer, or in one expert."""
        inter = self.inter if self.experts is None else self.experts.inter
        return 3 * self.hidden * inter / self.ranks

    @property
    def head_bytes(self) -> float:
        """Bytes of the output head."""
        return self.vocab * self.hidden * BF16 / self.ranks

    def context(self, tokens: int) -> float:
        """Positions of all layers that a token sees, after so many."""
        near = tokens if self.window is None else min(tokens, self.window)
        return self.layers * (tokens + near) / 2

    def num_bytes(self, time: int) -> float:
        """Bytes of all weights on a GPU, and of the embedding if there are experts or ranks do not share it."""
        each = self.attention_weights * self.stored
        if self.experts is None:
            each += self.mlp_weights * self.stored
        else:
            count = self.experts.count + self.experts.shared
            each += count * self.mlp_weights * self.experts.stored[time]
        return self.layers * each + 2 * self.head_bytes


BEFORE, AFTER = 0, 1
GPUS = (
    Gpu(
        name="H100",
        memory=80 * GB,
        peak=PEAKS["H100"],
        clocks=132 * 1.755e9,
        matrix_share=0.70,
        attention_share=0.45,
        launch=2.5e-6,
        link=360 * GB,
    ),
    Gpu(
        name="A100",
        memory=80 * GB,
        peak=PEAKS["A100"],
        clocks=108 * 1.41e9,
        matrix_share=0.80,
        attention_share=0.55,
        launch=3e-6,
        link=240 * GB,
        has_e4m3=False,
    ),
    Gpu(
        name="L4",
        memory=24 * GB,
        peak=PEAKS["L4"],
        clocks=58 * 2.04e9,
        matrix_share=0.52,
        attention_share=0.45,
        launch=3e-6,
        link=None,
    ),
    Gpu(
        name="4090",
        memory=24 * GB,
        peak=PEAKS["RTX 4090"],
        clocks=128 * 2.52e9,
        matrix_share=0.90,
        attention_share=0.55,
        launch=2.5e-6,
        link=None,
    ),
)
LLAMA_8B = Model(
    name="8B, bfloat16",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inter=14336,
    vocab=128256,
)
MODELS = (
    LLAMA_8B,
    replace(LLAMA_8B, name="8B, int4", stored=INT4),
    replace(LLAMA_8B, name="8B, FP8", stored=FP8),
    Model(
        name="gpt-oss-20b",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        inter=0,
        vocab=201088,
        experts=Experts(count=32, top_k=4, inter=2880, stored=(BF16, MXFP4)),
        window=128,
        plain_launches=15,
    ),
    Model(
        name="Qwen3-30B-A3B",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        inter=0,
        vocab=151936,
        experts=Experts(count=128, top_k=8, inter=768, stored=(BF16, BF16)),
    ),
    Model(
        name="DeepSeek-V2-Lite",
        layers=27,
        hidden=2048,
        heads=16,
        kv_heads=1,
        head_dim=192,
        inter=0,
        vocab=102400,
        experts=Experts(count=64, top_k=6, inter=1408, stored=(BF16, BF16), shared=2),
        latents=Latents(latent=512, rotated=64, key=128, value=128),
    ),
    Model(
        name="70B on 4 GPUs",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        inter=28672,
        vocab=128256,
        ranks=4,
    ),
)
SMALL_LAUNCHES, EXPERT_LAUNCHES = 6, 6
"""Kernels of a layer besides its linears: two norms, rotation, attention, folding, activation; and of experts."""
LATENT_LAUNCHES, SHARED_LAUNCHES = 2, 2
"""A layer's linears of heads; the activation of shared experts, and the sum with the others."""
CODE_LAUNCHES = 3
"""A layer's further kernels over codes: parts of sums."""
ONE_SHOT, NCCL = 6e-6, 18e-6
"""Seconds of a small sum over ranks."""
SLOTS_AT_ONCE, WAVE = 384, 1.75e-6
"""Programs of experts that a GPU holds, and seconds of one that has nothing to do, with its share of the start."""
CODED_PROMPT_SHARE = 0.43
"""Share of the matrix rate that prompts reach where every tile decodes its weights again."""
TILE = 128
"""Pairs, and outputs, of a program of experts in prompts."""
TRITON_EXPERTS, GROUPED_EXPERTS = 0.65, 0.85
"""Shares of the matrix rate that Triton's grouped products and torch's reach."""


def fits(model: Model, gpu: Gpu, time: int) -> bool:
    """Whether the weights leave room, and GPUs are linked where there are several."""
    linked = model.ranks == 1 or gpu.link is not None
    return linked and model.num_bytes(time) <= LARGEST_PART * gpu.memory


def decode_seconds(model: Model, gpu: Gpu, rows: int, time: int) -> float:
    """Seconds of a step of `rows` tokens after CONTEXT others."""
    read = gpu.peak.bandwidth * READ_RATE
    seconds = model.layers * _weights_seconds(model, gpu, rows, time) + model.head_bytes / read
    seconds += rows * model.context(CONTEXT) * model.cached / (gpu.peak.bandwidth * SMALL_RATE)
    operations = 2 * rows * _active_weights(model) * model.layers
    seconds = max(seconds, operations / (gpu.peak.rate * gpu.matrix_share))
    seconds += model.layers * _launches(model, time) * gpu.launch
    if model.ranks > 1:
        seconds += 2 * model.layers * (NCCL if time == BEFORE else ONE_SHOT)
    if model.experts is not None and time == BEFORE:
        seconds += model.layers * _idle_programs(model, model.experts, rows)
    return seconds


def _launches(model: Model, time: int) -> int:
    """Kernels of a layer in addition to its linears."""
    launches = SMALL_LAUNCHES + (0 if model.stored == BF16 else CODE_LAUNCHES)
    launches += 0 if model.latents is None else LATENT_LAUNCHES
    launches += model.plain_launches if time == BEFORE else 0
    if model.experts is not None:
        launches += EXPERT_LAUNCHES + (SHARED_LAUNCHES if model.experts.shared else 0)
    return launches


def _weights_seconds(model: Model, gpu: Gpu, rows: int, time: int) -> float:
    """To read what a layer's linears take for `rows` tokens."""
    seconds = _read_seconds(model.attention_weights, model.stored, gpu, time)
    if model.experts is None:
        return seconds + _read_seconds(model.mlp_weights, model.stored, gpu, time)
    chosen = (model.experts.chosen(rows) + model.experts.shared) * model.mlp_weights
    return seconds + _read_seconds(chosen, model.experts.stored[time], gpu, time)


def _read_seconds(weights: float, stored: float, gpu: Gpu, time: int) -> float:
    rate = gpu.peak.bandwidth * READ_RATE
    if stored < BF16:
        by_clock = BYTES_A_CLOCK[stored][time]
        if stored == FP8 and time == AFTER and gpu.has_e4m3:
            by_clock = CONVERTED
        rate = min(gpu.peak.bandwidth * SMALL_RATE, gpu.clocks * by_clock)
    return weights * stored / rate


def _active_weights(model: Model) -> float:
    """Number of weights in a layer that one token is multiplied with."""
    count = 1 if model.experts is None else model.experts.top_k + model.experts.shared
    return model.attention_weights + count * model.mlp_weights


def _idle_programs(model: Model, experts: Experts, rows: int) -> float:
    """Seconds of a layer in programs without work: two products had slots for every expert in each column of tiles."""
    tiles = (2 * experts.inter + model.hidden) // 64
    slots = experts.count + rows * experts.top_k // 16
    idle = max(0.0, slots - experts.chosen(rows)) * tiles
    return idle / SLOTS_AT_ONCE * WAVE


def _idle_in_parts(model: Model, experts: Experts, pairs: int) -> float:
    """Seconds of a layer in programs without work: each part of the experts has programs for all pairs."""
    idle = 0.0
    for outputs, inputs in ((2 * experts.inter, model.hidden), (model.hidden, experts.inter)):
        parts = math.ceil(experts.count * outputs * inputs * BF16 / EXPERT_BYTES)
        idle += (parts - 1) * pairs / TILE * math.ceil(outputs / TILE)
    return idle / SLOTS_AT_ONCE * WAVE


def prompt_seconds(model: Model, gpu: Gpu, tokens: int, time: int) -> float:
    """Seconds of a step of one prompt."""
    rate = gpu.peak.rate * gpu.matrix_share
    dense = model.attention_weights + (model.mlp_weights if model.experts is None else 0)
    if model.experts is not None:
        dense += model.experts.shared * model.mlp_weights
    share = CODED_PROMPT_SHARE if model.stored < BF16 and time == BEFORE else 1.0
    is_scaled = model.stored == FP8 and time == AFTER and gpu.has_e4m3
    share = 2 * SCALED_SHARE if is_scaled else share
    seconds = 2 * tokens * dense * model.layers / (rate * share)
    if model.stored < BF16 and time == AFTER:
        # Decoded once and written in 16 bits, or put into the library's order.
        decoded = dense * model.layers * (model.stored + (FP8 if is_scaled else BF16))
        seconds += decoded / (gpu.peak.bandwidth * SMALL_RATE)
    if model.experts is not None:
        seconds += _experts_prompt_seconds(model, model.experts, gpu, tokens, time)
    # Half of the positions are before a token, on average.
    pairs = tokens * model.context(tokens) / (2 if model.window is None else 1)
    if model.window is not None:
        near = min(tokens, 2 * model.window)
        pairs = tokens * model.layers * (tokens + near) / 4
    seconds += pairs * model.pair_operations / (gpu.peak.rate * gpu.attention_share)
    passes = (
        8 * model.hidden + 3 * (model.heads + 2 * model.kv_heads) * model.head_dim / model.ranks
    )
    passes += 0 if model.experts is not None else 3 * model.inter / model.ranks
    passes += 2 * model.hidden * model.plain_launches if time == BEFORE else 0
    seconds += tokens * model.layers * passes * BF16 / (gpu.peak.bandwidth * SMALL_RATE)
    if model.ranks > 1:
        assert gpu.link is not None
        sent = 2 * (model.ranks - 1) / model.ranks * tokens * model.hidden * BF16
        seconds += 2 * model.layers * sent / gpu.link
    return seconds


def _experts_prompt_seconds(
    model: Model, experts: Experts, gpu: Gpu, tokens: int, time: int
) -> float:
    pairs, stored = tokens * experts.top_k, experts.stored[time]
    reached, seconds = TRITON_EXPERTS, 0.0
    if stored < BF16 and pairs < EXPERT_ROWS * experts.count:
        reached = CODED_PROMPT_SHARE
    elif stored < BF16:
        # Decoded once, and written in 16 bits.
        decoded = experts.count * model.mlp_weights * (stored + BF16)
        seconds = decoded / (gpu.peak.bandwidth * SMALL_RATE)
        seconds += _idle_in_parts(model, experts, pairs)
        seconds *= model.layers
    elif time == AFTER:
        reached = GROUPED_EXPERTS
    rate = gpu.peak.rate * gpu.matrix_share * reached
    seconds += 2 * pairs * model.mlp_weights * model.layers / rate
    results = pairs * model.hidden * COPY_LAUNCHES * (2 * BF16 if time == BEFORE else BF16)
    between = 4 * pairs * experts.inter * BF16
    return seconds + model.layers * (results + between) / (gpu.peak.bandwidth * SMALL_RATE)


CASES: Sequence[tuple[str, bool, int]] = (
    ("decode 1", True, 1),
    ("decode 32", True, 32),
    ("prompt 2k", False, 2048),
    ("prompt 8k", False, 8192),
)
"""The name, whether it is a decode, and the rows or tokens."""
HEADINGS = ("model", "GPU", *(name for name, *_ in CASES))


def cell(model: Model, gpu: Gpu, case: tuple[str, bool, int]) -> str:
    """Milliseconds before and after; of latents, for which there were no kernels before, after."""
    _, is_decode, size = case
    times = (BEFORE, AFTER) if model.latents is None else (AFTER,)
    compute = decode_seconds if is_decode else prompt_seconds
    shown = [
        _milliseconds(compute(model, gpu, size, time)) if fits(model, gpu, time) else "no room"
        for time in times
    ]
    return " → ".join(dict.fromkeys(shown))


def _milliseconds(seconds: float) -> str:
    number = seconds * 1e3
    return f"{number:.1f}" if number < 100 else f"{number:.0f}"


def table() -> str:
    """The table in Markdown, ms a step before and after."""
    rows = [
        (model.name, gpu.name, *(cell(model, gpu, case) for case in CASES))
        for model in MODELS
        for gpu in GPUS
    ]
    return markdown(HEADINGS, rows)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m bench.gpu.computed", description=__doc__).parse_args()
    sys.stdout.write(table() + "\n")
