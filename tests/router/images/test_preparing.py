"""Pictures become the tiles of transformers' processors, to the bit, and bad ones cost nothing but themselves."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image, PngImagePlugin
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from millrace_router.images.child import (
    MOST_TRIES,
    BrokenProcessError,
    DecodingError,
    DecodingLimits,
    DecodingProcess,
    NotStartedError,
    Tiles,
)
from millrace_router.images.decoding import NICENESS
from millrace_router.images.families import geometry_of
from millrace_router.images.fetch import ImageFetcher
from millrace_router.images.geometry import Geometry, GeometryError, expansion
from millrace_router.images.prompts import ImagePrompts
from millrace_router.images.store import ImageStore
from millrace_router.request.images import PreparedImage
from millrace_router.text.control_tokens import ControlTokens
from millrace_testing.router.fuzz_images import fuzz

SMALL = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
SIZES = [(1, 1), (20, 20), (97, 53), (53, 97), (32, 32), (33, 32), (31, 64), (5, 640), (640, 5)]


def decoded(
    content: bytes | list[bytes],
    processor: dict[str, Any] = SMALL,
    detail: Any = "auto",
    family: str = "smolvlm",
    **limits: Any,
) -> Tiles:
    async def run(process: DecodingProcess) -> Tiles:
        return await process.decode(content, detail)  # type: ignore[arg-type]

    tiles: Tiles = with_process(run, processor, family, **limits)
    return tiles


def with_process(
    use: Callable[[DecodingProcess], Coroutine[Any, Any, Any]],
    processor: dict[str, Any] = SMALL,
    family: str = "smolvlm",
    **limits: Any,
) -> Any:
    async def run() -> Any:
        process = DecodingProcess(geometry_of(family, processor), DecodingLimits(**limits))
        try:
            return await use(process)
        finally:
            await process.close()

    return asyncio.run(run())


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    content = random.Random(width * 10_000 + height).randbytes(width * height * bands)
    return Image.frombytes(mode, (width, height), content)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def reference(image: Image.Image, processor: dict[str, Any], cls: Any) -> tuple[Any, int, int]:
    made = cls(**processor, do_rescale=False, do_normalize=False, return_row_col_info=True)
    values = made.preprocess(image, return_tensors="np")
    (rows,), (columns,) = values["rows"], values["cols"]
    return np.asarray(values["pixel_values"])[0], int(rows[0]), int(columns[0])


@pytest.mark.parametrize("cls", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_are_those_of_transformers_to_the_bit(size: tuple[int, int], cls: Any) -> None:
    image = noise(*size)
    expected, rows, columns = reference(image, SMALL, cls)
    tiles = decoded(encoded(image))
    assert (tiles.rows, tiles.columns, tiles.num_tiles) == (rows, columns, len(expected))
    assert tiles.pixels == expected.astype(np.uint8).tobytes()


@pytest.mark.parametrize("size", [(1024, 768), (4000, 3000)], ids=str)
def test_a_photo_has_the_tiles_of_the_real_settings(size: tuple[int, int]) -> None:
    processor = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    image = noise(size[0] // 4, size[1] // 4).resize(size)
    expected, *_ = reference(image, processor, SmolVLMImageProcessorPil)
    tiles = decoded(encoded(image, compress_level=0), processor, max_bytes=100 << 20)
    assert tiles.num_tiles == 13
    assert tiles.pixels == expected.astype(np.uint8).tobytes()


def test_low_detail_is_one_tile_as_without_splitting() -> None:
    image = noise(97, 53)
    expected, *_ = reference(
        image, {**SMALL, "do_image_splitting": False}, SmolVLMImageProcessorPil
    )
    low = decoded(encoded(image), detail="low")
    assert (low.num_tiles, low.pixels) == (1, expected.astype(np.uint8).tobytes())
    assert low.digest != decoded(encoded(image)).digest


SQUARES = {"gemma3": Gemma3ImageProcessorPil, "paligemma": SiglipImageProcessorPil}
"""Families that make one square of an image."""


@pytest.mark.parametrize("family", SQUARES)
def test_a_square_is_that_of_transformers_to_the_bit(family: str) -> None:
    processor = {"size": {"height": 28, "width": 28}}
    made = SQUARES[family](**processor, do_rescale=False, do_normalize=False)
    for size in SIZES:
        image = noise(*size)
        expected = np.asarray(made.preprocess(image, return_tensors="np")["pixel_values"])[0]
        tiles = decoded(encoded(image), processor, family=family)
        assert (tiles.rows, tiles.columns, tiles.num_tiles) == (0, 0, 1)
        assert tiles.pixels == expected.astype(np.uint8).tobytes()


SCAN = {
    "size": {"height": 28, "width": 28},
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def in_both_details(
    images: list[Image.Image], processor: dict[str, Any], family: str
) -> list[tuple[Tiles, Tiles]]:
    """What one process makes of each picture with the details `auto` and `low`."""

    async def run(process: DecodingProcess) -> list[tuple[Tiles, Tiles]]:
        contents = [encoded(image) for image in images]
        return [
            (await process.decode(each, "auto"), await process.decode(each, "low"))
            for each in contents
        ]

    tiles: list[tuple[Tiles, Tiles]] = with_process(run, processor, family)
    return tiles


def test_pan_and_scan_has_the_tiles_of_transformers_to_the_bit() -> None:
    images = [noise(*size) for size in (*SIZES, (26, 10), (16, 23), (10, 60), (7, 30))]
    made = Gemma3ImageProcessorPil(**SCAN, do_rescale=False, do_normalize=False)
    geometry = geometry_of("gemma3", SCAN)
    for image, (tiles, low) in zip(images, in_both_details(images, SCAN, "gemma3"), strict=True):
        values = made.preprocess(image, return_tensors="np")
        expected = np.asarray(values["pixel_values"]).astype(np.uint8)
        assert tiles.rows * tiles.columns == values["num_crops"][0]
        assert (tiles.num_tiles, tiles.pixels) == (len(expected), expected.tobytes())
        assert tiles.num_tiles <= geometry.most_tiles
        assert (low.num_tiles, low.pixels) == (1, expected[:1].tobytes())


CROPPED = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
GRIDS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_tile_of_llava_is_that_of_transformers_to_the_bit(size: tuple[int, int]) -> None:
    image = noise(*size)
    made = CLIPImageProcessorPil(**CROPPED, do_rescale=False, do_normalize=False)
    expected = np.asarray(made.preprocess(image, return_tensors="np")["pixel_values"])[0]
    tiles = decoded(encoded(image), CROPPED, family="llava")
    assert tiles.num_tiles == 1
    assert tiles.pixels == expected.astype(np.uint8).tobytes()


@pytest.mark.parametrize("size", [*SIZES, (60, 60), (49, 47), (100, 30)], ids=str)
def test_the_grid_of_llava_next_is_that_of_transformers_to_the_bit(size: tuple[int, int]) -> None:
    image, processor = noise(*size), {**CROPPED, "image_grid_pinpoints": GRIDS}
    made = LlavaNextImageProcessorPil(**processor, do_rescale=False, do_normalize=False)
    values = np.asarray(made.preprocess(image, return_tensors="np")["pixel_values"])[0]
    tiles = decoded(encoded(image), processor, family="llava_next")
    expected = np.concatenate([values[1:], values[:1]]).astype(np.uint8)
    assert (tiles.num_tiles, tiles.size) == (len(expected), image.size[::-1])
    assert tiles.pixels == expected.tobytes()
    geometry = geometry_of("llava_next", processor)
    order = geometry.order(tiles.size, (tiles.rows, tiles.columns), 9)
    counter = LlavaNextProcessor.__new__(LlavaNextProcessor)
    counter.image_processor, counter.patch_size, counter.num_additional_image_tokens = made, 8, 0
    assert sum(count for _, count in order) == counter._get_number_of_features(*tiles.size, 24, 24)
    low = decoded(encoded(image), processor, detail="low", family="llava_next")
    assert low.pixels == values[:1].astype(np.uint8).tobytes()


def test_the_grid_of_llava_onevision_is_that_of_transformers_to_the_bit() -> None:
    processor = {"size": {"height": 24, "width": 24}, "image_grid_pinpoints": GRIDS}
    made = LlavaOnevisionImageProcessorPil(**processor, do_rescale=False, do_normalize=False)
    geometry = geometry_of("llava_onevision", processor | {"max_grid_tiles": 2})
    counter = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    counter.image_processor, counter.num_image_tokens = made, 9
    counter.vision_aspect_ratio = "anyres_max_2"
    images = [noise(*size) for size in (*SIZES, (60, 60), (200, 150), (70, 190))]
    both = in_both_details(images, processor | {"max_grid_tiles": 2}, "llava_onevision")
    reduced = 0
    for image, (tiles, low) in zip(images, both, strict=True):
        values = np.asarray(made.preprocess([image], return_tensors="np")["pixel_values"])[0]
        expected = np.concatenate([values[1:], values[:1]]).astype(np.uint8)
        assert (tiles.num_tiles, tiles.pixels) == (len(expected), expected.tobytes())
        layout = tiles.rows, tiles.columns
        order = geometry.order(tiles.size, layout, 9)
        count = counter._get_number_of_features(*tiles.size, 24, 24)
        assert sum(each for _, each in order) == count
        reduced += geometry.reduction(tiles.size, layout, 9) is not None
        # In a conversation with several pictures, each has borders in place of a grid.
        several = made.preprocess([[image, image]], return_tensors="np")["pixel_values"]
        assert low.pixels == np.asarray(several)[1].astype(np.uint8).tobytes()
    assert 0 < reduced < len(images)


def test_an_image_of_llava_onevision_has_the_tokens_of_its_processor() -> None:
    geometry = geometry_of("llava_onevision", {"max_grid_tiles": 9})
    counter = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    counter.image_processor, counter.num_image_tokens = LlavaOnevisionImageProcessorPil(), 729
    counter.vision_aspect_ratio = "anyres_max_9"
    draw = random.Random(1)
    for _ in range(300):
        size = draw.randint(20, 3000), draw.randint(20, 3000)
        layout = geometry.layout(*size)
        order = geometry.order(size, (layout.rows, layout.columns), 729)
        expected = counter._get_number_of_features(*size, 384, 384)
        assert sum(count for _, count in order) == expected


def test_the_text_for_a_square_is_that_of_the_processor() -> None:
    vocabulary = {"<unk>": 0, "<start_of_image>": 1, "<end_of_image>": 2, "<image_soft_token>": 3}
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=RustTokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )
    made = Gemma3Processor(Gemma3ImageProcessorPil(), tokens, image_seq_length=4)
    geometry = geometry_of("gemma3", SCAN)
    assert geometry.placeholder == made.image_token
    for rows, columns in ((0, 0), (1, 3), (2, 1)):
        expected = made.replace_image_token({"num_crops": [rows * columns]}, 0)
        assert geometry.expansion(rows, columns, 4) == expected


def test_a_prompt_with_a_picture_is_that_of_the_processor_for_paligemma() -> None:
    vocabulary = {"<unk>": 0, "<bos>": 1, "<eos>": 2, "<image>": 3}
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=RustTokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<image>"},
    )
    pictures = SiglipImageProcessorPil()
    pictures.image_seq_length = 4
    made, geometry = PaliGemmaProcessor(pictures, tokens), geometry_of("paligemma", {})
    _, (expected,), *_ = made.prepare_inputs_layout(
        images=[noise(9, 9)], text=["<image>what is it?"]
    )
    store = ImageStore(
        DecodingProcess(geometry, DecodingLimits()),
        ImageFetcher((), max_bytes=1),
        rows_per_tile=4,
        max_images=1,
        max_rows=4,
        max_memory=1,
    )
    prompts = ImagePrompts(store, ControlTokens(()))
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    image = PreparedImage(b"", 0, 0, 1, 224, 224, 4, b"")
    text = prompts.joined(parts, [image])
    assert text == expected.replace("<image>", made.replace_image_token({}, 0))
    assert not prompts.adds_special_tokens


def test_counts_follow_from_the_size_alone() -> None:
    geometry = Geometry.of("smolvlm", SMALL)
    processor = SmolVLMImageProcessorPil(**SMALL)
    for height, width in SIZES:
        num, rows, columns = processor.get_number_of_image_patches(height, width, {})
        layout = geometry.layout(height, width)
        assert (layout.num_tiles, layout.rows, layout.columns) == (max(num, 1), rows, columns)
        assert layout.num_tiles <= geometry.most_tiles


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "MPO"])
def test_every_format_is_decoded_as_transformers_loads_it(kind: str) -> None:
    content = encoded(noise(40, 30), kind)
    loaded = Image.open(io.BytesIO(content)).convert("RGB")
    expected, *_ = reference(loaded, SMALL, SmolVLMImageProcessorPil)
    assert decoded(content).pixels == expected.astype(np.uint8).tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "CMYK", "I;16", "1"])
def test_every_mode_becomes_rgb_as_pillow_converts_it(mode: str) -> None:
    image = noise(40, 30, mode) if mode != "I;16" else Image.frombytes(mode, (40, 30), bytes(2400))
    content = encoded(image, "TIFF")
    expected, *_ = reference(image.convert("RGB"), SMALL, SmolVLMImageProcessorPil)
    assert decoded(content).pixels == expected.astype(np.uint8).tobytes()


def test_a_turned_photo_is_turned_back() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = noise(40, 30)
    turned = decoded(encoded(image, exif=exif))
    assert turned.pixels == decoded(encoded(image.transpose(Image.Transpose.ROTATE_270))).pixels


def test_one_picture_in_two_formats_has_one_digest() -> None:
    image = noise(40, 30)
    png, webp = decoded(encoded(image)), decoded(encoded(image, "WEBP", lossless=True))
    assert png.digest == webp.digest
    assert png.digest != decoded(encoded(noise(30, 40))).digest


def test_the_text_for_a_picture_is_that_of_the_processor() -> None:
    one = "<fake_token_around_image><global-img><image><image><fake_token_around_image>"
    assert expansion(0, 0, 2) == one
    tiles = [f"<fake_token_around_image><row_1_col_{n}><image><image>" for n in (1, 2)]
    below = [tile.replace("row_1", "row_2") for tile in tiles]
    assert expansion(2, 2, 2) == f"{''.join(tiles)}\n{''.join(below)}\n\n{one}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not one of PNG, JPEG, WEBP, GIF, TIFF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not one of"),
        (encoded(noise(9, 9), "BMP"), "is not one of"),
        (encoded(noise(40, 30))[:-900], "cannot be decoded"),
        (encoded(noise(2, 500)), "a ratio of more than 200"),
        (encoded(Image.new("1", (300, 300))), "more than 80000 pixels"),
        (encoded(Image.new("1", (800, 800))), "more than 80000 pixels"),
    ],
)
def test_a_bad_picture_is_refused_in_words(content: bytes, message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        decoded(content, max_pixels=80_000)


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = encoded(Image.new("1", (12_000, 12_000)))
    assert len(bomb) < 200_000
    with pytest.raises(DecodingError, match="pixels"):
        decoded(bomb)


def test_a_picture_that_breaks_the_time_costs_the_process_and_the_next_one_works() -> None:
    async def run(process: DecodingProcess) -> int:
        with pytest.raises(BrokenProcessError):
            await process.decode(encoded(Image.new("RGB", (5000, 5000))), "auto")
        process.limits = DecodingLimits()
        await process.decode(encoded(noise(9, 9)), "auto")
        return process.num_started

    assert with_process(run, {"size": {"longest_edge": 4096}}, seconds=-1.0) == 2


def test_a_process_that_is_killed_from_outside_costs_no_picture() -> None:
    async def run(process: DecodingProcess) -> int:
        first = await process.decode(encoded(noise(9, 9)), "auto")
        assert process._process is not None
        process._process.send_signal(signal.SIGKILL)
        assert await process.decode(encoded(noise(9, 9)), "auto") == first
        return process.num_started

    assert with_process(run) == 2


async def broken_by_bad(code: str, process: DecodingProcess) -> int:
    """How often a process with this code is started for a picture that is refused."""
    process._command = (sys.executable, "-P", "-c", code)
    with pytest.raises(BrokenProcessError):
        await process.decode(b"bad", "auto")
    return process.num_started


def test_a_picture_with_which_the_process_ends_each_time_is_refused() -> None:
    code = (
        "import os, millrace_router.images.decoding as d\n"
        "d._prepare = lambda *_: os.abort(); d.main()"
    )

    assert with_process(partial(broken_by_bad, code)) == MOST_TRIES


def test_a_picture_that_takes_all_the_time_of_the_process_is_tried_once() -> None:
    code = (
        "import millrace_router.images.decoding as d\n"
        "def forever(*_):\n"
        "    while True: pass\n"
        "d._prepare = forever; d.main()"
    )

    assert with_process(partial(broken_by_bad, code), seconds=0.5) == 1


def test_a_process_that_does_not_start_is_not_a_fault_of_the_picture() -> None:
    async def run(process: DecodingProcess) -> None:
        process._command = (sys.executable, "-c", "")
        with pytest.raises(NotStartedError):
            await process.decode(encoded(noise(9, 9)), "auto")

    with_process(run)


def test_texts_and_scans_that_take_long_to_unpack_are_refused() -> None:
    texts = PngImagePlugin.PngInfo()
    for number in range(20):
        texts.add_text(f"text {number}", "x" * (1 << 20), zip=True)
    bomb, scans = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (9, 9)).save(bomb, "PNG", pnginfo=texts)
    Image.new("RGB", (2000, 1500)).save(scans, "JPEG", progressive=True)
    content = scans.getvalue()
    start = content.rindex(b"\xff\xda")
    repeated = content[:start] + content[start:-2] * 200 + content[-2:]

    async def run(process: DecodingProcess) -> None:
        await process.decode(content, "auto")
        with pytest.raises(DecodingError, match="cannot be decoded"):
            await process.decode(bomb.getvalue(), "auto")
        with pytest.raises(DecodingError, match="scans of 2000 x 1500 pixels"):
            await process.decode(repeated, "auto")

    with_process(run)


def test_the_process_lets_the_shards_of_this_host_go_first() -> None:
    async def run(process: DecodingProcess) -> int:
        await process.decode(encoded(noise(9, 9)), "auto")
        assert process._process is not None
        return int(psutil.Process(process._process.pid).nice())

    assert with_process(run) == min(19, os.nice(0) + NICENESS)


def test_the_process_can_open_nothing() -> None:
    code = (
        "import os, sys, millrace_router.images.decoding as d;"
        "prepare = d._prepare\n"
        "def probe(content, *rest):\n"
        "    try: eval(content)\n"
        "    except OSError: raise d._Refused('cannot be opened')\n"
        "    return prepare(content, *rest)\n"
        "d._prepare = probe; d.main()"
    )

    async def run(process: DecodingProcess) -> None:
        process._command = (sys.executable, "-P", "-c", code)
        for attempt in (
            b"open('/etc/hostname')",
            b"__import__('socket').socket()",
            b"os.pipe()",
            b"os.write(os.dup(1), b'')",
        ):
            with pytest.raises(DecodingError, match="cannot be opened"):
                await process.decode(attempt, "auto")

    with_process(run)


def test_mutated_pictures_are_answered_one_way_or_the_other() -> None:
    taken = asyncio.run(fuzz(500, seed=43)).taken
    assert taken["tiles"] > 20
    assert taken["cannot"] > 20
    assert taken.total() == 500


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"resample": 3}, "`resample`"),
        ({"do_resize": False}, "`do_resize`"),
        ({"size": {"height": 9}}, "`size`"),
        ({"max_image_size": {"longest_edge": 0}}, "`max_image_size`"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        Geometry.of("idefics3", processor)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"resample": 3}, "`resample` has to be 2"),
        (SCAN | {"pan_and_scan_max_num_crops": 1}, "whole number from 2 to 63"),
        (SCAN | {"pan_and_scan_min_crop_size": 3}, "pixels from 4 on"),
        (SCAN | {"pan_and_scan_min_ratio_to_activate": "1.2"}, "a number from 1 on"),
        ({"size": {"height": 9, "width": 8}}, "square"),
        ({"size": {"longest_edge": 8}}, "`size`"),
    ],
)
def test_settings_of_a_square_that_would_be_ignored_are_refused(
    processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        geometry_of("gemma3", processor)


@pytest.mark.parametrize("size", [*SIZES[:-2], (9, 640), (160, 96), (300, 40)], ids=str)
@pytest.mark.parametrize("cell", [16, 28])
def test_pixtral_keeps_the_ratio_and_rounds_up_to_features(
    size: tuple[int, int], cell: int
) -> None:
    image, processor = noise(*size), {"size": {"longest_edge": 96}}
    made = PixtralImageProcessorPil(
        **processor,
        patch_size={"height": cell, "width": cell},
        do_rescale=False,
        do_normalize=False,
    )
    expected = np.asarray(made.preprocess(image, return_tensors="np")["pixel_values"])[0]
    tiles = decoded(encoded(image), {**processor, "cell": cell}, family="mistral3")
    assert (3, *tiles.tile) == expected.shape
    assert tiles.pixels == expected.astype(np.uint8).tobytes()
    assert (tiles.rows, tiles.columns) == tuple(side // cell for side in tiles.tile)
    geometry = geometry_of("mistral3", {**processor, "cell": cell})
    assert tiles.rows * tiles.columns <= geometry.most_rows
    assert len(tiles.pixels) <= geometry.most_bytes


def test_pixtral_ends_every_row_of_features() -> None:
    geometry = geometry_of("pixtral", {"cell": 16})
    text = "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"
    assert geometry.expansion(2, 2, 4) == text
    small = geometry.layout(3000, 1500, "low")
    assert (small.rows, small.columns) == (16, 8)
    assert geometry.layout(3000, 1500).rows == 64


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"resample": 1}, "BICUBIC"),
        ({"size": {"longest_edge": 0}}, "sides"),
        ({"size": {"height": 9}}, "sides"),
        ({"do_center_crop": True}, "do_center_crop"),
    ],
)
def test_settings_of_pixtral_that_would_be_ignored_are_refused(
    processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        geometry_of("pixtral", {"cell": 16, **processor})


INTERN = {"size": {"height": 32, "width": 32}, "max_patches": 6}


@pytest.mark.parametrize("size", [*SIZES, (100, 100), (64, 64), (130, 70)], ids=str)
def test_internvl_cuts_the_grid_of_the_nearest_ratio(size: tuple[int, int]) -> None:
    image = noise(*size)
    made = GotOcr2ImageProcessorPil(**INTERN, do_rescale=False, do_normalize=False)
    values = made.preprocess(image, crop_to_patches=True, return_tensors="np")
    expected = np.asarray(values["pixel_values"])
    tiles = decoded(encoded(image), INTERN, family="internvl")
    assert tiles.num_tiles == len(expected)
    assert tiles.pixels == expected.astype(np.uint8).tobytes()
    text = geometry_of("internvl", INTERN).expansion(tiles.rows, tiles.columns, 2)
    assert text == f"<img>{'<IMG_CONTEXT>' * (2 * tiles.num_tiles)}</img>"
    assert decoded(encoded(image), INTERN, "low", family="internvl").num_tiles == 1


def test_internvl_has_as_many_tiles_as_the_processor_for_every_size() -> None:
    made, geometry = GotOcr2ImageProcessorPil(**INTERN), geometry_of("internvl", INTERN)
    for height in range(8, 200, 7):
        for width in range(8, 200, 11):
            count = made.get_number_of_image_patches(height, width, {"crop_to_patches": True})
            assert geometry.layout(height, width).num_tiles == count <= geometry.most_tiles
