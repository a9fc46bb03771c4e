"""The pictures of requests in memory: sources become tiles once, and tiles are kept as long as a request has them."""

from __future__ import annotations

import asyncio
import binascii
import re
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from millrace_router.errors import ImageInvalid, Overloaded
from millrace_router.images.child import BrokenProcessError, DecodingError, DecodingProcess, Tiles
from millrace_router.images.fetch import FetchError, ImageFetcher
from millrace_router.request.images import ImageSource, PreparedImage
from millrace_router.telemetry.metrics import Metrics

DATA = "data:"
_HEAD = re.compile(r"data:[\w.+/-]*(?:;[\w.-]+=[\w.-]*)*;base64,", re.IGNORECASE | re.ASCII)
MAX_HEAD_CHARS = 256
MAX_BROKEN = 1024
"""Sources that have broken the process and are remembered."""
MAX_SOURCES = 4096
WAIT_SECONDS = 10.0
"""How long a request waits for memory."""
BUSY_SECONDS = 1.0


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
    ) -> None:
        """`max_rows` is the most rows of features of one request; `cell` is as in `VisionInfo`.

        `max_memory` is in bytes of tiles; it is enough for one picture in any case.
        """
        self.max_rows = max_rows
        self.geometry = process.geometry
        self.max_tiles = self.geometry.most_tiles
        """The most tiles of one image."""
        self.max_memory = max(max_memory, self.geometry.most_bytes)
        self.max_images = max_images
        self.most_rows_per_tile = self.geometry.most_rows or rows_per_tile
        self._rows_per_tile, self._cell = rows_per_tile, cell
        self._extra_rows = extra_rows
        self.in_use = 0
        """Bytes of all tiles in memory."""
        self.num_prepared = 0
        """Pictures that the process has decoded."""
        if metrics is not None:
            metrics.image_bytes.follow(lambda: self.in_use)
        self._metrics = metrics
        self._process = process
        self._fetcher = fetcher
        self._wait_seconds = wait_seconds
        self._live: weakref.WeakValueDictionary[bytes, PreparedImage] = (
            weakref.WeakValueDictionary()
        )
        self._recent: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()
        """Digests of tiles by the digest of a source and its detail."""
        self._broken: OrderedDict[bytes, None] = OrderedDict()
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def prepare(self, sources: Sequence[ImageSource]) -> tuple[PreparedImage, ...]:
        """Return the pictures of a request in its order.

        Raises:
            ImageInvalid: one of them cannot be used; the message names its part.
            Overloaded: other requests' pictures take all the memory for them.

        """
        if len(sources) > self.max_images:
            raise ImageInvalid(
                sources[self.max_images].part,
                f"is one too many: a request may have {self.max_images}",
            )
        if self.geometry.has_one_grid and len(sources) > 1:
            sources = [replace(source, detail="low") for source in sources]
        images = tuple([await self._prepare(source) for source in sources])
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

    async def _prepare(self, source: ImageSource) -> PreparedImage:
        try:
            content, key = await self._content(source)
        except FetchError as error:
            raise ImageInvalid(source.part, str(error)) from None
        if (image := self._known(key)) is not None:
            return image
        async with self._turn:
            # Another request may have had the same picture.
            if (image := self._known(key)) is not None:
                return image
            if key in self._broken:
                raise ImageInvalid(source.part, "took too long, or too much memory, before")
            await self._wait_for_memory()
            return await self._decode(source, content, key)

    async def _content(self, source: ImageSource) -> tuple[bytes, bytes]:
        """Return the bytes of a source, and a key that covers them and the detail; raises FetchError."""
        most = self._process.limits.max_bytes
        if source.url[: len(DATA)].lower() != DATA:
            content = await self._fetcher.fetch(source.url)
        elif 3 * len(source.url) > 4 * (most + MAX_HEAD_CHARS):
            raise FetchError(f"has more than {most} bytes")
        else:
            content = await asyncio.to_thread(_from_data, source.url)
        if len(content) > most:
            raise FetchError(f"has {len(content)} bytes, more than {most}")
        digest = await asyncio.to_thread(lambda: sha256(content).digest())
        return content, sha256(digest + source.detail.encode()).digest()

    def _known(self, key: bytes) -> PreparedImage | None:
        digest = self._digests.get(key)
        image = None if digest is None else self._live.get(digest)
        if image is None:
            return None
        self._digests.move_to_end(key)
        self._recent[image.digest] = image
        self._recent.move_to_end(image.digest)
        return image

    async def _decode(self, source: ImageSource, content: bytes, key: bytes) -> PreparedImage:
        try:
            tiles = await self._process.decode(content, source.detail)
        except DecodingError as error:
            raise ImageInvalid(source.part, str(error)) from None
        except BrokenProcessError:
            self._broken[key] = None
            if len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
            raise ImageInvalid(source.part, "takes too long, or too much memory") from None
        self.num_prepared += 1
        if self._metrics is not None:
            self._metrics.images_decoded.inc()
        image = self._live.get(tiles.digest)
        if image is None:
            layout = tiles.rows, tiles.columns
            image = PreparedImage(
                digest=tiles.digest,
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
            self._live[tiles.digest] = image
            self.in_use += len(image.pixels)
            loop = asyncio.get_running_loop()
            weakref.finalize(image, self._free, len(image.pixels), loop)
        self._digests[key] = image.digest
        if len(self._digests) > MAX_SOURCES:
            self._digests.popitem(last=False)
        self._recent[image.digest] = image
        return image

    def _rows_of(self, tiles: Tiles) -> int:
        if not tiles.is_grid:
            return self._rows_per_tile
        height, width = tiles.tile
        return (height // self._cell) * (width // self._cell)

    async def _wait_for_memory(self) -> None:
        """Forget pictures that no request has until the next one fits, or wait for one; raises Overloaded."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not self._has_room():
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise Overloaded(
                "Model is overloaded: the images of other requests take all the memory for them",
                retry_after_seconds=BUSY_SECONDS,
            ) from None

    def _has_room(self) -> bool:
        most = self.max_memory - self.geometry.most_bytes
        while self.in_use > most and self._recent:
            self._recent.popitem(last=False)
        return self.in_use <= most

    def _free(self, num_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.in_use -= num_bytes
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._freed.set)


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
