"""The last versions of the operator's adapters from the hub, on disk: they outlast the router."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from millrace_router.adapters.adapter_files import DIGEST
from millrace_router.request.adapter import AdapterVersion

FOLDER = "last-versions"
_VERSION = TypeAdapter(AdapterVersion)


class LastVersions:
    """A file for each source in a folder of the adapter cache, which servers of other models may share."""

    def __init__(self, cache: Path, *, server: Hashable) -> None:
        """`server` is what a version depends on beside its source: the hub, the model's layers and the limits."""
        self._folder = cache / FOLDER
        self._server = server

    def keep(self, source: Hashable, version: AdapterVersion) -> None:
        """Write the version that `source` has now, whole or not at all; raises OSError. Blocks."""
        path = self._path(source)
        partial = path.with_suffix(f".{os.getpid()}")
        self._folder.mkdir(exist_ok=True)
        partial.write_bytes(_VERSION.dump_json(version))
        partial.replace(path)

    def get(self, source: Hashable, name: str) -> AdapterVersion | None:
        """Read the last version of `source`, by its name now; None if there is none. Blocks."""
        try:
            version = _VERSION.validate_json(self._path(source).read_bytes())
        except (OSError, ValidationError):
            return None
        # The digest becomes a path.
        return replace(version, name=name) if DIGEST.fullmatch(version.digest) else None

    def _path(self, source: Hashable) -> Path:
        key = sha256(repr((self._server, source)).encode(errors="surrogatepass"))
        return self._folder / f"{key.hexdigest()}.json"
