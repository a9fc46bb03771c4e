"""Headers of safetensors files against the format's own library, and each way in which they can be wrong."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.tensors import parse_safetensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def file_of(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(begin: int = 0, end: int = 8, **fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]} | fields


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    )
)
def test_files_of_the_library_are_read(tensors: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    made = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    data = save(made, metadata={"a": "b"})
    file = parse_safetensors(data)
    theirs = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    assert file.tensors.keys() == theirs.keys()
    assert file.metadata == {"a": "b"}
    for name, tensor in file.tensors.items():
        assert tensor.dtype == theirs[name]["dtype"]
        assert list(tensor.shape) == theirs[name]["shape"]
        assert bytes(tensor.data) == bytes(theirs[name]["data"])


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "seven bytes": (b"\0" * 7, "cut short"),
    "header cut short": (file_of({}, length=100), "cut short"),
    "header too long": (file_of({}, length=(8 << 20) + 1), "has 8388609 bytes"),
    "header of 2^64": (file_of({}, length=(1 << 64) - 1), "bytes"),
    "not JSON": (file_of(b"{x}"), "is not JSON"),
    "a list": (file_of(b"[]"), "brace"),
    "no brace": (file_of(b" {}"), "brace"),
    "nothing": (file_of(b""), "brace"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "is not JSON"),
    "twice": (
        file_of(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 8),
        "key 'a' twice",
    ),
    "field twice": (
        file_of(
            b'{"a": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8
        ),
        "key 'dtype' twice",
    ),
    "deep": (file_of(b"{" + b'"a":{' * 100_000 + b"}" * 100_001), "nested"),
    "gap": (
        file_of({"a": entry(), "b": entry(9, 17)}, b"\0" * 17),
        "invalid offset for tensor `b`",
    ),
    "overlap": (
        file_of({"a": entry(), "b": entry(4, 12)}, b"\0" * 12),
        "invalid offset for tensor `b`",
    ),
    "the same": (file_of({"a": entry(), "b": entry()}, b"\0" * 8), "invalid offset for tensor"),
    "a name of control characters, out of order": (
        file_of({"a\r\n\x1b" + "b" * 1000: entry(4, 12)}, b"\0" * 12),
        "invalid offset",
    ),
    "late": (file_of({"a": entry(4, 12)}, b"\0" * 12), "invalid offset for tensor `a`"),
    "cut short": (file_of({"a": entry()}, b"\0" * 7), "file not fully covered"),
    "more": (file_of({"a": entry()}, b"\0" * 9), "file not fully covered"),
    "no tensors, but bytes": (file_of({}, b"\0"), "file not fully covered"),
    "shape": (file_of({"a": entry(shape=[3])}, b"\0" * 8), "invalid shape"),
    "overflow": (file_of({"a": entry(0, 0, shape=[1 << 62, 4])}), "overflow"),
    "wide offsets": (
        file_of({"a": entry(0, 1 << 66, shape=[1 << 64])}),
        "expected usize",
    ),
    "backwards": (file_of({"a": entry(8, 0)}, b"\0" * 8), "invalid offset for tensor `a`"),
    "three offsets": (
        file_of({"a": entry(data_offsets=[0, 4, 8])}, b"\0" * 8),
        "expected 2 elements",
    ),
    "negative": (file_of({"a": entry(data_offsets=[-8, 0])}), "expected usize"),
    "truth as a number": (file_of({"a": entry(0, 4, shape=[True])}, b"\0" * 4), "expected usize"),
    "a fraction": (file_of({"a": entry(shape=[2.0])}, b"\0" * 8), "expected usize"),
    "no list": (file_of({"a": entry(shape={})}, b"\0" * 8), "expected a sequence"),
    "dimensions": (file_of({"a": entry(shape=[2] + [1] * 8)}, b"\0" * 8), "'a' has 9 dimensions"),
    "no dtype": (
        file_of({"a": {"shape": [], "data_offsets": [0, 0]}}),
        "'a' must have only dtype, shape and data_offsets",
    ),
    "one more field": (file_of({"a": entry(x=1)}, b"\0" * 8), "'a' must have only dtype"),
    "no object": (file_of({"a": 3}), "'a' must have only dtype, shape and data_offsets"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "not an object of strings"),
    "metadata, a list": (file_of({"__metadata__": []}), "not an object of strings"),
    "control characters": (file_of({"a\r\n\x1b": 3}), r"'a\r\n\x1b'"),
    "half of a character": (file_of(b'{"a\\ud800": {}}'), r"at the key 'a\ud800'"),
    "half of a character in metadata": (
        file_of(b'{"__metadata__": {"a": "\\udc00"}}'),
        "half of a character at the key 'a'",
    ),
    "a long name": (file_of({"a" * 10_000: 3}), "aaa…'"),
} | {
    dtype: (file_of({"a": entry(dtype=dtype)}, b"\0" * 8), f"'a' has the dtype '{dtype}'")
    for dtype in ("F64", "F8_E4M3", "F8_E5M2", "I8", "I64", "U8", "BOOL", "f32", "", "F4")
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(data: bytes, message: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_safetensors(data)
    assert message in str(refusal.value)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500


def test_the_order_of_the_header_is_free() -> None:
    file = parse_safetensors(
        file_of({"b": entry(8, 16), "e": entry(8, 8, shape=[0]), "a": entry()}, b"12345678abcdefgh")
    )
    assert {name: bytes(one.data) for name, one in file.tensors.items()} == {
        "a": b"12345678",
        "b": b"abcdefgh",
        "e": b"",
    }
