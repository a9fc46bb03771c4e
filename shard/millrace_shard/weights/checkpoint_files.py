"""The files of a model repository that serving needs, and a check that a folder has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from millrace_shard.errors import ModelError
from millrace_shard.weights.json_object import parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = "tokenizer.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# The files from which `transformers` builds a fast tokenizer if the repository lacks tokenizer.json.
TOKENIZER_SOURCES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
)
METADATA = (
    "config*.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    INDEX,
    *TOKENIZER_SOURCES,
)


class PickledWeightsError(ModelError):
    """The weights exist only as pickle files, which may run code when they are read."""


class IncompleteModelError(ModelError):
    """Files that serving needs are missing."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: its path, and its size in bytes, 0 if the hub does not report it."""

    path: str
    size: int


def metadata_files(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """The small files: configuration, tokenizer, chat template and index of the weights."""
    return [file for file in files if _matches(file.path, METADATA)]


def weight_files(files: Sequence[RemoteFile], *, index: bytes | None) -> list[RemoteFile]:
    """The safetensors files of the model: those that the index names, else the single file, else all of them.

    Raises PickledWeightsError if there are only pickles, and IncompleteModelError if weights are missing.
    """
    if index is not None:
        indexed = indexed_names(index)
        return [file for file in files if file.path in indexed]
    whole = [file for file in files if file.path == SINGLE]
    weights = whole or [file for file in files if fnmatchcase(file.path, "model*.safetensors")]
    if not weights:
        _refuse_pickles(file.path for file in files)
        raise IncompleteModelError(f"there is neither {SINGLE} nor {INDEX}")
    return weights


def missing_files(folder: Path) -> list[str]:
    """The names of files that serving needs and `folder` lacks; empty if the model is complete.

    Raises PickledWeightsError if the weights exist only as pickles.
    """
    missing = missing_small_files(folder)
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if INDEX in names:
        indexed = indexed_names((folder / INDEX).read_bytes())
        return missing + sorted(indexed - set(names))
    weights = [name for name in names if fnmatchcase(name, "model*.safetensors")]
    if SINGLE not in names and any("-of-" in name for name in weights):
        missing.append(INDEX)
    if not weights:
        _refuse_pickles(names)
    return missing if weights else [*missing, SINGLE]


def missing_small_files(folder: Path) -> list[str]:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if not any(_matches(name, TOKENIZER_SOURCES) for name in names):
        missing.append(TOKENIZER)
    return missing


def indexed_names(index: bytes) -> set[str]:
    """The names of the files that an index lists. Raises ModelError for a damaged index."""
    try:
        return set(parse_json(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{INDEX} is damaged: {error!r}") from error


def _refuse_pickles(names: Iterable[str]) -> None:
    pickles = sorted(name for name in names if _matches(name, PICKLES))
    if pickles:
        raise PickledWeightsError(
            f"the weights are pickle files ({', '.join(pickles[:3])}), which may run code when read;"
            " safetensors and GGUF files are read"
        )


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return "/" not in path and any(fnmatchcase(path, pattern) for pattern in patterns)
