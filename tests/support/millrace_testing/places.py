"""Places in a program where a test lets a process of it die.

While the file MILLRACE_TEST_TORN exists, which names a place, the first process that comes there removes it and dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_at(place: str) -> bool:
    """Whether this process is to die at `place`; the next one is not."""
    path = Path(os.environ["MILLRACE_TEST_TORN"])
    try:
        if path.read_text() != place:
            return False
        path.unlink()
    except OSError:
        return False
    return True


def always(*_: object) -> bool:
    """Whether a method that is called is the place: it is."""
    return True


def wrap(
    owner: type,
    name: str,
    place: str,
    is_there: Callable[..., object],
    die: Callable[..., None],
    *,
    is_after: bool = False,
) -> None:
    """Let a process that is to die at `place` `die` where `is_there`, before the method `name` or after it."""
    method = vars(owner)[name]

    def come_by(*arguments: Any) -> None:
        if is_there(*arguments) and is_at(place):
            die(*arguments)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not is_after:
            come_by(*arguments)
        result = method(*arguments, **options)
        if is_after:
            come_by(*arguments)
        return result

    setattr(owner, name, wrapped)


def die(*_: object) -> None:
    """End as by a kill from outside."""
    os.kill(os.getpid(), signal.SIGKILL)
