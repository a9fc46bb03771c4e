"""The pictures of requests in memory: sources become tiles once, and tiles are kept as long as a request has them."""

from __future__ import annotations

import asyncio
import binascii
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256

from millrace_router.errors import ImageInvalid, ImagesUnavailable, Overloaded
from millrace_router.images.child import (
    BrokenProcessError,
    DecodingError,
    DecodingProcess,
    NotStartedError,
    Tiles,
)
from millrace_router.images.fetch import FetchError, ImageFetcher
from millrace_router.request.images import ImageSource, PreparedImage
from millrace_router.telemetry.metrics import Metrics

DATA = "data:"
_HEAD = re.compile(r"data:[\w.+/-]*(?:;[\w.-]+=[\w.-]*)*;base64,", re.IGNORECASE | re.ASCII)
MAX_HEAD_CHARS = 256
MAX_BROKEN = 1024
"""Sources that have broken the process and are remembered."""
REFUSED_SECONDS = 600.0
"""How long they are."""
MAX_SOURCES = 4096
WAIT_SECONDS = 10.0
"""How long a request waits for memory, those before it included."""
BUSY_SECONDS = 1.0


class _Memory:
    """The bytes of pictures, in use and promised to those that are being decoded."""

    def __init__(self, most: int, wait_seconds: float, forget: Callable[[], bool]) -> None:
        """`forget` lets a picture go that no request has; whether there was one."""
        self.most = most
        self.in_use = 0
        self._promised = 0
        self._wait_seconds = wait_seconds
        self._forget = forget
        self._freed = asyncio.Event()
        self._first_waits = asyncio.Lock()

    @asynccontextmanager
    async def promised(self, num_bytes: int) -> AsyncIterator[None]:
        """Promise so many bytes; others are forgotten, or waited for in turn. Raises Overloaded."""
        if num_bytes:
            try:
                async with asyncio.timeout(self._wait_seconds), self._first_waits:
                    while not self._has_room(num_bytes):
                        self._freed.clear()
                        await self._freed.wait()
            except TimeoutError:
                raise Overloaded(
                    "Model is overloaded: the images of other requests take all the memory for them",
                    retry_after_seconds=BUSY_SECONDS,
                ) from None
        self._promised += num_bytes
        try:
            yield
        finally:
            self._promised -= num_bytes
            self._freed.set()

    def use(self, image: PreparedImage) -> None:
        """Count the bytes of a picture as long as anything refers to it."""
        self.in_use += len(image.pixels)
        weakref.finalize(image, self._free, len(image.pixels), asyncio.get_running_loop())

    def _has_room(self, num_bytes: int) -> bool:
        most = self.most - self._promised - num_bytes
        while self.in_use > most and self._forget():
            pass
        return self.in_use <= most

    def _free(self, num_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.in_use -= num_bytes
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._freed.set)


