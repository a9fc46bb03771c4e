"""Damaged and unsupported GGUF files are refused by one error, or loaded; nothing else happens."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as BlockType

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_shard.weights.gguf.block_formats import FORMATS, OTHER_NAMES, find_format
from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import BLOCK_TYPES, HALVES, TinyGguf
from millrace_testing.mutations import mutated_gguf

NUM_MUTATIONS = 300
MOST_BYTES = 64 << 20
"""Of memory that Python allocates for one header."""
LLAMA = struct.pack("<Q", 5) + b"llama"
VERSION = 4
"""The offset of the version."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return TinyGguf("llama", "Q4_0").write(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def test_mutated_headers_are_refused_or_loaded(whole: bytes, tmp_path: Path) -> None:
    messages = list[str]()
    for seed in range(NUM_MUTATIONS):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(mutated_gguf(whole, random.Random(seed)))
        tracemalloc.start()
        try:
            prepare_gguf(path, tmp_path / "cache", tokenizer=None)
        except ModelError as error:
            messages.append(str(error))
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert most < MOST_BYTES, seed
        path.unlink()
    assert len(messages) > NUM_MUTATIONS // 2
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GGUX" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:VERSION] + struct.pack("<I", 1) + data[VERSION + 4 :], "version 1"),
        (lambda data: data[:VERSION] + struct.pack(">I", 3) + data[VERSION + 4 :], "big-endian"),
        (lambda data: data[:1000], "more than it can hold|is cut short"),
        (
            lambda data: data.replace(LLAMA, LLAMA[:-5] + b"gemma", 1),
            "has the architecture 'gemma'",
        ),
        (lambda data: data[:-1000], "is cut short: tensor"),
    ],
    ids=["empty", "magic", "version", "big-endian", "header cut", "architecture", "data cut"],
)
def test_files_that_are_none(change: Any, message: str, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(change(whole))
    with pytest.raises(ModelError, match=message):
        prepare_gguf(path, tmp_path / "cache", tokenizer=None)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "--tokenizer-name"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.block_count": 3}, "blk.2"),
        ({"llama.block_count": 1 << 20}, "announces 1048576 layers"),
    ],
)
def test_models_that_are_not_supported(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = TinyGguf("llama", metadata=metadata).write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        prepare_gguf(path, tmp_path / "cache", tokenizer=None)


def test_a_part_of_a_split_file_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="part of a split file"):
        prepare_gguf(path, tmp_path / "cache", tokenizer=None)


def load(folder: Path) -> None:
    load_model(
        folder,
        dtype=torch.float32,
        kernels=PlainKernels(deterministic=True),
        group=ProcessGroup.single(),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_weights_that_are_not_finite_are_named(kind: str, tmp_path: Path) -> None:
    made = TinyGguf("llama", kind, num_hidden_layers=1)
    data = made.tensors["blk.0.ffn_down.weight"][0]
    nan = {"F32": struct.pack("<f", np.nan), "BF16": b"\xc0\x7f"}.get(
        kind, struct.pack("<e", np.nan)
    )
    size = len(nan)
    for place in HALVES.get(kind, (0,)):
        kept = data[..., place : place + size].copy()
        data[..., place : place + size] = np.frombuffer(nan, np.uint8)
        folder = prepare_gguf(made.write(tmp_path / f"{place}.gguf"), tmp_path, tokenizer=None)
        named = rf"^tensor blk.0.ffn_down.weight in {place}.gguf has values that are not finite"
        with pytest.raises(WeightsError, match=named):
            load(folder)
        data[..., place : place + size] = kept


def test_a_block_type_that_is_not_supported(whole: bytes, tmp_path: Path) -> None:
    name = b"blk.0.ffn_down.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[at : at + 4] == struct.pack("<I", 2)
    for number, text in ((10, "Q2_K"), (99, "99")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
        message = f"ffn_down.weight has the block type {text}; these are supported: F32, .*Q6_K"
        with pytest.raises(UnsupportedModel, match=message):
            prepare_gguf(path, tmp_path / "cache", tokenizer=None)


def test_a_file_that_is_cut_short_after_it_was_prepared(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    folder = prepare_gguf(path, tmp_path / "cache", tokenizer=None)
    path.write_bytes(whole[:-1000])
    with pytest.raises(WeightsError, match=r"^model\.gguf is cut short: tensor"):
        load(folder)
    path.write_bytes(whole)
    files = GgufFiles(folder)
    path.write_bytes(whole[:-100_000])
    with pytest.raises(WeightsError, match=r"^m\.gguf was cut short while tensor output.weight"):
        files.read("lm_head.weight", dim=0, span=(0, 288))
    files.close()


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
    result = FORMATS[BlockType[kind]].decode(torch.from_numpy(blocks)).float().numpy().reshape(-1)
    ordinary = ~np.isnan(expected)
    assert ordinary.mean() > 0.9
    bits = [values.view(np.uint32)[ordinary] for values in (result, expected)]
    assert np.array_equal(*bits)
    assert np.isnan(result[~ordinary]).all()


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
