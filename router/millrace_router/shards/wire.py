"""Converts between the router's types and the messages of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from pydantic import Field

from millrace_proto import generate_pb2 as pb
from millrace_router.request.adapter import AdapterModule
from millrace_router.request.entry import entry_of
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.step_plan import Row, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A shard group's description of its model; the same on every rank."""

    model_type: str
    dtype: str
    device_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    block_size: int
    world_size: int
    attention: str
    deterministic: bool
    prefill_logprobs: bool
    window_size: int | None
    quantization: str | None = None
    """How the weights are quantised; None for plain weights."""
    hidden_size: int = 0
    """Numbers in a hidden state."""
    headless: bool = False
    """Whether the checkpoint has no output head."""
    kv_cache_dtype: str = ""
    """Type of keys and values in the KV cache."""
    max_draft_tokens: Annotated[int, Field(alias="speculate")] = 0
    """The largest number of draft tokens of one sequence in one step; `speculate` in JSON."""
    grammars: bool = False
    adapter_modules: tuple[AdapterModule, ...] = ()
    """The layers that adapters may change; none if the shards take no adapters."""

    def with_largest_slices(self, others: Sequence[ShardInfo]) -> ShardInfo:
        """The same, where a slice of each module takes as many bytes as on the rank where it takes most."""
        if not self.adapter_modules:
            return self
        ranks = zip(*(info.adapter_modules for info in (self, *others)), strict=True)
        largest = [max(same, key=lambda module: module.bytes_per_slice) for same in ranks]
        return replace(self, adapter_modules=tuple(largest))

    @property
    def arithmetic(self) -> tuple[object, ...]:
        """The fields that determine an answer's last bits."""
        return (
            self.dtype,
            self.kv_cache_dtype,
            self.attention,
            self.block_size,
            self.deterministic,
        )

    def difference(self, other: ShardInfo) -> str:
        """Return the fields that differ from `other`, in words; empty if none do."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return ", ".join(f"{name} is {a} instead of {b}" for name, a, b in pairs if a != b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of Warmup, with values for the limits that the user left open."""

    num_blocks: int
    max_batch_total_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    kv_bytes_per_token: int
    adapter_pages: int = 0
    """Pages of 64 KiB for adapters on each rank."""


def info_from_pb(message: pb.InfoResponse) -> ShardInfo:
    """Read a shard's description of its model."""
    return ShardInfo(
        model_type=message.model_type,
        dtype=message.dtype,
        device_type=message.device_type,
        vocab_size=message.vocab_size,
        max_position_embeddings=message.max_position_embeddings,
        eos_token_ids=frozenset(message.eos_token_ids),
        block_size=message.block_size,
        world_size=message.world_size,
        attention=message.attention,
        deterministic=message.deterministic,
        prefill_logprobs=message.prefill_logprobs,
        window_size=message.window_size if message.HasField("window_size") else None,
        quantization=message.quantization if message.HasField("quantization") else None,
        hidden_size=message.hidden_size,
        headless=message.headless,
        kv_cache_dtype=message.kv_cache_dtype,
        max_draft_tokens=message.max_draft_tokens,
        grammars=message.grammars,
        adapter_modules=tuple(
            AdapterModule(
                name=module.name,
                inputs=module.inputs,
                outputs=module.outputs,
                bytes_per_slice=module.bytes_per_slice,
            )
            for module in message.adapter_modules
        ),
    )


def capacity_from_pb(messages: Sequence[pb.WarmupResponse]) -> Capacity:
    """Return the smallest capacity any rank reports."""
    return Capacity(
        num_blocks=min(message.num_blocks for message in messages),
        max_batch_total_tokens=min(message.max_batch_total_tokens for message in messages),
        max_input_tokens=min(message.max_input_tokens for message in messages),
        max_total_tokens=min(message.max_total_tokens for message in messages),
        kv_bytes_per_token=max(message.kv_bytes_per_token for message in messages),
        adapter_pages=min(message.adapter_pages for message in messages),
    )


def open_to_pb(epoch: int) -> pb.StepRequest:
    """Return the message that begins an epoch."""
    return pb.StepRequest(epoch=epoch, number=0, open=pb.Open())


def plan_to_pb(plan: StepPlan, *, epoch: int, number: int) -> pb.StepRequest:
    """Write a step: Prefill when it computes prompt tokens, else Decode, else FilterBatch."""
    message = pb.StepRequest(epoch=epoch, number=number)
    if not plan.has_forward:
        message.filter_batch.dropped_slots.extend(plan.dropped)
        return message
    step = message.prefill if plan.chunks else message.decode
    step.decode_slots.extend(plan.decodes)
    if plan.decode_tokens:
        step.decode_tokens.extend(plan.decode_tokens)
        if any(plan.draft_tokens):
            step.draft_tokens.extend(plan.draft_tokens)
    if plan.chunks:
        message.prefill.chunk_slots.extend(slot for slot, _ in plan.chunks)
        message.prefill.chunk_tokens.extend(num_tokens for _, num_tokens in plan.chunks)
    if plan.dropped or plan.grown or plan.admitted:
        change = step.change
        change.dropped_slots.extend(plan.dropped)
        change.grown_slots.extend(slot for slot, _ in plan.grown)
        change.grown_blocks.extend(block for _, block in plan.grown)
        change.admitted.extend(_sequence_to_pb(row) for row in plan.admitted)
    return message


def _sequence_to_pb(row: Row) -> pb.Sequence:
    entry = entry_of(row.entry)
    request = entry.request
    return pb.Sequence(
        slot=row.slot,
        request_id=entry.request_id,
        input_ids=(*request.input_ids, *entry.generated_ids),
        generated_tokens=len(entry.generated_ids),
        cached_tokens=row.num_cached,
        parameters=parameters_to_pb(request),
        top_n_tokens=request.top_n_tokens,
        prefill_logprobs=entry.wants_prompt_logprobs,
        prefill_top_n_tokens=request.prompt_top_n_tokens if entry.wants_prompt_logprobs else 0,
        min_new_tokens=request.min_new_tokens,
        grammar=None if request.grammar is None else request.grammar.to_pb(pb.Grammar()),
        adapter_slot=entry.adapter_slot,
        pooling=None
        if request.pooling is None
        else pb.Pooling(logit_ids=request.pooling.logit_ids),
        close_within=request.max_new_tokens if request.grammar and request.grammar.closes else 0,
    )


def parameters_to_pb(request: ValidRequest) -> pb.NextTokenChooserParameters:
    """Write the parameters of the choice of the next token."""
    message = pb.NextTokenChooserParameters()
    request.sampling.to_pb(message)
    if request.min_new_tokens:
        # Only the ban before a minimum needs them: the router ends the sequence.
        message.stop_ids.extend(request.stop_token_ids)
    return message
