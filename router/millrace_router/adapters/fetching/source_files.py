"""The files of an adapter from a folder or the hub, none of which is trusted: their names, sizes and JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace_router.adapters.fetching.errors import Invalid, TooLarge
from millrace_router.errors import quoted

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Private copies, each read once."""

    config: bytes
    weights: bytes

    def digest(self) -> str:
        """Return the key under which a refusal of these files is remembered."""
        parts = [hashlib.sha256(part).hexdigest() for part in (self.config, self.weights)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def check_listing(sizes: dict[str, int], max_bytes: int) -> None:
    """Check the files of an adapter by name and size, before any is read.

    Raises:
        Invalid: a file is missing, or there is only a pickle.
        TooLarge: a file is larger than allowed.

    """
    if CONFIG_FILE not in sizes:
        raise Invalid(f"there is no {CONFIG_FILE}")
    if WEIGHTS_FILE not in sizes:
        pickle = next((name for name in PICKLES if name in sizes), None)
        raise Invalid(
            f"there is no {WEIGHTS_FILE}"
            if pickle is None
            else f"there is no {WEIGHTS_FILE}; {pickle} is a pickle, which can run code and is never loaded"
        )
    if sizes[CONFIG_FILE] > MAX_CONFIG_BYTES:
        raise Invalid(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    if sizes[WEIGHTS_FILE] > max_bytes:
        raise TooLarge(sizes[WEIGHTS_FILE], max_bytes)


JsonObject = dict[str, Any]


def parse_object(data: bytes, *, what: str) -> JsonObject:
    """Parse a JSON object; `what` names the text in errors.

    Raises:
        Invalid: the text is not a JSON object in UTF-8, has a key twice, or a number that is not finite.

    """

    def unique(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
        parsed: JsonObject = {}
        for key, value in pairs:
            if key in parsed:
                raise Invalid(f"{what} has the key {quoted(key)} twice")
            if not all(map(_is_text, (key, value))):
                raise Invalid(f"{what} has half of a character at the key {quoted(key)}")
            parsed[key] = value
        return parsed

    def refuse(constant: str) -> None:
        raise Invalid(f"{what} contains {constant}, which JSON does not allow")

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise Invalid(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise Invalid(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Invalid(f"{what} is not a JSON object")
    return value


def _is_text(value: object) -> bool:
    """Return whether a string has no lone surrogates, which UTF-8 cannot write."""
    try:
        return not isinstance(value, str) or value.encode() is not None
    except UnicodeEncodeError:
        return False
