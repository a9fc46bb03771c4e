"""The columns that a step reads on the device, which go up by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.device import transfers
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.decode_graphs import DecodeColumns, DecodeGraphs
from millrace_shard.sampling.sampling_rows import DeviceRows, SamplingRows
from millrace_shard.sampling.thresholds import uniforms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step on the device."""

    ragged: RaggedBatch | None
    """The model's input; None if the graphs have it."""
    adapters: AdapterRows | None = None
    """The rows' adapters, if the graphs have the model's input."""
    rows: SamplingRows
    cleared: Sequence[Tensor]
    """Blocks to clear before the forward pass."""


def upload_inputs(
    batch: Batch, layout: StepLayout, cleared: Sequence[Ints], graphs: DecodeGraphs | None
) -> StepInputs:
    """The inputs of the step, for one of `graphs` if it is a plain step that fits; `cleared` are blocks of each group.

    Raises StepInvalid, see SequenceAdapters.
    """
    if graphs is not None and layout.is_plain:
        adapters = batch.adapters.rows(layout.slots, None, None)
        if graphs.fits(len(layout.slots), adapters):
            return _inputs_of_graph(batch, layout, cleared, graphs, adapters)
    if not transfers.is_synchronous(batch.device):
        return _packed_inputs(batch, layout, cleared)
    if layout.is_plain:
        ragged = batch.ragged_decodes(layout.slots, layout.starts)
    else:
        rows = layout.slots, layout.starts, layout.counts
        ragged = batch.ragged(*rows, _logit_rows(layout), layout.num_drafts)
        ragged = _with_images(batch, layout, ragged)
    ragged = _with_axes(batch, layout, ragged)
    index = [batch.to_device(blocks) for blocks in cleared]
    return StepInputs(ragged=ragged, rows=layout.sampling, cleared=index)


def _inputs_of_graph(
    batch: Batch,
    layout: StepLayout,
    cleared: Sequence[Ints],
    graphs: DecodeGraphs,
    adapters: AdapterRows | None,
) -> StepInputs:
    rows = layout.sampling
    columns = DecodeColumns(layout.slots, layout.starts, _uniforms(rows))
    slots, _, positions, drawn, changes, *index = graphs.upload(
        columns, [batch.blocks.take_changes(), *cleared]
    )
    batch.blocks.change(changes)
    if not transfers.is_synchronous(batch.device):
        rows = replace(rows, device=DeviceRows(slots, positions, drawn, batch.parameters))
    return StepInputs(ragged=None, adapters=adapters, rows=rows, cleared=index)


def _packed_inputs(batch: Batch, layout: StepLayout, cleared: Sequence[Ints]) -> StepInputs:
    rows = layout.sampling
    ragged, (slots, positions, drawn, *index) = batch.ragged_with(
        layout.slots,
        layout.starts,
        layout.counts,
        _logit_rows(layout),
        [layout.sampled, rows.positions, _uniforms(rows), *cleared],
    )
    states = batch.states.rows(layout.slots, layout.starts, layout.counts, layout.num_drafts)
    ragged = replace(ragged, all_logits=layout.is_plain, states=states)
    return StepInputs(
        ragged=_with_axes(batch, layout, _with_images(batch, layout, ragged)),
        rows=replace(rows, device=DeviceRows(slots, positions, drawn, batch.parameters)),
        cleared=index,
    )


def _with_images(batch: Batch, layout: StepLayout, ragged: RaggedBatch) -> RaggedBatch:
    """The same with the features of images that chunks, which are the first rows, reach into, and what they see."""
    chunks = slice(layout.num_chunks)
    replaced = batch.images.rows(layout.slots[chunks], layout.starts[chunks], layout.counts[chunks])
    if replaced is not None:
        ragged = replace(ragged, replaced=replaced)
    return batch.images.with_ends(ragged, layout.slots, layout.starts, layout.counts)


def _with_axes(batch: Batch, layout: StepLayout, ragged: RaggedBatch) -> RaggedBatch:
    """The same with positions of three axes, if a row has images of any size."""
    axes = batch.images.axes(layout.slots, layout.starts, layout.counts)
    return ragged if axes is None else replace(ragged, axes=axes)


def _logit_rows(layout: StepLayout) -> Ints:
    """The tokens whose logits, or hidden states where prompts are scored or pooled, are needed."""
    return layout.state_rows if layout.needs_states else layout.logit_rows


def _uniforms(rows: SamplingRows) -> Ints:
    if not rows.parameters["do_sample"].any():
        return np.zeros(len(rows.positions), dtype=np.int64)
    return uniforms(rows.parameters["seed"], rows.positions)
