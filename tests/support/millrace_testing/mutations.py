"""Random changes of files: of bytes, of JSON texts, and of the headers of safetensors and GGUF files."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

TEXTS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\u0000", b"\\ud800", b"null", b"true", b"NaN")
NUMBERS = (b"-1", b"0", b"1e9", b"1e999", b"18446744073709551616", b"9223372036854775807", b"0.5")
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of the numbers of safetensors."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, 2**64, 10**30, 0.5, "", "x", "\x00", "../x", [], {}),
    *([1], [0, 8], {"a": 1}, "F32", "BF16", "F64", float("nan"), "pissa", "a\r\nb", "(", ".*"),
)


def mutated_bytes(data: bytes, random_: random.Random) -> bytes:
    """Change, insert or remove a few bytes."""
    result = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(result) + 1)
        match random_.randrange(5):
            case 0:
                result[at : at + 1] = bytes([random_.randrange(256)])
            case 1:
                result[at:at] = random_.choice(TEXTS + NUMBERS)
            case 2:
                del result[at : at + random_.choice((1, 1, 8, 64))]
            case 3:
                del result[at:]
            case _:
                result[at:at] = result[at : at + random_.choice((1, 8, 64))]
    return bytes(result)


def mutated_json(text: bytes, random_: random.Random) -> bytes:
    """Change values and keys of a JSON text, and now and then its bytes."""
    value = json.loads(text)
    for _ in range(random_.randint(1, 3)):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = random_.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and random_.random() < 0.7:
                place = inner
                continue
            _change(place, key, random_)
            break
    result = json.dumps(value).encode()
    return mutated_bytes(result, random_) if random_.random() < 0.1 else result


def _change(place: Any, key: Any, random_: random.Random) -> None:
    # A value in two places of one text could be put into itself.
    old = deepcopy(place[key])
    match random_.randrange(4):
        case 0 if type(old) is int:
            place[key] = old + random_.choice((-8, -1, 1, 8, 2**32, 2**64))
        case 1 if isinstance(place, dict):
            place[random_.choice([*place, "new", "a\x1b", "r", "__metadata__"])] = old
        case 2 if isinstance(place, dict):
            del place[key]
        case _:
            place[key] = deepcopy(random_.choice(VALUES))


def mutated_file(data: bytes, random_: random.Random) -> bytes:
    """Mutate a safetensors file: its header, its length, or its end."""
    (length,) = struct.unpack_from("<Q", data)
    header, body = data[8 : 8 + length], data[8 + length :]
    match random_.randrange(6):
        case 0:
            header = mutated_bytes(header, random_)
        case 1:
            body = body[: random_.randrange(len(body) + 1)] + bytes(random_.choice((0, 1, 4)))
        case 2:
            length = random_.choice((0, 1, length + 1, length - 1, 2**23 + 1, 2**63, 2**64 - 1))
            return struct.pack("<Q", length) + header + body
        case _:
            header = mutated_json(header, random_)
    return struct.pack("<Q", len(header)) + header + body


def mutated_tensor(data: bytes, random_: random.Random) -> bytes:
    """Change one tensor of a safetensors file, which stays valid: its dtype, shape, place, name or bytes."""
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    names = [name for name in header if name != "__metadata__"]
    name = random_.choice(names)
    info = header[name]
    start, end = info["data_offsets"]
    match random_.randrange(5):
        case 0:
            info["dtype"], info["shape"] = _other_type(info["dtype"], info["shape"], random_)
        case 1:
            shape = info["shape"]
            others = (shape[::-1], [math.prod(shape)], [1, *shape], [*shape, 1])
            info["shape"] = random_.choice(others)
        case 2:
            other = header[
                random_.choice([each for each in names if _size(header[each]) == _size(info)])
            ]
            for field in random_.choice((("data_offsets",), ("data_offsets", "shape", "dtype"))):
                info[field], other[field] = other[field], info[field]
        case 3:
            kind = random_.choice(names).rpartition(".")[2]
            changed = random_.choice(
                (f"{name.rpartition('.')[0]}.{kind}", name + "x", "model." + name)
            )
            if changed not in header:
                header[changed] = header.pop(name)
        case _:
            size = random_.choice((1, 2, 4, end - start))
            at = random_.randrange(start, max(start + 1, end - size + 1))
            body[at : at + size] = random_.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _size(info: Mapping[str, Any]) -> int:
    start, end = info["data_offsets"]
    return int(end - start)


def _other_type(dtype: str, shape: list[int], random_: random.Random) -> tuple[str, list[int]]:
    """Another dtype for the same bytes, and a shape with the last axis made longer or shorter, if that is possible."""
    other = random_.choice(list(WIDTHS))
    size = (shape[-1] if shape else 1) * WIDTHS[dtype]
    if size % WIDTHS[other]:
        return dtype, shape
    last = size // WIDTHS[other]
    if not shape:
        return other, [] if last == 1 else [last]
    return other, [*shape[:-1], last]


def mutated_gguf(data: bytes, random_: random.Random) -> bytes:
    """Mutate the header of a GGUF file one to four times, or cut the file short."""
    changed, end = bytearray(data), gguf_header_end(data)
    for _ in range(random_.randint(1, 4)):
        place = random_.randrange(max(1, min(end, len(changed) - 16)))
        kind = random_.randrange(5) if len(changed) > end else 0
        if kind == 0:
            changed[place] ^= 1 << random_.randrange(8)
        elif kind == 1:
            changed[place] = random_.choice((0, 0xFF, 0x7F, 0x80))
        elif kind == 2:
            number = random_.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            changed[place : place + 8] = struct.pack("<Q", number)
        elif kind == 3:
            del changed[place : place + random_.randint(1, 16)]
        else:
            del changed[random_.randrange(64, len(changed)) :]
    return bytes(changed)


def gguf_header_end(data: bytes) -> int:
    """A place behind the last tensor info, whose name is among the last in the header."""
    return data.rindex(b"output_norm.weight") + 100
