"""The quantisation of a model's linears, found before its weights are read."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from millrace_shard.kernels.layer_shape import CodedLinears
from millrace_shard.kernels.layer_weights import Activation, ClampedSwiglu
from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor
from millrace_shard.models.recurrent_spec import KimiDeltaSpec, Mamba1Spec, RecurrentSpec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    GatedSpec,
    LatentSpec,
    LayerNames,
    LayerSpec,
)
from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.gguf.known_folders import MODEL
from millrace_shard.weights.quantized.fp4 import EXPERTS, MX_GROUP, MXFP4
from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.made_at_load import MadeAtLoad, made_at_load
from millrace_shard.weights.quantized.module_tensors import Cut
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.quantized.unpacking import float4_values, integers
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
        if layer.recurrent is not None:
            linears += _recurrent(f"{prefix}{layer.recurrent.module}.", layer.recurrent, spec)
        if layer.attends:
            linears += _attention(prefix, spec, layer)
        if layer.has_feed_forward:
            linears += _feed_forward(prefix, spec, layer)
    name = spec.names.embedding if spec.tied_head else spec.names.head
    return [*linears, NamedLinear(module=name, outputs=spec.vocab_size, inputs=spec.hidden_size)]


def expert_linears(spec: DecoderSpec) -> list[NamedLinear]:
    """The linears of the first routed expert of each layer that has experts."""
    linears = list[NamedLinear]()
    for index, layer in enumerate(spec.layers):
        half = layer.mixture
        if half is not None and layer.has_feed_forward:
            names = spec.names.layer.experts[0]
            prefix = f"{spec.names.layers}.{index}.{names.experts}.0."
            first = _with_gate(half.activation, names.gate, names.up)
            width = half.intermediate_size
            inputs = half.latent_size or spec.hidden_size
            linears += _gated(prefix, first, names.down, width, inputs)
    return linears


def _attention(prefix: str, spec: DecoderSpec, layer: LayerSpec) -> Iterator[NamedLinear]:
    names, attention, hidden = spec.names.layer, layer.attention, spec.hidden_size
    if attention.latent is not None:
        yield from _latent_attention(prefix, names, attention, attention.latent, hidden)
        return
    query_width, kv_width = (
        count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads)
    )
    gated_width = query_width * (2 if attention.gated else 1)
    parts = {names.query: gated_width, names.key: kv_width, names.value: kv_width}
    if attention.kv_source is not None:
        parts = {names.query: gated_width}
    elif attention.values_are_keys:
        del parts[names.value]
    if names.qkv is not None:
        parts = {names.qkv: query_width + 2 * kv_width}
    for name, outputs in parts.items():
        yield NamedLinear(module=prefix + name, outputs=outputs, inputs=hidden)
    yield NamedLinear(
        module=prefix + names.out, outputs=hidden, inputs=query_width, shares_inputs=True
    )


def _recurrent(module: str, recurrent: RecurrentSpec, spec: DecoderSpec) -> Iterator[NamedLinear]:
    for name, count in recurrent.outputs.items():
        yield NamedLinear(module=module + name, outputs=count, inputs=spec.hidden_size)
    if isinstance(recurrent, KimiDeltaSpec):
        for name, count in recurrent.second_outputs.items():
            yield NamedLinear(module=module + name, outputs=count, inputs=recurrent.head_dim)
    if isinstance(recurrent, Mamba1Spec):
        sizes = {"x_proj": (recurrent.made, recurrent.inner)}
        sizes["dt_proj"] = recurrent.inner, recurrent.rank
        for name, (outputs, inputs) in sizes.items():
            is_row = name == "x_proj"
            yield NamedLinear(
                module=module + name, outputs=outputs, inputs=inputs, shares_inputs=is_row
            )
    out, hidden = module + recurrent.out, spec.hidden_size
    yield NamedLinear(module=out, outputs=hidden, inputs=recurrent.inner, shares_inputs=True)


def _latent_attention(
    prefix: str, names: LayerNames, attention: AttentionSpec, latent: LatentSpec, hidden: int
) -> Iterator[NamedLinear]:
    """All but the linear that makes keys and values of latents, which is never multiplied as codes."""
    own, queries = names.latent, attention.num_heads * latent.head_width
    made = latent.query_dim
    if made is None:
        yield NamedLinear(module=prefix + names.query, outputs=queries, inputs=hidden)
    else:
        yield NamedLinear(module=prefix + own.queries_in, outputs=made, inputs=hidden)
        yield NamedLinear(module=prefix + own.queries_out, outputs=queries, inputs=made)
    yield NamedLinear(module=prefix + own.latent, outputs=attention.head_dim, inputs=hidden)
    width = attention.out_width
    yield NamedLinear(module=prefix + names.out, outputs=hidden, inputs=width, shares_inputs=True)


def _feed_forward(prefix: str, spec: DecoderSpec, layer: LayerSpec) -> list[NamedLinear]:
    names, half, hidden = spec.names.layer, layer.feed_forward, spec.hidden_size
    if not isinstance(half, ExpertsSpec):
        return _dense(prefix, names, half, hidden)
    own, size, linears = names.experts[0], half.latent_size, list[NamedLinear]()
    if size is not None:
        linears.append(NamedLinear(module=prefix + own.latent_in, outputs=size, inputs=hidden))
        linears.append(NamedLinear(module=prefix + own.latent_out, outputs=hidden, inputs=size))
    if half.shared is not None:
        linears += _shared(prefix, own, half.shared.mlp, hidden)
    return linears


def _with_gate(activation: Activation | ClampedSwiglu, gate: str, up: str) -> tuple[str, ...]:
    is_plain = isinstance(activation, Activation) and not activation.has_gate
    return (up,) if is_plain else (gate, up)


def _dense(prefix: str, names: LayerNames, half: GatedSpec, hidden: int) -> list[NamedLinear]:
    width = half.intermediate_size
    if names.gate_up is None:
        first_two = _with_gate(half.activation, names.gate, names.up)
        return _gated(prefix, first_two, names.down, width, hidden)
    first, last = _gated(prefix, (names.gate_up,), names.down, width, hidden)
    return [NamedLinear(module=first.module, outputs=2 * width, inputs=hidden), last]


def _shared(prefix: str, names: ExpertNames, half: GatedSpec, hidden: int) -> list[NamedLinear]:
    module, width = f"{prefix}{names.shared}.", half.intermediate_size
    if names.shared_gate_up is None:
        first_two = _with_gate(half.activation, "gate_proj", "up_proj")
        return _gated(module, first_two, names.shared_down, width, hidden)
    first, last = _gated(module, (names.shared_gate_up,), names.shared_down, width, hidden)
    return [NamedLinear(module=first.module, outputs=2 * width, inputs=hidden), last]


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
    if (folder / MODEL).is_file():
        with closing(GgufFiles(folder)) as files:
            for cost in files.costs():
                logger.info("quantised weights: %s", cost)
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
INT8 = "int8"
"""The value of --quantize whose codes the kernels make."""
INT8_FORMAT = CodeFormat(values=tuple(integers(8).tolist()), group_size=None)
STACKED_FORMAT = CodeFormat(values=tuple(float4_values().tolist()), group_size=MX_GROUP)
"""Of gpt-oss's experts, which are not modules of the file."""


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
        other_head = spec.names.head if spec.tied_head else None
        codes = [each for each, _ in _read(folder, quantization, cuts, other_head)]
    else:
        codes = [each for each, _ in _made(made.linear, cuts[:-1])]
        if made.head is not None:
            codes.append(made.head(torch.zeros(1, cuts[-1][0].inputs)))
    return tuple(dict.fromkeys(map(CodeFormat.of, codes)))


