"""Downloads from the hub into its cache: retried, resumed, and with progress in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
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
    IncompleteModelError,
    RemoteFile,
    metadata_files,
    weight_files,
)
from millrace_shard.model_loader.download_progress import (
    MIB,
    REPORT_SECONDS,
    DownloadProgress,
    folder_bytes,
)
from millrace_shard.model_loader.hub_connection import check_connection

TRIES = 5
FIRST_WAIT_SECONDS = 1.0
# All errors of the hub client's HTTP library, found through the bases of its error, may be temporary.
TRANSIENT: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
FINAL_STATUSES = frozenset({400, 401, 403, 404, 410, 451})

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """The endpoint, token and cache folder of the hub, and how its downloads wait and report."""

    endpoint: str
    token: str | None
    cache: Path
    wait: Callable[[float], None] = field(default=time.sleep)
    """Waits between attempts."""
    progress_seconds: float = REPORT_SECONDS
    """Between two lines about progress."""


def download_snapshot(
    model_id: str, *, revision: str | None, access: HubAccess, needs_weights: bool = True
) -> Path:
    """Download the missing files of one commit, without `needs_weights` only the small ones; returns their folder.

    Weights are downloaded last, so a snapshot with weights is complete. Raises IncompleteModelError,
    PickledWeightsError, or the hub client's errors after `TRIES` attempts, at once for errors that a retry cannot fix.
    """
    return _retried(
        lambda: _download(model_id, revision, access, needs_weights=needs_weights),
        what=model_id,
        access=access,
    )


def _download(
    model_id: str, revision: str | None, access: HubAccess, *, needs_weights: bool
) -> Path:
    def fetch(files: Sequence[RemoteFile]) -> Path:
        # Files are requested by the name of the revision, so that the cache maps the name to its commit.
        folder = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=access.cache,
            endpoint=access.endpoint,
            token=access.token,
            allow_patterns=[escape(file.path) for file in files],
        )
        return Path(folder)

    api = HfApi(endpoint=access.endpoint, token=access.token)
    info = api.model_info(model_id, revision=revision, files_metadata=True)
    files = [RemoteFile(sibling.rfilename, sibling.size or 0) for sibling in info.siblings or ()]
    small = metadata_files(files)
    if not small:
        raise IncompleteModelError("there is no configuration and no tokenizer")
    folder = fetch(small)
    if not needs_weights:
        return folder
    index = folder / INDEX
    weights = weight_files(files, index=index.read_bytes() if index.is_file() else None)
    blobs = access.cache / f"models--{model_id.replace('/', '--')}" / "blobs"
    total = sum(file.size for file in weights)
    what = "1 weight file" if len(weights) == 1 else f"{len(weights)} weight files"
    log.info("downloading %s, %.0f MiB", what, total / MIB)
    # The small files are negligible.
    with DownloadProgress(
        total, lambda: folder_bytes(blobs, "*"), interval=access.progress_seconds
    ):
        return fetch(weights)


def download_file(model_id: str, name: str, *, revision: str | None, access: HubAccess) -> Path:
    """Download one file. Raises as `download_snapshot`."""
    return Path(
        _retried(
            lambda: hf_hub_download(
                model_id,
                name,
                revision=revision,
                cache_dir=access.cache,
                endpoint=access.endpoint,
                token=access.token,
            ),
            what=name,
            access=access,
        )
    )


def _retried(attempt: Callable[[], T], *, what: str, access: HubAccess) -> T:
    """Call `attempt` until it succeeds, with doubled waits in between; the last error is raised.

    The hub's client resumes files, but gives up at the first failed description of a repository.
    """
    check_connection(access.endpoint)
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
            access.wait(seconds)
    return attempt()


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the hub client adds advice for Python programmers below it."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _is_final(error: BaseException) -> bool:
    kinds = (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError)
    if isinstance(error, kinds):
        return True
    if isinstance(error, HfHubHTTPError):
        return getattr(error.response, "status_code", None) in FINAL_STATUSES
    return isinstance(error, EntryNotFoundError) and not isinstance(error, FileNotFoundError)
