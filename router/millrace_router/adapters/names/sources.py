"""Where the files of a named adapter are. A client's string becomes part of a path only after its form was checked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from millrace_router.config import AdapterSpec
from millrace_router.errors import ValidationError
from millrace_router.request.adapter import AdapterSource

MAX_NAME_LENGTH = 256
FILES = ("adapter_config.json", "adapter_model.safetensors")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_HUB_ID = re.compile(
    rf"(?P<id>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_./-]{{0,127}}))?"
)
_LOCAL_ID = re.compile(rf"{_PART}(?:/{_PART}){{0,7}}")
_DIGEST = re.compile(r"(?P<name>.+)@sha256:(?P<digest>[0-9a-f]{64})")

Stamp = tuple[tuple[int, int, int], ...]
"""(inode, size, time of the last change) of each file of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSource:
    """The place of an adapter's files."""

    kind: AdapterSource
    location: str
    """A folder, or an id on the hub."""
    root: Path | None = None
    """The folder that a client's folder is in, by the relative path `location`."""
    revision: str | None = None
    by_operator: bool = False
    """Whether the operator named it: then any folder is allowed, and on the hub the server's own token counts."""

    @property
    def folder(self) -> Path:
        """The folder of a local source."""
        return Path(self.location) if self.root is None else self.root / self.location


def check_name(name: str) -> str:
    """Return `name` if logs, headers and metrics can show it; raises ValidationError."""
    if len(name) > MAX_NAME_LENGTH:
        raise ValidationError(
            f"the name of an adapter must have at most {MAX_NAME_LENGTH} characters. Given: {len(name)}"
        )
    if not name.isprintable():
        raise ValidationError("the name of an adapter must not have control characters")
    return name


def split_digest(name: str) -> tuple[str, str | None]:
    """Return the name and the digest of `name@sha256:digest`; None for a name without one."""
    match = _DIGEST.fullmatch(name)
    return (name, None) if match is None else (match["name"], match["digest"])


def hub_source(name: str) -> NamedSource | None:
    """Return the source of `org/repo` or `org/repo@revision`; None for any other name."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name:
        return None
    return NamedSource(kind=AdapterSource.HUB, location=match["id"], revision=match["revision"])


def local_source(name: str, root: Path) -> NamedSource | None:
    """Return the source of a folder below `root`; None for a name that is no plain relative path."""
    if _LOCAL_ID.fullmatch(name) is None or ".." in name:
        return None
    return NamedSource(kind=AdapterSource.LOCAL, location=name, root=root)


def operators_source(spec: AdapterSpec) -> NamedSource:
    """Return the source that the operator means: a path that is absolute or exists is a folder, else an id on the hub.

    Raises:
        ValueError: it is neither.

    """
    path = Path(spec.path).expanduser()
    if path.is_absolute() or spec.path.startswith(".") or path.is_dir():
        location = str(path.absolute())
        return NamedSource(kind=AdapterSource.LOCAL, location=location, by_operator=True)
    source = hub_source(spec.path)
    if source is None:
        raise ValueError(f"{spec.path!r} is neither a folder nor an id on the hub")
    return NamedSource(
        kind=AdapterSource.HUB,
        location=source.location,
        revision=spec.revision or source.revision,
        by_operator=True,
    )


def is_allowed(source: NamedSource, patterns: Iterable[str]) -> bool:
    """Return whether a client may name this id, by patterns such as `hub:org/*`."""
    return any(fnmatchcase(f"{source.kind}:{source.location}", pattern) for pattern in patterns)


def stamp_of(folder: Path) -> Stamp | None:
    """Return what changes when the files of a folder are replaced; None if one is missing. Blocks."""
    try:
        found = [(folder / name).stat() for name in FILES]
    except OSError:
        return None
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)
