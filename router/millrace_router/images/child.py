"""Runs the process that decodes pictures, and replaces it when one of them has broken a limit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from millrace_router.images.geometry import AnyGeometry
from millrace_router.request.images import Detail

COMMAND = (sys.executable, "-P", "-m", "millrace_router.images.decoding")
PASSED_ON = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
FRAME_HEAD_BYTES = 8
START_SECONDS = 30.0
END_SECONDS = 5.0
"""For a process that has closed its output to end by itself."""
MOST_TRIES = 3
OWN_BYTES = 512 << 20
"""Address space of the process without a picture."""
BYTES_PER_PIXEL = 16
"""Memory for a pixel while it is decoded, turned and converted."""


class DecodingError(Exception):
    """The process refuses the picture; the message completes "the image"."""


class BrokenProcessError(Exception):
    """The process took too long with this picture, or ended with it each time."""


class NotStartedError(Exception):
    """The process cannot be started."""


class _EndedError(Exception):
    """The process has ended with `status`, which is negative for a signal."""

    def __init__(self, status: int | None) -> None:
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """Limits of a picture, and of the process that decodes it."""

    max_bytes: int = 20 << 20
    max_pixels: int = 33_000_000
    seconds: float = 10.0

    @property
    def max_memory(self) -> int:
        """Address space of the process in bytes."""
        return OWN_BYTES + BYTES_PER_PIXEL * self.max_pixels + 2 * self.max_bytes


@dataclass(frozen=True, slots=True)
class Tiles:
    """A picture in tiles."""

    digest: bytes
    """SHA-256 of the tiles, their layout, and the settings of the processor."""
    rows: int
    columns: int
    num_tiles: int
    pixels: bytes
    """uint8 [num_tiles, 3, height, width]."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the picture as it came, in pixels."""
    tile: tuple[int, int] = (0, 0)
    """Height and width of a tile."""
    is_grid: bool = False
    """As in `PreparedImage`."""


class DecodingProcess:
    """Decodes one picture at a time; the process starts with the first one."""

    def __init__(
        self, geometry: AnyGeometry, limits: DecodingLimits, *, command: Sequence[str] = COMMAND
    ) -> None:
        self.geometry = geometry
        self.limits = limits
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self.num_started = 0
        self.fingerprint = orjson.dumps(geometry.as_json()).decode()

    async def decode(self, content: bytes, detail: Detail) -> Tiles:
        """Make tiles of the bytes of a picture.

        Raises:
            DecodingError: the picture cannot be used.
            BrokenProcessError: it breaks a limit of time or memory.
            NotStartedError: there is no process for it.

        """
        async with self._turn:
            answer, pixels = await self._answered(content, detail)
        if "refusal" in answer:
            raise DecodingError(answer["refusal"])
        return Tiles(
            bytes.fromhex(answer["digest"]),
            answer["rows"],
            answer["columns"],
            answer["num_tiles"],
            pixels,
            (answer["height"], answer["width"]),
            tuple(answer["tile"]),
            answer["is_grid"],
        )

    async def _answered(self, content: bytes, detail: Detail) -> tuple[dict[str, Any], bytes]:
        """Ask until there is an answer: what has ended a process may have had nothing to do with the picture."""
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                return await self._answer(content, detail)
            except NotStartedError:
                if not tries_left:
                    raise
            except _EndedError as error:
                if error.status == -signal.SIGXCPU or not tries_left:
                    raise BrokenProcessError from error
        raise AssertionError

    async def _answer(self, content: bytes, detail: Detail) -> tuple[dict[str, Any], bytes]:
        """Ask the process once; raises as `decode`, and _EndedError."""
        process = await self._running()
        request: dict[str, object] = {"detail": detail, "fingerprint": self.fingerprint}
        try:
            # It may wait for the processor, so that more time passes than it computes.
            async with asyncio.timeout(2 * self.limits.seconds + 1):
                return await _ask(process, request, content)
        except TimeoutError as error:
            await self._end()
            raise BrokenProcessError from error
        except (OSError, EOFError) as error:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_SECONDS)
            status = process.returncode
            await self._end()
            raise _EndedError(status) from error
        except BaseException:
            # Its answer would be read as the next picture's.
            await self._end()
            raise

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        settings = {
            "geometry": self.geometry.as_json(),
            "max_pixels": self.limits.max_pixels,
            "max_memory": self.limits.max_memory,
            "seconds": self.limits.seconds,
        }
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
                cwd="/",
            )
            self.num_started += 1
            async with asyncio.timeout(START_SECONDS):
                await _ask(self._process, settings)
        except (TimeoutError, OSError, EOFError) as error:
            await self._end()
            raise NotStartedError from error
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _ask(
    process: asyncio.subprocess.Process, request: dict[str, object], content: bytes = b""
) -> tuple[dict[str, Any], bytes]:
    """Write a frame and read the answer's; raises OSError or EOFError if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    text = orjson.dumps(request)
    head = len(text).to_bytes(4, "little") + len(content).to_bytes(4, "little")
    process.stdin.writelines((head, text, content))
    await process.stdin.drain()
    head = await process.stdout.readexactly(FRAME_HEAD_BYTES)
    num_json, num_bytes = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
    answer = orjson.loads(await process.stdout.readexactly(num_json))
    return answer, await process.stdout.readexactly(num_bytes)
