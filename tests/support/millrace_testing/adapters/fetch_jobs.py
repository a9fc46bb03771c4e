"""Requests to the fetching process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace_router.adapters.fetching.jobs import answer
from millrace_router.request.adapter import AdapterModule

MAX_BYTES = 1 << 24


def fetch_request(
    folder: Path | str,
    cache: Path,
    modules: Sequence[AdapterModule],
    *,
    root: Path | None = None,
    max_rank: int = 64,
    max_bytes: int = MAX_BYTES,
    known: str | None = None,
) -> dict[str, Any]:
    """Ask for an adapter in a folder."""
    return {
        "job": "fetch",
        "source": {
            "kind": "local",
            "id": str(folder),
            "revision": None,
            "root": None if root is None else str(root),
            "token": None,
            "endpoint": "",
        },
        "limits": {"max_rank": max_rank, "max_bytes": max_bytes, "timeout_seconds": 60.0},
        "cache": str(cache),
        "modules": [(module.name, module.inputs, module.outputs) for module in modules],
        "known": known,
    }


def fetch_folder(
    folder: Path | str, cache: Path, modules: Sequence[AdapterModule], **options: Any
) -> dict[str, Any]:
    """Fetch from a folder in this process."""
    return answer(fetch_request(folder, cache, modules, **options))
