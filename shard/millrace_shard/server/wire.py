"""Converts between the engine's types and the messages of the wire."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Sampling
from millrace_proto.sequence import Grammar, Pooling
from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import (
    BatchChange,
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
        deterministic=deterministic and loaded.model.info.batch_invariant,
        prefill_logprobs=prefill_logprobs,
        window_size=info.window_size,
        max_draft_tokens=loaded.max_draft_tokens,
        grammars=loaded.grammars is not None and loaded.grammars.compiler is not None,
        adapter_modules=_adapter_modules(loaded.adapters),
        quantization=info.quantization,
        kv_cache_dtype=cache_dtype_name(loaded.kv_dtype),
        hidden_size=info.hidden_size,
        headless=info.headless,
        group=loaded.group.id,
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
    )


def step_from_pb(message: pb.StepRequest) -> Step:
    return Step(message.epoch, message.number, _work(message))


def _work(message: pb.StepRequest) -> Work:
    match message.WhichOneof("work"):
        case "open":
            return Open()
        case "prefill":
            return Forward(
                change=_change(message.prefill.change),
                chunk_slots=_ints(message.prefill.chunk_slots),
                chunk_tokens=_ints(message.prefill.chunk_tokens),
                decode_slots=_ints(message.prefill.decode_slots),
                decode_tokens=_ints(message.prefill.decode_tokens),
                draft_tokens=_ints(message.prefill.draft_tokens),
            )
        case "decode":
            return Forward(
                change=_change(message.decode.change),
                decode_slots=_ints(message.decode.decode_slots),
                decode_tokens=_ints(message.decode.decode_tokens),
                draft_tokens=_ints(message.decode.draft_tokens),
            )
        case "filter_batch":
            return Filter(_ints(message.filter_batch.dropped_slots))
        case _:
            return Unknown()


def _change(message: pb.BatchChange) -> BatchChange:
    return BatchChange(
        dropped_slots=_ints(message.dropped_slots),
        admitted=tuple(_sequence(sequence) for sequence in message.admitted),
        grown_slots=_ints(message.grown_slots),
        grown_blocks=_ints(message.grown_blocks),
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
