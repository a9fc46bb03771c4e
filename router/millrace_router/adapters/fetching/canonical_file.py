"""The canonical file of an adapter, which shards read: equal adapters have equal files. Its SHA-256 is the version."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace_router.adapters.cache import ADAPTER_FILE, PARTIAL_PREFIX
from millrace_router.adapters.fetching.canonical import LoraModule
from millrace_router.adapters.fetching.errors import Unavailable
from millrace_router.adapters.fetching.tensors import (
    DTYPE_BYTES,
    METADATA,
    Tensor,
    from_float32,
    parse_safetensors,
    to_float32,
)

FORMAT = "millrace-adapter-1"
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Version:
    """An adapter in the cache."""

    digest: str
    num_bytes: int


def write_adapter(modules: Sequence[LoraModule], cache: Path) -> Version:
    """Write `<cache>/<digest>/adapter.safetensors`; the folder appears whole, or not at all.

    Raises:
        Unavailable: the disk is full or fails.

    """
    chunks = list(_chunks(modules))
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    version = Version(digest.hexdigest(), sum(len(chunk) for chunk in chunks))
    try:
        _store(chunks, version, cache)
    except OSError as error:
        reason = "the disk of the adapter cache is full"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the adapter cache cannot be written: {os.strerror(error.errno or 0)}"
        raise Unavailable(reason) from None
    return version


def read_adapter(digest: str, cache: Path) -> list[LoraModule]:
    """Read a canonical file back, and check its digest.

    Raises:
        Unavailable: the file is gone or was changed; another fetch restores it.

    """
    try:
        data = (cache / digest / ADAPTER_FILE).read_bytes()
    except OSError:
        raise Unavailable("an adapter to merge is no longer in the cache") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise Unavailable("the file of an adapter to merge was changed in the cache")
    file = parse_safetensors(data)
    tensors = file.tensors
    return [
        LoraModule(
            name=name,
            a=tensors[f"{name}.lora_A"],
            b=tensors[f"{name}.lora_B"],
            scales=to_float32(tensors[f"{name}.scales"]),
            bias=to_float32(tensors[f"{name}.bias"]) if shape["bias"] else None,
        )
        for name, shape in json.loads(file.metadata["modules"]).items()
    ]


def _chunks(modules: Sequence[LoraModule]) -> Iterator[bytes | memoryview]:
    """Return the parts of the file: its header, and the tensors, the widest values first, so that each is aligned."""
    tensors = dict(_tensors(modules))
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    offsets, end = {}, 0
    for name in order:
        begin, end = end, end + tensors[name].data.nbytes
        offsets[name] = [begin, end]
    header = {METADATA: {"format": FORMAT, "modules": _modules_json(modules)}} | {
        name: {"data_offsets": offsets[name], "dtype": tensor.dtype, "shape": list(tensor.shape)}
        for name, tensor in sorted(tensors.items())
    }
    text = _json(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    yield from (tensors[name].data for name in order)


def _tensors(modules: Sequence[LoraModule]) -> Iterator[tuple[str, Tensor]]:
    for module in modules:
        yield f"{module.name}.lora_A", module.a
        yield f"{module.name}.lora_B", module.b
        yield f"{module.name}.scales", from_float32(module.scales)
        if module.bias is not None:
            yield f"{module.name}.bias", from_float32(module.bias)


def _modules_json(modules: Sequence[LoraModule]) -> str:
    return _json(
        {
            module.name: {
                "bias": module.bias is not None,
                "inputs": module.inputs,
                "outputs": module.outputs,
                "rank": module.rank,
            }
            for module in sorted(modules, key=lambda module: module.name)
        }
    )


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _store(chunks: Sequence[bytes | memoryview], version: Version, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL_PREFIX}{os.getpid()}-", dir=cache))
    try:
        with (partial / ADAPTER_FILE).open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        target = cache / version.digest
        try:
            partial.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # The version is there. Its file may have been damaged since, and this one is right.
            (partial / ADAPTER_FILE).replace(target / ADAPTER_FILE)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
