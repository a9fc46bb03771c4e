"""A stepper of a tiny model that reads images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from millrace_shard.batch.sequence import ImageGrid, ImageSpan
from millrace_shard.batch.sequence_images import FeatureRows
from millrace_shard.batch.step import Encode, Forward, StepResult
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.vision.encoder import ImageEncoder, ImageSize, Vision, load_vision
from millrace_shard.vision.grid_reduction import GridReduction
from millrace_testing.engines.steps import Stepper, ints
from millrace_testing.models.models import read_model
from millrace_testing.models.vision_models import (
    IMAGE_TOKEN,
    Pixels,
    Prompt,
    picture,
    prompt_with,
    spec_of,
)

CPU = torch.device("cpu")
ROWS = 9
"""Features of a tile."""


def read_encoder(folder: Path, kernels: Kernels, dtype: torch.dtype = torch.float32) -> Vision:
    with torch.inference_mode():
        vision = load_vision(spec_of(folder), folder, dtype=dtype, kernels=kernels, device=CPU)
    assert vision is not None
    return vision


class ImageStepper(Stepper):
    """A stepper of a model that reads images, with rows for four tiles."""

    def __init__(
        self,
        folder: Path,
        kernels: Kernels,
        dtype: torch.dtype = torch.float32,
        num_rows: int = 60,
        group: ProcessGroup | None = None,
        graphs: GraphSettings | None = None,
    ) -> None:
        with torch.inference_mode():
            model = read_model(folder, kernels, dtype=dtype, group=group)
        vision = read_encoder(folder, kernels, dtype)
        self.spec = vision.spec
        values = torch.zeros(num_rows, self.spec.row_size, dtype=dtype)
        self.features = FeatureRows(
            values, IMAGE_TOKEN, self.spec.mask, has_axes=self.spec.has_axes
        )
        super().__init__(model, kernels, dtype=dtype, images=self.features, graphs=graphs)
        self.runner.images = ImageEncoder(vision, self.features)

    def put(
        self,
        pixels: Pixels,
        *,
        slot: int,
        first_row: int = 0,
        reduction: GridReduction | None = None,
    ) -> None:
        tiles, _, height, width = pixels.shape
        size = ImageSize(
            slot=slot,
            first_row=first_row,
            digest=bytes([slot]) * 32,
            num_tiles=tiles,
            height=height,
            width=width,
            reduction=reduction,
        )
        assert self.runner.images is not None
        self.runner.images.put(size, pixels)

    def encode(
        self, slots: Iterable[int], units: Iterable[int], layers: Iterable[int] = ()
    ) -> StepResult:
        step = Encode(image_slots=ints(slots), units=ints(units), layers=ints(layers))
        with torch.inference_mode():
            return self.runner.encode(step).finish()

    def put_all(self, pictures: Iterable[Pixels]) -> None:
        """Encode pictures, whose rows follow each other from 0 on."""
        row = 0
        for slot, pixels in enumerate(pictures):
            self.put(pixels, slot=slot, first_row=row)
            self.encode([slot] * len(pixels), range(len(pixels)))
            row += len(pixels) * self.spec.rows_of(*pixels.shape[2:])

    def admission_of(self, slot: int, prompt: Prompt, *, first_row: int = 0) -> Forward:
        step = self.admission(slot, prompt.ids, top_n_tokens=5)
        (sequence,) = step.change.admitted
        images = tuple(ImageSpan(at, count, row + first_row) for at, count, row in prompt.spans)
        grids = tuple(ImageGrid(*grid) for grid in prompt.grids)
        with_images = replace(sequence, images=images, image_grids=grids)
        return replace(step, change=replace(step.change, admitted=(with_images,)))

    def chunks(self, step: Forward, sizes: Iterable[int]) -> StepResult:
        """Run an admission in chunks; the last result."""
        slots, result, change = step.chunk_slots, StepResult(), step.change
        for size in sizes:
            result = self.run(Forward(change=change, chunk_slots=slots, chunk_tokens=ints([size])))
            change = Forward().change
        return result


def answer_on_a_rank(group: ProcessGroup, folder: Path) -> tuple[list[int], list[float], int]:
    """Id and log probability after a prompt with an image, and the checksum of its features."""
    stepper = ImageStepper(folder, PlainKernels(deterministic=True), group=group)
    prompt = prompt_with([picture(2, seed=1)], ROWS)
    stepper.put(prompt.pictures[0], slot=0)
    encoded = stepper.encode([0, 0], [0, 1])
    result = stepper.run(stepper.admission_of(0, prompt))
    return result.ids.tolist(), result.logprobs.tolist(), encoded.checksum
