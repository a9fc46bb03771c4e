"""A checkpoint of random weights, made on the device and streamed to one file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from bench.gpu.children import SHARED_MEMORY, scratch_prefix
from bench.gpu.engine.random_weights import fill
from bench.harness.checkpoints import Shape, describe, tensor_shapes

BYTES = 2
"""Bytes of a bfloat16."""
HEADROOM = 1.2
WEIGHTS_FILE = "model.safetensors"


class NoRoomError(Exception):
    """No folder has room for the checkpoint."""


def num_bytes(shape: Shape) -> int:
    """Bytes of all tensors."""
    return BYTES * sum(torch.Size(sizes).numel() for sizes in tensor_shapes(shape).values())


@contextmanager
def temporary_checkpoint(shape: Shape, device: torch.device) -> Iterator[Path]:
    """A folder with the checkpoint for the length of the block, in memory if it fits; raises NoRoomError."""
    places = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    with ExitStack() as stack:
        yield _written(shape, device, places, stack)


def _written(shape: Shape, device: torch.device, places: Sequence[Path], stack: ExitStack) -> Path:
    """The folder in the first place where writing succeeds, because reported free space may be wrong."""
    wanted = num_bytes(shape)
    for place in places:
        if not place.is_dir() or shutil.disk_usage(place).free < HEADROOM * wanted:
            continue
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getpid()), dir=place)
        )
        try:
            write_weights(Path(folder) / WEIGHTS_FILE, shape, device)
        except OSError as error:
            print(f"{place}: {error}", flush=True)
            stack.close()
            continue
        describe(Path(folder), shape)
        return Path(folder)
    raise NoRoomError(f"no room for a checkpoint of {wanted / 1e9:.1f} GB")


def write_weights(path: Path, shape: Shape, device: torch.device) -> None:
    """Write the safetensors file: length of the header, header, tensors one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    shapes = tensor_shapes(shape)
    for name, sizes in shapes.items():
        end = offset + BYTES * torch.Size(sizes).numel()
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, sizes in shapes.items():
            tensor = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            fill(tensor, name)
            left = tensor.view(torch.uint8).cpu().numpy().data.cast("B")
            while left:
                left = left[file.write(left) :]
