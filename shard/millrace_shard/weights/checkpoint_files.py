"""The files of a model repository that serving needs, and a check that a folder has them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from millrace_proto.small_files import read_small_file
from millrace_shard.errors import ModelError
from millrace_shard.weights.gguf.file_names import best_mmproj, chosen, in_short, part_names, tags
from millrace_shard.weights.json_object import parse_json, read_json_object

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
    "preprocessor_config.json",
    "processor_config.json",
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
    """The safetensors files of the model: those that a valid index names, else the single file, else all of them.

    Raises PickledWeightsError if there are only pickles, and IncompleteModelError if weights are missing.
    """
    whole = [file for file in files if file.path == SINGLE]
    if index is not None:
        indexed = indexed_names(index)
        if not (whole and is_stale(indexed)):
            return [file for file in files if file.path in indexed]
    weights = whole or [file for file in files if fnmatchcase(file.path, "model*.safetensors")]
    if not weights:
        _refuse_pickles(file.path for file in files)
        raise IncompleteModelError(f"there is neither {SINGLE} nor {INDEX}")
    return weights


def gguf_files(
    files: Sequence[RemoteFile], tag: str | None, *, needs_mmproj: bool
) -> list[RemoteFile] | None:
    """The parts of the GGUF file of the block type `tag`; None if safetensors, or nothing, are to be served.

    With `needs_mmproj` the file with its encoder of images is the last, if there is one.

    Without a tag, GGUF files are for repositories without safetensors. Raises IncompleteModelError, with the block
    types that are there, and for missing parts.
    """
    by_name = {file.path: file for file in files}
    if tag is None and any(fnmatchcase(name, "model*.safetensors") for name in by_name):
        return None
    name = chosen(by_name, tag)
    if name is None:
        if tag is None:
            return None
        raise IncompleteModelError(no_such_tag(tag, by_name))
    missing = [part for part in part_names(name) if part not in by_name]
    if missing:
        raise IncompleteModelError(
            f"the split file {name} is incomplete: it has no {in_short(missing)}"
        )
    mmproj = best_mmproj(by_name, name) if needs_mmproj else None
    return [by_name[part] for part in (*part_names(name), *([] if mmproj is None else [mmproj]))]


def no_such_tag(tag: str, names: Iterable[str]) -> str:
    """The text of an error that names the block types of the GGUF files among `names`."""
    there = tags(names)
    if not there:
        return f"it has no GGUF files, so leave :{tag} out"
    return f"no GGUF file is of the type {tag}; these are there: {', '.join(there)}"


def missing_files(folder: Path) -> list[str]:
    """The names of files that serving needs and `folder` lacks; empty if the model is complete.

    Raises PickledWeightsError if the weights exist only as pickles.
    """
    missing = missing_small_files(folder)
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if INDEX in names:
        try:
            indexed = indexed_names(read_small_file(folder / INDEX))
        except OSError as error:
            raise ModelError(f"{folder / INDEX} cannot be read: {error}") from error
        if not (SINGLE in names and is_stale(indexed)):
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


def is_stale(indexed: Iterable[str]) -> bool:
    """Whether an index is left from before a merge into `SINGLE`, which is read then, as in transformers."""
    return SINGLE not in indexed


ENCODERS = frozenset(
    {"albert", "bert", "camembert", "clip", "convbert", "deberta", "deberta-v2", "distilbert"}
    | {"electra", "ernie", "esm", "funnel", "layoutlm", "modernbert", "mpnet", "new", "nomic_bert"}
    | {"roberta", "siglip", "vit", "wav2vec2", "xlm-roberta"}
)
"""Values of `model_type` of models that only encode."""
IS_DECODER = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes that produce text."""


def refuse_other_kinds(folder: Path) -> None:
    """Raise ModelError for a model with an encoder, whatever the form of its weights."""
    config = read_json_object(folder / "config.json") or {}
    kind, classes = config.get("model_type"), config.get("architectures") or ()
    if config.get("is_encoder_decoder") is True:
        reason = "has an encoder"
    elif kind in ENCODERS and not any(str(name).endswith(IS_DECODER) for name in classes):
        reason = "only encodes"
    else:
        return
    raise ModelError(
        f"{folder}: a model of the type {kind!r} {reason}, and only decoders are served, also for embeddings"
        " (--task embed)"
    )


def _refuse_pickles(names: Iterable[str]) -> None:
    pickles = sorted(name for name in names if _matches(name, PICKLES))
    if pickles:
        raise PickledWeightsError(
            f"the weights are pickle files ({', '.join(pickles[:3])}), which may run code when read;"
            " safetensors and GGUF files are read"
        )


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return "/" not in path and any(fnmatchcase(path, pattern) for pattern in patterns)


RACY_NS = 2_000_000_000
"""A file that changed so recently may change again within the same tick of the clock."""


def file_state(path: Path) -> str:
    """What changes when a file is written or replaced, without reading it. Raises OSError."""
    status = path.stat()
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{status.st_dev} {status.st_ino} {status.st_size} {times}"


def changed_recently(path: Path) -> bool:
    """Whether `file_state` may fail to show the next change. Raises OSError."""
    return path.stat().st_ctime_ns > time.time_ns() - RACY_NS
