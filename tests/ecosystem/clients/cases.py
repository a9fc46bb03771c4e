"""Runs the functions of a client script, each a case; prints a line for each and fails if any did."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

Error = TypeVar("Error", bound=Exception)

PROMPT = "The mill stands by the river and"
MESSAGES = [{"role": "user", "content": "What does a mill do?"}]


def raised(kind: type[Error], call: Callable[[], object]) -> Error:
    """The error of `kind` that the call ends in; AssertionError when it does not."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def run(cases: Sequence[Callable[[str], None]]) -> None:
    """Call every case with the base URL that is the script's only argument."""
    base_url = sys.argv[1]
    failed = 0
    for case in cases:
        try:
            case(base_url)
        except Exception:  # noqa: BLE001
            failed += 1
            sys.stdout.write(f"FAILED {case.__name__}\n{traceback.format_exc()}\n")
        else:
            sys.stdout.write(f"passed {case.__name__}\n")
    sys.exit(1 if failed else 0)
