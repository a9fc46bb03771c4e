"""The tensors of one rank, read from a checkpoint's files; of a split tensor only the rank's part is read."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.transfers import copy_to
from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import Origin, Part, StoredWeight, UnreadParts
from millrace_shard.weights.checkpoint_files import SINGLE
from millrace_shard.weights.gguf.files import GgufFiles, MmprojFiles
from millrace_shard.weights.gguf.known_folders import MMPROJ, MODEL
from millrace_shard.weights.packed_weights import PackedWeights
from millrace_shard.weights.quantized.fp4 import read_expert
from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.made_at_load import MadeAtLoad, quantized
from millrace_shard.weights.quantized.module_tensors import Cut, ModuleTensors, Span
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.read_ahead import LoadProgress, ReadAhead
from millrace_shard.weights.safetensor_files import SafetensorFiles


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of a tensor: `units` of `unit_size` rows from `first` on, split over the ranks by units.

    If there are fewer units than ranks, neighbouring ranks hold the same unit.
    """

    name: str
    units: int
    unit_size: int = 1
    first: int = 0
    total: int | None = None
    """Rows of the whole tensor, which may have others before and after these; None: these are all."""

    @property
    def rows(self) -> int:
        return self.units * self.unit_size if self.total is None else self.total

    def of(self, suffix: str) -> Columns:
        """The same rows of the tensor `suffix` of the module that `name` names."""
        return replace(self, name=f"{self.name}.{suffix}")

    def span(self, rank: int, world_size: int) -> tuple[int, int]:
        """The half-open range of rows of one rank."""
        count = max(1, self.units // world_size)
        first = rank * self.units // world_size
        start = self.first + first * self.unit_size
        return start, start + count * self.unit_size


logger = logging.getLogger(__name__)

CheckpointFiles = SafetensorFiles | GgufFiles | MmprojFiles
VALUES = "values"
"""The route of codes that are kept as numbers of the model's dtype."""
FILL_ELEMENTS = 1 << 24
"""Values that are read at a time to fill a tensor: files with quantised blocks decode them into memory."""


class Weights:
    """Tensors by name, in `dtype` on `device`, sliced for this rank.

    Names follow the transformers class (`model.layers.0…`); files without the leading `model.` are supported.
    `shape` is the whole tensor's and is checked. Methods raise WeightsError, naming the tensor or the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup,
        file: str = SINGLE,
        quantization: Quantization | MadeAtLoad | None = None,
        packed: PackedWeights | None = None,
    ) -> None:
        """Open the checkpoint in `folder`, or only `file` in it, which is quantised, or to be quantised, so.

        MMPROJ has the encoder of images of a GGUF file.

        With `packed`, codes that an earlier start has packed are not read.
        """
        self.files: CheckpointFiles
        if file == MMPROJ:
            self.files = MmprojFiles(folder / file)
        else:
            self.files = open_files(folder, file)
        self._packed = packed
        self._slow: dict[str, list[str]] = {}
        is_kept = packed is not None and packed.is_kept
        self._ahead = ReadAhead([] if is_kept else self.files.paths())
        self._progress = LoadProgress(self.files.num_bytes())
        self.dtype = dtype
        self._device = device
        self._copy = copy_to(device)
        self._rank = group.rank
        self._world_size = group.world_size
        self._views: list[tuple[Tensor, int]] = []
        self._made = quantization if isinstance(quantization, MadeAtLoad) else None
        self._reader: LinearReader | None = None
        if isinstance(quantization, Quantization) and isinstance(self.files, SafetensorFiles):
            self._reader = LinearReader(self.files, quantization, self._note)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def check_layers(self, count: int) -> None:
        self.files.check_layers(count)

    def stored_names(self) -> Iterable[str]:
        """The names of the tensors in safetensors files; none of other files."""
        return self.files.names() if isinstance(self.files, SafetensorFiles) else ()

    def close(self) -> None:
        for reason, names in self._slow.items():
            logger.warning("%s: %s", reason, in_short(names))
        self._slow.clear()
        self._ahead.close()
        self._views.clear()
        self.files.close()

    def replicated(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, in `dtype` if it is given."""
        self._check(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        self._fill(out, name, shape, (0, shape[0]))
        return out

    def whole(self, name: str) -> Tensor:
        """The whole tensor of a safetensors file in its own dtype, on the host."""
        if not isinstance(self.files, SafetensorFiles):
            raise WeightsError(f"tensor {name} is missing from the checkpoint")
        return self.files.whole(name)

    def columns(self, parts: Sequence[Columns], inputs: int) -> StoredWeight:
        """The rank's outputs of all `parts`, each [rows, inputs]; valid until `release`."""
        return self._cut([(part.name, self._column_cut(part, inputs)) for part in parts])

    def dense(self, part: Columns, inputs: int) -> Tensor:
        """The rank's outputs [rows, inputs] as numbers; codes of the file are dequantised, and none are made."""
        cut = self._column_cut(part, inputs)
        if (codes := self._read_codes(part.name, cut)) is not None:
            return StoredWeight((codes,), self.dtype, self._device, self._copy).copied()
        start, end = cut.rows
        out = self._new(end - start, inputs)
        self._fill(out, part.name, (part.rows, inputs), cut.rows)
        return out

    def biases(self, parts: Sequence[Columns]) -> Tensor:
        """The rank's outputs of all `parts`, each [rows]."""
        for part in parts:
            self._check(part.name, (part.rows,))
        spans = [self._span(part) for part in parts]
        out = self._new(sum(end - start for start, end in spans))
        values = torch.split(out, [end - start for start, end in spans])
        for part, span, rank_part in zip(parts, spans, values, strict=True):
            self._fill(rank_part, part.name, (part.rows,), span)
        return out

    def heads(self, name: str, heads: Columns) -> Tensor:
        """The rank's heads of a tensor [units, unit_size], or [units * unit_size] if that is its shape in the file."""
        start, end = self._span(heads)
        if self.files.shape(name) == (heads.rows,):
            out = self._new(end - start)
            self._fill(out, name, (heads.rows,), (start, end))
            return out
        size = heads.unit_size
        self._check(name, (heads.units, size))
        out = self._new((end - start) // size, size)
        self._fill(out, name, (heads.units, size), (start // size, end // size))
        return out

    def rows(self, name: str, outputs: int, inputs: int) -> StoredWeight:
        """The rank's inputs, [outputs, inputs / world_size]; valid until `release`."""
        share = inputs // self._world_size
        span = (self._rank * share, (self._rank + 1) * share)
        cut = Cut(outputs=outputs, inputs=inputs, rows=(0, outputs), columns=span)
        return self._cut([(name, cut)])

    def has_stacked_codes(self, name: str) -> bool:
        return f"{name}_blocks" in self.files

    def stacked_codes(
        self, name: str, shape: tuple[int, int, int], index: int, *, rows: slice, columns: Span
    ) -> QuantizedTensor | None:
        """A part of expert `index` of experts `shape` [E, out, in] that the file has in MXFP4; None if it has not.

        The tensors are `name`_blocks and `name`_scales. Valid until `release`.
        """
        if not isinstance(self.files, SafetensorFiles) or not self.has_stacked_codes(name):
            return None
        module, _, rank_part = name.rpartition(".")
        experts = shape[0]
        tensors = ModuleTensors(
            self.files, module, lambda values, size: self._note(values, size // experts)
        )
        return read_expert(tensors, rank_part, shape, index, rows=rows, columns=columns)

    def stacked(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        """Element `index` of a tensor of `shape` [E, ...], in the dtype of the file; valid until `release`."""
        self._check(name, shape)
        values = self.files.read(name, dim=0, span=(index, index + 1))
        self._note(values, self.files.stored_bytes(name) // shape[0])
        return values[0]

    def span(self, name: str, shape: tuple[int, ...], span: tuple[int, int]) -> Tensor:
        """Rows of a tensor of `shape`, in the dtype of the file; valid until `release`."""
        self._check(name, shape)
        values = self.files.read(name, dim=0, span=span)
        self._note(values, values.nbytes)
        return values

    def stored(
        self,
        name: str,
        index: int,
        shape: tuple[int, int],
        read: Callable[[], Iterable[Part]],
    ) -> StoredWeight:
        """The rank's weight `shape` [out, in] of element `index` of the stacked experts `name`; `read` reads it."""
        is_coded = self._made is not None or self.has_stacked_codes(name)
        return self._weight(
            f"{name}.{index}",
            shape,
            lambda: (self._made_of(part) if isinstance(part, Tensor) else part for part in read()),
            is_coded=is_coded,
        )

    def vocabulary(self, name: str, vocab_size: int, hidden_size: int) -> Tensor:
        """The rank's rows of the vocabulary, [ceil(vocab_size / world_size), hidden_size]; zeros past the last id."""
        share, start, end = self._vocabulary_span(vocab_size)
        stored = self._codes(name, vocab_size, hidden_size, (start, end))
        if stored is None:
            self._check(name, (vocab_size, hidden_size))
        elif (kept := stored.packed(VALUES)) is not None:
            return kept.view(self.dtype).view(share, hidden_size)
        out = self._new(share, hidden_size)
        if stored is not None:
            out[: end - start] = stored.copied()
            self.release()
        else:
            self._fill(out[: end - start], name, (vocab_size, hidden_size), (start, end))
        out[end - start :] = 0
        if stored is not None:
            stored.keep(VALUES, out.view(-1).view(torch.uint8))
        return out

    def has_codes(self, name: str) -> bool:
        """Whether a safetensors file has the weight `name` quantised, in the way that its config describes."""
        return self._reader is not None and self._reader.has_codes(name)

    def head(self, name: str, vocab_size: int, hidden_size: int) -> StoredWeight:
        """The same rows for an output head; they may be quantised. Valid until `release`."""
        share, start, end = self._vocabulary_span(vocab_size)
        stored = self._codes(name, vocab_size, hidden_size, (start, end))
        if stored is None:
            return self.made_head(self.vocabulary(name, vocab_size, hidden_size))
        if end - start == share:
            return stored
        rest = torch.zeros(share - (end - start), hidden_size, dtype=self.dtype)
        return replace(stored, parts=(*stored.parts, rest))

    def made_head(self, weight: Tensor) -> StoredWeight:
        """An output head that is not quantised in the files, quantised if the head is to be."""
        quantize = None if self._made is None else self._made.head
        if quantize is None:
            return StoredWeight.of(weight)
        outputs, inputs = weight.shape
        return self._weight(
            "head", (outputs, inputs), lambda: [quantized(weight, quantize)], is_coded=True
        )

    def release(self) -> None:
        """Release the pages of all stored weights, which must have been packed or copied."""
        for values, num_bytes in self._views:
            self.files.release(values)
            self._count(num_bytes)
        self._views.clear()

    def _weight(
        self,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], Iterable[Part]],
        *,
        is_coded: bool,
    ) -> StoredWeight:
        """A weight that is read at once, or, if it consists of codes that may be kept, when it is used."""
        origin = Origin(name=name, warn=self._warn, packed=self._packed)
        later = is_coded and self._packed is not None
        parts = UnreadParts(shape, read) if later else tuple(read())
        return StoredWeight(parts, self.dtype, self._device, self._copy, origin)

    def _warn(self, reason: str, name: str) -> None:
        self._slow.setdefault(reason, []).append(name)

    def _cut(self, cuts: Sequence[tuple[str, Cut]]) -> StoredWeight:
        """The parts `cuts` of tensors, which a fused module has all in one tensor."""
        rows = sum(cut.rows[1] - cut.rows[0] for _, cut in cuts)
        first, end = cuts[0][1].columns
        names = (f"{name}{[*cut.rows, *cut.columns]}" for name, cut in cuts)
        return self._weight(
            " ".join(names),
            (rows, end - first),
            lambda: [self._linear(name, cut) for name, cut in cuts],
            is_coded=self._made is not None or all(self._holds_codes(name) for name, _ in cuts),
        )

    def _holds_codes(self, name: str) -> bool:
        if isinstance(self.files, GgufFiles):
            return name in self.files and self.files.format(name).split is not None
        return self.has_codes(name)

    def _span(self, part: Columns) -> tuple[int, int]:
        return part.span(self._rank, self._world_size)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def _fill(self, out: Tensor, name: str, shape: tuple[int, ...], span: tuple[int, int]) -> None:
        """Copy the rows `span` of a tensor into `out`; the range may be empty."""
        self._check(name, shape)
        step = max(1, FILL_ELEMENTS // math.prod(shape[1:]))
        for start in range(*span, step):
            end = min(start + step, span[1])
            values = self.files.read(name, dim=0, span=(start, end))
            self._copy(out[start - span[0] : end - span[0]], values)
            self.files.release(values)
        self._count(self.files.stored_bytes(name))

    def _linear(self, name: str, cut: Cut) -> Tensor | QuantizedTensor:
        if (codes := self._read_codes(name, cut)) is not None:
            return codes
        self._check(name, (cut.outputs, cut.inputs))
        dim, span = (0, cut.rows) if cut.has_all_inputs else (1, cut.columns)
        values = self.files.read(name, dim=dim, span=span)
        self._note(values, self.files.stored_bytes(name))
        return self._made_of(values, name)

    def _made_of(self, values: Tensor, name: str = "of the experts") -> Tensor | QuantizedTensor:
        """A part of the tensor `name`, quantised if the weights are to be."""
        if self._made is None:
            return values
        made = quantized(values, self._made.linear)
        if not made.scales.isfinite().all():
            raise WeightsError(f"tensor {name} has values that are not finite numbers")
        return made

    def _read_codes(self, name: str, cut: Cut) -> QuantizedTensor | None:
        """A part of a weight that is quantised in the files; None if it is not."""
        if not isinstance(self.files, GgufFiles):
            return None if self._reader is None else self._reader.read(name, cut)
        codes = self.files.codes(name, cut)
        if codes is not None:
            self._count(self.files.stored_bytes(name))
        return codes

    def _codes(self, name: str, outputs: int, inputs: int, rows: Span) -> StoredWeight | None:
        """Rows of a weight that is quantised in the files; None if it is not."""
        cut = Cut(outputs=outputs, inputs=inputs, rows=rows, columns=(0, inputs))
        if self._holds_codes(name):
            return self._cut([(name, cut)])
        # This checks that the file has no scales of a weight without codes.
        self._read_codes(name, cut)
        return None

    def _column_cut(self, part: Columns, inputs: int) -> Cut:
        return Cut(outputs=part.rows, inputs=inputs, rows=self._span(part), columns=(0, inputs))

    def _vocabulary_span(self, vocab_size: int) -> tuple[int, int, int]:
        """The number of rows of each rank, and the begin and end of this rank's rows."""
        share = -(-vocab_size // self._world_size)
        start = min(self._rank * share, vocab_size)
        return share, start, min(start + share, vocab_size)

    def _note(self, values: Tensor, num_bytes: int) -> None:
        """Remember a view, whose pages `release` returns."""
        self._views.append((values, num_bytes))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored_shape = self.files.shape(name)
        if stored_shape != shape:
            raise WeightsError(
                f"tensor {name} has shape {list(stored_shape)}, its config says {list(shape)}"
            )
        if not self.files.is_plain(name):
            raise WeightsError(
                f"tensor {name} does not hold floating-point numbers, and config.json does not say how it is quantised"
            )

    def _count(self, num_bytes: int) -> None:
        """Count the bytes of a whole tensor, whatever part this rank reads: their total is the size of the files."""
        self._ahead.used(num_bytes)
        self._progress.add(num_bytes)


LAYER = re.compile(r"\.(\d+)\.")
PART = re.compile(r"\[[^]]*]|\.weight")


def in_short(names: Iterable[str]) -> str:
    """The names of weights by layers, such as `layers.{0,1,5}.self_attn.q_proj`, without rows and columns."""
    layers: dict[str, list[str]] = {}
    for name in names:
        short = PART.sub("", name)
        number = LAYER.search(short)
        listed = layers.setdefault(LAYER.sub(".{}.", short), [])
        if number is not None and number[1] not in listed:
            listed.append(number[1])
    return ", ".join(
        name.replace("{}", "{" + ",".join(numbers) + "}") for name, numbers in layers.items()
    )


def checkpoint_bytes(folder: Path) -> int:
    files = open_files(folder)
    try:
        encoder = folder / MMPROJ
        return files.num_bytes() + (encoder.stat().st_size if encoder.is_file() else 0)
    finally:
        files.close()


def open_files(folder: Path, file: str = SINGLE) -> SafetensorFiles | GgufFiles:
    """The files of the checkpoint in `folder`, or only the safetensors `file` in it. Raises WeightsError."""
    if file == SINGLE and (folder / MODEL).is_file():
        return GgufFiles(folder)
    return SafetensorFiles(folder, file)
