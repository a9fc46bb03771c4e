"""Sections 3.3 to 3.6: the native routes' errors, parameters, answers, headers and streams."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from millrace_router.errors import GenerationError, IncompleteGeneration, RouterError
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server.services import KEEP_ALIVE_SECONDS
from millrace_router.server.sse import KEEP_ALIVE
from millrace_testing.contract.contract import (
    ABSENT,
    COLUMNS,
    EVENTS,
    Held,
    Reply,
    Rule,
    Script,
    exactly,
    explode,
)
from millrace_testing.router.edge import echo, fail, finished, play, token_event

ROUTES = ("/", "/generate", "/generate_stream")
NUMBER = re.compile("[0-9]+")
U64 = 2**64 - 1


def asked(**parameters: Any) -> dict[str, Any]:
    """A prompt of two words, for two tokens."""
    return {"inputs": "hello world", "parameters": {"max_new_tokens": 2, **parameters}}


def ends_with(*texts: str, reason: FinishReason, text: str) -> Script:
    """Generate these tokens, of which `text` is what remains."""

    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.batched_at = stream.queued_at
        end = finished(text, len(texts), reason=reason)
        for index, piece in enumerate(texts, start=1):
            last = index == len(texts)
            stream.token(token_event(index, piece, finished=end if last else None))

    return script


def fails_with(error: RouterError, *texts: str) -> Script:
    """Fail after these tokens."""

    def script(_: ValidRequest, stream: TokenStream) -> None:
        for index, text in enumerate(texts, start=1):
            stream.token(token_event(index, text))
        stream.fail(error)

    return script


def seeded(request: ValidRequest, stream: TokenStream) -> None:
    """Report the seed of requests that sample, as shards do."""
    play(stream, " x", seed=request.sampling.seed if request.sampling.samples else None)


def unlikely(_: ValidRequest, stream: TokenStream) -> None:
    """Send two log probabilities that are hard to format, with candidates."""
    stream.token(token_event(1, "é", logprob=-1.3242188, q=-0.25))
    end = finished("é", 2, reason=FinishReason.EOS_TOKEN, seed=U64)
    stream.token(token_event(2, "</s>", logprob=float("nan"), finished=end))


def envelope(kind: str, message: str) -> dict[str, Any]:
    """TGI's."""
    return exactly({"error": message, "error_type": kind})  # type: ignore[return-value]


OUT_OF_LUCK = "Request failed during generation: Server error: out of luck"
TOO_COLD = "Input validation error: `temperature` must be strictly positive"

ERRORS = [
    *(
        Rule(
            section="3.3",
            says=f"{kind} is {status} on {path}",
            path=path,
            body=body,
            script=script,
            server=server,
            default=Reply(status=status, body=envelope(kind, message)),
            strict=Reply(events=[envelope(kind, message)], headers={"x-accel-buffering": "no"})
            if path == "/generate_stream"
            else None,
        )
        for path in ROUTES
        for kind, status, message, body, script, server in (
            ("generation", 424, OUT_OF_LUCK, asked(), fail, "usual"),
            ("overloaded", 429, "Model is overloaded", asked(), echo, "full"),
            ("validation", 422, TOO_COLD, asked(temperature=0), echo, "usual"),
            (
                "incomplete_generation",
                500,
                "Incomplete generation",
                asked(),
                fails_with(IncompleteGeneration()),
                "usual",
            ),
        )
    ),
    Rule(
        section="3.6",
        says="a stream of POST / that fails early has its status, or is a 200 with the error",
        path="/",
        body=asked(temperature=0) | {"stream": True},
        default=Reply(status=422, body=envelope("validation", TOO_COLD)),
        strict=Reply(
            events=[envelope("validation", TOO_COLD)],
            headers={"x-compute-type": "gpu+optimized", "cache-control": "no-cache"},
        ),
    ),
    *(
        Rule(
            section="3.6",
            says=f"a stream that fails late reports it and ends: {kind}",
            path="/generate_stream",
            body=asked(),
            script=fails_with(error, " x"),
            default=Reply(events=[{"index": 1}, envelope(kind, message)]),
        )
        for kind, message, error in (
            ("generation", OUT_OF_LUCK, GenerationError("out of luck")),
            (
                "incomplete_generation_stream",
                "Incomplete generation stream",
                IncompleteGeneration(),
            ),
        )
    ),
    Rule(
        section="3.3",
        says="an unexpected error is reported as internal",
        path="/generate",
        body=asked(),
        script=explode,
        default=Reply(status=500, body=envelope("internal", "Internal server error")),
    ),
    Rule(
        section="3.3",
        says="being overloaded says when to come back",
        path="/generate",
        body=asked(),
        server="full",
        default=Reply(status=429, headers={"retry-after": NUMBER}),
    ),
]

