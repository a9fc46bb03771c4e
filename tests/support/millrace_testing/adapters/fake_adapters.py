"""The adapters of a fake shard: slots with digests, pages, and faults that a test plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256
from threading import Event

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_router.request.adapter import PAGE_BYTES, AdapterModule, AdapterVersion

MODULE = AdapterModule(
    name="model.layers.0.self_attn.q_proj", inputs=8, outputs=8, bytes_per_slice=PAGE_BYTES
)
"""The only layer of the fake model; one slice of it is a page."""


def version_of(name: str, *, number: int = 0, num_pages: int = 1) -> AdapterVersion:
    """A version of the adapter `name`; another number is another version."""
    digest = sha256(f"{name} {number}".encode()).hexdigest()
    return AdapterVersion(digest=digest, name=name, num_slices=((MODULE.name, num_pages),))


def seed_of(digest: str) -> int:
    """A number that differs between digests; 0 for the base model."""
    return int(digest[:12], 16) + 1 if digest else 0


class AdapterLoadError(Exception):
    """The gRPC status of a refused call."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class FakeAdapters:
    """Slots and pages; raises AssertionError if the router breaks a rule."""

    def __init__(self, *, max_adapters: int = 0, num_pages: int = 0) -> None:
        """Without `max_adapters` the shard takes no adapters."""
        self.max_adapters = max_adapters
        self.num_pages = num_pages
        self.pages: dict[str, int] = {}
        """Pages by digest; 1 for others."""
        self.slots: dict[int, str] = {}
        """The digest in each full slot."""
        self.errors: dict[str, str] = {}
        """Errors that answer loads of a digest."""
        self.gates: dict[str, Event] = {}
        """Loads of a digest wait for its event."""
        self.on_load: Callable[[str], None] = lambda _: None
        """Called at the start of every load."""
        self.num_asked = 0
        """Calls of `LoadAdapter` so far."""
        self.loads: list[str] = []
        """Digests in order of their loads, those that were there already included."""
        self.num_read = Counter[str]()
        """How often the file of each digest was read."""

    def modules(self) -> Iterable[pb.AdapterModule]:
        """The layers for `Info`."""
        if self.max_adapters:
            yield pb.AdapterModule(
                name=MODULE.name,
                inputs=MODULE.inputs,
                outputs=MODULE.outputs,
                bytes_per_slice=MODULE.bytes_per_slice,
            )

    def load(self, slot: int, digest: str, *, in_use: Iterable[int]) -> str | None:
        """Fill a slot, unless sequences use another adapter in it; `in_use` has the slots of all sequences."""
        self.loads.append(digest)
        self.on_load(digest)
        assert 1 <= slot <= self.max_adapters, f"there is no adapter slot {slot}"
        if self.slots.get(slot) == digest:
            return None
        assert slot not in in_use, f"adapter slot {slot} is replaced under a sequence"
        assert digest not in self.slots.values(), "an adapter in two slots"
        if digest in self.errors:
            return self.errors[digest]
        others = (self.pages.get(held, 1) for at, held in self.slots.items() if at != slot)
        if sum(others) + self.pages.get(digest, 1) > self.num_pages:
            raise AdapterLoadError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no pages are left")
        self.slots[slot] = digest
        self.num_read[digest] += 1
        return None

    def unload(self, slot: int, *, in_use: Iterable[int]) -> None:
        """Empty a slot."""
        assert 1 <= slot <= self.max_adapters, f"there is no adapter slot {slot}"
        assert slot not in in_use, f"adapter slot {slot} is emptied under a sequence"
        self.slots.pop(slot, None)

    def is_valid(self, sequence: pb.Sequence) -> bool:
        """Whether the adapter of a sequence is loaded."""
        return not sequence.adapter_slot or sequence.adapter_slot in self.slots

    def digest_for(self, sequence: pb.Sequence) -> str:
        """The digest in the adapter slot of `sequence`; "" without one."""
        return self.slots[sequence.adapter_slot] if sequence.adapter_slot else ""


def adapters_for(
    versions: Iterable[AdapterVersion], *, max_adapters: int, num_pages: int
) -> FakeAdapters:
    """The slots and pages of a shard, on which `versions` take as many pages as in the router."""
    adapters = FakeAdapters(max_adapters=max_adapters, num_pages=num_pages)
    for version in versions:
        adapters.pages[version.digest] = version.num_pages({MODULE.name: MODULE.bytes_per_slice})
    return adapters
