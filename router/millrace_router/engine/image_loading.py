"""Sends the pixels of pictures to the shards while the batch goes on, and ends requests whose pictures fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import structlog

from millrace_router.errors import ImageFailed, NonFiniteOutput, Quarantined, RouterError
from millrace_router.recovery.quarantine import REFUSED_SECONDS
from millrace_router.request.request import ValidRequest
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.image_features import Features, ImageFeatures
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.step_channel import StepChannel

PUT_SECONDS = 60.0
"""A call of this length counts as failed."""
MAX_FAILURES = 3
"""Epochs that end while a picture is encoded, after which it is refused for `REFUSED_SECONDS`."""
MAX_REFUSED = 1024

log = structlog.get_logger(__name__)


class ImageLoading:
    """Calls the shards for the `ImageFeatures` of the planner.

    A picture that the shards refuse ends only the requests with it. A lost shard ends the epoch; the next one begins
    without features, and those that its requests need are made again.
    """

    def __init__(
        self, channel: StepChannel, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel = channel
        self._calls: set[asyncio.Task[None]] = set()
        self._end: Callable[[SchedulableRequest, RouterError], None] = lambda _, __: None
        self._wake: Callable[[], None] = lambda: None
        self._report: Callable[[ShardError], None] = lambda _: None
        self._failures: Counter[bytes] = Counter()
        """Epochs that ended while a picture was encoded, by digest."""
        self._refused: dict[bytes, float] = {}
        """Until when a picture is refused."""
        self._clock = clock

    def connect(
        self,
        *,
        end: Callable[[SchedulableRequest, RouterError], None],
        wake: Callable[[], None],
        report: Callable[[ShardError], None],
    ) -> None:
        """Set the callbacks, as in `AdapterHooks`."""
        self._end, self._wake, self._report = end, wake, report

    def check(self, request: ValidRequest) -> None:
        """Raise Quarantined for a picture that has ended several epochs."""
        now = self._clock()
        if any(now < self._refused.get(span.image.digest, 0.0) for span in request.images):
            raise Quarantined

    def after_plan(self, planner: Planner) -> None:
        """Send the pixels of the pictures that have got a slot."""
        images = planner.images
        if images is None:
            return
        for features in images.take_puts():
            task = asyncio.create_task(self._put(images, features))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def computed(self, images: ImageFeatures) -> None:
        """Record the answer to a step, after the planner did."""
        # A picture may break the shards by any of its tiles, after others were encoded.
        for digest in images.take_completed():
            self._failures.pop(digest, None)
        for request in images.take_failed():
            self._end(request, NonFiniteOutput())

    def failed(
        self, plan: StepPlan, images: ImageFeatures
    ) -> tuple[bool, list[SchedulableRequest]]:
        """Count a step that ended the epoch; whether it has encoded pictures, and the requests to end.

        These are the requests of a picture that has done so several times.
        """
        ending = list[SchedulableRequest]()
        digests = {images.digest_in(part.slot) for part in plan.encodes} - {None}
        for digest in digests:
            assert digest is not None
            self._failures[digest] += 1
            if self._failures[digest] >= MAX_FAILURES:
                log.error("an image is refused for ten minutes", digest=digest.hex())
                del self._failures[digest]
                self._refused[digest] = self._clock() + REFUSED_SECONDS
                ending += images.waiting_for(digest)
        for each in (self._failures, self._refused):
            while len(each) > MAX_REFUSED:
                del each[next(iter(each))]
        return bool(digests), ending

    def close_epoch(self) -> None:
        """End all calls."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    async def _put(self, images: ImageFeatures, features: Features) -> None:
        assert features.slot is not None
        try:
            await self._channel.put_image(
                features.slot, features.first_row, features.image, timeout=PUT_SECONDS
            )
        except (ShardLost, ShardHung) as error:
            # No step may be in flight that would notice it.
            self._report(error)
            return
        except ShardError as error:
            log.warning(
                "the shards refuse an image", digest=features.image.digest.hex(), error=str(error)
            )
            images.refuse(features)
            for request in images.take_failed():
                self._end(request, ImageFailed())
        else:
            images.put(features)
        self._wake()
