"""Which pictures' features are on the shards, and in which rows; pictures are encoded tile by tile, and a tile
layer by layer while others wait.

The shards execute steps in order: so rows may be given to another picture as soon as the last step that reads them is
sent, and a slot of pixels once the step that frees it is answered.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from millrace_router.request.images import Mask, PreparedImage
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.step_plan import TilePart


@dataclass(slots=True, eq=False)
class Features:
    """A picture that has rows of features."""

    image: PreparedImage
    first_row: int
    slot: int | None = None
    """Of its pixels; None before they are sent and after they are freed."""
    is_put: bool = False
    """Whether the shards have its pixels."""
    num_layers: int = 1
    """Layers of the encoder, which each tile passes."""
    num_sent: int = 0
    """Layers of all tiles in steps that are sent."""
    num_computed: int = 0
    """Layers of all tiles in steps that are answered."""
    users: set[int] = field(default_factory=set)
    """Ids of requests whose prompts need it, until all of the prompt is planned."""

    @property
    def is_ready(self) -> bool:
        return self.num_computed == self.num_to_compute

    @property
    def num_to_compute(self) -> int:
        """Layers of all tiles."""
        return self.image.num_tiles * self.num_layers

    @property
    def end_row(self) -> int:
        return self.first_row + self.image.num_rows


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is admitted once its pictures are encoded."""

    seniority: int
    request: SchedulableRequest
    images: Sequence[PreparedImage]
    has_rows: bool = False


