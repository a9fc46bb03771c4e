"""Pictures of any size for Qwen's processors: sizes and pixels of transformers' class for PIL, to the bit."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from millrace_router.images.child import DecodingLimits, DecodingProcess, Tiles
from millrace_router.images.families import geometry_of
from millrace_router.images.fetch import ImageFetcher
from millrace_router.images.geometry import GeometryError
from millrace_router.images.prompts import ImagePrompts
from millrace_router.images.qwen_vl import QwenGeometry
from millrace_router.images.store import ImageStore
from millrace_router.request.images import ImageSource
from millrace_router.text.control_tokens import ControlTokens

SMALL = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}}
NEWER = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
OLDER = {"min_pixels": 3136, "max_pixels": 12_845_056}
SIZES = [(1, 1), (20, 20), (97, 53), (53, 97), (28, 28), (29, 57), (4, 640), (640, 4), (300, 500)]


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    content = random.Random(width * 10_000 + height).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), content)


def decoded(contents: list[bytes], geometry: QwenGeometry, detail: Any = "auto") -> list[Tiles]:
    async def run() -> list[Tiles]:
        process = DecodingProcess(geometry, DecodingLimits())
        try:
            return [await process.decode(content, detail) for content in contents]
        finally:
            await process.close()

    return asyncio.run(run())


def pixels_of(values: Any, rows: int, columns: int, patch: int) -> np.ndarray[Any, Any]:
    """The picture [3, height, width] whose patches [patches, 3 * 2 * patch * patch] a processor has made."""
    cells = np.asarray(values).reshape(rows, columns, 2, 2, 3, 2, patch, patch)[..., 0, :, :]
    whole = cells.transpose(4, 0, 2, 5, 1, 3, 6)
    return whole.reshape(3, rows * 2 * patch, columns * 2 * patch)


@pytest.mark.parametrize("settings", [SMALL, NEWER | {"size": SMALL["size"]}], ids=["14", "16"])
def test_a_picture_has_the_patches_of_transformers_to_the_bit(settings: dict[str, Any]) -> None:
    geometry = QwenGeometry.of("qwen2_vl", settings)
    images = [noise(*size) for size in SIZES]
    own = decoded([encoded(image) for image in images], geometry)
    processor = Qwen2VLImageProcessorPil(**settings, do_rescale=False, do_normalize=False)
    for image, tiles in zip(images, own, strict=True):
        theirs = processor.preprocess(image, return_tensors="np")
        _, rows, columns = (int(each) for each in theirs["image_grid_thw"][0])
        assert (tiles.rows, tiles.columns) == (rows // 2, columns // 2)
        expected = pixels_of(theirs["pixel_values"], rows // 2, columns // 2, processor.patch_size)
        assert (tiles.tile) == expected.shape[1:]
        assert tiles.pixels == expected.astype(np.uint8).tobytes()
        assert (tiles.is_grid, tiles.num_tiles) == (True, 1)


@pytest.mark.parametrize("settings", [SMALL, NEWER, OLDER, {}], ids=["small", "3", "2", "default"])
def test_sizes_follow_those_of_transformers(settings: dict[str, Any]) -> None:
    geometry = QwenGeometry.of("qwen2_5_vl", settings)
    processor = Qwen2VLImageProcessorPil(**settings)
    draw = random.Random(1)
    for _ in range(300):
        height, width = draw.choice((9, 99, 999)), draw.randint(20, 1800)
        layout = geometry.layout(height, width)
        expected = processor.get_number_of_image_patches(height, width, {})
        assert layout.rows * layout.columns * 4 == expected
        assert layout.rows * layout.columns <= geometry.most_rows
        low = geometry.layout(height, width, "low")
        assert low.rows * low.columns <= max(300, geometry.min_pixels // geometry.cell**2 + 60)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"resample": 1}, "`resample` has to be 3, which is BICUBIC"),
        ({"do_normalize": False}, "`do_normalize`"),
        ({"size": {"height": 9}}, "the least number of pixels has to be"),
        ({"size": 9}, "`size` has to have"),
        ({"patch_size": 0}, "patch_size has to be"),
        ({"max_pixels": 1 << 40}, "the largest number of pixels has to be"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        geometry_of("qwen2_vl", processor)


async def test_the_text_for_a_picture_is_that_of_the_processor() -> None:
    geometry = QwenGeometry.of("qwen2_vl", SMALL)
    store = ImageStore(
        DecodingProcess(geometry, DecodingLimits()),
        ImageFetcher((), max_bytes=99),
        rows_per_tile=0,
        cell=28,
        max_images=4,
        max_rows=100,
        max_memory=1 << 20,
    )
    control = ControlTokens(geometry.needed_tokens)
    prompts = ImagePrompts(store, control)
    content = base64.b64encode(encoded(noise(90, 60))).decode()
    try:
        images = await prompts.prepare([ImageSource(f"data:image/png;base64,{content}", "inputs")])
    finally:
        await prompts.close()
    (image,) = images
    assert (image.rows, image.columns, image.num_rows) == (2, 3, 6)
    assert image.tile_cost == 6 / 256
    pads = "<|image_pad|>" * 6
    turn = "<|vision_start|><|image_pad|><|vision_end|>Look"
    assert prompts.expanded(turn, images) == f"<|vision_start|>{pads}<|vision_end|>Look"
    text = f"{control.picture}Look"
    assert prompts.expanded(text, images) == f"<|vision_start|>{pads}<|vision_end|>Look"
    parts = [{"type": "image"}, {"type": "text", "text": "Look"}]
    assert prompts.joined(parts, images) == f"<|vision_start|>{pads}<|vision_end|>Look"
