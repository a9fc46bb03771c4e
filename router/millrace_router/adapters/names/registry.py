"""The adapters that the operator has named, by the flags or by the admin routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace_router.adapters.names.recent import Recent
from millrace_router.adapters.names.sources import NamedSource, Stamp
from millrace_router.request.adapter import AdapterVersion

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
        """Return the registration of `name`."""
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