DEFAULTS = {
    "sampling.temperature": 1.0,
    "sampling.repetition_penalty": 1.0,
    "sampling.frequency_penalty": 0.0,
    "sampling.top_k": 0,
    "sampling.top_p": 1.0,
    "sampling.typical_p": 1.0,
    "sampling.do_sample": False,
    "sampling.watermark": False,
    "sampling.seed": int,
    "max_new_tokens": 14,
    "stop_sequences": (),
    "top_n_tokens": 0,
    "grammar": ABSENT,
    "prefill_logprobs": False,
    "ignore_eos": False,
}
NULLS = dict.fromkeys(
    (
        "best_of",
        "temperature",
        "repetition_penalty",
        "frequency_penalty",
        "top_k",
        "top_p",
        "typical_p",
        "do_sample",
        "max_new_tokens",
        "return_full_text",
        "stop",
        "truncate",
        "watermark",
        "details",
        "decoder_input_details",
        "seed",
        "top_n_tokens",
        "grammar",
        "adapter_id",
    )
)

PARAMETERS = [
    *(
        Rule(
            section="3.4",
            says=f"{says} on {path}",
            path=path,
            body={"inputs": "hello world", **more},
            default=Reply(),
            generates=wanted,
        )
        for path in ROUTES
        for says, more, wanted in (
            ("absent parameters sample", {}, DEFAULTS | {"sampling.do_sample": True}),
            ("null parameters are absent", {"parameters": None}, {"sampling.do_sample": True}),
            ("empty parameters do not sample", {"parameters": {}}, DEFAULTS),
            ("every option may be null", {"parameters": NULLS}, DEFAULTS),
        )
    ),
    *(
        Rule(
            section="3.4",
            says=f"{name} {value!r} goes to the shards",
            path="/generate",
            body=asked(**{name: value}),
            default=Reply(),
            generates=wanted,
        )
        for name, value, wanted in (
            ("temperature", 0.5, {"sampling.temperature": 0.5}),
            ("repetition_penalty", 1.5, {"sampling.repetition_penalty": 1.5}),
            ("frequency_penalty", -2, {"sampling.frequency_penalty": -2.0}),
            ("top_k", 3, {"sampling.top_k": 3}),
            ("top_p", 0.25, {"sampling.top_p": 0.25}),
            ("typical_p", 0.75, {"sampling.typical_p": 0.75}),
            ("do_sample", True, {"sampling.do_sample": True}),
            ("max_new_tokens", 14, {"max_new_tokens": 14}),
            ("stop", ["a", "b"], {"stop_sequences": ("a", "b")}),
            ("truncate", 1, {"input_ids": (3,)}),
            ("watermark", True, {"sampling.watermark": True}),
            ("seed", U64, {"sampling.seed": U64}),
            ("top_n_tokens", 5, {"top_n_tokens": 5}),
            ("decoder_input_details", True, {"prefill_logprobs": False}),
        )
    ),
    Rule(
        section="3.4",
        says="a whole number with a fraction is an integer, unlike in TGI",
        path="/generate",
        body=asked(max_new_tokens=2.0),
        default=Reply(),
        strict=Reply(status=422, body=re.compile(r"Failed to des.+parameters\.max_new_tokens.+")),
    ),
    *(
        Rule(
            section="3.4",
            says=f"{name} {value!r} is not of its type",
            path="/generate",
            body=asked(**{name: value}),
            default=Reply(status=422, body={"error_type": "validation"}),
            strict=Reply(status=422, body=re.compile(rf"Failed to des.+parameters\.{name}.+")),
            generates={},
        )
        for name, value in (
            ("max_new_tokens", -1),
            ("max_new_tokens", 2**32),
            ("top_k", "5"),
            ("top_k", 2**31),
            ("seed", 2**64),
            ("temperature", True),
            ("do_sample", 1),
            ("stop", "a"),
            ("grammar", {"type": "nothing", "value": "a"}),
        )
    ),
    Rule(
        section="2.5",
        says="more than 1024 tokens are one generation of as many",
        path="/generate",
        body=asked(max_new_tokens=2000),
        server="roomy",
        default=Reply(),
        generates={"max_new_tokens": 2000},
    ),
    Rule(
        section="2.1 of the ecosystem",
        says="an adapter that is not there",
        path="/generate",
        body=asked(adapter_id="mine"),
        default=Reply(
            status=404,
            body={
                "error": "The adapter 'mine' does not exist",
                "error_type": "adapter_not_found",
            },
        ),
        strict=Reply(body={"generated_text": " x x"}),
        generates={},
        generates_strictly={"max_new_tokens": 2},
    ),
]

