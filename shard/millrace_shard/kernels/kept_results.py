"""Results of checks and measurements in files, which later starts on this machine read and do not repeat.

A file holds one result. Its name is a digest of what the result depends on: the library of operators, torch, the CPU,
the number of threads, our own code, and what the caller names. A file that is damaged, or that other users can write,
counts as absent. Without the folder `results` in the cache, everything is measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import millrace_shard
from millrace_shard.kernels.build import cache_folder, load_operators, operators_loaded
from millrace_shard.kernels.toolchain import BuildError, check_owners

ENDING = ".result"
MOST_FILES = 512

logger = logging.getLogger(__name__)


class KeptResults:
    """Results by name, each a value that JSON has. Neither reading nor writing fails."""

    def __init__(self, folder: Path | None, versions: Sequence[str]) -> None:
        """Results in `folder` that depend on `versions`; None keeps nothing."""
        self._folder = folder
        self._versions = tuple(versions)

    def get(self, name: str) -> object:
        """The result `name`; None where no earlier start has kept it."""
        if self._folder is None:
            return None
        key = self._key(name)
        path = self._folder / f"{key}{ENDING}"
        try:
            check_owners(self._folder, path)
            digest, _, content = path.read_text(errors="replace").partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, BuildError) as error:
            _warn_once(f"results of earlier starts are not read: {error}")
            return None
        if digest != _digest_of(key, content):
            logger.warning("%s is damaged, and its result is measured again", path)
            with suppress(OSError):
                path.unlink()
            return None
        # The oldest file goes first, and this one has been used.
        with suppress(OSError):
            os.utime(path)
        result: object = json.loads(content)
        return result

    def put(self, name: str, result: object) -> None:
        """Keep `result`."""
        if self._folder is None:
            return
        key, content = self._key(name), json.dumps(result)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_owners(self._folder)
            write_text(self._folder / f"{key}{ENDING}", f"{_digest_of(key, content)}\n{content}")
            files = sorted(self._folder.glob(f"*{ENDING}"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                file.unlink()
        except (OSError, BuildError) as error:
            _warn_once(f"results are not kept for later starts: {error}")

    def passed(self, name: str, check: Callable[[], bool]) -> bool:
        """Whether `check` passes. It does not run where it has passed before; a failure is never kept."""
        if self.get(name) is True:
            return True
        has_passed = check()
        if has_passed:
            self.put(name, True)  # noqa: FBT003
        return has_passed

    def _key(self, name: str) -> str:
        return _digest_of(*self._versions, name)[:32]


def kept_results() -> KeptResults:
    """The results of this machine, in Millrace's cache. Call this on the thread that computes."""
    library, unit = "plain", ""
    if operators_loaded():
        library, unit = load_operators(), torch.ops.millrace.tile_unit()
    capabilities = sorted(torch.cpu.get_capabilities().items())
    cpu = f"{torch.backends.cpu.get_cpu_capability()} {capabilities} {unit}"
    threads = f"{torch.get_num_threads()} threads"
    versions = [library, torch.__version__, cpu, threads, _own_code()]
    try:
        return KeptResults(cache_folder("results"), versions)
    except BuildError:
        return KeptResults(None, versions)


@functools.cache
def _own_code() -> str:
    """A digest of the sources of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(millrace_shard.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _digest_of(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file that other processes see as a whole. Raises OSError."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)
