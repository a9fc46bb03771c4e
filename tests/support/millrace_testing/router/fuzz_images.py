"""Mutates files of images: each is refused, or becomes tiles of the right size, in bounded time and memory.

`python -m millrace_testing.router.fuzz_images COUNT SEED` gives COUNT mutations to the process that decodes, which
has to outlive them all, and prints what it took.
"""

from __future__ import annotations

import asyncio
import io
import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from PIL import Image

from millrace_router.images.child import (
    COMMAND,
    DecodingError,
    DecodingLimits,
    DecodingProcess,
    Tiles,
)
from millrace_router.images.geometry import Geometry

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF")
EDGE = 32
SETTINGS = {"size": {"longest_edge": 3 * EDGE}, "max_image_size": {"longest_edge": EDGE}}
LIMITS = DecodingLimits(max_bytes=1 << 20, max_pixels=4_000_000, seconds=10.0)
LONGEST_MESSAGE = 200
LARGEST_PART = 64
"""Most bytes of a part that is moved or removed."""
NUMBERS = (0, 1, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)
MAX_MEMORY = 200 << 20
"""Bytes of memory that the process may use: 4 million pixels take 16 bytes each, and it has 30 MiB of its own."""


class ImageFuzz:
    """Mutated images for one process."""

    def __init__(self, process: DecodingProcess, seed: int) -> None:
        self.taken: Counter[str] = Counter()
        self.peak_memory = 0
        """Most bytes of memory that the process has used."""
        self.slowest = 0.0
        """Seconds of the slowest answer."""
        self._process = process
        self._random = random.Random(seed)
        self._good = [*map(_file, KINDS), _animation(), _tiled(), _progressive()]

    async def check(self) -> None:
        """Give one mutation to the process; raises BrokenProcessError if that ends it."""
        content = self._mutated()
        began = time.monotonic()
        try:
            tiles = await self._process.decode(content, self._random.choice(("auto", "low")))
        except DecodingError as error:
            _check_message(str(error))
            self.taken[str(error).split(" ")[0]] += 1
        else:
            _check_tiles(tiles)
            self.taken["tiles"] += 1
        self.slowest = max(self.slowest, time.monotonic() - began)

    def measure(self) -> None:
        """Read how much memory the process has used."""
        living = (p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE)
        (child,) = (each for each in living if COMMAND[-1] in each.cmdline())
        status = Path(f"/proc/{child.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        self.peak_memory = int(fields["VmHWM"].split()[0]) << 10

    def _mutated(self) -> bytes:
        draw = self._random
        content = bytearray(draw.choice(self._good))
        for _ in range(draw.randint(1, 4)):
            # Headers are short, and decide most.
            reach = max(1, len(content) if draw.random() < 0.5 else min(len(content), 128))
            at = draw.randrange(reach)
            match draw.randrange(7):
                case 0:
                    flipped = 1 << draw.randrange(8)
                    content[at : at + 1] = bytes(byte ^ flipped for byte in content[at : at + 1])
                case 1:
                    content[at : at + 1] = bytes([draw.choice((0, 0xFF, 0x7F, 0x80))])
                case 2:
                    number, order = draw.choice(NUMBERS), draw.choice("<>")
                    content[at : at + 4] = struct.pack(f"{order}I", number)
                case 3:
                    del content[at : at + draw.randint(1, LARGEST_PART)]
                case 4:
                    content[at:at] = content[at : at + draw.randint(1, LARGEST_PART)]
                case 5:
                    del content[max(at, 1) :]
                case _:
                    other = draw.choice(self._good)
                    content = bytearray(other[:at]) + content[at:]
        return bytes(content)


async def fuzz(count: int, seed: int = 0) -> ImageFuzz:
    """Try `count` mutations.

    Raises:
        AssertionError: an answer is wrong, or takes too much memory.
        BrokenProcessError: an image ends the process.

    """
    process = DecodingProcess(Geometry.of("smolvlm", SETTINGS), LIMITS)
    images = ImageFuzz(process, seed)
    try:
        for _ in range(count):
            await images.check()
        images.measure()
    finally:
        await process.close()
    assert process.num_started == 1
    assert images.peak_memory < MAX_MEMORY, images.peak_memory
    return images


def _check_message(message: str) -> None:
    assert message
    assert message.isprintable(), message
    assert len(message) < LONGEST_MESSAGE, message


def _check_tiles(tiles: Tiles) -> None:
    assert tiles.num_tiles == tiles.rows * tiles.columns + 1
    assert len(tiles.pixels) == tiles.num_tiles * 3 * EDGE * EDGE
    assert len(tiles.digest) == 32


def _file(kind: str, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    _noise(0, mode).save(file, kind, **options)
    return file.getvalue()


def _animation() -> bytes:
    return _file("GIF", save_all=True, append_images=[_noise(number) for number in (1, 2)])


def _tiled() -> bytes:
    return _file("TIFF", "CMYK", compression="tiff_lzw")


def _progressive() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return _file("JPEG", progressive=True, exif=exif)


def _noise(seed: int, mode: str = "RGB") -> Image.Image:
    size = (40, 30)
    content = random.Random(seed).randbytes(size[0] * size[1] * len(mode))
    return Image.frombytes(mode, size, content)


def main() -> None:
    """Run as a command."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.monotonic()
    images = asyncio.run(fuzz(count, seed))
    sys.stdout.write(
        f"{count} images in {time.monotonic() - began:.0f} s, {images.slowest * 1000:.0f} ms the slowest,"
        f" {images.peak_memory >> 20} MiB at most: {dict(images.taken)}\n"
    )


if __name__ == "__main__":
    main()
