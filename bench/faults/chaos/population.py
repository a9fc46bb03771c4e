"""The requests of a campaign: every route, streams and whole answers, greedy and seeded, long and short."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.faults.adapters import CHANGING, STEADY
from bench.faults.streams import mixed_bodies

Json = dict[str, Any]

TOPICS = ("prefill", "decode", "a KV cache", "the router", "a shard", "a block", "a step")
TEXT = (
    "the router plans a step and the shard computes it while tokens stream to many clients "
    "each block holds keys and values of a prompt that others may share until it is evicted"
)
WORDS = TEXT.split()
STOPS = ("the", ".", " a", "and", "token")
NUM_PREAMBLES = 4
"""Shared beginnings of prompts, which use the prefix cache."""
SHARE_LONG = 0.05
SHARE_ADAPTED = 0.5
SHARE_MERGED = 0.05
REGISTERED = frozenset({*STEADY, *CHANGING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request; its answers are the same except for ids, times and cached tokens."""

    name: str
    path: str
    body: Mapping[str, Any]
    adapter: str = ""
    """The name of its adapter, if it has one."""

    @property
    def streams(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return self.path == "/generate_stream" or bool(self.body.get("stream"))

    @property
    def is_openai(self) -> bool:
        """Whether its path is one of OpenAI's."""
        return self.path.startswith("/v1/")


def population(seed: int, *, size: int, adapters: Sequence[str] = ()) -> list[Request]:
    """`size` requests from a seed; routes take turns, everything else is random.

    Half of them have one of `adapters`; a few of the others have a sum of two of `STEADY`.
    """
    drawing = random.Random(f"population {seed}")
    preambles = [_words(drawing, 40 + 30 * i) for i in range(NUM_PREAMBLES)]
    requests = []
    for i in range(size):
        make, path, streams = ROUTES[i % len(ROUTES)]
        body = make(drawing, _prompt(drawing, preambles))
        if streams and path != "/generate_stream":
            body["stream"] = True
        if not streams and path == "/generate" and drawing.random() < 0.3:
            body["parameters"]["decoder_input_details"] = True
        request = Request(name=f"{i} {path}", path=path, body=body)
        requests.append(_adapted(drawing, request, adapters) if adapters else request)
    return requests


def mixed_streams(size: int, *, longest: int) -> list[Request]:
    """`size` streams of all kinds of sampling, of `longest` tokens or less, down to half as many."""
    return [
        Request(name=f"{number} stream", path="/generate_stream", body=body)
        for number, body in enumerate(mixed_bodies(size, longest=longest))
    ]


def greedy_streams(
    seed: int,
    *,
    count: int,
    new_tokens: int,
    top_tokens: int = 0,
    name: str = "long",
    adapter: str = "",
) -> list[Request]:
    """Streams of exactly `new_tokens` tokens, for faults that need long streams."""
    drawing = random.Random(f"{name} {adapter} {seed}")
    parameters = {
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "details": True,
        "top_n_tokens": top_tokens,
        **(named(adapter) if adapter else {}),
    }
    return [
        Request(
            name=f"{name} {adapter} {i}",
            path="/generate_stream",
            body={"inputs": _words(drawing, 20), "parameters": parameters},
            adapter=adapter,
        )
        for i in range(count)
    ]


def named(adapter: str) -> Json:
    """Fields that name any adapter in a folder; the second one changes the form of the answer."""
    return {"adapter_id": adapter, "adapter_source": "local"}


def _adapted(drawing: random.Random, request: Request, adapters: Sequence[str]) -> Request:
    """The same request, with an adapter in half of all cases."""
    kind = drawing.random()
    if kind < SHARE_ADAPTED:
        adapter = drawing.choice(adapters)
        fields = {"adapter_id": adapter} if adapter in REGISTERED else named(adapter)
        if request.is_openai:
            fields["model"] = fields.pop("adapter_id")
    elif kind < SHARE_ADAPTED + SHARE_MERGED and not request.is_openai:
        ids, weights = drawing.sample(list(STEADY), k=2), [drawing.uniform(0.2, 1), 0.5]
        recipe = {"ids": ids, "weights": weights, "merge_strategy": "cat"}
        adapter, fields = "", {"merged_adapters": recipe}
    else:
        return request
    body = dict(request.body)
    if request.is_openai:
        body |= fields
    else:
        body["parameters"] = body["parameters"] | fields
    return replace(request, body=body, adapter=adapter)


def _words(drawing: random.Random, count: int) -> str:
    return " ".join(drawing.choices(WORDS, k=count))


def _prompt(drawing: random.Random, preambles: list[str]) -> str:
    question = f"What is {drawing.choice(TOPICS)}?"
    kind = drawing.random()
    if kind < 0.4:
        return question
    if kind < 0.7:
        return f"{drawing.choice(preambles)}. {question}"
    return f"{_words(drawing, drawing.randint(5, 150))}. {question}"


def _new_tokens(drawing: random.Random) -> int:
    return drawing.randint(100, 160) if drawing.random() < SHARE_LONG else drawing.randint(1, 50)


def _native(drawing: random.Random, prompt: str) -> Json:
    parameters: Json = {"max_new_tokens": _new_tokens(drawing), "details": True}
    if drawing.random() < 0.5:
        parameters |= {
            "do_sample": True,
            "seed": drawing.getrandbits(63),
            "temperature": drawing.choice((0.5, 0.9, 1.3)),
        }
        if drawing.random() < 0.5:
            parameters |= {"top_k": drawing.randint(5, 80), "top_p": 0.9}
        if drawing.random() < 0.2:
            parameters["typical_p"] = 0.8
    if drawing.random() < 0.3:
        parameters |= {"repetition_penalty": 1.2, "frequency_penalty": 0.1}
    if drawing.random() < 0.3:
        parameters["stop"] = drawing.sample(STOPS, k=2)
    if drawing.random() < 0.2:
        parameters["top_n_tokens"] = drawing.randint(1, 5)
    if drawing.random() < 0.2:
        parameters["return_full_text"] = True
    parameters["ignore_eos"] = drawing.random() < 0.6
    return {"inputs": prompt, "parameters": parameters}


def _openai(drawing: random.Random) -> Json:
    body: Json = {"model": "tgi", "max_tokens": _new_tokens(drawing), "temperature": 0}
    if drawing.random() < 0.5:
        body |= {"temperature": 0.9, "top_p": 0.95, "seed": drawing.getrandbits(63)}
    if drawing.random() < 0.3:
        body |= {"frequency_penalty": 0.3, "presence_penalty": 0.2}
    if drawing.random() < 0.3:
        body["stop"] = drawing.sample(STOPS, k=2)
    if drawing.random() < 0.3:
        body["stream_options"] = {"include_usage": True}
    body["ignore_eos"] = drawing.random() < 0.6
    return body


def _chat(drawing: random.Random, prompt: str) -> Json:
    body = _openai(drawing) | {"messages": [{"role": "user", "content": prompt}]}
    if drawing.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": drawing.randint(1, 5)}
    return body


def _completion(drawing: random.Random, prompt: str) -> Json:
    several = drawing.random() < 0.2
    return _openai(drawing) | {"prompt": [prompt, f"{prompt} And then?"] if several else prompt}


ROUTES: tuple[tuple[Callable[[random.Random, str], Json], str, bool], ...] = (
    (_native, "/generate_stream", True),
    (_native, "/generate", False),
    (_chat, "/v1/chat/completions", True),
    (_completion, "/v1/completions", True),
    (_native, "/", True),
    (_chat, "/v1/chat/completions", False),
    (_native, "/generate_stream", True),
    (_completion, "/v1/completions", False),
    (_native, "/", False),
)
"""The function that makes the body, the path, and whether the answer streams."""
