"""The adapter cache on disk, `<cache>/<digest>/adapter.safetensors`: how large it is, and which versions leave it."""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

ADAPTER_FILE = "adapter.safetensors"
PARTIAL_PREFIX = ".partial-"
"""Prefix of folders that are being written; the process id of the writer and another dash follow."""
DIGEST = re.compile(r"[0-9a-f]{64}")


KEPT_SECONDS = 5.0
"""A version that was requested this recently may be on its way into use."""


class AdapterCache:
    """Versions by digest, least recently used first; `open`, `touch` and the deletions look at the disk."""

    def __init__(self, folder: Path, *, max_bytes: int, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._clock = clock
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._last_use: dict[str, float] = {}

    def open(self) -> None:
        """Find the versions of an earlier process, and remove what it did not finish; no fetch may be running."""
        self.folder.mkdir(parents=True, exist_ok=True)
        versions = []
        for path in self.folder.iterdir():
            if path.name.startswith(PARTIAL_PREFIX):
                shutil.rmtree(path, ignore_errors=True)
            elif DIGEST.fullmatch(path.name) and (path / ADAPTER_FILE).is_file():
                status = (path / ADAPTER_FILE).stat()
                versions.append((status.st_mtime, path.name, status.st_size))
        self._sizes = OrderedDict((digest, size) for _, digest, size in sorted(versions))

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def size_of(self, digests: Collection[str]) -> int:
        """Size of the `digests` that are in the cache."""
        return sum(self._sizes.get(digest, 0) for digest in set(digests))

    def use(self, digest: str, num_bytes: int) -> None:
        """Count a version as the most recently used."""
        self._sizes[digest] = num_bytes
        self._sizes.move_to_end(digest)
        self._last_use[digest] = self._clock()

    def touch(self, digest: str) -> bool:
        """Whether the version is in the cache, which counts as a use; one whose file was removed is not."""
        num_bytes = self._sizes.get(digest)
        if num_bytes is None or not (self.folder / digest / ADAPTER_FILE).is_file():
            self.forget(digest)
            return False
        self.use(digest, num_bytes)
        return True

    def forget(self, digest: str) -> None:
        """Stop counting a version; its files stay."""
        self._sizes.pop(digest, None)
        self._last_use.pop(digest, None)

    def evict(self, needed: Collection[str]) -> list[str]:
        """Stop counting the least recently used versions, but none of `needed`, until the rest fits.

        The caller deletes the versions that are returned.
        """
        excess, now, victims = self.num_bytes - self.max_bytes, self._clock(), []
        for digest, size in list(self._sizes.items()):
            if excess <= 0:
                break
            last_use = self._last_use.get(digest)
            is_recent = last_use is not None and now < last_use + KEPT_SECONDS
            if digest not in needed and not is_recent:
                self.forget(digest)
                victims.append(digest)
                excess -= size
        return victims

    def delete_partials(self, pid: int) -> None:
        """Remove what a process that has ended did not finish."""
        for path in self.folder.glob(f"{PARTIAL_PREFIX}{pid}-*"):
            shutil.rmtree(path, ignore_errors=True)

    def delete(self, digests: Sequence[str]) -> None:
        """Remove the files of versions that `evict` or `forget` took out."""
        for digest in digests:
            shutil.rmtree(self.folder / digest, ignore_errors=True)
