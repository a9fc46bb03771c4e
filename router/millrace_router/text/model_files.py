"""The files of a model besides the tokenizer: where they are, small JSON files and the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from millrace_proto.small_files import read_small_file

JsonObject = dict[str, Any]

_END_TOKENS = ("eos_token", "eot_token")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ModelFilesError(Exception):
    """A file of the model folder cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Parsed files; a missing file is empty, since generation needs none of them."""

    config: JsonObject = field(default_factory=dict)
    tokenizer_config: JsonObject = field(default_factory=dict)
    generation_config: JsonObject = field(default_factory=dict)
    chat_template: str | None = None
    tool_template: str | None = None
    """Template for chats with tools, if the model has a separate one."""

    @classmethod
    def load(cls, folder: Path, *, tokenizer_config_path: Path | None = None) -> ModelFiles:
        """Read `folder`; `tokenizer_config_path` is read in place of its tokenizer_config.json.

        Raises:
            ModelFilesError: a file is malformed, or `tokenizer_config_path` does not exist.

        """
        if tokenizer_config_path is not None and not tokenizer_config_path.is_file():
            raise ModelFilesError(f"{tokenizer_config_path} does not exist")
        tokenizer_config = _read_json(tokenizer_config_path or folder / "tokenizer_config.json")
        templates: dict[str, str] = {}
        is_chosen = tokenizer_config_path is not None
        for fallback in _sources(folder, tokenizer_config, is_chosen=is_chosen):
            templates = fallback | templates
        return cls(
            config=_read_json(folder / "config.json"),
            tokenizer_config=tokenizer_config,
            generation_config=_read_json(folder / "generation_config.json"),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
        )

    @property
    def model_type(self) -> str | None:
        """Family name, such as `llama`."""
        model_type = self.config.get("model_type")
        return model_type if isinstance(model_type, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of `bos_token`, `eos_token` and the like, as chat templates name them."""
        texts = {name: _token_text(self.tokenizer_config.get(name)) for name in _SPECIAL_TOKENS}
        return {name: text for name, text in texts.items() if text is not None}

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that end a text or a turn, by tokenizer_config.json."""
        texts = (_token_text(self.tokenizer_config.get(name)) for name in _END_TOKENS)
        return tuple(text for text in texts if text is not None)


def _sources(
    folder: Path, tokenizer_config: JsonObject, *, is_chosen: bool
) -> Iterator[dict[str, str]]:
    """Yield templates by name in order of preference: TGI's order, with template files before tokenizer_config.json."""
    yield _templates(_read_json(folder / "chat_template.json"))
    if is_chosen and (chosen := _templates(tokenizer_config)):
        yield chosen
        return
    yield _template_files(folder)
    yield _templates(tokenizer_config)
    yield _templates(_read_json(folder / "processor_config.json"))


def _template_files(folder: Path) -> dict[str, str]:
    """Templates in separate files, with the names that transformers uses."""
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    paths["default"] = folder / "chat_template.jinja"
    read = {name: _read_text(path) for name, path in paths.items()}
    return {name: text for name, text in read.items() if text}


def _templates(holder: JsonObject) -> dict[str, str]:
    """Templates of a JSON file by name: a single one, a list, or an object."""
    value = holder.get("chat_template")
    if isinstance(value, str):
        value = {"default": value}
    elif isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in named}
    if not isinstance(value, dict):
        return {}
    return {name: text for name, text in value.items() if isinstance(text, str) and text}


def _token_text(value: object) -> str | None:
    """Text of a token in the form of a string or of `{"content": string}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> JsonObject:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object")
    return value


def _read_text(path: Path) -> str | None:
    try:
        return read_small_file(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error


HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
DEFAULT_REVISION = "main"


def find_snapshot(name: str, *, revision: str | None, cache: Path) -> Path:
    """Return the folder with one commit's files of the model `name`; its own name is the commit.

    `revision` is a branch, tag or commit. Raises ModelFilesError with the remedy in its text.
    """
    if HUB_NAME.fullmatch(name):
        model = cache / f"models--{name.replace('/', '--')}"
        reference = revision or DEFAULT_REVISION
        try:
            commit = (model / "refs" / reference).read_text().strip()
        except OSError:
            commit = reference
        folder = model / "snapshots" / commit
        if folder.is_dir():
            return folder
    at = f" at revision {revision}" if revision else ""
    option = f" --revision {revision}" if revision else ""
    raise ModelFilesError(
        f"--tokenizer-name {name} is neither a folder nor, in {cache}, a downloaded model{at}; download it with"
        f" `text-generation-server download-weights {name}{option}`, or set HF_HOME to the cache that has it"
    )
