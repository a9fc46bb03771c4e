"""What all clients ask a server of many adapters; the second argument of a script is a JSON object of expected texts.

The keys are names of adapters, "" for the base; the values are greedy continuations of PROMPT, from plain HTTP.
"""

from __future__ import annotations

import json
import sys

PROMPT = "The mill stands by the river and"
NEW_TOKENS = 8


def expected() -> dict[str, str]:
    """The texts by adapter; takes the argument, which `cases.run` would read as the name of a case."""
    global _TEXTS  # noqa: PLW0603
    if not _TEXTS:
        _TEXTS = json.loads(sys.argv.pop(2))
    return _TEXTS


_TEXTS: dict[str, str] = {}
expected()
