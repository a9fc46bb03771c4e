"""What a router learns, and what of it outlives the router in a file of the launcher's memory.

The file has two slots, which are written in turn, so that a router that is killed while it writes leaves the other
slot whole. A slot has a header and JSON: costs of steps, lengths of answers and quarantined requests, without text.
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

import orjson
import structlog

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.traffic import TrafficStatistics
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.start.shards import RouterDeployment

MAGIC = b"millrace"
VERSION = 1
"""Changes with the form of what is kept."""
SUM, NUMBERS = struct.Struct("<I"), struct.Struct("<8sIQI")
"""CRC-32 of the rest of the slot; then magic, version, number of the write, and bytes of JSON."""
HEADER_BYTES = SUM.size + NUMBERS.size
SLOT_BYTES = 1 << 20
KEEP_SECONDS = 10.0
DESCRIPTORS = {"supervisor_fd", "listen_fd", "state_fd", "run_log_fd", "is_successor"}
"""Flags that differ between two starts of one deployment."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Learned:
    """What a router learns while it serves."""

    cost: CostModel = field(default_factory=CostModel)
    traffic: TrafficStatistics = field(default_factory=TrafficStatistics)
    quarantine: Quarantine = field(default_factory=Quarantine)


class StateFile:
    """A file that outlives this process. Without one, or if it fails, nothing is kept and nothing is raised."""

    def __init__(self, fd: int | None) -> None:
        """Own the inherited file `fd`."""
        self.fd = fd
        self._number = 0
        with suppress(OSError):
            if fd is not None:
                os.set_inheritable(fd, False)  # noqa: FBT003

    def read(self) -> bytes:
        """Return the last content that was written as a whole; empty if there is none."""
        if self.fd is None:
            return b""
        try:
            slots = [os.pread(self.fd, SLOT_BYTES, place) for place in (0, SLOT_BYTES)]
        except OSError as error:
            log.warning("--state-fd cannot be read", error=error.strerror)
            return b""
        whole = [each for slot in slots if (each := _content(slot)) is not None]
        if len(whole) < sum(any(slot[:HEADER_BYTES]) for slot in slots):
            log.warning("A part of what the last router has learned cannot be read, and is ignored")
        self._number, content = max(whole, default=(0, b""))
        return content

    def write(self, content: bytes) -> None:
        """Replace the older content."""
        if self.fd is None or HEADER_BYTES + len(content) > SLOT_BYTES:
            return
        self._number += 1
        rest = NUMBERS.pack(MAGIC, VERSION, self._number, len(content)) + content
        place = SLOT_BYTES * (self._number % 2)
        try:
            os.pwrite(self.fd, SUM.pack(zlib.crc32(rest)) + rest, place)
        except OSError as error:
            log.warning("--state-fd cannot be written to", error=error.strerror)


def _content(slot: bytes) -> tuple[int, bytes] | None:
    """Return the number and the content of a slot; None unless it is whole and of this version."""
    if len(slot) < HEADER_BYTES:
        return None
    magic, version, number, length = NUMBERS.unpack_from(slot, SUM.size)
    rest = slot[SUM.size : HEADER_BYTES + length]
    is_whole = len(rest) == NUMBERS.size + length and SUM.unpack_from(slot)[0] == zlib.crc32(rest)
    if (magic, version) != (MAGIC, VERSION) or not is_whole:
        return None
    return number, rest[NUMBERS.size :]


class Memory:
    """Keeps what a router learns, for the next one of its launcher."""

    def __init__(self, deployment: RouterDeployment, launcher: LauncherChannel) -> None:
        """Costs are right for one `deployment`, and for one start of its shards."""
        config = deployment.config
        flags = config.model_dump(mode="json", exclude=DESCRIPTORS)
        self._file = StateFile(config.state_fd)
        self._deployment = repr((deployment.info, deployment.capacity, flags)).encode()
        self._launcher = launcher
        self._learned: Learned | None = None
        self._is_released = False

    def release(self) -> None:
        """Write a last time: the file is another router's."""
        if self._learned is not None:
            self.keep(self._learned)
        self._is_released = True

    def retake(self) -> None:
        """Write again, over what another router has written."""
        self._is_released = False
        # Its slot and its number are newer than ours.
        self._file.read()

    @property
    def _fingerprint(self) -> str:
        return sha256(b"%d %b" % (self._launcher.life, self._deployment)).hexdigest()

    def recall(self) -> Learned:
        """Return what the last router has learned; costs only if they are of the same shards and flags."""
        content = self._file.read()
        if not content:
            return Learned()
        try:
            kept = orjson.loads(content)
            is_same = kept["fingerprint"] == self._fingerprint
            learned = Learned(
                CostModel.resumed(kept["cost"]) if is_same else CostModel(),
                TrafficStatistics.resumed(kept["traffic"]),
            )
            learned.quarantine.resume(kept["quarantine"])
        except (KeyError, TypeError, ValueError) as error:
            log.warning(
                "What the last router has learned is unknown, and is ignored", why=str(error)
            )
            return Learned()
        return learned

    def keep(self, learned: Learned) -> None:
        """Write what is learned until now."""
        if self._is_released:
            return
        kept = {
            "fingerprint": self._fingerprint,
            "cost": learned.cost.learned(),
            "traffic": learned.traffic.learned(),
            "quarantine": learned.quarantine.learned(),
        }
        self._file.write(orjson.dumps(kept))

    async def run(self, learned: Learned) -> None:
        """Keep it every `KEEP_SECONDS`, and at events after which the next router needs it.

        These are a new quarantined request, a new start of the shards, and the end of this task.
        """
        if self._file.fd is None:
            return
        self._learned = learned
        learned.quarantine.on_added = self._launcher.on_new_life = lambda: self.keep(learned)
        try:
            while True:
                self.keep(learned)
                await asyncio.sleep(KEEP_SECONDS)
        finally:
            self.keep(learned)
