"""Comparison of the keys that clients present."""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest

from millrace_router.request.scheduling import API_KEY_HEADER


def presents_key(headers: Mapping[str, str], key: str) -> bool:
    """Return whether `key` is in the headers, exactly: as a bearer token, or in `x-api-key` for Anthropic's clients."""
    as_bearer = compare_digest(_header(headers, "authorization"), f"Bearer {key}".encode())
    as_bare = compare_digest(_header(headers, API_KEY_HEADER), key.encode())
    return as_bearer or as_bare


def _header(headers: Mapping[str, str], name: str) -> bytes:
    return headers.get(name, "").encode(errors="surrogateescape")
