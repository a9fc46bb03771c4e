"""Prepares a GGUF file as a model folder, which router and shards read as any other."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from millrace_shard.errors import ModelError, WeightsError
from millrace_shard.weights.checkpoint_files import TOKENIZER
from millrace_shard.weights.gguf.config import architecture_of, model_config
from millrace_shard.weights.gguf.file_names import SNAPSHOT, parts_of
from millrace_shard.weights.gguf.files import read_part
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.known_folders import (
    FORMAT_VERSION,
    MMPROJ,
    MODEL,
    MORE,
    TOKENIZER_FILES,
    Beside,
)
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.mmproj import Mmproj
from millrace_shard.weights.gguf.tensor_names import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    check_tensors,
)
from millrace_shard.weights.gguf.tokenizer import (
    PREFIX,
    Vocabulary,
    tokenizer_config,
    tokenizer_json,
)
from millrace_shard.weights.json_object import read_json_object
from millrace_shard.weights.published import NO_SAMPLING

logger = logging.getLogger(__name__)


def prepare_gguf(
    path: Path,
    cache_root: Path,
    *,
    tokenizer: Path | None,
    sampling: Mapping[str, float] = NO_SAMPLING,
    mmproj: Path | None = None,
) -> Path:
    """The folder below `cache_root` with the files of the model in `path`, made at the first call.

    `path` may be any part of a split file. The folder holds config.json, generation_config.json, tokenizer.json,
    tokenizer_config.json and model.gguf, a link to the file, with more of them for further parts; with `mmproj`, the
    file with the encoder of images, also mmproj.gguf, a link to it, and preprocessor_config.json. The files of the
    tokenizer come from the folder `tokenizer`, else from the file's metadata; `sampling` are values for
    generation_config.json that `tokenizer` lacks. Raises ModelError, whose text names the file and what is wrong with
    it; no weight has been read then.
    """
    paths, beside = parts_of(path), Beside(tokenizer=tokenizer, sampling=sampling, mmproj=mmproj)
    header = GgufHeader.read(*paths)
    images = None if mmproj is None else Mmproj.open(mmproj)
    snapshot = SNAPSHOT.match(str(path.absolute()))
    # From the name of a folder the launcher reads the commit of a model on the hub.
    name = _digest(header, images, beside) + (f"-{snapshot[2]}" if snapshot else "")
    target = cache_root / name
    if (target / MODEL).is_file():
        return target
    cache_root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache_root))
    try:
        _write(building, header, images, beside)
        if mmproj is not None:
            (building / MMPROJ).symlink_to(mmproj.resolve())
        for number, part in enumerate(paths, 1):
            link = MODEL if number == 1 else MORE.format(number)
            (building / link).symlink_to(part.resolve())
        try:
            building.rename(target)
        except OSError:
            # Another process was faster, or the link of an older folder leads nowhere.
            if not (target / MODEL).is_file():
                shutil.rmtree(target, ignore_errors=True)
                building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _digest(header: GgufHeader, images: Mmproj | None, beside: Beside) -> str:
    digest, tokenizer, sampling = hashlib.sha256(), beside.tokenizer, beside.sampling
    state = [str(FORMAT_VERSION)]
    for each in [header] if images is None else [header, images.header]:
        state.append(str(each.size))
        for path, num_bytes in zip(each.paths, each.num_bytes, strict=True):
            with path.open("rb") as file:
                digest.update(file.read(num_bytes))
            state.append(str(path.resolve()))
    for path in [] if tokenizer is None else sorted(tokenizer.iterdir()):
        if path.name in TOKENIZER_FILES:
            status = path.stat()
            state.append(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}")
    if sampling:
        state.append(json.dumps(dict(sampling), sort_keys=True))
    digest.update("\n".join(state).encode())
    return digest.hexdigest()[:16]


def _write(folder: Path, header: GgufHeader, images: Mmproj | None, beside: Beside) -> None:
    metadata, name = Metadata(header.metadata, header.path.name), header.path.name
    config = model_config(header, metadata, _rope_factors(header))
    check_tensors(header, config, architecture_of(metadata, name))
    if beside.tokenizer is None:
        generation = _write_tokenizer(folder, metadata, config, images)
    else:
        file_tokens = metadata.texts(f"{PREFIX}tokens") or []
        generation = _copy_tokenizer(
            folder, beside.tokenizer, file_tokens, vocab_size=config["vocab_size"]
        )
    if images is not None:
        arch = metadata.text("general.architecture")
        placeholder = Tokenizer.from_file(str(folder / TOKENIZER)).token_to_id(images.tokens[0])
        config = images.config(config, str(arch), placeholder, name)
        _write_json(folder / "preprocessor_config.json", images.processor())
    ends = generation.get("eos_token_id")
    _write_json(folder / "config.json", {**config, "eos_token_id": ends})
    _write_json(folder / "generation_config.json", {**beside.sampling, **generation})


def _write_tokenizer(
    folder: Path, metadata: Metadata, config: dict[str, Any], images: Mmproj | None
) -> dict[str, Any]:
    """Write the files of the tokenizer in the metadata; returns the object of generation_config.json."""
    vocabulary = Vocabulary.read(metadata, vocab_size=config["vocab_size"])
    if images is not None:
        vocabulary = vocabulary.with_images(*images.tokens)
    (folder / TOKENIZER).write_text(tokenizer_json(metadata, vocabulary))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, vocabulary))
    ids = {f"{name}_token_id": vocabulary.named.get(name) for name in ("bos", "pad")}
    special_ids = {name: id_ for name, id_ in ids.items() if id_ is not None}
    return {**special_ids, "eos_token_id": vocabulary.end_ids() or None}


def _copy_tokenizer(
    folder: Path, source: Path, file_tokens: Sequence[str], *, vocab_size: int
) -> dict[str, Any]:
    """Copy the files of the tokenizer in `source`; returns the object of generation_config.json.

    `file_tokens` are the tokens in the file, if it has any.
    """
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:
        # The library raises plain exceptions.
        raise ModelError(f"the tokenizer in {source} cannot be read: {error}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:
        raise WeightsError(
            f"the tokenizer in {source} has ids up to {largest}, and the model embeddings for {vocab_size}"
        )
    _check_vocabulary(source, tokenizer, file_tokens)
    generation = read_json_object(source / "generation_config.json") or {}
    if "eos_token_id" not in generation:
        generation["eos_token_id"] = _eos_id(source, tokenizer)
    return generation


def _check_vocabulary(source: Path, tokenizer: Tokenizer, file_tokens: Sequence[str]) -> None:
    """Raise WeightsError unless most tokens in the file have their ids in `tokenizer`, and log that some have not.

    Files may name special and unused tokens differently.
    """
    others = {
        id_: (tokenizer.id_to_token(id_), token)
        for id_, token in enumerate(file_tokens)
        if tokenizer.id_to_token(id_) != token
    }
    if not others:
        return
    first, (theirs, token) = next(iter(others.items()))
    difference = (
        f"the tokenizer in {source} has other ids for {len(others)} of the {len(file_tokens)} tokens in the file: "
        f"id {first} is {theirs!r}, and {token!r} in the file"
    )
    if len(others) > len(file_tokens) // 2:
        raise WeightsError(f"{difference}; name the model that the file was made from")
    logger.warning("%s", difference)


def _eos_id(source: Path, tokenizer: Tokenizer) -> int | None:
    token = (read_json_object(source / "tokenizer_config.json") or {}).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _rope_factors(header: GgufHeader) -> dict[str, Tensor]:
    """The tensors that divide the frequencies of rotary embeddings, float32 vectors by name."""
    factors = {}
    for name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
        tensor = header.tensors.get(name)
        if tensor is None:
            continue
        if len(tensor.shape) != 1 or tensor.format.dtype != torch.float32:
            raise WeightsError(f"tensor {name} is not a vector of float32")
        with header.paths[tensor.part].open("rb") as file:
            factors[name] = read_part(file, tensor, (0, 1), (0, tensor.shape[0]))[0]
    return factors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
