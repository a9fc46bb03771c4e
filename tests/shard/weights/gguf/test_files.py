"""Damaged and unsupported GGUF files are refused by one error, or loaded; nothing else happens."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as BlockType

from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.weights import checkpoint_files
from millrace_shard.weights.download import HubAccess
from millrace_shard.weights.gguf import header
from millrace_shard.weights.gguf.block_formats import FORMATS, OTHER_NAMES, find_format
from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.known_folders import Beside, known_folder, remember_folder
from millrace_shard.weights.hub import HubSettings, resolve
from millrace_testing.models.gguf_files import (
    BLOCK_TYPES,
    HALVES,
    PLAIN,
    TinyGguf,
    set_halves,
)
from millrace_testing.models.models import read_model
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


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "phi3", "qwen2_moe"])
def test_mutated_headers_are_refused_or_loaded(family: str, tmp_path: Path) -> None:
    whole = TinyGguf(family, "Q4_0").write(tmp_path / "whole.gguf").read_bytes()
    count = NUM_MUTATIONS if family == "llama" else NUM_MUTATIONS // 6
    messages = list[str]()
    for seed in range(count):
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
    assert len(messages) > count // 2
    assert not any("\n" in message for message in messages)


def _read(path: Path, *, with_lists: bool) -> GgufHeader | None:
    try:
        return GgufHeader.read(path, with_lists=with_lists)
    except ModelError:
        return None


def test_headers_are_the_same_without_lists_of_tokens(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    header, quick = _read(path, with_lists=True), _read(path, with_lists=False)
    assert header is not None
    assert quick is not None
    numbers = {key: value for key, value in header.metadata.items() if not isinstance(value, list)}
    assert len(numbers) < len(header.metadata)
    assert repr(quick.metadata) == repr(numbers)
    assert replace(quick, metadata={}) == replace(header, metadata={})
    for size in range(0, header.num_bytes[0], 7):
        path.write_bytes(whole[:size])
        assert _read(path, with_lists=False) is None, size


def test_a_folder_with_one_gguf_file_is_that_model(whole: bytes, tmp_path: Path) -> None:
    access = HubAccess(endpoint="http://127.0.0.1:9", token=None, cache=tmp_path / "hub")
    settings = HubSettings(access=access, offline=True, side_root=tmp_path / "side")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m.Q4_0.gguf").write_bytes(whole)
    (folder / "imatrix-m.gguf").write_bytes(b"statistics")
    (folder / "config.json").write_text("{}")
    found = resolve(str(folder), revision=None, settings=settings)
    assert (found / "model.gguf").resolve() == folder / "m.Q4_0.gguf"
    elsewhere = replace(settings, weights_override=folder)
    assert resolve("org/model", revision=None, settings=elsewhere) == found
    (folder / "m.Q8_0.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"it has m.Q4_0.gguf, m.Q8_0.gguf\)"):
        resolve(str(folder), revision=None, settings=settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GGUX" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:VERSION] + struct.pack("<I", 1) + data[VERSION + 4 :], "version 1"),
        (lambda data: data[:VERSION] + struct.pack(">I", 3) + data[VERSION + 4 :], "big-endian"),
        (lambda data: data[:1000], "more than it can hold|is cut short"),
        (
            lambda data: data.replace(LLAMA, LLAMA[:-5] + b"mamba", 1),
            "has the architecture 'mamba'; these are supported: llama, qwen2, ",
        ),
        (lambda data: data[:-1000], "is cut short: tensor"),
    ],
    ids=["empty", "magic", "version", "big-endian", "header cut", "architecture", "data cut"],
)
def test_invalid_gguf_files_are_refused(
    change: Any, message: str, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(change(whole))
    with pytest.raises(ModelError, match=message):
        prepare_gguf(path, tmp_path / "cache", tokenizer=None)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_used_count"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "--tokenizer-name"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.block_count": 3}, "blk.2"),
        ({"llama.block_count": 1 << 20}, "announces 1048576 layers"),
        ({"llama.block_count": 1 << 30}, "announces 1073741824 layers"),
    ],
)
def test_gguf_models_that_are_not_supported_are_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = TinyGguf("llama", metadata=metadata).write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        prepare_gguf(path, tmp_path / "cache", tokenizer=None)


RESOLVED = """
import sys
from millrace_shard.variables import Variables
from millrace_shard.weights.hub import HubSettings, resolve
print(resolve(sys.argv[1], revision=None, settings=HubSettings.of(Variables())), "torch" in sys.modules)
"""


def test_a_known_file_is_resolved_without_torch(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)

    def resolved() -> list[str]:
        home = os.environ | {"HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", RESOLVED, str(path)]
        return subprocess.check_output(command, env=home, text=True).split()

    prepared = prepare_gguf(path, tmp_path / "home" / "millrace" / "gguf", tokenizer=None)
    remember_folder(prepared, path, prepared.parent, Beside())
    # A file that has just been written may still change: nothing is remembered of it.
    assert known_folder(path, prepared.parent, Beside()) is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_files, "RACY_NS", -(10**12))
        remember_folder(prepared, path, prepared.parent, Beside())
    assert resolved() == [str(prepared), "False"]
    path.write_bytes(TinyGguf("llama", "Q8_0").write(tmp_path / "other.gguf").read_bytes())
    assert resolved()[0] != str(prepared)


@pytest.mark.parametrize("kind", [*PLAIN, *HALVES])
def test_weights_that_are_not_finite_are_named(kind: str, tmp_path: Path) -> None:
    made = TinyGguf("llama", kind, num_hidden_layers=1)
    data = made.tensors["blk.0.ffn_down.weight"][0]
    whole = data.copy()
    for place in HALVES.get(kind, (0,)):
        if kind in HALVES:
            blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[BlockType[kind]][1])
            set_halves(kind, blocks, place, np.full(len(blocks), np.nan, np.float16))
        else:
            nan = {"F32": struct.pack("<f", np.nan), "BF16": b"\xc0\x7f"}.get(kind, b"\x00\x7e")
            data[..., : len(nan)] = np.frombuffer(nan, np.uint8)
        folder = prepare_gguf(made.write(tmp_path / f"{place}.gguf"), tmp_path, tokenizer=None)
        named = rf"^tensor blk.0.ffn_down.weight in {place}.gguf has values that are not finite"
        with pytest.raises(WeightsError, match=named):
            read_model(folder)
        data[:] = whole


def test_values_past_the_largest_float_are_named(tmp_path: Path) -> None:
    made = TinyGguf("llama", "MXFP4", num_hidden_layers=1)
    made.tensors["blk.0.ffn_down.weight"][0][..., 0] = 255
    folder = prepare_gguf(made.write(tmp_path / "m.gguf"), tmp_path, tokenizer=None)
    with pytest.raises(WeightsError, match=r"^tensor blk.0.ffn_down.weight in m.gguf has values"):
        read_model(folder)


def test_a_block_type_that_is_not_supported_is_refused(whole: bytes, tmp_path: Path) -> None:
    name = b"blk.0.ffn_down.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[at : at + 4] == struct.pack("<I", 2)
    for number, text in ((15, "Q8_K"), (99, "99")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
        message = f"ffn_down.weight has the block type {text}; these are supported: F32, .*NVFP4"
        with pytest.raises(UnsupportedModel, match=message):
            prepare_gguf(path, tmp_path / "cache", tokenizer=None)


def test_a_file_that_is_cut_short_after_it_was_prepared_is_named(
    whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    folder = prepare_gguf(path, tmp_path / "cache", tokenizer=None)
    path.write_bytes(whole[:-1000])
    with pytest.raises(WeightsError, match=r"^model\.gguf is cut short: tensor"):
        read_model(folder)
    path.write_bytes(whole)
    files = GgufFiles(folder)
    path.write_bytes(whole[:-100_000])
    with pytest.raises(WeightsError, match=r"^m\.gguf was cut short while tensor output.weight"):
        files.read("lm_head.weight", dim=0, span=(0, 288))
    files.close()


def test_a_file_that_is_opened_again_is_not_parsed_again(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    folder = prepare_gguf(path, tmp_path / "cache", tokenizer=None)
    parsed = []

    def parse(path: Path, data: Any, **options: Any) -> GgufHeader:
        parsed.append(path)
        return parse_header(path, data, **options)

    parse_header = header._parse
    monkeypatch.setattr(header, "_parse", parse)
    for _ in range(3):
        GgufFiles(folder).close()
    assert len(parsed) == 1
    os.utime(path, ns=(1, 1))
    GgufFiles(folder).close()
    assert len(parsed) == 2


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
        set_halves(kind, blocks, place, scales)
    return blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_ggmls_bit_for_bit(kind: str) -> None:
    blocks = blocks_of(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, BlockType[kind]).reshape(-1)
    result = FORMATS[BlockType[kind]].decode(torch.from_numpy(blocks)).float().numpy().reshape(-1)
    ordinary = ~np.isnan(expected)
    assert ordinary.mean() > 0.9
    bits = [values.view(np.uint32)[ordinary] for values in (result, expected)]
    assert np.array_equal(*bits)
    assert np.isnan(result[~ordinary]).all()


@pytest.mark.parametrize(
    "kind", [name for name in BLOCK_TYPES if name.endswith("_K") or name[:2] == "IQ"]
)
def test_scales_of_k_quants_count_units(kind: str) -> None:
    blocks = blocks_of(kind)[1::2]
    split = FORMATS[BlockType[kind]].split
    assert split is not None
    parts = split(torch.from_numpy(blocks.copy()))
    if kind == "IQ4_NL":
        assert parts.units is None
        return
    assert parts.units is not None
    for numbers, units in (
        (parts.scales, parts.units.scales),
        (parts.offsets, parts.units.offsets),
    ):
        if numbers is not None:
            counts = (numbers / units).round()
            assert torch.equal(counts * units, numbers)
            assert float(counts.abs().max()) <= 128


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


@pytest.mark.parametrize(("number", "name"), [(9, "Q8_1"), (5, "5"), (2**32 - 1, "4294967295")])
def test_other_formats_are_named(number: int, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"blk\.0 has the block type {name}; .* NVFP4$"):
        find_format(number, "blk.0")
