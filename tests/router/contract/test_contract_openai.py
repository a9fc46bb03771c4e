"""Sections 3.7 and 3.8: OpenAI's routes, where OpenAI's contract wins unless TGI is to be followed strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from millrace_router.request.request import FinishReason, Grammar, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.contract.contract import (
    ABSENT,
    COLUMNS,
    Held,
    Reply,
    Rule,
    Script,
    exactly,
    explode,
)
from millrace_testing.router.edge import break_off, fail, finished, token_event

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
PATHS = (CHAT_PATH, COMPLETION_PATH)
DONE = "[DONE]"
UUID = "[0-9a-f]{32}"


def chat(**more: Any) -> dict[str, Any]:
    """A chat of two words, for two tokens."""
    return {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 2, **more}


def completion(**more: Any) -> dict[str, Any]:
    """The same as a completion."""
    return {"prompt": "hello world", "max_tokens": 2, **more}


def both(**more: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Either of them, with its path."""
    return ((CHAT_PATH, chat(**more)), (COMPLETION_PATH, completion(**more)))


def says(reason: FinishReason, *texts: str) -> Script:
    """Generate these tokens, and end for this reason."""

    def script(_: ValidRequest, stream: TokenStream) -> None:
        end = finished("".join(texts), len(texts), reason=reason)
        for index, text in enumerate(texts, start=1):
            last = index == len(texts)
            stream.token(token_event(index, text, finished=end if last else None))

    return script


def penalized(**penalties: float) -> dict[str, float]:
    """The sampling parameters of a request with these penalties and no others."""
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0}
    neutral |= {"presence_penalty": 0.0, "openai_frequency_penalty": 0.0}
    return {f"sampling.{name}": value for name, value in (neutral | penalties).items()}


def chosen(**keys: Any) -> dict[str, Any]:
    """An answer, or a chunk, whose one choice is so."""
    return {"choices": [keys]}


USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
OUT_OF_LUCK = "Request failed during generation: Server error: out of luck"
STOPPED = says(FinishReason.STOP_SEQUENCE, " x", " y")
TOLD = {"error": {"message": OUT_OF_LUCK, "type": "generation", "http_status_code": 424}}
TOLD_AS_TGI = {"error": exactly({"message": OUT_OF_LUCK, "http_status_code": 422})}
SERVED = "org/tiny"

