"""Converts between the engine's types and the messages of the wire."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Sampling
from millrace_proto.sequence import Grammar, Pooling
from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import ImageGrid, ImageSpan, Sequence
from millrace_shard.batch.sequence_images import Mask
from millrace_shard.batch.sequence_states import NO_SAVES, StateSaves
from millrace_shard.batch.step import (
    BatchChange,
    Encode,
    FailureKind,
    Filter,
    Forward,
    Open,
    Step,
    StepFailure,
    StepReply,
    StepResult,
    Unknown,
    Work,
)
from millrace_shard.engine.engine import Progress
from millrace_shard.engine.kv_capacity import Capacity, WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.kernels.kv_cache import cache_dtype_name
from millrace_shard.kernels.kv_store import Directory
from millrace_shard.vision.encoder import IMAGE_SLOTS, ImageSize, Vision
from millrace_shard.vision.grid_reduction import GridReduction

KINDS = {
    FailureKind.FAILED: pb.StepError.KIND_FAILED,
    FailureKind.OUT_OF_MEMORY: pb.StepError.KIND_OUT_OF_MEMORY,
    FailureKind.REFUSED: pb.StepError.KIND_REFUSED,
}


def warmup_from_pb(message: pb.WarmupRequest) -> WarmupRequest:
    return WarmupRequest(
        max_batch_prefill_tokens=message.max_batch_prefill_tokens,
        max_batch_size=message.max_batch_size,
        max_concurrent_requests=message.max_concurrent_requests,
        max_input_tokens=_optional(message, "max_input_tokens"),
        max_total_tokens=_optional(message, "max_total_tokens"),
        max_batch_total_tokens=_optional(message, "max_batch_total_tokens"),
        num_blocks=_optional(message, "num_blocks"),
        max_adapters=message.max_adapters,
        adapter_pages=_optional(message, "adapter_pages"),
        window_blocks=tuple(message.window_blocks),
        state_pages=_optional(message, "state_pages"),
        feature_rows=_optional(message, "feature_rows"),
    )


def capacity_to_pb(capacity: Capacity) -> pb.WarmupResponse:
    """Write the answer to Warmup."""
    return pb.WarmupResponse(
        num_blocks=capacity.num_blocks,
        max_batch_total_tokens=capacity.max_batch_total_tokens,
        max_input_tokens=capacity.max_input_tokens,
        max_total_tokens=capacity.max_total_tokens,
        kv_bytes_per_token=capacity.kv_bytes_per_token,
        adapter_pages=capacity.adapter_pages,
        has_kv_store=capacity.has_kv_store,
        window_groups=[
            pb.WindowGroup(
                num_blocks=num_blocks,
                window=shape.window,
                reach=shape.reach,
                num_layers=shape.num_layers,
                bytes_per_token=shape.bytes_per_token,
            )
            for shape, num_blocks in capacity.windows
        ],
        state_pages=capacity.state_pages,
        state_page_bytes=capacity.state_page_bytes,
        feature_rows=capacity.feature_rows,
        image_slots=IMAGE_SLOTS if capacity.feature_rows else 0,
    )


def directory_to_pb(directory: Directory | None) -> pb.BlocksResponse:
    """Write what the shard holds of blocks that outlive it; None: nothing does."""
    if directory is None:
        return pb.BlocksResponse()
    return pb.BlocksResponse(
        life=directory.life,
        blocks=directory.blocks.tolist(),
        owners=directory.owners.tolist(),
        generations=directory.generations.tolist(),
        keys=directory.keys,
    )


def info_to_pb(
    loaded: LoadedModel, *, deterministic: bool, prefill_logprobs: bool
) -> pb.InfoResponse:
    info = loaded.model.info
    return pb.InfoResponse(
        model_type=info.model_type,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device_type=loaded.device.type,
        vocab_size=info.vocab_size,
        max_position_embeddings=info.max_position_embeddings,
        eos_token_ids=info.eos_token_ids,
        block_size=loaded.kernels.block_size,
        rank=loaded.group.rank,
        world_size=loaded.group.world_size,
        attention=loaded.kernels.name,
        operators=loaded.kernels.operators,
        deterministic=deterministic and loaded.model.info.batch_invariant,
        prefill_logprobs=prefill_logprobs,
        window_size=info.window_size,
        max_draft_tokens=loaded.max_draft_tokens,
        grammars=loaded.grammars is not None and loaded.grammars.compiler is not None,
        adapter_modules=_adapter_modules(loaded.adapters),
        quantization=info.quantization,
        kv_cache_dtype=cache_dtype_name(loaded.kv_dtype),
        quantize_activations=loaded.activations,
        int8_gain=loaded.int8_gain,
        hidden_size=info.hidden_size,
        headless=info.headless,
        group=loaded.group.id,
        has_states=bool(loaded.model.geometry.states),
        vision=None if loaded.vision is None else _vision(loaded.vision),
    )


def _vision(vision: Vision) -> pb.Vision:
    spec = vision.spec
    return pb.Vision(
        family=spec.family,
        rows_per_tile=0 if spec.cell else spec.rows_per_tile,
        tile_height=0 if spec.cell else spec.tile_size,
        tile_width=0 if spec.cell else spec.tile_size,
        cell=spec.cell,
        image_token_id=spec.image_token_id,
        digest=vision.digest,
        num_layers=spec.num_layers,
        mask=_MASKS[spec.mask],
        extra_rows=spec.extra_rows,
        max_grid_tiles=spec.max_grid_tiles,
    )


_MASKS = {
    Mask.CAUSAL: pb.Vision.MASK_CAUSAL,
    Mask.IMAGE: pb.Vision.MASK_IMAGE,
    Mask.PROMPT: pb.Vision.MASK_PROMPT,
}


def image_from_pb(message: pb.PutImageRequest) -> ImageSize:
    """What the first message of an image says of it."""
    reduction = None
    if message.HasField("reduction"):
        sent = message.reduction
        reduction = GridReduction(sent.columns, sent.top, sent.left, sent.rows, sent.row_size)
    return ImageSize(
        slot=message.image_slot,
        first_row=message.first_row,
        digest=message.digest,
        num_tiles=message.num_tiles,
        height=message.height,
        width=message.width,
        reduction=reduction,
    )


def _adapter_modules(store: AdapterStore | None) -> list[pb.AdapterModule]:
    return [
        pb.AdapterModule(
            name=part.name,
            inputs=part.inputs,
            outputs=part.outputs,
            bytes_per_slice=bytes_per_slice,
        )
        for part, bytes_per_slice in (() if store is None else store.modules())
    ]


def progress_to_pb(progress: Progress) -> pb.HealthResponse:
    """Write the progress of the engine."""
    return pb.HealthResponse(
        last_step=progress.last_step,
        pending_steps=progress.pending_steps,
        idle_ns=progress.idle_ns,
        warmed_up=progress.warmed_up,
        pulse=progress.pulse,
    )


def step_from_pb(message: pb.StepRequest) -> Step:
    return Step(message.epoch, message.number, _work(message))


def _work(message: pb.StepRequest) -> Work:
    match message.WhichOneof("work"):
        case "open":
            return Open(message.open.life)
        case "prefill":
            return Forward(
                change=_change(message.prefill.change),
                chunk_slots=_ints(message.prefill.chunk_slots),
                chunk_tokens=_ints(message.prefill.chunk_tokens),
                decode_slots=_ints(message.prefill.decode_slots),
                decode_tokens=_ints(message.prefill.decode_tokens),
                draft_tokens=_ints(message.prefill.draft_tokens),
                saves=_saves(message.prefill),
            )
        case "decode":
            return Forward(
                change=_change(message.decode.change),
                decode_slots=_ints(message.decode.decode_slots),
                decode_tokens=_ints(message.decode.decode_tokens),
                draft_tokens=_ints(message.decode.draft_tokens),
                saves=_saves(message.decode),
            )
        case "encode":
            return Encode(
                change=_change(message.encode.change),
                image_slots=_ints(message.encode.image_slots),
                units=_ints(message.encode.units),
                layers=_ints(message.encode.layers),
            )
        case "filter_batch":
            return Filter(_ints(message.filter_batch.dropped_slots))
        case _:
            return Unknown()


def _saves(message: pb.Prefill | pb.Decode) -> StateSaves:
    columns = message.saved_slots, message.saved_positions, message.saved_pages
    return StateSaves(*map(_ints, columns)) if len(message.saved_slots) else NO_SAVES


def _change(message: pb.BatchChange) -> BatchChange:
    return BatchChange(
        dropped_slots=_ints(message.dropped_slots),
        admitted=tuple(_sequence(sequence) for sequence in message.admitted),
        grown_slots=_ints(message.grown_slots),
        grown_blocks=_ints(message.grown_blocks),
        unsealed_blocks=_ints(message.unsealed_blocks),
        sealed_blocks=_ints(message.sealed_blocks),
        sealed_keys=tuple(message.sealed_keys),
        freed_images=_ints(message.freed_images),
    )


def _sequence(message: pb.Sequence) -> Sequence:
    return Sequence(
        slot=message.slot,
        request_id=message.request_id,
        input_ids=_ints(message.input_ids),
        generated_tokens=message.generated_tokens,
        cached_tokens=message.cached_tokens,
        parameters=Sampling.from_pb(message.parameters)
        if message.HasField("parameters")
        else Sampling(),
        top_n_tokens=message.top_n_tokens,
        prefill_logprobs=message.prefill_logprobs,
        prefill_top_n_tokens=message.prefill_top_n_tokens,
        min_new_tokens=message.min_new_tokens,
        grammar=Grammar.from_pb(message.grammar) if message.HasField("grammar") else None,
        close_within=message.close_within,
        adapter_slot=message.adapter_slot,
        pooling=Pooling(tuple(message.pooling.logit_ids)) if message.HasField("pooling") else None,
        window_starts=tuple(message.window_starts),
        state_page=message.state_page,
        restored_page=message.restored_page,
        images=tuple(
            ImageSpan(span.position, span.tokens, span.first_row) for span in message.images
        ),
        image_grids=tuple(
            ImageGrid(grid.position, grid.rows, grid.columns) for grid in message.image_grids
        ),
    )


def reply_to_pb(reply: StepReply, *, with_tokens: bool) -> pb.StepResponse:
    """Write the answer to a step, without the tokens on ranks other than 0."""
    message = pb.StepResponse(epoch=reply.epoch, number=reply.number)
    if isinstance(reply.outcome, StepFailure):
        message.error.kind = KINDS[reply.outcome.kind]
        message.error.message = reply.outcome.message
        return message
    result = reply.outcome
    message.checksum = result.checksum
    message.failed_slots.extend(result.failed_slots.tolist())
    message.closed_slots.extend(result.closed_slots)
    message.failed_images.extend(result.failed_images)
    if reasons := result.failure_reasons:
        message.failure_reasons.extend(
            reasons.get(slot, "") for slot in result.failed_slots.tolist()
        )
    message.computed_slots.extend(result.computed_slots.tolist())
    message.computed_positions.extend(result.computed_positions.tolist())
    message.drafted_tokens.extend(result.drafted_tokens.tolist())
    message.timings.forward_ns = result.timings.forward_ns
    message.timings.decode_ns = result.timings.decode_ns
    message.timings.total_ns = result.timings.total_ns
    if result.timings.concat_ns is not None:
        message.timings.concat_ns = result.timings.concat_ns
    if with_tokens:
        _write_tokens(message, result)
    return message


def _write_tokens(message: pb.StepResponse, result: StepResult) -> None:
    message.slots.extend(result.slots.tolist())
    message.counts.extend(result.counts.tolist())
    message.ids.extend(result.ids.tolist())
    message.logprobs.extend(result.logprobs.tolist())
    message.top_counts.extend(result.top_counts.tolist())
    message.top_ids.extend(result.top_ids.tolist())
    message.top_logprobs.extend(result.top_logprobs.tolist())
    message.prefill_slots.extend(result.prefill_slots.tolist())
    message.prefill_counts.extend(result.prefill_counts.tolist())
    message.prefill_logprobs.extend(result.prefill_logprobs.tolist())
    message.prefill_top_counts.extend(result.prefill_top_counts.tolist())
    message.prefill_top_ids.extend(result.prefill_top_ids.tolist())
    message.prefill_top_logprobs.extend(result.prefill_top_logprobs.tolist())
    message.pooled_slots.extend(result.pooled_slots.tolist())
    message.pooled_counts.extend(result.pooled_counts.tolist())
    message.pooled_values.extend(result.pooled_values.tolist())


def _ints(values: Iterable[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _optional(message: pb.WarmupRequest, name: str) -> int | None:
    value: int = getattr(message, name)
    return value if message.HasField(name) else None  # type: ignore[arg-type]
