"""The formats of a model's codes, found before it is loaded, for kernels that are compiled for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from millrace_shard.kernels.quantized.code_format import CodeFormat
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.models.quantized.named_linears import NamedLinear, named_linears
from millrace_shard.models.spec.decoder_spec import DecoderSpec
from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.made_at_load import MadeAtLoad, made_at_load
from millrace_shard.weights.quantized.module_tensors import Cut
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.weights import open_files

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
        found = _read(folder, quantization, cuts, spec.names.head if spec.tied_head else None)
    else:
        found = _made(made, cuts)
    return tuple(dict.fromkeys(map(CodeFormat.of, found)))


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