BOTH = [
    *(
        Rule(
            section=section,
            says=f"{model} is answered with {name}: {path}",
            path=path,
            body=body | {"model": model},
            default=Reply(body={"model": name}),
        )
        for section, (path, body) in zip(("3.7", "3.8"), both(), strict=True)
        for model, name in (("tgi", SERVED), ("other", "other"), (None, SERVED))
    ),
    *(
        Rule(
            section=section,
            says=f"a failure before the first token: {path}",
            path=path,
            body=body,
            script=fail,
            default=Reply(status=424, body=TOLD | {"error_type": "generation"}),
            strict=Reply(
                status=424, body=exactly({"error": OUT_OF_LUCK, "error_type": "generation"})
            ),
        )
        for section, (path, body) in zip(("3.7", "3.8"), both(), strict=True)
    ),
    *(
        Rule(
            section="3.3",
            says=f"an unexpected error: {path}",
            path=path,
            body=body,
            script=explode,
            default=Reply(
                status=500,
                body={"error": {"message": "Internal server error", "type": "internal"}},
            ),
            strict=Reply(
                status=500,
                body=exactly({"error": "Internal server error", "error_type": "internal"}),
            ),
        )
        for path, body in both()
    ),
    *(
        Rule(
            section="3.6",
            says=f"a failure before the first token of a stream: {path}",
            path=path,
            body=body,
            script=fail,
            default=Reply(status=424, body=TOLD),
            strict=Reply(events=[TOLD_AS_TGI, DONE]),
        )
        for path, body in both(stream=True)
    ),
    *(
        Rule(
            section="3.6",
            says=f"a request that is not valid, for a stream: {path}",
            path=path,
            body=body,
            default=Reply(status=422, body={"error": {"type": "validation"}}),
            strict=Reply(events=[{"error": {"http_status_code": 422, "message": str}}, DONE]),
        )
        for path, body in both(stream=True, stop=list("abcde"))
    ),
    *(
        Rule(
            section="3.6",
            says=f"a failure in mid-stream, and the end: {path}",
            path=path,
            body=body,
            script=break_off,
            default=Reply(
                body=re.compile(
                    r'data: .*data: {"error".*"http_status_code":424}}\n\ndata: \[DONE\]\n\n', re.S
                )
            ),
            strict=Reply(
                body=re.compile(r'data: .*"http_status_code":422}}\n\ndata: \[DONE\]\n\n', re.S)
            ),
        )
        for path, body in both(stream=True)
    ),
    *(
        Rule(
            section="3.2",
            says=f"{kind} is refused: {path}",
            path=path,
            body=body,
            headers={"content-type": "application/json"},
            default=Reply(status=status, body={"error": {"message": str, "type": "validation"}}),
            strict=Reply(status=status, body=re.compile("Failed to .+")),
        )
        for path in PATHS
        for kind, body, status in (
            ("what is not JSON", b"{", 400),
            ("JSON of another shape", {"messages": 1, "prompt": 1, "stream": True}, 422),
        )
    ),
    *(
        Rule(
            section=section,
            says=f"temperature {temperature} {says}: {path}",
            path=path,
            body=body | {"temperature": temperature},
            default=Reply(),
            generates={"sampling.do_sample": samples},
        )
        for section, (path, body) in zip(("3.7", "3.8"), both(), strict=True)
        for temperature, says, samples in (
            (0, "is greedy", False),
            (None, "samples", True),
            (0.5, "samples", True),
        )
    ),
    *(
        Rule(
            section="2.1 of the ecosystem",
            says=f"top_p of 1: {path}",
            path=path,
            body=body,
            default=Reply(),
            strict=Reply(
                status=422, body={"error": re.compile(".*`top_p` must be > 0.0 and < 1.0")}
            ),
        )
        for path, body in both(top_p=1)
    ),
    *(
        Rule(
            section="3.7",
            says=f"stop may be {stop!r}: {path}",
            path=path,
            body=body | {"stop": stop},
            default=Reply(),
            generates={"stop_sequences": stops},
        )
        for path, body in both()
        for stop, stops in (("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()))
    ),
    *(
        Rule(
            section="3.7",
            says=f"a response format is a grammar: {path} {wanted['type']} with {[*wanted][1]}",
            path=path,
            body=body | {"response_format": wanted},
            default=Reply(),
            generates={"grammar.source": re.compile(".*properties.*")},
        )
        for path, body in both()
        for wanted in (
            {"type": "json_object", "value": {"properties": {}}},
            {"type": "json", "value": {"properties": {}}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": {}}}},
            {"type": "json_schema", "value": {"name": "n", "schema": {"properties": {}}}},
        )
    ),
]

HEAD = {
    "object": "chat.completion",
    "id": re.compile(f"chatcmpl-{UUID}"),
    "created": int,
    "model": SERVED,
    "system_fingerprint": re.compile(r"[0-9.]+\S*-native"),
}

CHATS = [
    Rule(
        section="3.7",
        says="an answer, `object` first",
        path=CHAT_PATH,
        body=chat(),
        default=Reply(
            body=exactly(
                {
                    **HEAD,
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": " x x"},
                            "logprobs": None,
                            "finish_reason": "length",
                        }
                    ],
                    "usage": USAGE,
                }
            )
        ),
        strict=Reply(body=exactly({**HEAD, "id": "", "choices": list, "usage": USAGE})),
    ),
    Rule(
        section="3.7",
        says="the role comes first, or with every chunk",
        path=CHAT_PATH,
        body=chat(stream=True),
        default=Reply(
            events=[
                chosen(delta={"role": "assistant", "content": ""}, finish_reason=None),
                chosen(delta=exactly({"content": " x"}), finish_reason=None) | {"usage": None},
                chosen(delta=exactly({"content": " x"}), finish_reason="length"),
                DONE,
            ]
        ),
        strict=Reply(
            events=[
                chosen(delta=exactly({"role": "assistant", "content": " x"}), finish_reason=None)
                | {"id": "", "usage": None},
                chosen(delta={"role": "assistant", "content": " x"}, finish_reason="length"),
                DONE,
            ]
        ),
    ),
    Rule(
        section="3.7",
        says="usage comes in a separate chunk, if it is requested",
        path=CHAT_PATH,
        body=chat(stream=True, stream_options={"include_usage": True}),
        default=Reply(events=[{"usage": None}] * 3 + [{"choices": [], "usage": USAGE}, DONE]),
        strict=Reply(events=[{"usage": None}] * 2 + [{"choices": [], "usage": USAGE}, DONE]),
    ),
    Rule(
        section="3.7",
        says="a special token is without text, and ends for `stop`",
        path=CHAT_PATH,
        body=chat(),
        script=says(FinishReason.EOS_TOKEN, " x", "</s>"),
        default=Reply(body=chosen(message={"content": " x"}, finish_reason="stop")),
    ),
    Rule(
        section="3.7",
        says="a stop string is cut off, or kept",
        path=CHAT_PATH,
        body=chat(stop=" y"),
        script=STOPPED,
        default=Reply(body=chosen(message={"content": " x"}, finish_reason="stop")),
        strict=Reply(body=chosen(message={"content": " x y"}, finish_reason="stop_sequence")),
    ),
    Rule(
        section="3.7",
        says="a stop string is cut off a stream, or kept",
        path=CHAT_PATH,
        body=chat(stop=" y", stream=True),
        script=STOPPED,
        default=Reply(
            events=[
                chosen(delta={"content": ""}, finish_reason=None),
                chosen(delta={"content": " x"}, finish_reason=None),
                chosen(delta={"content": ""}, finish_reason="stop"),
                DONE,
            ]
        ),
        strict=Reply(
            events=[
                chosen(delta={"content": " x"}, finish_reason=None),
                chosen(delta={"content": " y"}, finish_reason="stop_sequence"),
                DONE,
            ]
        ),
    ),
    *(
        Rule(
            section="3.7",
            says=f"{name} says how many tokens",
            path=CHAT_PATH,
            body={"messages": chat()["messages"], name: 2},
            default=Reply(),
            generates={"max_new_tokens": 2},
        )
        for name in ("max_tokens", "max_completion_tokens")
    ),
    *(
        Rule(
            section="3.7",
            says=f"penalties are OpenAI's, or TGI's: {penalties}",
            path=CHAT_PATH,
            body=chat(**penalties),
            default=Reply(),
            generates=penalized(**ours),
            generates_strictly=penalized(**theirs),
        )
        for penalties, ours, theirs in (
            (
                {"presence_penalty": 0.5, "frequency_penalty": 1.5},
                {"presence_penalty": 0.5, "openai_frequency_penalty": 1.5},
                {"repetition_penalty": 2.5, "frequency_penalty": 1.5},
            ),
            ({"presence_penalty": 0}, {}, {"repetition_penalty": 2.0}),
            ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        )
    ),
    Rule(
        section="3.7",
        says="top_logprobs are candidates",
        path=CHAT_PATH,
        body=chat(logprobs=True, top_logprobs=2),
        default=Reply(body=chosen(logprobs={"content": [{"token": " x", "logprob": -0.5}] * 2})),
        generates={"top_n_tokens": 2},
    ),
    *(
        Rule(
            section="3.7",
            says=f"content may be {kind}",
            path=CHAT_PATH,
            body=chat(messages=[{"role": "user", "content": content}]),
            default=Reply(),
            generates={"input_ids": (2, 3)},
        )
        for kind, content in (
            ("text", "hello world"),
            ("parts", [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]),
        )
    ),
    Rule(
        section="3.7",
        says="null content needs tool calls",
        path=CHAT_PATH,
        body=chat(messages=[{"role": "assistant", "content": None}]),
        default=Reply(status=422, body={"error_type": "validation"}),
        strict=Reply(status=422, body=re.compile("Failed to deserialize.+")),
    ),
    *(
        Rule(
            section="3.3",
            says=f"no template, no chat{', whether or not a stream is wanted' if stream else ''}",
            path=CHAT_PATH,
            body=chat(stream=stream),
            server="templateless",
            default=Reply(
                status=422,
                body={
                    "error": {"message": "Template error: template not found"},
                    "error_type": "template_error",
                },
            ),
            strict=Reply(
                status=422,
                body={
                    "error": "Template error: template not found",
                    "error_type": "template_error",
                },
            ),
        )
        for stream in (False, True)
    ),
    *(
        Rule(
            section="3.5",
            says=f"headers {'of a stream' if stream else 'of an answer'}",
            path=CHAT_PATH,
            body=chat(stream=stream),
            default=Reply(headers=headers | {"x-compute-type": "1-cpu"}),
            strict=Reply(headers=headers | {"x-compute-type": "gpu+optimized"}),
        )
        for stream, headers in (
            (
                False,
                {
                    "x-compute-characters": "11",
                    "x-prompt-tokens": "2",
                    "x-compute-time": str,
                    "x-generated-tokens": "2",
                },
            ),
            (
                True,
                {
                    "x-compute-characters": "11",
                    "x-prompt-tokens": ABSENT,
                    "x-compute-time": ABSENT,
                    "x-generated-tokens": ABSENT,
                },
            ),
        )
    ),
]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
UNKNOWN_TOOL = "Tool with name nothing not found: the tools are weather"
CALL = says(FinishReason.EOS_TOKEN, '{"name": "weather", ', '"parameters": {"place": "x"}}', "</s>")


def tooled(**more: Any) -> dict[str, Any]:
    """A chat that may call a tool."""
    return chat(tools=[TOOL], max_tokens=64, **more)


def told_of_tool(message: str) -> Reply:
    """A refusal in OpenAI's envelope."""
    error = {"message": f"Tool error: {message}", "type": "tool_error"}
    return Reply(status=422, body={"error": error, "error_type": "tool_error"})


def told_as_tgi(message: str) -> Reply:
    """The same in TGI's."""
    return Reply(
        status=422, body=exactly({"error": f"Tool error: {message}", "error_type": "tool_error"})
    )


def arguments_are(given: Any) -> bool:
    """The arguments of `CALL`, as text."""
    return isinstance(given, str) and json.loads(given) == {"place": "x"}


def called(id_: Any, reason: str) -> Reply:
    """An answer with `CALL` in it."""
    function = {"name": "weather", "arguments": arguments_are, "description": None}
    call = {"id": id_, "type": "function", "function": function}
    message = {"role": "assistant", "content": ABSENT, "tool_calls": [call]}
    return Reply(body=chosen(message=message, finish_reason=reason))


TOOLS = [
    *(
        Rule(
            section="3.7",
            says=f"a call with tool_choice {choice if isinstance(choice, str | None) else 'object'}",
            path=CHAT_PATH,
            body=tooled(tool_choice=choice),
            script=CALL,
            server="roomy",
            default=called(re.compile("call_[0-9a-f]{24}"), "tool_calls"),
            strict=called("0", "stop"),
            generates={"grammar": guided},
        )
        for choice, guided in (
            (None, ABSENT),
            ("auto", ABSENT),
            ("required", Grammar),
            ("weather", Grammar),
            ({"type": "function", "function": {"name": "weather"}}, Grammar),
        )
    ),
    Rule(
        section="3.7",
        says="tool_choice none leaves text",
        path=CHAT_PATH,
        body=tooled(tool_choice="none"),
        script=CALL,
        server="roomy",
        default=Reply(
            body=chosen(message={"content": str, "tool_calls": ABSENT}, finish_reason="stop")
        ),
        generates={"grammar": ABSENT, "input_ids": (2, 3)},
    ),
    *(
        Rule(
            section="3.7",
            says=f"a tool that is not there{' for a stream' if stream else ''}",
            path=CHAT_PATH,
            body=tooled(tool_choice="nothing", stream=stream),
            server="roomy",
            default=told_of_tool(UNKNOWN_TOOL),
            strict=told_as_tgi("Tool with name nothing not found"),
            generates={},
        )
        for stream in (False, True)
    ),
    Rule(
        section="9.6",
        says="a call that is forced and a response format exclude each other",
        path=CHAT_PATH,
        body=tooled(
            tool_choice="required", response_format={"type": "json", "value": {"properties": {}}}
        ),
        server="roomy",
        default=told_of_tool("Grammar and tools are mutually exclusive"),
        strict=told_as_tgi("Grammar and tools are mutually exclusive"),
        generates={},
    ),
    Rule(
        section="3.7",
        says="no tools together with a response format",
        path=CHAT_PATH,
        body=chat(tools=[], response_format={"type": "json", "value": {"properties": {}}}),
        default=Reply(),
        strict=told_as_tgi("Grammar and tools are mutually exclusive"),
    ),
]

COMPLETIONS = [
    Rule(
        section="3.8",
        says="an answer",
        path=COMPLETION_PATH,
        body=completion(),
        default=Reply(
            body={
                **HEAD,
                "object": "text_completion",
                "id": re.compile(f"cmpl-{UUID}"),
                "choices": [
                    {"index": 0, "text": " x x", "logprobs": None, "finish_reason": "length"}
                ],
                "usage": USAGE,
            }
        ),
        strict=Reply(body={"id": "", "choices": list, "usage": USAGE}),
    ),
    Rule(
        section="3.8",
        says="a choice for each prompt, in their order",
        path=COMPLETION_PATH,
        body=completion(prompt=["hello", "world"]),
        default=Reply(
            body={
                "choices": [{"index": 0, "text": " x x"}, {"index": 1, "text": " x x"}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6},
            }
        ),
    ),
    Rule(
        section="3.8",
        says="no prompts are none",
        path=COMPLETION_PATH,
        body=completion(prompt=[]),
        default=Reply(status=422, body={"error_type": "validation"}),
        strict=Reply(status=422, body=re.compile("Failed to deserialize.+prompt.+")),
    ),
    *(
        Rule(
            section="3.3",
            says=f"{says}{' in a stream' if stream else ''}",
            path=COMPLETION_PATH,
            body=completion(stream=stream, **more),
            default=Reply(
                status=422, body={"error": {"message": message}, "error_type": error_type}
            ),
            strict=Reply(status=422, body={"error": message, "error_type": error_type}),
        )
        for stream in (False, True)
        for says, more, message, error_type in (
            (
                "too many prompts",
                {"prompt": ["a"] * 5},
                "Number of prompts exceeds the maximum allowed batch size of 4",
                "batch size exceeded",
            ),
            (
                "a suffix",
                {"suffix": "a"},
                "Suffix is not supported and can be achieved by preprocessing the prompt.",
                "suffix not supported",
            ),
        )
    ),
    Rule(
        section="3.8",
        says="usage comes with the last chunk of a choice",
        path=COMPLETION_PATH,
        body=completion(stream=True),
        default=Reply(
            events=[
                chosen(text=" x") | {"usage": ABSENT},
                chosen(text=" x", finish_reason="length") | {"usage": USAGE},
                DONE,
            ]
        ),
    ),
    Rule(
        section="3.5",
        says="no time of computing is reported for several prompts",
        path=COMPLETION_PATH,
        body=completion(prompt=["hello", "world"]),
        default=Reply(
            headers={
                "x-compute-time": ABSENT,
                "x-total-time": str,
                "x-prompt-tokens": "2",
                "x-generated-tokens": "4",
            }
        ),
    ),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("rule", [*BOTH, *CHATS, *TOOLS, *COMPLETIONS], ids=str)
def test_rule_holds(servers: Callable[[str, str], Held], rule: Rule, column: str) -> None:
    servers(rule.server, column).check(rule, column)
