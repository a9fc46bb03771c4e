"""Names of adapters, where their files are, and the names that the operator has registered."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from millrace_router.adapters.memory import Recent
from millrace_router.config import AdapterSpec
from millrace_router.errors import ValidationError
from millrace_router.request.adapter import AdapterSource, AdapterVersion

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
    """Where an adapter's files are."""

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
        return Path(self.location) if self.root is None else self.root / self.location

    @property
    def key(self) -> Hashable:
        """The key that sources with the same files share."""
        return self.kind, self.location, self.revision, self.root


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
    """Return the source of a folder below `root`; None for a name that is not a plain relative path."""
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
        states = [(folder / name).stat() for name in FILES]
    except OSError:
        return None
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in states)


MAX_OLDER = 8
"""Former versions of a name that `name@sha256:…` still finds."""
MAX_REMOVED = 65_536


@dataclass(slots=True)
class Registration:
    """A name, its source, and the versions that were fetched from there."""

    name: str
    source: NamedSource
    current: AdapterVersion | None = None
    """The version of new requests; None before the first use."""
    stamp: Stamp | None = None
    """Inode, size and time of each file of a local folder when `current` was fetched."""
    older: tuple[AdapterVersion, ...] = ()

    def update(self, version: AdapterVersion, stamp: Stamp | None = None) -> None:
        """Make `version` the one of new requests."""
        former = self.current
        if former is not None and former.digest != version.digest:
            rest = tuple(one for one in self.older if one.digest != former.digest)
            self.older = (former, *rest)[:MAX_OLDER]
        self.current, self.stamp = version, stamp

    def version(self, digest: str) -> AdapterVersion | None:
        """Return the version with this digest, current or former."""
        versions = self.older if self.current is None else (self.current, *self.older)
        return next((one for one in versions if one.digest == digest), None)


@dataclass(slots=True)
class Registry:
    """Registrations by name, and the names that are no longer registered."""

    _by_name: dict[str, Registration] = field(default_factory=dict)
    _removed: Recent[str, bool] = field(default_factory=lambda: Recent(MAX_REMOVED))

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Registration | None:
        return self._by_name.get(name)

    def was(self, name: str) -> bool:
        """Return whether `name` was registered, and is not now."""
        return name not in self._by_name and self._removed.get(name) is not None

    def add(self, registration: Registration) -> None:
        """Register a name, in place of its former registration if there is one."""
        self._by_name[registration.name] = registration
        self._removed.drop(registration.name)

    def remove(self, name: str) -> bool:
        """Remove the registration of `name`; returns whether it existed. Streams that use its versions go on."""
        if self._by_name.pop(name, None) is None:
            return False
        self._removed.put(name, value=True)
        return True
