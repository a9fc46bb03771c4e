"""Reads the grammars of requests: on the event loop, or in a process of its own what would hold everybody else up.

A thread would be no help: almost all of the work holds the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, TypeVar, TypeVarTuple

import orjson

from millrace_router.errors import Overloaded
from millrace_router.request.grammar import GrammarType, grammar_json, resolved_from
from millrace_router.request.request import Grammar
from millrace_router.tool_calls.call_format import has_grammar
from millrace_router.tool_calls.grammar import chat_grammar, chat_grammar_from
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_format import ToolFormat
from millrace_router.validation.grammar_admission import MAX_WAITING, TOO_MANY
from millrace_router.validation.grammar_process import GrammarProcess

LARGE_BYTES = 1 << 14
"""More are read elsewhere; so many take a fraction of a millisecond, a few with tools."""
NUM_REMEMBERED = 16
"""Large grammars whose reading is remembered, at up to some megabytes each."""

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class GrammarReader:
    """Large ones are read one at a time, in the order they came; one whose request is gone by then is not read."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        """Waits for the process."""
        self._process = GrammarProcess()
        self._call: Callable[..., Any] = lru_cache(NUM_REMEMBERED)(self._process.call)
        self._num_waiting = 0

    async def read(self, grammar: GrammarType) -> Grammar:
        """Do as `grammar.resolved()`; raises Overloaded, too."""
        json = grammar_json(grammar)
        if len(json) <= LARGE_BYTES:
            return grammar.resolved()
        return await self._elsewhere(resolved_from, json)

    async def of_chat(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Tool],
        choice: ToolChoice,
        answer: Grammar | None,
    ) -> Grammar | None:
        """Do as `chat_grammar`; raises Overloaded, too."""
        if answer is None and not has_grammar(tools, choice):
            return None
        json = orjson.dumps(tools)
        if len(json) + (0 if answer is None else len(answer.source)) <= LARGE_BYTES:
            return chat_grammar(tool_format, tools, choice, answer)
        return await self._elsewhere(chat_grammar_from, tool_format, json, choice, answer)

    async def _elsewhere(
        self, function: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(TOO_MANY)
        self._num_waiting += 1
        try:
            call = partial(self._call, function, *arguments)
            result: Result = await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._num_waiting -= 1
        return result
