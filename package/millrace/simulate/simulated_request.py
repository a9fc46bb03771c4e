"""A request in the simulator: it has lengths where an `Entry` has tokens, and names for its KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.images import ImageSpan, PreparedImage
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.step_plan import Row

ADAPTER_MODULE = "adapter"
"""The only layer of simulated adapters; a slice of it is a page."""
_NUMBERS = [b"%d" % number for number in range(1000)]


class PrefixNames:
    """Names of the blocks that the requests of a group share; each name is made once."""

    def __init__(self) -> None:
        self._names: dict[str, list[bytes]] = {}

    def first(self, group: str, count: int) -> Sequence[bytes]:
        """The names of the first `count` blocks of `group`."""
        names = self._names.setdefault(group, [])
        if len(names) < count:
            prefix = group.encode()
            names += [b"%b/%d" % (prefix, index) for index in range(len(names), count)]
        return names[:count]

    @staticmethod
    def chained(ids: Sequence[int], tokens_of_id: int, size: int, places: range) -> list[bytes]:
        """The names of blocks of `size` tokens at `places`, if each of `ids` stands for so many tokens.

        An id stands for the tokens before its own, too.
        """
        return [
            b"/%d/%d" % (ids[((place + 1) * size - 1) // tokens_of_id], place) for place in places
        ]


class SimulatedRequest(SchedulableRequest):
    """A request in the simulated router. Its client never leaves."""

    __slots__ = (
        "_block_size",
        "_group",
        "_keys",
        "_num_shared",
        "_prefixes",
        "arrival",
        "asked_at",
        "last_token_at",
        "output_tokens",
    )

    closed = False

    def __init__(
        self,
        request_id: int,
        arrival: Arrival,
        *,
        max_new_tokens: int,
        block_size: int,
        prefixes: PrefixNames,
    ) -> None:
        super().__init__(
            request_id=request_id,
            num_prompt_tokens=arrival.prompt_tokens,
            max_new_tokens=max_new_tokens,
            scheduling=SchedulingParameters(
                priority=arrival.priority,
                tenant=arrival.tenant,
                max_queue_seconds=arrival.max_queue_seconds,
            ),
            queued_at=arrival.arrived_at,
            adapter=_version_of(arrival),
            images=_images_of(arrival, request_id),
        )
        self.arrival = arrival
        self.asked_at = arrival.arrived_at
        """When its client sent it first; earlier than `queued_at` if a replica failed meanwhile."""
        self.output_tokens = min(arrival.output_tokens, max_new_tokens)
        self.last_token_at: float | None = None
        """When its first token since its admission came; after a preemption, when its last token came."""
        self._prefixes = prefixes
        # Adapters share no blocks; a slash is in no name of theirs that is left as it is.
        self._group = f"{arrival.adapter}/{arrival.group}" if arrival.adapter else arrival.group
        shared = arrival.prompt_tokens if arrival.chain else arrival.prefix_tokens
        self._num_shared = shared // block_size
        self._block_size = block_size
        self._keys: list[bytes] = []

    @property
    def num_tokens_left(self) -> int:
        """Tokens that its answer lacked when it was admitted last."""
        return self.output_tokens - self.num_generated

    @property
    def may_repeat_blocks(self) -> bool:
        """Whether it may compute a block that is cached already: its group's, or its own after a preemption."""
        return self.num_preemptions > 0 or self.arrival.prefix_tokens >= self.arrival.prompt_tokens

    def shared_keys(self) -> Sequence[bytes]:
        """Names of the full blocks of its prompt that other requests may have, too."""
        return self.block_keys(min(self._num_shared, self.num_prompt_tokens // self._block_size))

    def block_keys(self, count: int) -> Sequence[bytes]:
        """Names of its first `count` blocks: its group's first, then its own."""
        keys = self._keys
        if len(keys) < count:
            if len(keys) < self._num_shared:
                keys += self._shared(len(keys), min(count, self._num_shared))
            own = b"%d." % self.request_id
            keys += [own + index for index in _NUMBERS[len(keys) : count]]
            keys += [own + b"%d" % index for index in range(len(keys), count)]
        return keys[:count]

    def _shared(self, first: int, end: int) -> Sequence[bytes]:
        arrival = self.arrival
        if not arrival.chain:
            return self._prefixes.first(self._group, end)[first:]
        places = range(first, end)
        return PrefixNames.chained(arrival.chain, arrival.chain_tokens, self._block_size, places)


class Arrival(NamedTuple):
    """One request of a workload."""

    arrived_at: float
    """Seconds on the virtual clock."""
    prompt_tokens: int
    output_tokens: int
    """Tokens after which the model would end the answer."""
    max_new_tokens: int | None = None
    """The client's limit; None for the server's."""
    group: str = ""
    """Requests of one group begin with equal tokens."""
    prefix_tokens: int = 0
    """The number of its first tokens, prompt and answer, that it shares with its group."""
    priority: int = 0
    tenant: str = ""
    max_queue_seconds: float | None = None
    adapter: str = ""
    """The name of its LoRA adapter; empty for the base model."""
    adapter_pages: int = 1
    """Pages of 64 KiB of that adapter."""
    chain: tuple[int, ...] = ()
    """Numbers of its prompt's parts; equal ones are equal tokens after equal beginnings. It excludes a group."""
    chain_tokens: int = 1
    """Tokens of each part but the last."""
    tiles: int = 0
    """Tiles of its image, which is the end of its prompt; 0: it has none."""
    tile_tokens: int = 0
    """Tokens of its prompt that each of them takes."""


def _version_of(arrival: Arrival) -> AdapterVersion | None:
    """The version of its adapter, whose name stands for its digest."""
    name = arrival.adapter
    if not name:
        return None
    pages = ((ADAPTER_MODULE, arrival.adapter_pages),)
    return AdapterVersion(digest=name, name=name, num_slices=pages)


def _images_of(arrival: Arrival, request_id: int) -> Sequence[ImageSpan]:
    """Its image, which no other request has."""
    if not arrival.tiles:
        return ()
    image = PreparedImage(
        digest=b"%d" % request_id,
        rows=arrival.tiles - 1,
        columns=1,
        num_tiles=arrival.tiles,
        height=0,
        width=0,
        rows_per_tile=arrival.tile_tokens,
        pixels=b"",
    )
    return (ImageSpan(arrival.prompt_tokens - image.num_rows, image.num_rows, image, 0),)


def request_of(row: Row) -> SimulatedRequest:
    assert isinstance(row.entry, SimulatedRequest)
    return row.entry
