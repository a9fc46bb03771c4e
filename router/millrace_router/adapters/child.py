"""Runs the fetching process once."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

COMMAND = (sys.executable, "-P", "-m", "millrace_router.adapters.fetching")
PASSED_ON = (
    *("PATH", "LANG", "LC_ALL", "TMPDIR"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)
"""Variables for programs, modules, certificates and the way to the network; none has a token."""


class ChildError(Exception):
    """The fetching process was killed, took too long, or has a defect; `pid` is 0 if it did not start."""

    def __init__(self, message: str, *, pid: int = 0) -> None:
        super().__init__(message)
        self.pid = pid


async def run_child(
    request: Mapping[str, Any], *, timeout_seconds: float, command: Sequence[str] = COMMAND
) -> dict[str, Any]:
    """Give the process its request and return its answer; it is killed when this call ends first.

    Raises:
        ChildError: the process did not answer.

    """
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # Each thread of numpy's linear algebra, which is not used, would reserve memory.
    environment |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        with _memory(orjson.dumps(request)) as stdin:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                cwd="/",
            )
    except OSError as error:
        raise ChildError(
            f"the fetching process did not start: {os.strerror(error.errno or 0)}"
        ) from None
    try:
        async with asyncio.timeout(timeout_seconds):
            text, _ = await process.communicate()
    except TimeoutError:
        raise ChildError("the fetch took too long", pid=process.pid) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = f"the fetching process was killed, status {process.returncode}"
        raise ChildError(reason, pid=process.pid)
    try:
        answer = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ChildError("the fetching process did not answer") from None
    if answer.get("error") == "broken":
        raise ChildError(f"the fetching process failed: {answer['reason']}")
    return dict(answer)


@contextmanager
def _memory(content: bytes) -> Iterator[int]:
    """A file with `content`, open at its start: in memory on Linux, elsewhere a temporary file.

    uvloop raises RuntimeError from `communicate` when the other end of a pipe for stdin is closed early.
    """
    if sys.platform == "linux":
        file = os.memfd_create("request")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    try:
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)
