"""The process that decodes pictures: a client's bytes in, tiles of uint8 out. The only code that knows Pillow.

It reads and writes frames: the length of a JSON object, the length of what follows it, the object, and bytes. A picture
that breaks a limit of time or memory ends this process; the router starts another.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import resource
import struct
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, BinaryIO, NoReturn

from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from millrace_router.images.families import geometry_from
from millrace_router.images.geometry import MAX_RATIO, AnyGeometry, Layout

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF")
FRAME = struct.Struct("<II")
NICENESS = 5
OPEN_FILES = 3
"""Standard input, output and errors: nothing else can be opened."""
MOST_TEXT_BYTES = 4 << 20
"""All texts of a PNG together; Pillow unpacks them when it opens the file."""
SCAN = b"\xff\xda"
MOST_SCANS = 16
"""A JPEG of the largest size may have so many scans, and a smaller one more: each takes time for every pixel."""


class _Refused(Exception):  # noqa: N818
    """The picture is refused; the message completes "the image"."""


def main() -> NoReturn:
    """Answer frames until standard input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # The shards on this host go first, as answers that run wait for them.
    os.nice(NICENESS)
    settings, _ = _read(source)
    geometry = geometry_from(settings["geometry"])
    # Plugins are loaded now, as no file can be opened later; `FORMATS` says which of them are used.
    Image.init()
    Image.MAX_IMAGE_PIXELS = settings["max_pixels"]
    PngImagePlugin.MAX_TEXT_MEMORY = MOST_TEXT_BYTES
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    _limit(resource.RLIMIT_AS, settings["max_memory"])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _write(sink, {"is_ready": True})
    while True:
        request, content = _read(source)
        _limit_time(settings["seconds"])
        try:
            answer, pixels = _prepare(content, request, geometry, settings["max_pixels"])
        except _Refused as error:
            answer, pixels = {"refusal": str(error)}, b""
        except MemoryError:
            answer, pixels = {"refusal": "takes too much memory to decode"}, b""
        # A decoder may raise anything for bytes that are not a picture.
        except Exception:  # noqa: BLE001
            answer, pixels = {"refusal": "cannot be decoded"}, b""
        _write(sink, answer, pixels)


def _prepare(
    content: bytes, request: dict[str, Any], geometry: AnyGeometry, max_pixels: int
) -> tuple[dict[str, Any], bytes]:
    """Return the layout and the tiles, each [3, height, width], one after the other. Raises _Refused."""
    try:
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _Refused(f"has more than {max_pixels} pixels") from None
    except UnidentifiedImageError:
        raise _Refused(f"is not one of {', '.join(FORMATS)}") from None
    width, height = opened.size
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _Refused(f"has {width} x {height} pixels, a ratio of more than {MAX_RATIO}")
    if opened.format == "JPEG":
        num_scans = content.count(SCAN)
        if num_scans > MOST_SCANS and num_scans * width * height > MOST_SCANS * max_pixels:
            raise _Refused(f"has {num_scans} scans of {width} x {height} pixels")
    image = ImageOps.exif_transpose(opened).convert("RGB")
    width, height = image.size
    layout = geometry.layout(height, width, request["detail"])
    original = image = image if layout.square is None else _squared(image, layout.square)
    for tall, wide in layout.resized:
        image = image.resize((wide, tall), geometry.resample)
    digest = hashlib.sha256(request["fingerprint"].encode())
    digest.update(f" {layout.num_tiles} {layout.rows} {layout.columns} {layout.tile}".encode())
    if layout.is_padded:
        digest.update(f" {height} {width}".encode())
    tiles = bytearray()
    for tile in _tiles(original, image, layout, geometry.resample):
        for band in tile.split():
            tiles += band.tobytes()
    digest.update(tiles)
    answer = {
        "digest": digest.hexdigest(),
        "rows": layout.rows,
        "columns": layout.columns,
        "num_tiles": layout.num_tiles,
        "height": height,
        "width": width,
        "tile": layout.tile,
        "is_grid": layout.is_grid,
    }
    return answer, bytes(tiles)


def _squared(image: Image.Image, color: tuple[int, ...]) -> Image.Image:
    """Return a picture in the middle of a square."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _tiles(
    original: Image.Image, image: Image.Image, layout: Layout, resample: int
) -> Iterator[Image.Image]:
    """Yield the tiles of a resized picture row by row, and then, or before them, the whole picture as one."""
    tall, wide = layout.tile
    if layout.is_cropped:
        yield image
        yield from (each.resize((wide, tall), resample) for each in _crops(original, layout))
        return
    if layout.num_tiles == 1:
        yield _middle(image, tall, wide)
        return
    if layout.is_padded:
        image = _middle(image, layout.rows * tall, layout.columns * wide)
    for row in range(layout.rows):
        for column in range(layout.columns):
            left, top = column * wide, row * tall
            yield image.crop((left, top, left + wide, top + tall))
    yield (original if layout.is_padded else image).resize((wide, tall), resample)


def _crops(image: Image.Image, layout: Layout) -> Iterator[Image.Image]:
    """Yield the parts of a picture, row by row."""
    tall, wide = math.ceil(image.height / layout.rows), math.ceil(image.width / layout.columns)
    for top, left in product(range(0, image.height, tall), range(0, image.width, wide)):
        yield image.crop((left, top, min(left + wide, image.width), min(top + tall, image.height)))


def _middle(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return the middle of a picture, with black around it where it is smaller."""
    if image.size == (width, height):
        return image
    left, top = (abs(a - b) // 2 for a, b in zip(image.size, (width, height), strict=True))
    left, top = left if image.width > width else -left, top if image.height > height else -top
    return image.crop((left, top, left + width, top + height))


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _limit_time(seconds: float) -> None:
    """Let this process compute for so long from now on; it is killed after that."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until, hard))


def _read(source: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read a frame; ends the process at the end of the input."""
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        sys.exit(0)
    num_json, num_bytes = FRAME.unpack(head)
    return json.loads(source.read(num_json)), source.read(num_bytes)


def _write(sink: BinaryIO, answer: dict[str, Any], content: bytes = b"") -> None:
    text = json.dumps(answer).encode()
    sink.write(FRAME.pack(len(text), len(content)))
    sink.write(text)
    sink.write(content)
    sink.flush()


if __name__ == "__main__":
    main()
