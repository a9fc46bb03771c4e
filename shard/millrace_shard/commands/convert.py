"""`convert`: a local folder's pytorch_model*.bin to safetensors, without running any code from the pickles."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from millrace_shard.errors import ModelError
from millrace_shard.weights.checkpoint_files import INDEX, SINGLE

MAX_FILE_BYTES = 5_000_000_000
# The errors of torch's restricted unpickler for bytes that are not a checkpoint; it validates little.
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)
PICKLE_INDEX = "pytorch_model.bin.index.json"


class ConversionError(ModelError):
    """The pickles are missing or damaged, or contain more than tensors."""


def convert(folder: Path, output: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Write every tensor of the folder's pickles to safetensors in `output`, with the same name and dtype.

    Tensors that share memory, such as tied embeddings, are written once per name, so that readers need not know of the
    tie. More than `max_file_bytes` are split into numbered files with an index. A file gets its final name when it is
    complete. Returns the files. Raises ConversionError.
    """
    if (output / SINGLE).exists() or (output / INDEX).exists():
        raise ConversionError(f"{output} already has safetensors weights")
    output.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[Path, list[str]]] = []
    total = 0
    try:
        for number, tensors in enumerate(_groups(_pickles(folder), max_file_bytes)):
            path = output / f".converting-{number:05d}.safetensors"
            parts.append((path, list(tensors)))
            save_file(tensors, path, metadata={"format": "pt"})
            total += sum(tensor.nbytes for tensor in tensors.values())
        return _publish(parts, output, total=total)
    finally:
        for path, _ in parts:
            path.unlink(missing_ok=True)


def _pickles(folder: Path) -> list[Path]:
    index = folder / PICKLE_INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = [folder / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ConversionError(
                f"{PICKLE_INDEX} names {', '.join(missing)}, which {folder} lacks"
            )
        return paths
    paths = sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ConversionError(f"{folder} has no pytorch_model*.bin")
    return paths


def _groups(paths: Sequence[Path], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in file order, in groups of at most `max_bytes`; a larger tensor is a group by itself."""
    group: dict[str, torch.Tensor] = {}
    size = 0
    for path in paths:
        for name, tensor in _read(path).items():
            if group and size + tensor.nbytes > max_bytes:
                yield group
                group, size = {}, 0
            # A copy per name is needed, since safetensors refuses shared memory.
            group[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            size += tensor.nbytes
    if group:
        yield group


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ConversionError(f"{path} cannot be read as plain tensors: {error}") from error
    if not isinstance(tensors, dict):
        raise ConversionError(f"{path} holds a {type(tensors).__name__}, not named tensors")
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConversionError(f"{path} holds more than tensors: {', '.join(map(str, others[:3]))}")
    return tensors


def _publish(parts: Sequence[tuple[Path, list[str]]], output: Path, *, total: int) -> list[Path]:
    """Rename the finished parts; the index is written last, so that its files exist."""
    if len(parts) == 1:
        return [parts[0][0].rename(output / SINGLE)]
    weight_map: dict[str, str] = {}
    files = []
    for number, (path, names) in enumerate(parts, start=1):
        target = output / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, target.name))
        files.append(path.rename(target))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the folder given on the command line; returns 1, with a message on stderr, after an error."""
    parser = argparse.ArgumentParser(prog="millrace-shard convert", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with pytorch_model*.bin")
    parser.add_argument("--output", type=Path, help="where to write; the folder itself when absent")
    arguments = parser.parse_args(argv)
    try:
        files = convert(arguments.folder, arguments.output or arguments.folder)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in files))
    return 0
