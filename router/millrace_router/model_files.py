"""What the router reads of a model folder besides the tokenizer: small JSON files and the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

JsonObject = dict[str, Any]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ModelFilesError(Exception):
    """A file of the model folder is there but cannot be read as what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Parsed files; a missing one is empty, for none is needed to generate."""

    config: JsonObject = field(default_factory=dict)
    tokenizer_config: JsonObject = field(default_factory=dict)
    generation_config: JsonObject = field(default_factory=dict)
    chat_template: str | None = None

    @classmethod
    def load(cls, folder: Path, *, tokenizer_config_path: Path | None = None) -> ModelFiles:
        """Read `folder`; `tokenizer_config_path` is read in place of its tokenizer_config.json.

        Raises:
            ModelFilesError: a file is malformed, or `tokenizer_config_path` does not exist.

        """
        if tokenizer_config_path is not None and not tokenizer_config_path.is_file():
            raise ModelFilesError(f"{tokenizer_config_path} does not exist")
        tokenizer_config = _read_json(tokenizer_config_path or folder / "tokenizer_config.json")
        templates = _chat_templates(
            folder, tokenizer_config, chosen=tokenizer_config_path is not None
        )
        return cls(
            config=_read_json(folder / "config.json"),
            tokenizer_config=tokenizer_config,
            generation_config=_read_json(folder / "generation_config.json"),
            chat_template=next((template for template in templates if template), None),
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


def _chat_templates(
    folder: Path, tokenizer_config: JsonObject, *, chosen: bool
) -> Iterator[str | None]:
    """Yield templates, the one to prefer first: TGI's order, with chat_template.jinja before what newer models drop."""
    yield _template(_read_json(folder / "chat_template.json"))
    if chosen:
        yield _template(tokenizer_config)
    yield _read_text(folder / "chat_template.jinja")
    yield _template(tokenizer_config)
    yield _template(_read_json(folder / "processor_config.json"))


def _template(holder: JsonObject) -> str | None:
    """Take the template out of a file: itself, or the one named `default` of a list."""
    value = holder.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _token_text(value: object) -> str | None:
    """Text of a token that is given as a string or as `{"content": string}`."""
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
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
