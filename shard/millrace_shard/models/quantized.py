"""The quantisation of a model's linears, found before its weights are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor
from millrace_shard.models.spec import DecoderSpec, ExpertNames, ExpertsSpec, LayerNames, LayerSpec
from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.made_at_load import MadeAtLoad, made_at_load
from millrace_shard.weights.quantized.module_tensors import Cut
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.weights import open_files


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLinear:
    """A linear before it is split over ranks."""

    module: str
    outputs: int
    inputs: int
    shares_inputs: bool = False
    """Whether each rank has a part of the inputs, not of the outputs."""


def named_linears(spec: DecoderSpec) -> list[NamedLinear]:
    """All linears except routed experts', the head last."""
    linears = list[NamedLinear]()
    for index, layer in enumerate(spec.layers):
        prefix = f"{spec.names.layers}.{index}."
        linears += _attention(prefix, spec, layer)
        linears += _feed_forward(prefix, spec, layer)
    name = spec.names.embedding if spec.tied_head else spec.names.head
    return [*linears, NamedLinear(module=name, outputs=spec.vocab_size, inputs=spec.hidden_size)]


def expert_linears(spec: DecoderSpec) -> list[NamedLinear]:
    """The linears of the first routed expert of each layer that has experts."""
    linears = list[NamedLinear]()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.feed_forward, ExpertsSpec):
            names = spec.names.layer.experts[0]
            prefix = f"{spec.names.layers}.{index}.{names.experts}.0."
            modules = (names.gate, names.up), names.down
            width = layer.feed_forward.intermediate_size
            linears += _gated(prefix, *modules, width, spec.hidden_size)
    return linears


def _attention(prefix: str, spec: DecoderSpec, layer: LayerSpec) -> Iterator[NamedLinear]:
    names, attention, hidden = spec.names.layer, layer.attention, spec.hidden_size
    query_width, kv_width = (
        count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads)
    )
    parts = {names.query: query_width, names.key: kv_width, names.value: kv_width}
    if names.qkv is not None:
        parts = {names.qkv: query_width + 2 * kv_width}
    for name, outputs in parts.items():
        yield NamedLinear(module=prefix + name, outputs=outputs, inputs=hidden)
    yield NamedLinear(
        module=prefix + names.out, outputs=hidden, inputs=query_width, shares_inputs=True
    )


def _feed_forward(prefix: str, spec: DecoderSpec, layer: LayerSpec) -> list[NamedLinear]:
    names, half, hidden = spec.names.layer, layer.feed_forward, spec.hidden_size
    if not isinstance(half, ExpertsSpec):
        return _dense(prefix, names, half.intermediate_size, hidden)
    if half.shared is None:
        return []
    return _shared(prefix, names.experts[0], half.shared.mlp.intermediate_size, hidden)


def _dense(prefix: str, names: LayerNames, width: int, hidden: int) -> list[NamedLinear]:
    if names.gate_up is None:
        return _gated(prefix, (names.gate, names.up), names.down, width, hidden)
    first, last = _gated(prefix, (names.gate_up,), names.down, width, hidden)
    return [NamedLinear(module=first.module, outputs=2 * width, inputs=hidden), last]


def _shared(prefix: str, names: ExpertNames, width: int, hidden: int) -> list[NamedLinear]:
    gate, up, down = (f"{names.shared}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    return _gated(prefix, (gate, up), down, width, hidden)


def _gated(
    prefix: str, first: tuple[str, ...], down: str, width: int, hidden: int
) -> list[NamedLinear]:
    return [
        *(NamedLinear(module=prefix + name, outputs=width, inputs=hidden) for name in first),
        NamedLinear(module=prefix + down, outputs=hidden, inputs=width, shares_inputs=True),
    ]


logger = logging.getLogger(__name__)


def quantization_of(
    folder: Path, flag: str | None, spec: DecoderSpec, world_size: int
) -> Quantization | MadeAtLoad | None:
    """The quantisation of the checkpoint, or the one that --quantize requests; None for plain weights.

    Raises UnsupportedModel, also for ranks that cannot share the groups of inputs.
    """
    quantization = read_quantization(folder, flag)
    if quantization is None:
        made = made_at_load(flag)
        if made is not None:
            logger.info("--quantize %s: %s", made.method, made.summary)
        return made
    linears = (*named_linears(spec), *expert_linears(spec))
    quantization.check_groups([(each.module, each.inputs) for each in linears])
    shared = [(each.module, each.inputs) for each in linears if each.shares_inputs]
    quantization.check_ranks(shared, world_size)
    logger.info("quantised weights: %s", quantization.summary)
    for note in quantization.notes:
        logger.info("quantised weights: %s", note)
    return quantization


ROWS = 64
"""Outputs that are read of a linear: zero points that are all 0 in them are so in the others."""


def code_formats(
    folder: Path, spec: DecoderSpec, *, quantize: str | None, rank: int, world_size: int
) -> tuple[CodeFormat, ...]:
    """The formats of the rank's linears and head, each once; `quantize` is the value of --quantize.

    A few outputs are read of one linear of each kind. Raises ModelError as the load does.
    """
    quantization, linears = read_quantization(folder, quantize), named_linears(spec)
    cuts = [(each, _cut(each, rank, world_size)) for each in linears]
    made = None if quantization is not None else made_at_load(quantize)
    if made is None:
        codes = _read(folder, quantization, cuts, spec.names.head if spec.tied_head else None)
    else:
        codes = _made(made, cuts)
    return tuple(dict.fromkeys(map(CodeFormat.of, codes)))


def _cut(linear: NamedLinear, rank: int, world_size: int) -> Cut:
    share = linear.inputs // world_size
    span = (rank * share, (rank + 1) * share) if linear.shares_inputs else (0, linear.inputs)
    rows = (0, min(ROWS, linear.outputs))
    return Cut(outputs=linear.outputs, inputs=linear.inputs, rows=rows, columns=span)


Cuts = list[tuple[NamedLinear, Cut]]
"""Linears, the head last, and what is read of each."""


def _made(made: MadeAtLoad, cuts: Cuts) -> Iterator[QuantizedTensor]:
    widths = dict.fromkeys(cut.columns[1] - cut.columns[0] for _, cut in cuts[:-1])
    for width in widths:
        yield made.linear(torch.zeros(1, width))
    if made.head is not None:
        yield made.head(torch.zeros(1, cuts[-1][0].inputs))


def _read(
    folder: Path, quantization: Quantization | None, cuts: Cuts, other_head: str | None
) -> Iterator[QuantizedTensor]:
    """The codes of `cuts`, and of the head `other_head`, which takes the place of a tied one if the file has it."""
    with closing(open_files(folder)) as files:
        read: Callable[[str, Cut], QuantizedTensor | None]
        kind: Callable[[str], object]
        if isinstance(files, GgufFiles):
            read, kind = files.codes, files.format
        elif quantization is not None:
            format_of = quantization.format_of
            reader = LinearReader(files, quantization, lambda *_: None)
            read = reader.read
            if other_head is not None and reader.has_codes(f"{other_head}.weight"):
                linear, cut = cuts[-1]
                cuts = [*cuts[:-1], (replace(linear, module=other_head), cut)]
            kind = lambda name: format_of((name.removesuffix(".weight"),))  # noqa: E731
        else:
            return
        seen = set[object]()
        for linear, cut in cuts:
            name = f"{linear.module}.weight"
            key = kind(name), cut.inputs, cut.columns
            if key not in seen and (found := read(name, cut)) is not None:
                seen.add(key)
                yield found
