"""Values of blocks, against ggml's own package in Python."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as BlockType

from millrace_shard.errors import UnsupportedModel
from millrace_shard.weights.gguf.block_formats import FORMATS, OTHER_NAMES, find_format
from millrace_testing.models.gguf_files import BLOCK_TYPES, HALVES

EXTREMES = np.array([0, 1, 0x03FF, 0x0400, 0x7BFF, 0x8000, 0x8001, 0xFBFF, 0x3C00], np.uint16)
"""float16 by their bits: zeros, subnormal numbers, the largest ones of both signs, and one."""


def blocks_of(kind: str) -> np.ndarray:
    """Random blocks, with all bits in the codes; half of them have extreme scales."""
    generator = np.random.default_rng(len(kind))
    _, num_bytes = gguf.GGML_QUANT_SIZES[BlockType[kind]]
    blocks = generator.integers(0, 256, (4096, num_bytes), dtype=np.uint8)
    for place in HALVES.get(kind, ()):
        scales = generator.standard_normal(len(blocks)).astype(np.float16)
        scales[::2] = generator.choice(EXTREMES, len(blocks) // 2).view(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_ggmls_bit_for_bit(kind: str) -> None:
    blocks = blocks_of(kind)
    expected = gguf.quants.dequantize(blocks, BlockType[kind]).reshape(-1)
    found = FORMATS[BlockType[kind]].decode(torch.from_numpy(blocks)).float().numpy().reshape(-1)
    ordinary = ~np.isnan(expected)
    assert ordinary.mean() > 0.9
    bits = [values.view(np.uint32)[ordinary] for values in (found, expected)]
    assert np.array_equal(*bits)
    assert np.isnan(found[~ordinary]).all()


def test_sizes_and_names_are_ggmls() -> None:
    assert {form.name for form in FORMATS.values()} == set(BLOCK_TYPES)
    for number, form in FORMATS.items():
        kind = BlockType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (
            form.name,
            (form.elements, form.num_bytes),
        )
    assert all(BlockType(number).name == name for number, name in OTHER_NAMES.items())
    assert {kind.value for kind in BlockType} >= FORMATS.keys() | OTHER_NAMES.keys()


@pytest.mark.parametrize(("number", "name"), [(11, "Q3_K"), (5, "5"), (2**32 - 1, "4294967295")])
def test_other_formats_are_named(number: int, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"blk\.0 has the block type {name}; .* Q6_K$"):
        find_format(number, "blk.0")
