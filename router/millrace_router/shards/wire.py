"""Converts between the router's types and the messages of the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated

from pydantic import Field

from millrace_proto import generate_pb2 as pb
from millrace_router.request.adapter import AdapterModule
from millrace_router.request.entry import entry_of
from millrace_router.request.images import Mask, PreparedImage
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.block_ledger import StoredBlock, StoredBlocks
from millrace_router.scheduler.step_plan import Row, StepPlan
from millrace_router.scheduler.window_blocks import WindowGroup

PIXELS_PER_MESSAGE = 2_000_000
"""Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInfo:
    """How the model reads images."""

    family: str
    rows_per_tile: int
    """Rows of features, and placeholders, of a tile; 0 if pictures are one tile of any size."""
    tile_height: int
    """In pixels; 0 if pictures are one tile of any size."""
    tile_width: int
    image_token_id: int
    """The placeholder."""
    digest: int
    """Differs where the features of equal pixels may differ."""
    num_layers: int = 1
    """Of the encoder."""
    mask: Mask = Mask.CAUSAL
    extra_rows: int = 0
    """Rows of features of each picture behind its tiles' rows."""
    cell: int = 0
    """Pixels of a side of what a feature stands for, if pictures are one tile of any size."""
    max_grid_tiles: int = 0
    """Tiles beyond which the features of a grid become fewer; 0: they never do."""

    def rows_of_tile(self, height: int, width: int) -> int:
        """Return the rows of features of a tile of this size in pixels."""
        if self.cell:
            return (height // self.cell) * (width // self.cell)
        return self.rows_per_tile


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
    quantize_activations: str | None = None
    """The activations of products with quantised weights, `exact` or `int8`; None for plain weights."""
    int8_gain: float | None = None
    """How many times as fast activations in int8 are, if the shards have chosen by it."""
    max_draft_tokens: Annotated[int, Field(alias="speculate")] = 0
    """The largest number of draft tokens of one sequence in one step; `speculate` in JSON."""
    grammars: bool = False
    has_states: bool = False
    """Whether layers keep a state in place of keys and values."""
    operators: tuple[str, ...] = ()
    """Operators of libraries that the kernels take."""
    vision: VisionInfo | None = None
    """None for a model that reads only text."""
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
            self.quantize_activations,
            self.attention,
            self.operators,
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
    has_kv_store: bool = field(default=False, compare=False)
    """Whether the KV cache of every rank outlives it."""
    window_groups: tuple[WindowGroup, ...] = ()
    """Layers with an attention window, which have their own blocks."""
    state_pages: int = 0
    """Pages of states on each rank, page 0 included; 0 without recurrent layers."""
    state_page_bytes: int = 0
    feature_rows: int = 0
    """Rows for features of images; 0 for a model that reads only text."""
    image_slots: int = 0
    """Images whose pixels may be on the shards at a time."""


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
        quantize_activations=message.quantize_activations
        if message.HasField("quantize_activations")
        else None,
        int8_gain=message.int8_gain if message.HasField("int8_gain") else None,
        max_draft_tokens=message.max_draft_tokens,
        grammars=message.grammars,
        has_states=message.has_states,
        operators=tuple(message.operators),
        vision=_vision_from_pb(message.vision) if message.HasField("vision") else None,
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


def _vision_from_pb(message: pb.Vision) -> VisionInfo:
    return VisionInfo(
        family=message.family,
        rows_per_tile=message.rows_per_tile,
        tile_height=message.tile_height,
        tile_width=message.tile_width,
        image_token_id=message.image_token_id,
        digest=message.digest,
        num_layers=max(1, message.num_layers),
        mask=_MASKS[message.mask],
        extra_rows=message.extra_rows,
        cell=message.cell,
        max_grid_tiles=message.max_grid_tiles,
    )


_MASKS = {
    pb.Vision.MASK_CAUSAL: Mask.CAUSAL,
    pb.Vision.MASK_IMAGE: Mask.IMAGE,
    pb.Vision.MASK_PROMPT: Mask.PROMPT,
}


def capacity_from_pb(messages: Sequence[pb.WarmupResponse]) -> Capacity:
    """Return the smallest capacity any rank reports."""
    return Capacity(
        num_blocks=min(message.num_blocks for message in messages),
        max_batch_total_tokens=min(message.max_batch_total_tokens for message in messages),
        max_input_tokens=min(message.max_input_tokens for message in messages),
        max_total_tokens=min(message.max_total_tokens for message in messages),
        kv_bytes_per_token=max(message.kv_bytes_per_token for message in messages),
        adapter_pages=min(message.adapter_pages for message in messages),
        has_kv_store=all(message.has_kv_store for message in messages),
        window_groups=tuple(
            WindowGroup(
                num_blocks=min(each.num_blocks for each in ranks),
                window=ranks[0].window,
                reach=max(each.reach for each in ranks),
                num_layers=ranks[0].num_layers,
                bytes_per_token=max(each.bytes_per_token for each in ranks),
            )
            for ranks in zip(*(message.window_groups for message in messages), strict=True)
        ),
        state_pages=min(message.state_pages for message in messages),
        state_page_bytes=max(message.state_page_bytes for message in messages),
        feature_rows=min(message.feature_rows for message in messages),
        image_slots=min(message.image_slots for message in messages),
    )


def stored_from_pb(message: pb.BlocksResponse) -> StoredBlocks:
    """Read a rank's directory of blocks."""
    entries = map(StoredBlock, message.owners, message.generations, message.keys)
    return StoredBlocks(message.life, dict(zip(message.blocks, entries, strict=True)))


async def image_to_pb(
    epoch: int, slot: int, first_row: int, image: PreparedImage
) -> AsyncIterator[pb.PutImageRequest]:
    """Yield the messages of PutImage: the first has all fields, the others further pixels."""
    pixels, reduction = memoryview(image.pixels), None
    if image.reduction is not None:
        reduction = pb.GridReduction(**asdict(image.reduction))
    yield pb.PutImageRequest(
        epoch=epoch,
        image_slot=slot,
        first_row=first_row,
        digest=image.digest,
        num_tiles=image.num_tiles,
        height=image.height,
        width=image.width,
        pixels=bytes(pixels[:PIXELS_PER_MESSAGE]),
        reduction=reduction,
    )
    for start in range(PIXELS_PER_MESSAGE, len(pixels), PIXELS_PER_MESSAGE):
        yield pb.PutImageRequest(pixels=bytes(pixels[start : start + PIXELS_PER_MESSAGE]))


def open_to_pb(epoch: int, life: int = 0) -> pb.StepRequest:
    """Return the message that begins an epoch with the blocks of the ledger `life`; 0: there is none."""
    return pb.StepRequest(epoch=epoch, number=0, open=pb.Open(life=life))


def plan_to_pb(plan: StepPlan, *, epoch: int, number: int) -> pb.StepRequest:
    """Write a step: Encode, Prefill when it computes prompt tokens, else Decode, else FilterBatch."""
    message = pb.StepRequest(epoch=epoch, number=number)
    if plan.is_encoding:
        encode = message.encode
        encode.image_slots.extend(part.slot for part in plan.encodes)
        encode.units.extend(part.tile for part in plan.encodes)
        encode.layers.extend(part.num_layers for part in plan.encodes)
        encode.change.dropped_slots.extend(plan.dropped)
        encode.change.freed_images.extend(plan.freed_images)
        return message
    if not plan.has_forward:
        message.filter_batch.dropped_slots.extend(plan.dropped)
        return message
    step = message.prefill if plan.chunks else message.decode
    step.decode_slots.extend(plan.decodes)
    if plan.decode_tokens:
        step.decode_tokens.extend(plan.decode_tokens)
        if any(plan.draft_tokens):
            step.draft_tokens.extend(plan.draft_tokens)
    for slot, position, page in plan.saves:
        step.saved_slots.append(slot)
        step.saved_positions.append(position)
        step.saved_pages.append(page)
    if plan.chunks:
        message.prefill.chunk_slots.extend(slot for slot, _ in plan.chunks)
        message.prefill.chunk_tokens.extend(num_tokens for _, num_tokens in plan.chunks)
    if plan.dropped or plan.grown or plan.admitted or plan.seals or plan.freed_images:
        change = step.change
        change.freed_images.extend(plan.freed_images)
        change.dropped_slots.extend(plan.dropped)
        change.grown_slots.extend(slot for slot, _ in plan.grown)
        change.grown_blocks.extend(block for _, block in plan.grown)
        change.admitted.extend(_sequence_to_pb(row) for row in plan.admitted)
        change.unsealed_blocks.extend(plan.seals.unsealed)
        change.sealed_blocks.extend(plan.seals.sealed.keys())
        change.sealed_keys.extend(plan.seals.sealed.values())
    return message


def _sequence_to_pb(row: Row) -> pb.Sequence:
    entry = entry_of(row.entry)
    request, parameters = entry.request, parameters_to_pb(entry.request)
    if request.min_new_tokens:
        parameters.stop_ids.extend(sorted(entry.further_end_ids))
    return pb.Sequence(
        slot=row.slot,
        request_id=entry.request_id,
        input_ids=(*request.input_ids, *entry.generated_ids),
        generated_tokens=len(entry.generated_ids),
        cached_tokens=row.num_cached,
        parameters=parameters,
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
        window_starts=row.window_starts,
        state_page=row.state_page,
        restored_page=row.restored_page,
        images=[
            pb.ImageSpan(position=position, tokens=tokens, first_row=first)
            for position, tokens, first in row.image_rows
        ],
        image_grids=[
            pb.ImageGrid(position=span.position, rows=span.image.rows, columns=span.image.columns)
            for span in request.images
            if span.image.is_grid and not span.row
        ],
    )


def parameters_to_pb(request: ValidRequest) -> pb.NextTokenChooserParameters:
    """Write the parameters of the choice of the next token."""
    message = pb.NextTokenChooserParameters()
    request.sampling.to_pb(message)
    if request.min_new_tokens:
        # Only the ban before a minimum needs them: the router ends the sequence.
        message.stop_ids.extend(request.stop_token_ids)
    return message
