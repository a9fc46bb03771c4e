"""Measures what a hostile client costs others: `python -m bench.router --parts schemas bodies texts`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

from bench.router.hostile_schemas import SHAPES, largest
from bench.router.rig import rig
from millrace_router.errors import ToolError, ValidationError
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.parsing.call_format import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice

GOAL_SECONDS = {"schemas": 0.2, "bodies": 0.1, "texts": 0.5}
"""The longest time of a schema, of `/livez` beside bodies, and of a short request beside long texts."""
NUM_BODIES = 40
BODY_BYTES = 1_900_000
NUM_TEXTS = 8
PROBE_SECONDS = 0.01
TOOL_FORMATS = ("hermes", "qwen3_coder", "gemma4")
TURN = {"role": "user", "content": "a" * 400}
SHORT = {"inputs": "hello", "parameters": {"max_new_tokens": 1}}


def bodies_of(size: int) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield a name, a path, and a body of about `size` bytes for each part of the router that reads bodies."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    turns = [TURN] * min(4096, size // 450)
    tool = {"name": "f", "description": "x" * 200, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": tool}] * (size // 320)
    yield "one text", completions, {"prompt": "a " * (size // 2)}
    yield "unknown fields", completions, {"prompt": "a", **{f"f{i}": 1 for i in range(size // 14)}}
    yield "token ids", completions, {"prompt": [7] * (size // 3)}
    yield "texts", completions, {"prompt": ["a"] * (size // 5)}
    yield (
        "biases",
        completions,
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(size // 14)}},
    )
    yield "quotes", completions, {"prompt": "a", "user": '"[' * (size // 4)}
    yield "stop strings", "/generate", {"inputs": "a", "parameters": {"stop": ["ab"] * (size // 6)}}
    yield "turns", chat, {"messages": turns}
    yield (
        "parts",
        chat,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a" * 60}] * (size // 100)}
            ]
        },
    )
    yield "control tokens", chat, {"messages": [{**TURN, "content": "<|im_end|>" * (size // 10)}]}
    yield "tools", chat, {"messages": [TURN], "tools": tools}
    yield (
        "a schema",
        chat,
        {
            "messages": [TURN],
            "response_format": {
                "type": "json_object",
                "schema": {"enum": ["abcdefgh"] * (size // 12)},
            },
        },
    )
    yield "Anthropic's turns", "/v1/messages", {"model": "m", "max_tokens": 5, "messages": turns}
    yield "items", "/v1/responses", {"input": turns}


@dataclass(frozen=True, slots=True)
class Beside:
    """The waits of other clients beside a flood."""

    seconds: float
    """Duration of the flood."""
    waits: list[float]
    """Seconds of each request of the others."""
    statuses: Counter[int]
    """The flood's answers."""

    def row(self, name: str, goal: float) -> str:
        """A row of the table."""
        worst = max(self.waits)
        mark = "" if worst <= goal else " (missed)"
        answers = ", ".join(f"{count} x {status}" for status, count in self.statuses.items())
        return (
            f"| {name} | {self.seconds:.1f} | {1e3 * median(self.waits):.0f} "
            f"| **{1e3 * worst:.0f}**{mark} | {answers} |"
        )


def schemas(_: argparse.Namespace) -> None:
    """Print the time of the largest schema of each shape, as a form of the answer and as parameters of a tool."""
    print(f"\nschemas of the largest size, ms; the goal is {1e3 * GOAL_SECONDS['schemas']:.0f}")
    print(
        "| schema | answer | "
        + " | ".join(TOOL_FORMATS)
        + " |\n|---|--:|"
        + "--:|" * len(TOOL_FORMATS)
    )
    for name, shape in SHAPES.items():
        schema = largest(shape)
        reads: list[Callable[[], object]] = [RawGrammar(GrammarKind.JSON_SCHEMA, schema).read]
        reads += [partial(_grammar_of_tool, schema, one) for one in TOOL_FORMATS]
        cells = (_cell(min(_seconds(one) for _ in range(3))) for one in reads)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def _grammar_of_tool(schema: dict[str, Any], name: str) -> object:
    parameters = {"type": "object", **schema}
    tool = Tool(name="f", description=None, parameters=parameters, strict=False)
    return chat_grammar(format_of(None, name), [tool], ToolChoice("required"), None)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    with suppress(ValidationError, ToolError):
        call()
    return time.perf_counter() - began


def _cell(seconds: float) -> str:
    mark = "" if seconds <= GOAL_SECONDS["schemas"] else " (missed)"
    return f"{1e3 * seconds:.0f}{mark}"


def bodies(options: argparse.Namespace) -> None:
    """Print the longest wait for `/livez` beside 40 large bodies at a time, by kind of body."""
    goal = GOAL_SECONDS["bodies"]
    print(
        f"\n/livez beside {NUM_BODIES} bodies of {BODY_BYTES / 1e6} MB; the goal is {1e3 * goal:.0f} ms"
    )
    print("| bodies | s | median ms | longest ms | answers |\n|---|--:|--:|--:|---|")
    with rig(options) as at:
        for name, path, body in bodies_of(BODY_BYTES):
            data = json.dumps(body, separators=(",", ":")).encode()
            flood = partial(_post, at.port, path, data)
            beside = _beside(flood, NUM_BODIES, partial(_get, at.port, "/livez"))
            print(beside.row(name, goal), flush=True)


def texts(options: argparse.Namespace) -> None:
    """Print how long a short generation takes beside texts that are tokenized or estimated for their own sake."""
    goal = GOAL_SECONDS["texts"]
    print(
        f"\na generation of one token beside {NUM_TEXTS} clients with long texts; the goal is {1e3 * goal:.0f} ms"
    )
    print("| route | s | median ms | longest ms | answers |\n|---|--:|--:|--:|---|")
    data = json.dumps({"inputs": "word " * (BODY_BYTES // 5)}).encode()
    short = json.dumps(SHORT).encode()
    with rig(options) as at:
        for path in ("/v1/estimate", "/tokenize"):
            flood = partial(_post, at.port, path, data)
            one = partial(_post, at.port, "/generate", short)
            beside = _beside(flood, 4 * NUM_TEXTS, one, workers=NUM_TEXTS)
            print(beside.row(path, goal), flush=True)


def _beside(
    flood: Callable[[], int], count: int, probe: Callable[[], object], *, workers: int = NUM_BODIES
) -> Beside:
    """Call `flood` `count` times in threads, and `probe` again and again meanwhile.

    The flood comes from a process of the lowest priority: its clients would have processors of their own.
    """
    waits = list[float]()
    began = time.perf_counter()
    with ProcessPoolExecutor(
        1, mp_context=get_context("fork"), initializer=os.nice, initargs=(19,)
    ) as clients:
        answers = clients.submit(_flood, flood, count, workers)
        while not waits or not answers.done():
            start = time.perf_counter()
            probe()
            waits.append(time.perf_counter() - start)
            time.sleep(PROBE_SECONDS)
    return Beside(time.perf_counter() - began, waits, answers.result())


def _flood(call: Callable[[], int], count: int, workers: int) -> Counter[int]:
    with ThreadPoolExecutor(workers) as pool:
        return Counter(pool.map(lambda _: call(), range(count)))


def _post(port: int, path: str, data: bytes) -> int:
    """Post JSON on a connection of its own; the status."""
    return _status(port, "POST", path, data, {"content-type": "application/json"})


def _get(port: int, path: str) -> int:
    return _status(port, "GET", path)


def _status(port: int, *request: Any) -> int:  # noqa: ANN401
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(*request)
        answer = connection.getresponse()
        answer.read()
        return answer.status
