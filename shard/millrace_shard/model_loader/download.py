"""Files from the hub into its cache: retried, resumed, with progress as plain lines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from millrace_shard.model_loader.checkpoint_files import (
    INDEX,
    RemoteFile,
    metadata_files,
    weight_files,
)

TRIES = 5
FIRST_WAIT_SECONDS = 1.0
REPORT_SECONDS = 5.0
MIB = 1024 * 1024
# The hub client's own HTTP library is whatever its error derives from; all of its failures may pass.
TRANSIENT: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
FINAL_STATUSES = frozenset({400, 401, 403, 404, 410, 451})

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Where the hub is, who asks, and where files are kept."""

    endpoint: str
    token: str | None
    cache: Path
    wait: Callable[[float], None] = field(default=time.sleep)


def download_snapshot(model_id: str, *, revision: str | None, access: HubAccess) -> Path:
    """Fetch what is missing of one commit and return its snapshot folder.

    Small files come before weights, so a snapshot with weights has all the rest. Raises the hub client's errors
    once `TRIES` attempts at a file have failed, or at once for those that no retry can mend.
    """
    api = HfApi(endpoint=access.endpoint, token=access.token)
    info = _retried(
        lambda: api.model_info(model_id, revision=revision, files_metadata=True),
        what=model_id,
        wait=access.wait,
    )
    files = [RemoteFile(sibling.rfilename, sibling.size or 0) for sibling in info.siblings or ()]

    def fetch(chosen: Sequence[RemoteFile]) -> list[Path]:
        return [download_file(model_id, file, revision=revision, access=access) for file in chosen]

    small = fetch(metadata_files(files))
    index = next((path.read_bytes() for path in small if path.name == INDEX), None)
    weights = weight_files(files, index=index)
    blobs = access.cache / f"models--{model_id.replace('/', '--')}" / "blobs"
    with _Progress(weights, blobs):
        return fetch(weights)[0].parent


def download_file(
    model_id: str, file: RemoteFile, *, revision: str | None, access: HubAccess
) -> Path:
    """One file, by revision name, so that the cache also learns which commit the name stands for."""
    return Path(
        _retried(
            lambda: hf_hub_download(
                model_id,
                file.path,
                revision=revision,
                cache_dir=access.cache,
                endpoint=access.endpoint,
                token=access.token,
            ),
            what=file.path,
            wait=access.wait,
        )
    )


def _retried(attempt: Callable[[], T], *, what: str, wait: Callable[[float], None]) -> T:
    """Call until it succeeds, waiting twice as long each time; the last failure is raised."""
    for number in range(1, TRIES):
        try:
            return attempt()
        except TRANSIENT as error:
            if _is_final(error):
                raise
            seconds = FIRST_WAIT_SECONDS * 2 ** (number - 1)
            log.warning(
                "%s: %s; try %d of %d in %g s", what, first_line(error), number + 1, TRIES, seconds
            )
            wait(seconds)
    return attempt()


def first_line(error: BaseException) -> str:
    """The hub client's messages go on with advice for Python programmers."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _is_final(error: BaseException) -> bool:
    kinds = (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError)
    if isinstance(error, kinds):
        return True
    if isinstance(error, HfHubHTTPError):
        return getattr(error.response, "status_code", None) in FINAL_STATUSES
    return isinstance(error, EntryNotFoundError) and not isinstance(error, FileNotFoundError)


def progress_line(there: int, total: int, *, new: int, seconds: float) -> str:
    """Bytes `there` of `total`, and how long the rest takes at the rate of the `new` ones in `seconds`."""
    left = f"{(total - there) * seconds / new:.0f} s left" if new > 0 else "waiting for data"
    return f"downloaded {there / MIB:.0f} of {total / MIB:.0f} MiB, {left}"


class _Progress:
    """Logs files, bytes and seconds left while the cache's blobs grow; a context manager around the download."""

    def __init__(self, files: Sequence[RemoteFile], blobs: Path) -> None:
        self._files = files
        self._blobs = blobs
        self._total = sum(file.size for file in files)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, name="download-progress", daemon=True)

    def __enter__(self) -> None:
        log.info("downloading %d weight files, %.0f MiB", len(self._files), self._total / MIB)
        self._started = time.monotonic()
        self._first_bytes = self._bytes()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._done.wait(REPORT_SECONDS):
            there = min(self._bytes(), self._total)
            seconds = time.monotonic() - self._started
            log.info(
                "%s",
                progress_line(there, self._total, new=there - self._first_bytes, seconds=seconds),
            )

    def _bytes(self) -> int:
        """Bytes of the weights on disk, unfinished files included; small files are not worth telling apart."""
        total = 0
        for path in self._blobs.glob("*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                # It was renamed between listing and asking.
                continue
        return total
