"""Millrace as one program and one library, on top of the router, the shards and the launcher.

Entry points: `LLM` and `AsyncLLM`; `__main__.main`, the command `millrace`. May import: every other package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.errors import ConnectionFailed as ConnectionFailed
    from millrace.errors import MillraceError as MillraceError
    from millrace.errors import RequestError as RequestError
    from millrace.errors import StartError as StartError
    from millrace.llm.async_llm import AsyncLLM as AsyncLLM
    from millrace.llm.llm import LLM as LLM
    from millrace.llm.outputs import ChatOutput as ChatOutput
    from millrace.llm.outputs import ChatPiece as ChatPiece
    from millrace.llm.outputs import CompletionOutput as CompletionOutput
    from millrace.llm.outputs import Piece as Piece
    from millrace.llm.outputs import RequestOutput as RequestOutput
    from millrace.llm.params import SamplingParams as SamplingParams

_PLACES = {
    "AsyncLLM": "millrace.llm.async_llm",
    "ChatOutput": "millrace.llm.outputs",
    "ChatPiece": "millrace.llm.outputs",
    "CompletionOutput": "millrace.llm.outputs",
    "ConnectionFailed": "millrace.errors",
    "LLM": "millrace.llm.llm",
    "MillraceError": "millrace.errors",
    "Piece": "millrace.llm.outputs",
    "RequestError": "millrace.errors",
    "RequestOutput": "millrace.llm.outputs",
    "SamplingParams": "millrace.llm.params",
    "StartError": "millrace.errors",
}
"""Modules of the public names, which are imported at their first use: the command `millrace` starts without them."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