def coded_linears(
    folder: Path, spec: DecoderSpec, *, quantize: str | None, rank: int, world_size: int
) -> tuple[CodedLinears, ...]:
    """The rank's linears with weights of codes, by format and inputs, but for the head, which is always exact.

    An expert counts as often as a token has experts. Reads and raises as `code_formats`.
    """
    quantization = read_quantization(folder, quantize)
    mixtures = (layer.feed_forward for layer in spec.layers)
    top_k = [each.router.rule.top_k for each in mixtures if isinstance(each, ExpertsSpec)]
    experts = expert_linears(spec) * max(top_k, default=0)
    linears = [*named_linears(spec)[:-1], *experts]
    cuts = [(each, _cut(each, rank, world_size)) for each in linears]
    made = None if quantization is not None else made_at_load(quantize)
    if made is not None:
        coded = [(CodeFormat.of(codes), same) for codes, same in _made(made.linear, cuts)]
    else:
        kinds = _read(folder, quantization, cuts, None)
        coded = [(CodeFormat.of(codes), same) for codes, same in kinds]
        if quantization is not None and quantization.method == MXFP4:
            coded.append((STACKED_FORMAT, [pair for pair in cuts if EXPERTS in pair[0].module]))
        if not coded and quantize == INT8:
            coded = [(INT8_FORMAT, cuts)]
    outputs = Counter[tuple[CodeFormat, int]]()
    for form, same in coded:
        for linear, cut in same:
            share = 1 if linear.shares_inputs else world_size
            outputs[form, cut.columns[1] - cut.columns[0]] += linear.outputs // share
    return tuple(CodedLinears(form, inputs, count) for (form, inputs), count in outputs.items())


