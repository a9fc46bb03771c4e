"""Requests to the fetching process, and the limits that it keeps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from millrace_router.request.adapter import AdapterSource

DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSource:
    """Where the files of an adapter are."""

    kind: AdapterSource
    id: str
    """A repository on the hub, or a folder: relative to `root`, or any folder where there is no root."""
    name: str
    """The adapter's name for answers, logs and errors."""
    revision: str | None = None
    """A branch, tag or commit on the hub; None: main."""
    root: Path | None = None
    """The folder that a client's folder lies below; None for a folder that the operator registered."""
    token: str | None = field(default=None, repr=False)
    """For the hub. It goes to the fetching process on its standard input, and nowhere else."""
    caller: str = ""
    """The client that asks: the fetches of each client are limited. "" has no limit of its own."""
    by_operator: bool = False
    """Whether the operator named it: then its fetches are not limited at all."""

    @property
    def place(self) -> Hashable:
        """The key that sources with the same files share."""
        return self.kind, self.id, self.revision, self.root


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of an adapter, and of the process that fetches it."""

    max_rank: int = 64
    max_bytes: int = 2 << 30
    """Size of the file of weights."""
    timeout_seconds: float = 300.0
