"""Damaged and unsupported GGUF files are refused by one error, or loaded; nothing else happens."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from millrace_shard.errors import ModelError
from millrace_shard.model_loader.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import TinyGguf

NUM_MUTATIONS = 300
MOST_BYTES = 64 << 20
"""Of memory that Python allocates for one header."""
LLAMA = struct.pack("<Q", 5) + b"llama"
VERSION = 4
"""The offset of the version."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return TinyGguf("llama", "Q4_0").write(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def header_end(data: bytes) -> int:
    """A place behind the last tensor info, whose name is among the last in the header."""
    return data.rindex(b"output_norm.weight") + 100


def mutated(data: bytes, chooser: random.Random) -> bytes:
    """`data` with one to four changes in its header, or cut short."""
    changed, end = bytearray(data), header_end(data)
    for _ in range(chooser.randint(1, 4)):
        place = chooser.randrange(max(1, min(end, len(changed) - 16)))
        kind = chooser.randrange(5) if len(changed) > end else 0
        if kind == 0:
            changed[place] ^= 1 << chooser.randrange(8)
        elif kind == 1:
            changed[place] = chooser.choice((0, 0xFF, 0x7F, 0x80))
        elif kind == 2:
            number = chooser.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            changed[place : place + 8] = struct.pack("<Q", number)
        elif kind == 3:
            del changed[place : place + chooser.randint(1, 16)]
        else:
            del changed[chooser.randrange(64, len(changed)) :]
    return bytes(changed)


def test_mutated_headers_are_refused_or_loaded(whole: bytes, tmp_path: Path) -> None:
    messages = list[str]()
    for seed in range(NUM_MUTATIONS):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(mutated(whole, random.Random(seed)))
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
        (lambda data: data[:1000], "has no room|is cut short"),
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


def test_a_part_of_a_split_file(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="part of a split file"):
        prepare_gguf(path, tmp_path / "cache", tokenizer=None)