class ImageFeatures:
    """Gives pictures rows and slots.

    Requests get rows for all their pictures or for none, in the order in which they came here. A picture that no
    request needs keeps its rows until another one needs them, the last used the longest.
    """

    def __init__(
        self, num_rows: int, num_slots: int, num_layers: int = 1, mask: Mask = Mask.CAUSAL
    ) -> None:
        """`num_layers` is the number of layers of the encoder."""
        self.num_layers = num_layers
        self._mask = mask
        self._num_rows = num_rows
        self._by_digest: OrderedDict[bytes, Features] = OrderedDict()
        self._by_slot: dict[int, Features] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._to_free: list[int] = []
        """Slots whose pixels the next step frees."""
        self._retired: deque[tuple[int, int]] = deque()
        """(step that frees it, slot)."""
        self._to_put: deque[Features] = deque()
        self._to_encode: deque[Features] = deque()
        self._waiting: list[_Waiting] = []
        self._failed: list[SchedulableRequest] = []
        self._completed: list[bytes] = []
        """Digests of pictures that were encoded since they were last taken."""
        self.num_encoded = 0
        """Pictures that were encoded."""
        self.num_reused = 0
        """Pictures whose features a request has found here."""

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def num_rows_used(self) -> int:
        """Rows that hold features, or will."""
        return sum(features.image.num_rows for features in self._by_digest.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for features."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and generated tokens of those requests."""
        return sum(waiting.request.num_inputs for waiting in self._waiting)

    def is_ready(self, request: SchedulableRequest, num_cached: int) -> bool:
        """Return whether all placeholders after the first `num_cached` tokens have features that `request` keeps."""
        for image in _needed(request, num_cached):
            features = self._by_digest.get(image.digest)
            if features is None or not features.is_ready:
                return False
            if request.request_id not in features.users:
                return False
        return True

    def uncut(self, request: SchedulableRequest) -> Iterator[tuple[int, int]]:
        """Yield the [position, end) of each part of the inputs in which no chunk may end."""
        if self._mask is Mask.PROMPT:
            yield 0, request.num_prompt_tokens
        elif self._mask is Mask.IMAGE:
            yield from ((span.position, span.end) for span in request.images)

    def wait(self, seniority: int, request: SchedulableRequest, num_cached: int) -> None:
        """Have the pictures of a request encoded that its first `num_cached` tokens do not cover."""
        self.release(request)
        images = _needed(request, num_cached)
        self._waiting.append(_Waiting(seniority, request, images))
        self._give_rows()

    def cost_left(self, request: SchedulableRequest, num_cached: int) -> tuple[float, float]:
        """Return the tiles that are left to encode for `request`, and for those before it, as the cost model counts."""
        own = {image.digest: image for image in _needed(request, num_cached)}
        others = {image.digest: image for each in self._waiting for image in each.images}
        ahead = (image for digest, image in others.items() if digest not in own)
        return sum(map(self._cost_left, own.values())), sum(map(self._cost_left, ahead))

    def _cost_left(self, image: PreparedImage) -> float:
        features = self._by_digest.get(image.digest)
        num_done = 0 if features is None else features.num_computed // self.num_layers
        return (image.num_tiles - num_done) * image.tile_cost

    def rows_of(self, request: SchedulableRequest, num_cached: int) -> list[tuple[int, int, int]]:
        """Return (position, tokens, first row) of each span of placeholders that is not cached as a whole."""
        return [
            (span.position, span.tokens, self._by_digest[span.image.digest].first_row + span.row)
            for span in request.images
            if span.end > num_cached
        ]

    def release(self, request: SchedulableRequest) -> None:
        """Let rows be given away that `request` alone needs: all its prompt is planned, or it has left."""
        for span in request.images:
            features = self._by_digest.get(span.image.digest)
            if features is not None:
                features.users.discard(request.request_id)

    def take_ready(self) -> list[tuple[int, SchedulableRequest]]:
        """Remove and return the requests whose pictures are encoded, each with its seniority."""
        self._drop_closed()
        self._give_rows()
        ready = [each for each in self._waiting if each.has_rows and self._has_all(each)]
        if ready:
            self._waiting = [each for each in self._waiting if each not in ready]
        return [(each.seniority, each.request) for each in ready]

    def take_all(self) -> list[tuple[int, SchedulableRequest]]:
        """Remove and return the requests that wait."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self.release(each.request)
        return [(each.seniority, each.request) for each in waiting]

    def withdraw(self, leaves: Callable[[SchedulableRequest], bool]) -> list[SchedulableRequest]:
        """Remove and return the requests for which `leaves` is true."""
        leaving = [each.request for each in self._waiting if leaves(each.request)]
        if leaving:
            self._waiting = [each for each in self._waiting if each.request not in leaving]
            for request in leaving:
                self._leave(request)
        return leaving

    def _leave(self, request: SchedulableRequest) -> None:
        """Release the pictures of a request that ends, and encode no more of those that only it needs."""
        self.release(request)
        for span in request.images:
            features = self._by_digest.get(span.image.digest)
            if features is None or features.users or features.is_ready:
                continue
            del self._by_digest[span.image.digest]
            if features in self._to_put:
                self._to_put.remove(features)
            elif features.is_put:
                if features in self._to_encode:
                    self._to_encode.remove(features)
                self._free(features)

    def waiting_for(self, digest: bytes) -> list[SchedulableRequest]:
        """Return the requests that wait for the features of a picture."""
        return [
            each.request
            for each in self._waiting
            if any(image.digest == digest for image in each.images)
        ]

    def take_failed(self) -> list[SchedulableRequest]:
        """Remove and return the requests that have a picture without features."""
        failed, self._failed = self._failed, []
        return failed

    def take_completed(self) -> list[bytes]:
        """Remove and return the digests of the pictures that were encoded as a whole since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def take_puts(self) -> list[Features]:
        """Give slots to pictures whose pixels the shards lack, and return those: the caller sends their pixels."""
        puts = []
        while self._to_put and self._free_slots:
            features = self._to_put.popleft()
            features.slot = self._free_slots.pop()
            self._by_slot[features.slot] = features
            puts.append(features)
        return puts

    def put(self, features: Features) -> None:
        """Record that the shards have the pixels."""
        features.is_put = True
        if self._by_digest.get(features.image.digest) is features:
            self._to_encode.append(features)
        else:
            self._free(features)

    def refuse(self, features: Features) -> None:
        """Record that the shards do not take the pixels, or that the features are not finite."""
        if self._by_digest.get(features.image.digest) is features:
            del self._by_digest[features.image.digest]
        if features in self._to_encode:
            self._to_encode.remove(features)
        self._free(features)
        digest = features.image.digest
        failed = [
            each for each in self._waiting if any(one.digest == digest for one in each.images)
        ]
        self._waiting = [each for each in self._waiting if each not in failed]
        for each in failed:
            self.release(each.request)
        self._failed += [each.request for each in failed]

    @property
    def has_work(self) -> bool:
        """Whether there is something to encode."""
        return bool(self._to_encode)

    @property
    def next_cost(self) -> float:
        """Tiles of the cost model that the tile to encode next costs."""
        return self._to_encode[0].image.tile_cost

    def next_part(self, most_layers: int) -> TilePart:
        """Return up to `most_layers` of the tile to encode next, which count as sent."""
        features = self._to_encode[0]
        assert features.slot is not None
        tile, num_done = divmod(features.num_sent, self.num_layers)
        count = min(most_layers, self.num_layers - num_done)
        features.num_sent += count
        if features.num_sent == features.num_to_compute:
            self._to_encode.popleft()
        is_last = num_done + count == self.num_layers
        cost = features.image.tile_cost * count / self.num_layers
        return TilePart(features.slot, tile, count, is_last, cost)

    @property
    def lacks_slots(self) -> bool:
        """Whether pixels have to be forgotten before others can be sent."""
        return bool(self._to_put and self._to_free and not self._free_slots)

    def digest_in(self, slot: int) -> bytes | None:
        """Return the digest of the picture whose pixels are in `slot`."""
        features = self._by_slot.get(slot)
        return None if features is None else features.image.digest

    def computed(self, parts: Iterable[TilePart], failed_slots: Collection[int]) -> None:
        """Record the answer to a step with `parts`; the features of `failed_slots` are not finite."""
        for part in parts:
            features = self._by_slot.get(part.slot)
            if features is None:
                continue
            features.num_computed += part.num_layers
            if part.slot in failed_slots:
                self.refuse(features)
            elif features.is_ready:
                # The features are enough from now on.
                features.image = replace(features.image, pixels=b"")
                self.num_encoded += 1
                self._completed.append(features.image.digest)
                self._free(features)

    def take_freed(self, number: int) -> list[int]:
        """Return the slots that the step `number` frees."""
        freed, self._to_free = self._to_free, []
        self._retired.extend((number, slot) for slot in freed)
        return freed

    def answered(self, number: int) -> None:
        """Reuse the slots that the steps up to `number` have freed."""
        while self._retired and self._retired[0][0] <= number:
            self._free_slots.append(self._retired.popleft()[1])

    def _free(self, features: Features) -> None:
        if features.slot is not None:
            del self._by_slot[features.slot]
            if features.is_put:
                self._to_free.append(features.slot)
            else:
                self._free_slots.append(features.slot)
            features.slot = None

    def _has_all(self, waiting: _Waiting) -> bool:
        return all(self._by_digest[image.digest].is_ready for image in waiting.images)

    def _drop_closed(self) -> None:
        for each in [each for each in self._waiting if each.request.closed]:
            self._waiting.remove(each)
            self._leave(each.request)

    def _give_rows(self) -> None:
        for waiting in self._waiting:
            if not waiting.has_rows:
                if not self._give(waiting):
                    return
                waiting.has_rows = True

    def _give(self, waiting: _Waiting) -> bool:
        """Give rows to all pictures of a request, or to none."""
        user, new = waiting.request.request_id, list[Features]()
        known = [self._by_digest.get(image.digest) for image in waiting.images]
        for features in known:
            if features is not None:
                features.users.add(user)
        for image, features in zip(waiting.images, known, strict=True):
            if features is not None:
                continue
            first = self._room_for(image.num_rows)
            if first is None:
                for each in new:
                    del self._by_digest[each.image.digest]
                self.release(waiting.request)
                return False
            made = Features(image, first, users={user}, num_layers=self.num_layers)
            self._by_digest[image.digest] = made
            new.append(made)
        for features in known:
            if features is not None:
                self.num_reused += 1
                self._by_digest.move_to_end(features.image.digest)
        self._to_put.extend(new)
        return True

    def _room_for(self, num_rows: int) -> int | None:
        """Return the first of so many free rows; pictures that no request needs make room, the oldest first."""
        while (first := self._gap(num_rows)) is None:
            oldest = next(
                (one for one in self._by_digest.values() if not one.users and one.is_ready), None
            )
            if oldest is None:
                return None
            del self._by_digest[oldest.image.digest]
        return first

    def _gap(self, num_rows: int) -> int | None:
        end = 0
        for features in sorted(self._by_digest.values(), key=lambda one: one.first_row):
            if features.first_row - end >= num_rows:
                return end
            end = features.end_row
        return end if self._num_rows - end >= num_rows else None


def _needed(request: SchedulableRequest, num_cached: int) -> list[PreparedImage]:
    """Return the pictures with placeholders after the first `num_cached` tokens, each once."""
    images = {span.image.digest: span.image for span in request.images if span.end > num_cached}
    return list(images.values())
