"""The forms in which flags name LoRA adapters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """An adapter as the operator names it; `path` is a folder or an id on the hub."""

    name: str
    path: str
    revision: str | None = None


_TGI_ADAPTER = re.compile(r"([^=@]+)(?:=([^=@]+))?(?:@([^=@]+))?")


def tgi_adapter(text: str) -> AdapterSpec:
    """Read ID, ID@REVISION, NAME=PATH, NAME=PATH@REVISION or a JSON object; raises ValueError with TGI's text."""
    if text.startswith("{"):
        return _json_adapter(text)
    match = _TGI_ADAPTER.fullmatch(text)
    if match is None:
        raise ValueError(f"Invalid LoRA adapter format: {text}")
    name, path, revision = match.groups()
    return AdapterSpec(name=name, path=path or name, revision=revision)


def vllm_adapter(text: str) -> AdapterSpec:
    """Read NAME=PATH or a JSON object; raises ValueError."""
    if text.startswith("{"):
        return _json_adapter(text)
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"Invalid LoRA adapter format: {text}")
    return AdapterSpec(name=name, path=path)


def sglang_adapter(text: str) -> AdapterSpec:
    """Read PATH, which is the name too, NAME=PATH or a JSON object; raises ValueError."""
    if text.startswith("{"):
        return _json_adapter(text, prefix="lora_")
    return vllm_adapter(text if "=" in text else f"{text}={text}")


READERS = {
    "lora_adapters": tgi_adapter,
    "lora_modules": vllm_adapter,
    "lora_paths": sglang_adapter,
}
"""The form of an adapter in each flag."""


def _json_adapter(text: str, *, prefix: str = "") -> AdapterSpec:
    """Read an object with `name`, `path` and perhaps `revision`, all after `prefix`; others are ignored.

    Raises:
        ValueError: `text` is not such an object.

    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:
        fields = {}
    name, path, revision = (fields.get(prefix + key) for key in ("name", "path", "revision"))
    texts = all(isinstance(value, str) and value for value in (name, path))
    if not texts or not isinstance(revision, str | None):
        raise ValueError(f"Invalid LoRA adapter format: {text}")
    return AdapterSpec(name=name, path=path, revision=revision or None)


_ITEM = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\{(?:"(?:[^"\\]|\\.)*"|[^"{}])*\}|[^",{}])+')
"""A part of a list without a comma outside of objects and texts."""


def split_adapters(value: object) -> object:
    """Break strings at their commas, except for commas in JSON objects; other values are left to pydantic."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    parts: list[str] = []
    for item in map(str, value):
        text = item.strip()
        listed = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        items = [part.strip() for part in _ITEM.findall(listed)]
        # A text that does not split without a rest is not a list; the check of adapters refuses it.
        whole = _ITEM.sub("", listed).strip(", ") == ""
        parts.extend(part for part in (items if whole else [text]) if part)
    return tuple(parts)
