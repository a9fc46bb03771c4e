"""Downloads from the hub into its cache: resumed, and with progress in the log."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from glob import escape
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from millrace_shard.weights.checkpoint_files import (
    INDEX,
    IncompleteModelError,
    RemoteFile,
    gguf_files,
    metadata_files,
    refuse_other_kinds,
    weight_files,
)
from millrace_shard.weights.gguf.file_names import lines_aside, reason_aside, tags

CONNECT_SECONDS = 5.0
PORTS = {"http": 80, "https": 443}

log = logging.getLogger(__name__)


class HubUnreachableError(ConnectionError):
    """The host of the hub cannot be resolved, or does not answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}: name a folder, set HF_ENDPOINT to a hub that can be reached, or HF_HUB_OFFLINE=1 to use only"
            " the cache"
        )


@cache
def check_connection(endpoint: str) -> None:
    """Connect to the hub's host, unless a proxy is set, which may reach it. Raises HubUnreachableError.

    It does so once in the life of a process: what fails later may be a short disturbance.

    The hub's client would repeat a failed request for minutes, since it cannot tell a wrong address from that.
    """
    log.info("asking %s", endpoint)
    url = urlsplit(endpoint)
    host, scheme = url.hostname or "", url.scheme or "https"
    proxies = getproxies()
    if (scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return
    try:
        address = host, url.port or PORTS.get(scheme, 443)
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except socket.gaierror:
        raise HubUnreachableError(f"the name {host} cannot be resolved") from None
    except TimeoutError:
        raise HubUnreachableError(f"{host} does not answer within {CONNECT_SECONDS:g} s") from None
    except OSError as error:
        raise HubUnreachableError(f"{host} cannot be reached: {error.strerror or error}") from None


REPORT_SECONDS = 5.0
MIB = 1024 * 1024


def progress_line(there: int, total: int, *, new: int, seconds: float) -> str:
    """A log line: `there` of `total` bytes, and the time left at the rate of `new` bytes in `seconds`."""
    left = f"{(total - there) * seconds / new:.0f} s left" if new > 0 else "waiting for data"
    return f"downloaded {there / MIB:.0f} of {total / MIB:.0f} MiB, {left}"


def folder_bytes(folder: Path, pattern: str) -> int:
    total = 0
    for path in folder.glob(pattern):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            # The file was renamed after it was listed.
            continue
    return total


class DownloadProgress:
    """A context manager around a download that logs bytes and seconds left every `interval` seconds.

    `measure` returns the bytes on disk. The records have the field `fraction`, from which the launcher draws a bar.
    """

    def __init__(self, total: int, measure: Callable[[], int], *, interval: float) -> None:
        self._total = total
        self._measure = measure
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, name="download-progress", daemon=True)

    def __enter__(self) -> None:
        self._started = time.monotonic()
        self._first_bytes = self._measure()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._done.wait(self._interval):
            there = min(self._measure(), self._total)
            seconds = time.monotonic() - self._started
            log.info(
                "%s",
                progress_line(there, self._total, new=there - self._first_bytes, seconds=seconds),
                extra={"fields": {"fraction": round(there / max(1, self._total), 4)}},
            )


TRIES = 5
FIRST_WAIT_SECONDS = 1.0
# All errors of the hub client's HTTP library, found through the bases of its error, may be temporary.
TRANSIENT: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
FINAL_STATUSES = frozenset({400, 401, 403, 404, 410, 451})

T = TypeVar("T")


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
    model_id: str,
    *,
    revision: str | None,
    access: HubAccess,
    needs_weights: bool = True,
    tag: str | None = None,
    may_be_gguf: bool = True,
    needs_mmproj: bool = True,
) -> Path:
    """Download the missing files of one commit, without `needs_weights` only the small ones; returns their folder.

    With a `tag`, or if there are GGUF files in place of safetensors and `may_be_gguf`, it is the path of a GGUF file,
    which is downloaded as a whole, since it has configuration and tokenizer as well, and with `needs_mmproj` together
    with the file that has its encoder of images. Weights are downloaded last, so a
    snapshot with weights is complete. Raises IncompleteModelError, PickledWeightsError, or the hub client's errors
    after `TRIES` attempts, at once for errors that a retry cannot fix.
    """
    choose = partial(gguf_files, tag=tag, needs_mmproj=needs_mmproj)
    return _retried(
        lambda: _download(
            model_id,
            revision,
            access,
            needs_weights=needs_weights,
            choose=choose if may_be_gguf else lambda _: None,
        ),
        what=model_id,
        access=access,
    )


def _download(
    model_id: str,
    revision: str | None,
    access: HubAccess,
    *,
    needs_weights: bool,
    choose: Callable[[Sequence[RemoteFile]], list[RemoteFile] | None],
) -> Path:
    """The folder of the snapshot, or the first of the GGUF files that `choose` returns of all files."""

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
    if (parts := choose(files)) is not None:
        _log_choice(model_id, parts, [file.path for file in files])
        # A snapshot with the model counts as complete, so its encoder comes first.
        if encoder := [part for part in parts if reason_aside(part.path) is not None]:
            fetch(encoder)
        return _with_progress(fetch, parts, model_id, access) / parts[0].path
    small = metadata_files(files)
    if not small:
        raise IncompleteModelError("the configuration and the tokenizer are missing")
    folder = fetch(small)
    refuse_other_kinds(folder)
    if not needs_weights:
        return folder
    index = folder / INDEX
    weights = weight_files(files, index=index.read_bytes() if index.is_file() else None)
    return _with_progress(fetch, weights, model_id, access)


def _log_choice(model_id: str, parts: Sequence[RemoteFile], names: Sequence[str]) -> None:
    name, used = parts[0].path, {part.path for part in parts}
    others = [tag for tag in tags(names) if tag not in tags([name])]
    log.info(
        "%s: serving %s%s",
        model_id,
        name,
        f"; {model_id}:TAG chooses another one, TAG being one of {', '.join(others)}"
        if others
        else "",
    )
    for line in lines_aside(other for other in names if other not in used):
        log.info("%s", line)


def _with_progress(
    fetch: Callable[[Sequence[RemoteFile]], Path],
    weights: Sequence[RemoteFile],
    model_id: str,
    access: HubAccess,
) -> Path:
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