class ImageStore:
    """Prepares pictures, and counts the memory of their tiles.

    A picture in tiles is kept while anything refers to it, so each accepted request has its pictures until it ends. The
    others are kept while there is room, the last used the longest.
    """

    def __init__(  # noqa: PLR0913
        self,
        process: DecodingProcess,
        fetcher: ImageFetcher,
        *,
        rows_per_tile: int,
        extra_rows: int = 0,
        cell: int = 0,
        max_images: int,
        max_rows: int,
        max_memory: int,
        metrics: Metrics | None = None,
        wait_seconds: float = WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_rows` is the most rows of features of one request; `cell` is as in `VisionInfo`.

        `max_memory` is in bytes of tiles; it is enough for one picture in any case.
        """
        self.max_rows = max_rows
        self.geometry = process.geometry
        self.max_tiles = self.geometry.most_tiles
        """The most tiles of one image."""
        self.max_images = max_images
        self.most_rows_per_tile = self.geometry.most_rows or rows_per_tile
        self._rows_per_tile, self._cell = rows_per_tile, cell
        self._extra_rows = extra_rows
        self.num_prepared = 0
        """Pictures that the process has decoded."""
        if metrics is not None:
            metrics.image_bytes.follow(lambda: self._memory.in_use)
        self._metrics = metrics
        self._process = process
        self._fetcher = fetcher
        most = max(max_memory, self.geometry.most_bytes)
        self._memory = _Memory(most, wait_seconds, self._forget)
        self._live: weakref.WeakValueDictionary[bytes, PreparedImage] = (
            weakref.WeakValueDictionary()
        )
        self._recent: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()
        """Digests of tiles by the digest of a source and its detail."""
        self._broken: OrderedDict[bytes, float] = OrderedDict()
        """Until when each is refused."""
        self._clock = clock
        self._turn = asyncio.Lock()

    @property
    def in_use(self) -> int:
        """Bytes of all tiles in memory."""
        return self._memory.in_use

    async def prepare(
        self, sources: Sequence[ImageSource], salt: Sequence[str] = ()
    ) -> tuple[PreparedImage, ...]:
        """Return the pictures of a request in its order, which it shares only with requests of the same `salt`.

        Raises:
            ImageInvalid: one of them cannot be used; the message names its part.
            ImagesUnavailable: the process that decodes does not start.
            Overloaded: other requests' pictures take all the memory for them.

        """
        if len(sources) > self.max_images:
            raise ImageInvalid(
                sources[self.max_images].part,
                f"is one too many: a request may have {self.max_images}",
            )
        if self.geometry.has_one_grid and len(sources) > 1:
            sources = [replace(source, detail="low") for source in sources]
        contents = [await self._content(source, salt) for source in sources]
        images = await self._decoded(sources, contents, salt)
        num_rows = 0
        for source, image in zip(sources, images, strict=True):
            num_rows += image.num_rows
            if num_rows > self.max_rows:
                raise ImageInvalid(
                    source.part,
                    f"needs {image.num_rows} features, {num_rows} with those before it: a request may have"
                    f" {self.max_rows}",
                )
        return images

    def expansion(self, image: PreparedImage) -> str:
        """Return the text in place of the placeholder that a template writes for a picture."""
        if image.order:
            return self.geometry.needed_tokens[0] * image.num_tokens
        return self.geometry.expansion(image.rows, image.columns, image.rows_per_tile)

    async def close(self) -> None:
        """End the process that decodes."""
        await self._process.close()

    async def _decoded(
        self,
        sources: Sequence[ImageSource],
        contents: Sequence[tuple[bytes, bytes]],
        salt: Sequence[str],
    ) -> tuple[PreparedImage, ...]:
        """Return the pictures of `contents`, with memory for all that have to be decoded, or for none."""
        num_missing = len({key for _, key in contents if self._known(key) is None})
        while True:
            most = min(num_missing * self.geometry.most_bytes, self._memory.most)
            async with self._memory.promised(most):
                # While it waited, it kept no picture from being forgotten, and others may have decoded some.
                known = [self._known(key) for _, key in contents]
                missing = {
                    key for (_, key), image in zip(contents, known, strict=True) if not image
                }
                if len(missing) > num_missing:
                    num_missing = len(contents)
                    continue
                images = list[PreparedImage]()
                for source, (content, key) in zip(sources, contents, strict=True):
                    images.append(await self._prepare(source, content, key, salt))
                return tuple(images)

    async def _prepare(
        self, source: ImageSource, content: bytes, key: bytes, salt: Sequence[str]
    ) -> PreparedImage:
        async with self._turn:
            # Another request may have had the same picture.
            if (image := self._known(key)) is not None:
                return image
            if self.in_use and self.in_use + self.geometry.most_bytes > self._memory.most:
                # Its request has all the memory.
                raise ImageInvalid(
                    source.part, "and those before it do not fit into the memory for images"
                )
            if self._clock() < self._broken.get(key, 0.0):
                raise ImageInvalid(source.part, "took too long, or too much memory, before")
            return await self._decode(source, content, key, salt)

    async def _content(self, source: ImageSource, salt: Sequence[str]) -> tuple[bytes, bytes]:
        """Return the bytes of a source, and a key that covers them, the detail and the salt; raises ImageInvalid."""
        try:
            content = await self._bytes_of(source)
        except FetchError as error:
            raise ImageInvalid(source.part, str(error)) from None
        digest = await asyncio.to_thread(lambda: sha256(content).digest())
        return content, _salted(sha256(digest + source.detail.encode()).digest(), salt)

    async def _bytes_of(self, source: ImageSource) -> bytes:
        """Return the bytes of a source; raises FetchError."""
        most = self._process.limits.max_bytes
        if source.url[: len(DATA)].lower() != DATA:
            content = await self._fetcher.fetch(source.url)
        elif 3 * len(source.url) > 4 * (most + MAX_HEAD_CHARS):
            raise FetchError(f"has more than {most} bytes")
        else:
            content = await asyncio.to_thread(_from_data, source.url)
        if len(content) > most:
            raise FetchError(f"has {len(content)} bytes, more than {most}")
        return content

    def _known(self, key: bytes) -> PreparedImage | None:
        digest = self._digests.get(key)
        image = None if digest is None else self._live.get(digest)
        if image is None:
            return None
        self._digests.move_to_end(key)
        self._recent[image.digest] = image
        self._recent.move_to_end(image.digest)
        return image

    async def _decode(
        self, source: ImageSource, content: bytes, key: bytes, salt: Sequence[str]
    ) -> PreparedImage:
        try:
            tiles = await self._process.decode(content, source.detail)
        except DecodingError as error:
            raise ImageInvalid(source.part, str(error)) from None
        except NotStartedError:
            raise ImagesUnavailable from None
        except BrokenProcessError:
            self._broken[key] = self._clock() + REFUSED_SECONDS
            self._broken.move_to_end(key)
            if len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
            raise ImageInvalid(source.part, "takes too long, or too much memory") from None
        self.num_prepared += 1
        if self._metrics is not None:
            self._metrics.images_decoded.inc()
        digest = _salted(tiles.digest, salt)
        image = self._live.get(digest)
        if image is None:
            layout = tiles.rows, tiles.columns
            image = PreparedImage(
                digest=digest,
                rows=tiles.rows,
                columns=tiles.columns,
                num_tiles=tiles.num_tiles,
                height=tiles.tile[0],
                width=tiles.tile[1],
                rows_per_tile=self._rows_of(tiles),
                is_grid=tiles.is_grid,
                pixels=tiles.pixels,
                extra_rows=self._extra_rows,
                order=self.geometry.order(tiles.size, layout, self._rows_per_tile),
                reduction=self.geometry.reduction(tiles.size, layout, self._rows_per_tile),
            )
            self._live[digest] = image
            self._memory.use(image)
        self._digests[key] = image.digest
        if len(self._digests) > MAX_SOURCES:
            self._digests.popitem(last=False)
        self._recent[image.digest] = image
        return image

    def _forget(self) -> bool:
        if self._recent:
            self._recent.popitem(last=False)
            return True
        return False

    def _rows_of(self, tiles: Tiles) -> int:
        if not tiles.is_grid:
            return self._rows_per_tile
        height, width = tiles.tile
        return (height // self._cell) * (width // self._cell)


def _salted(digest: bytes, salt: Sequence[str]) -> bytes:
    """Return the digest, or another one for each salt."""
    return sha256(digest + repr(tuple(salt)).encode()).digest() if salt else digest


def _from_data(url: str) -> bytes:
    """Return the content of a `data:` URL; raises FetchError."""
    head = _HEAD.match(url[:MAX_HEAD_CHARS])
    if head is None:
        raise FetchError("has a `data:` URL that is not base64")
    try:
        # Clients wrap lines, and some leave the padding out.
        text = "".join(url[head.end() :].split())
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError:
        raise FetchError("is not valid base64") from None