TOKEN = {"text": " x", "logprob": -0.5, "special": False}
DETAILS = {
    "finish_reason": "length",
    "generated_tokens": 2,
    "seed": None,
    "prefill": [],
    "tokens": [exactly({"id": 1, **TOKEN}), exactly({"id": 2, **TOKEN})],
    "top_tokens": ABSENT,
    "best_of_sequences": ABSENT,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

ANSWERS = [
    Rule(
        section="3.4",
        says="the text alone",
        path="/generate",
        body=asked(),
        default=Reply(body=exactly({"generated_text": " x x"})),
    ),
    Rule(
        section="3.4",
        says="details tell of every token",
        path="/generate",
        body=asked(details=True),
        default=Reply(body={"details": DETAILS}),
    ),
    Rule(
        section="3.4",
        says="decoder_input_details implies details, and is empty where shards tell nothing",
        path="/generate",
        body=asked(decoder_input_details=True),
        default=Reply(body={"details": DETAILS}),
    ),
    Rule(
        section="3.4",
        says="the first token of a prompt has no log probability",
        path="/generate",
        body=asked(decoder_input_details=True),
        server="scoring",
        default=Reply(
            body={
                "details": {
                    "prefill": [
                        exactly({"id": 2, "text": " hello", "logprob": None}),
                        exactly({"id": 3, "text": " world", "logprob": -1.0}),
                    ]
                }
            }
        ),
    ),
    Rule(
        section="3.4",
        says="a request that samples gets its seed",
        path="/generate",
        body=asked(details=True, seed=U64, do_sample=True),
        script=seeded,
        default=Reply(body={"details": {"seed": U64}}),
    ),
    Rule(
        section="3.4",
        says="a request that does not sample gets null as its seed",
        path="/generate",
        body=asked(details=True, seed=U64),
        script=seeded,
        default=Reply(body={"details": {"seed": None}}),
    ),
    Rule(
        section="3.4",
        says="numbers are the shortest that read back to their 32 bits, and what is none is null",
        path="/generate",
        body=asked(details=True, top_n_tokens=1),
        script=unlikely,
        default=Reply(
            body=re.compile(r'.*"logprob":-1\.3242188,.*"logprob":null,.*"top_tokens":\[\[{.*')
        ),
    ),
    Rule(
        section="3.4",
        says="POST / answers a list of one, with the prompt before the text",
        path="/",
        body=asked(),
        default=Reply(body=[exactly({"generated_text": "hello world x x"})]),
    ),
    Rule(
        section="3.4",
        says="return_full_text may be turned off there",
        path="/",
        body=asked(return_full_text=False),
        default=Reply(body=[{"generated_text": " x x"}]),
    ),
    Rule(
        section="3.4",
        says="and on elsewhere, where it repeats what was sent and not what was truncated",
        path="/generate",
        body=asked(return_full_text=True, truncate=1),
        default=Reply(body={"generated_text": "hello world x x"}),
    ),
    Rule(
        section="3.4",
        says="best_of reports the others as well, all from one prompt",
        path="/generate",
        body=asked(best_of=2, do_sample=True, details=True),
        default=Reply(
            body={
                "generated_text": " x x",
                "details": {
                    "best_of_sequences": [
                        {"generated_text": " x x", "finish_reason": "length", "seed": int}
                    ]
                },
            }
        ),
        generates={"input_ids": (2, 3)},
    ),
    *(
        Rule(
            section="5",
            says=f"the text ends with a stop string, or before the last token: {reason.value}",
            path="/generate",
            body=asked(details=True),
            script=ends_with(" x", last, reason=reason, text=text),
            default=Reply(
                body={"generated_text": text, "details": {"finish_reason": reason.value}}
            ),
        )
        for reason, last, text in (
            (FinishReason.STOP_SEQUENCE, "stop", " xstop"),
            (FinishReason.EOS_TOKEN, "</s>", " x"),
        )
    ),
    *(
        Rule(
            section="3.4",
            says=f"a grammar {grammar['type']} is taken",
            path="/generate",
            body=asked(grammar=grammar),
            default=Reply(),
            generates={"grammar.source": source},
        )
        for grammar, source in (
            ({"type": "json", "value": SCHEMA}, re.compile(r'{"type":"object".+')),
            ({"type": "json_object", "value": SCHEMA}, re.compile(r'{"type":"object".+')),
            ({"type": "json", "value": '{"properties":{}}'}, re.compile(".+properties.+")),
            ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, str),
            ({"type": "regex", "value": "a+"}, "a+"),
        )
    ),
]