def _cut(linear: NamedLinear, rank: int, world_size: int) -> Cut:
    share = linear.inputs // world_size
    span = (rank * share, (rank + 1) * share) if linear.shares_inputs else (0, linear.inputs)
    rows = (0, min(ROWS, linear.outputs))
    return Cut(outputs=linear.outputs, inputs=linear.inputs, rows=rows, columns=span)


Cuts = list[tuple[NamedLinear, Cut]]
"""Linears, and what is read of each."""
Kinds = Iterator[tuple[QuantizedTensor, Cuts]]
"""The codes of one linear of each kind, and all linears of that kind."""


def _made(quantize: Callable[[Tensor], QuantizedTensor], cuts: Cuts) -> Kinds:
    kinds = defaultdict[int, Cuts](list)
    for linear, cut in cuts:
        kinds[cut.columns[1] - cut.columns[0]].append((linear, cut))
    for width, same in kinds.items():
        yield quantize(torch.zeros(1, width)), same


def _read(
    folder: Path, quantization: Quantization | None, cuts: Cuts, other_head: str | None
) -> Kinds:
    """The kinds of `cuts`; the head `other_head` takes the place of a tied one, the last, if the file has it."""
    with closing(open_files(folder)) as files:
        read: Callable[[str, Cut], QuantizedTensor | None]
        kind: Callable[[str], object]
        has_module: Callable[[str], bool] = lambda _: False  # noqa: E731
        if isinstance(files, GgufFiles):
            read, kind, has_module = files.codes, files.format, files.__contains__
        elif quantization is not None:
            format_of = quantization.format_of
            reader = LinearReader(files, quantization, lambda *_: None)
            read, has_module = reader.read, reader.has_codes
            if other_head is not None and reader.has_codes(f"{other_head}.weight"):
                linear, cut = cuts[-1]
                cuts = [*cuts[:-1], (replace(linear, module=other_head), cut)]
            kind = lambda name: format_of((name.removesuffix(".weight"),))  # noqa: E731
        else:
            return
        kinds = defaultdict[object, Cuts](list)
        for linear, cut in cuts:
            if EXPERTS in linear.module and not has_module(f"{linear.module}.weight"):
                continue
            kinds[kind(f"{linear.module}.weight"), cut.inputs, cut.columns].append((linear, cut))
        for same in kinds.values():
            tries = (read(f"{linear.module}.weight", cut) for linear, cut in same)
            codes = next((each for each in tries if each is not None), None)
            if codes is not None:
                yield codes, same