HEADERS = {
    "x-compute-type": "1-cpu",
    "x-compute-time": re.compile(r"[0-9]+\.[0-9e-]+"),
    "x-compute-characters": "11",
    "x-total-time": NUMBER,
    "x-validation-time": NUMBER,
    "x-queue-time": NUMBER,
    "x-inference-time": NUMBER,
    "x-time-per-token": NUMBER,
    "x-prompt-tokens": "2",
    "x-generated-tokens": "2",
}
STREAM_HEADERS = {
    "content-type": EVENTS,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-compute-type": "1-cpu",
    "x-compute-characters": "11",
    **dict.fromkeys(
        ("x-compute-time", "x-total-time", "x-queue-time", "x-generated-tokens"), ABSENT
    ),
}
TGI_COMPUTE = {"x-compute-type": "gpu+optimized"}
"""TGI names its own hardware by default."""
FIRST = (
    b'data: {"index":1,"token":{"id":1,"text":"\xc3\xa9","logprob":-1.3242188,"special":false},'
    b'"top_tokens":[{"id":9,"text":"q","logprob":-0.25,"special":false}],'
    b'"generated_text":null,"details":null}\n\n'
)
SECOND = (
    b'data: {"index":2,"token":{"id":2,"text":"</s>","logprob":null,"special":true},'
    b'"generated_text":"\xc3\xa9","details":{"finish_reason":"eos_token","generated_tokens":2,'
    b'"seed":18446744073709551615,"input_length":2,"cached_tokens":0}}\n\n'
)
LAST = {
    "index": 2,
    "token": {"text": "</s>", "special": True, "logprob": None},
    "generated_text": "é",
    "details": {"finish_reason": "eos_token", "generated_tokens": 2, "input_length": 2},
}
PLAIN_EVENT = exactly(
    {"index": 1, "token": exactly({"id": 1, **TOKEN}), "generated_text": None, "details": None}
)

STREAMS = [
    *(
        Rule(
            section="3.5",
            says=f"headers of an answer of {path}",
            path=path,
            body=asked(),
            default=Reply(headers=HEADERS),
            strict=Reply(headers=HEADERS | TGI_COMPUTE),
        )
        for path in ("/", "/generate")
    ),
    Rule(
        section="3.5",
        says="headers of a stream of /generate_stream",
        path="/generate_stream",
        body=asked(),
        default=Reply(headers=STREAM_HEADERS),
        strict=Reply(headers=STREAM_HEADERS | TGI_COMPUTE),
    ),
    Rule(
        section="3.5",
        says="headers of a stream of POST /",
        path="/",
        body={**asked(), "stream": True},
        default=Reply(headers=STREAM_HEADERS),
        strict=Reply(headers=STREAM_HEADERS | TGI_COMPUTE),
    ),
    Rule(
        section="3.4",
        says="one event a token, the last with the text and the details that were asked for",
        path="/generate_stream",
        body=asked(details=True, top_n_tokens=1),
        script=unlikely,
        default=Reply(events=[{"index": 1, "top_tokens": list}, LAST]),
    ),
    Rule(
        section="3.6",
        says="an event is a line of data and an empty one",
        path="/generate_stream",
        body=asked(details=True, top_n_tokens=1),
        script=unlikely,
        default=Reply(body=FIRST + SECOND),
    ),
    Rule(
        section="3.4",
        says="details are null unless they are asked for",
        path="/generate_stream",
        body=asked(),
        default=Reply(
            events=[PLAIN_EVENT, {"index": 2, "generated_text": " x x", "details": None}]
        ),
    ),
    Rule(
        section="3.4",
        says="a stream of POST / repeats the prompt with its last event",
        path="/",
        body={**asked(), "stream": True},
        default=Reply(events=[PLAIN_EVENT, {"index": 2, "generated_text": "hello world x x"}]),
    ),
    Rule(
        section="3.4",
        says="POST / with a null for stream streams nothing",
        path="/",
        body={**asked(), "stream": None},
        default=Reply(body=[{"generated_text": "hello world x x"}]),
    ),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("rule", [*ERRORS, *PARAMETERS, *ANSWERS, *STREAMS], ids=str)
def test_rule_holds(servers: Callable[[str, str], Held], rule: Rule, column: str) -> None:
    servers(rule.server, column).check(rule, column)


def test_a_comment_breaks_the_silence_after_15_seconds() -> None:
    """Section 3.6."""
    assert (KEEP_ALIVE, KEEP_ALIVE_SECONDS) == (b":\n\n", 15.0)
