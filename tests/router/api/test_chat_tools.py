"""Tools of a chat: which are offered, how calls are reported, in one piece and streamed, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.api.chat.choice import ChatDelta, ChoiceText
from millrace_router.api.openai.render import ChatRenderer, ResponseMeta
from millrace_router.request.names import Names
from millrace_router.request.request import FinishReason, Grammar, GrammarKind
from millrace_router.request.token_stream import Finished, Token, TokenEvent
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.tool import CallDelta, Tool, ToolChoice
from millrace_testing.engines.grammars import EOS, Words, lark
from millrace_testing.router.edge import Edge, limits_with, serving
from millrace_testing.router.streams import CHAT, added_up
from millrace_testing.text.texts import saying, tokenizer

TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | map(attribute='function.name') | join(',') }} {% endif %}"
    "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
)
LIMITS = limits_with(max_input_tokens=1000, max_total_tokens=2000)
BYTES = tokenizer("byte_level")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASKED = {"messages": [{"role": "user", "content": "hello"}], "tools": [WEATHER, CLOCK]}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 好"}}\n</tool_call>'
NOON = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CALL_ID = re.compile("call_[0-9a-f]{24}")


def served(*texts: str, **options: Any) -> Any:
    return serving(saying(*texts), **{"limits": LIMITS, "template": TEMPLATE, **options})


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that ids are there and differ; take them away, and the streams' indexes."""
    ids = [call["id"] for call in calls]
    assert all(CALL_ID.fullmatch(id_) for id_ in ids)
    assert len(set(ids)) == len(ids)
    return [{key: call[key] for key in call if key not in {"id", "index"}} for call in calls]


def called(name: str, arguments: str, **other: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**other, "name": name, "arguments": arguments}}


async def prompt_of(edge: Edge, body: dict[str, Any]) -> str:
    answer = await edge.answer("/chat_tokenize", body)
    return str(answer["templated_text"])


async def test_a_call_is_distinguished_from_text() -> None:
    async with served(f"Let me see.\n{PARIS}") as edge:
        answer = await edge.answer(CHAT, ASKED)
        assert len(edge.batcher.requests) == 1, "there is no second generation"
    (choice,) = answer["choices"]
    calls = choice["message"].pop("tool_calls")
    assert without_ids(calls) == [called("weather", '{"city": "Paris 好"}', description=None)]
    assert choice["message"] == {"role": "assistant", "content": "Let me see."}
    assert choice["finish_reason"] == "tool_calls"


async def test_a_call_without_text_has_null_for_content() -> None:
    async with served(NOON) as edge:
        _, answer, _ = await edge.post(CHAT, ASKED)
    assert answer["choices"][0]["message"]["content"] is None


async def test_several_calls_are_streamed_as_they_come() -> None:
    async with served(f"Well.\n{PARIS}\n{NOON}") as edge:
        chunks = await edge.chunks(CHAT, ASKED)
    (choice,) = added_up(chunks)
    calls = choice["message"].pop("tool_calls")
    assert [call["index"] for call in calls] == [0, 1]
    assert without_ids(calls) == [called("weather", '{"city": "Paris 好"}'), called("clock", "{}")]
    assert choice["message"] == {"role": "assistant", "content": "Well."}
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert sum("tool_calls" in delta for delta in deltas) > 5, "arguments come in pieces"
    assert deltas[-1] == {}, "the end comes after all calls"


async def test_each_choice_has_its_own_calls() -> None:
    async with served(PARIS, "None needed.", NOON) as edge:
        _, answer, _ = await edge.post(CHAT, {**ASKED, "n": 3})
        edge.batcher.script = saying(PARIS, "None needed.", NOON)
        streamed = added_up(await edge.chunks(CHAT, {**ASKED, "n": 3}))
    for choices in (answer["choices"], streamed):
        assert [choice["finish_reason"] for choice in choices] == [
            "tool_calls",
            "stop",
            "tool_calls",
        ]
        names = [
            [call["function"]["name"] for call in choice["message"].get("tool_calls", [])]
            for choice in choices
        ]
        assert names == [["weather"], [], ["clock"]]
        without_ids([*choices[0]["message"]["tool_calls"], *choices[2]["message"]["tool_calls"]])


async def test_calls_that_are_not_to_be_parallel_end_with_the_first() -> None:
    async with served(f"{PARIS}\n{NOON}") as edge:
        _, answer, _ = await edge.post(CHAT, {**ASKED, "parallel_tool_calls": False})
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"


HALF = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'
FLAWED = {
    "an unknown word": PARIS.replace('"Paris 好"', "Paris"),
    "two values": PARIS.replace(' 好"', '" "x"'),
    "no end": HALF,
}


@pytest.mark.parametrize("text", FLAWED.values(), ids=FLAWED)
async def test_a_call_that_cannot_be_mended_is_text_and_in_a_stream_no_reason(text: str) -> None:
    async with served(f"So. {text}", f"So. {text}") as edge:
        answer = await edge.answer(CHAT, ASKED)
        (streamed,) = added_up(await edge.chunks(CHAT, ASKED))
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": f"So. {text}"}
    assert (choice["finish_reason"], streamed["finish_reason"]) == ("stop", "stop")
    (call,) = streamed["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


async def test_a_whole_call_beside_a_broken_one_is_a_call() -> None:
    text = f"{FLAWED['an unknown word']} {NOON}"
    async with served(text, text) as edge:
        answer = await edge.answer(CHAT, ASKED)
        (streamed,) = added_up(await edge.chunks(CHAT, ASKED))
    (choice,) = answer["choices"]
    assert without_ids(choice["message"]["tool_calls"]) == [called("clock", "{}", description=None)]
    assert choice["message"]["content"] == FLAWED["an unknown word"]
    assert choice["finish_reason"] == "tool_calls"
    assert streamed["finish_reason"] == "stop", "clients would run both"


async def test_a_flaw_that_can_be_mended_is_no_flaw() -> None:
    written = PARIS.replace('"Paris 好"', "\"Paris\n\\d\", 'sure': True, ")
    async with served(written, written) as edge:
        answer = await edge.answer(CHAT, ASKED)
        (streamed,) = added_up(await edge.chunks(CHAT, ASKED))
    for choice in (answer["choices"][0], streamed):
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments == {"city": "Paris\n\\d", "sure": True}
        assert choice["finish_reason"] == "tool_calls"


async def test_a_brace_too_many_is_not_shown() -> None:
    async with served(PARIS.replace("}}", "}}}")) as edge:
        answer = await edge.answer(CHAT, ASKED)
    message = answer["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_is_not_an_error(*, stream: bool) -> None:
    async with serving(saying(HALF, end=()), limits=LIMITS, template=TEMPLATE) as edge:
        body = {**ASKED, "max_tokens": len(BYTES.encode(HALF))}
        if stream:
            (choice,) = added_up(await edge.chunks(CHAT, body))
        else:
            _, answer, _ = await edge.post(CHAT, body)
            (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    if stream:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "Pa'
    else:
        assert choice["message"] == {"role": "assistant", "content": HALF}


async def test_a_call_begins_with_its_name_and_no_arguments() -> None:
    async with served(PARIS) as edge:
        chunks = await edge.chunks(CHAT, ASKED)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    first, second, *_ = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first["function"] == {"name": "weather", "arguments": ""}
    assert second == {"index": 0, "function": {"arguments": "{"}}


BARE = '{"name": "weather", "arguments": {"city": "Paris"}}'
UNTAGGED = {
    "bare": BARE,
    "by the other name": BARE.replace("arguments", "parameters"),
    "in a fence": f"```json\n{BARE}\n```",
    "in a fence without a language": f"\n```\n{BARE}\n```\n",
    "in other tags": f"<tools>\n{BARE}\n</tools>",
    "in a fence without an end": f"```json\n{BARE}\n",
}
NOT_CALLS = {
    "with text behind it": f"{BARE}\nThis tells the weather.",
    "with text before it": f"Write this:\n{BARE}",
    "of an unknown tool": BARE.replace("weather", "rain"),
    "broken": BARE.replace('"Paris"', "Paris"),
    "two": f"{BARE}\n{BARE}",
    "cut": BARE[:-4],
}


@pytest.mark.parametrize("text", UNTAGGED.values(), ids=UNTAGGED)
async def test_an_answer_that_is_one_call_without_tags_is_a_call(text: str) -> None:
    async with served(text, text) as edge:
        answer = await edge.answer(CHAT, ASKED)
        (streamed,) = added_up(await edge.chunks(CHAT, ASKED))
    for choice in (answer["choices"][0], streamed):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "Paris"}'
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]


@pytest.mark.parametrize("text", UNTAGGED.values(), ids=UNTAGGED)
async def test_a_call_without_tags_is_text_where_calls_are_forbidden(text: str) -> None:
    async with served(text, text) as edge:
        answer = await edge.answer(CHAT, ASKED | {"tool_choice": "none"})
        (streamed,) = added_up(await edge.chunks(CHAT, ASKED | {"tool_choice": "none"}))
    for choice in (answer["choices"][0], streamed):
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("text", NOT_CALLS.values(), ids=NOT_CALLS)
async def test_other_answers_with_a_call_without_tags_are_text(text: str) -> None:
    async with served(text, text) as edge:
        answer = await edge.answer(CHAT, ASKED)
        (streamed,) = added_up(await edge.chunks(CHAT, ASKED))
    for choice in (answer["choices"][0], streamed):
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"


ITERATING = (
    "{% for turn in messages %}{{ turn.role }} {{ turn.content or '' }}{% for call in turn.tool_calls or [] %}"
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city": "Paris", "note": "so', "city=Paris;note=so;"),
        ('{"city": oops', 'arguments={"city": oops;'),
        ("Paris", "arguments=Paris;"),
        ("[1]", "arguments=[1];"),
        ("null", ""),
        ("", ""),
        (None, ""),
        ({"city": "Paris"}, "city=Paris;"),
    ],
)
async def test_any_call_of_an_earlier_turn_is_taken(arguments: object, rendered: str) -> None:
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [called("weather", arguments)]},  # type: ignore[arg-type]
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
    ]  # fmt: skip
    async with served(template=ITERATING) as edge:
        prompt = await prompt_of(edge, {"messages": turns})
    assert prompt == f"user helloassistant {rendered}tool [image left out]"


@pytest.mark.parametrize("odd", [{"content": None}, {}, {"content": []}, {"tool_calls": []}])
@pytest.mark.parametrize("role", ["assistant", "tool"])
async def test_an_empty_turn_is_taken(role: str, odd: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": role, **odd}]
    async with served(template=ITERATING) as edge:
        prompt = await prompt_of(edge, {"messages": [*turns, turns[0]]})
    assert prompt == f"user hello{role} user hello"


async def test_text_that_only_begins_like_a_call_is_text() -> None:
    said = "<tool_call>\nnever mind"
    async with served(said, said) as edge:
        _, answer, _ = await edge.post(CHAT, ASKED)
        streamed = added_up(await edge.chunks(CHAT, ASKED))
    for choice in (*answer["choices"], *streamed):
        assert choice["message"] == {"role": "assistant", "content": said}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "offered", "is_guided"),
    [
        pytest.param({}, "weather,clock", False, id="absent"),
        pytest.param({"tool_choice": None}, "weather,clock", False, id="null"),
        pytest.param({"tool_choice": "auto"}, "weather,clock", False, id="auto"),
        pytest.param({"tool_choice": "none"}, "weather,clock", False, id="none"),
        pytest.param({"tool_choice": "required"}, "weather,clock", True, id="required"),
        pytest.param({"tool_choice": "clock"}, "weather,clock", True, id="bare name"),
        pytest.param(
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            "weather,clock",
            True,
            id="named",
        ),
        pytest.param(
            {"tool_choice": {"function": {"name": "clock"}}}, "weather,clock", True, id="TGI's"
        ),
        pytest.param(
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "clock"}}],
                    },
                }
            },
            "clock",
            True,
            id="allowed",
        ),
    ],
)
async def test_choices_are_read_in_all_forms(
    fields: dict[str, Any], offered: str, *, is_guided: bool
) -> None:
    async with served(NOON) as edge:
        body = {**ASKED, **fields}
        prompt = await prompt_of(edge, body)
        answer = await edge.answer(CHAT, body)
        (request,) = edge.batcher.requests
    may_call = fields.get("tool_choice") != "none"
    assert prompt.startswith(f"<tool_call> {offered} user")
    assert (request.grammar is not None) == is_guided
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == ("tool_calls" if may_call else "stop")
    assert choice["message"]["content"] == (None if may_call else NOON)


async def test_a_turn_without_calls_shares_the_prompt_and_cannot_open_a_call() -> None:
    rust = RustTokenizer.from_str(BYTES._rust.to_str())
    rust.add_tokens([AddedToken("<tool_call>", special=False)])
    own = Tokenizer(rust)
    limits = limits_with(max_input_tokens=400, max_total_tokens=900, vocab_size=own.vocab_size)
    async with served(NOON, tokenizer=own, limits=limits) as edge:
        prompts = [
            await prompt_of(edge, {**ASKED, "tool_choice": word}) for word in ("auto", "none")
        ]
        await edge.post(CHAT, {**ASKED, "tool_choice": "none", "max_tokens": 4})
        (request,) = edge.batcher.requests
    assert prompts[0] == prompts[1]
    opener = (rust.token_to_id("<tool_call>"),)
    assert opener in request.sampling.rules.bad_words
    async with served(NOON, strict_tgi=True) as edge:
        assert (await prompt_of(edge, {**ASKED, "tool_choice": "none"})).startswith("user")


async def test_strict_tools_are_guided_though_nothing_is_forced() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    async with served(NOON) as edge:
        await edge.post(CHAT, {**ASKED, "tools": [strict, CLOCK]})
        (request,) = edge.batcher.requests
        (compiled,) = edge.batcher.compiler.asked
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.LARK
    assert compiled == request.grammar


ANY_JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tool_choice": "nothing"},
            "Tool with name nothing not found: the tools are weather, clock",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}},
            "Tool with name no not found: the tools are weather, clock",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools of type `web_search` are not supported"),
        ({"tools": [{"type": "function"}]}, "a tool of type `function` needs a `function`"),
        (
            {"tools": [], "tool_choice": "required"},
            "a call is `required`, but there are no `tools`",
        ),
        (
            {"tool_choice": "required", "response_format": ANY_JSON},
            "Grammar and tools are mutually exclusive",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_cannot_be_called_are_refused(
    fields: dict[str, Any], message: str, *, stream: bool
) -> None:
    async with served() as edge:
        status, answer, _ = await edge.post(CHAT, {**ASKED, "stream": stream, **fields})
        assert edge.batcher.requests == []
    assert (status, answer["error_type"]) == (422, "tool_error")
    assert answer["error"]["message"] == f"Tool error: {message}"


async def test_a_forced_call_needs_grammars() -> None:
    async with served(limits=limits_with(max_total_tokens=2000, grammars=False)) as edge:
        status, answer, _ = await edge.post(CHAT, {**ASKED, "tool_choice": "required"})
    assert (status, answer["error_type"]) == (422, "validation")
    assert answer["error"]["message"] == "Input validation error: grammar is not supported"


SCHEMA = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "json"])
async def test_with_a_schema_the_model_calls_or_answers(name: str) -> None:
    """The behaviour is OpenAI's; the test compiles the grammar as the shards do."""
    async with served(PARIS, tool_call_parser=name) as edge:
        await edge.answer(CHAT, {**ASKED, "response_format": AS_SCHEMA})
        (request,) = edge.batcher.requests
    assert request.grammar is not None
    calls = {
        "hermes": PARIS,
        "llama": '{"name": "weather", "parameters": {"city": "Paris"}}',
        "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
        "json": '{"name": "weather", "parameters": {"city": "Paris"}}',
    }
    assert [matches(request.grammar, said) for said in (calls[name], '{"degrees": 20}')] == [
        True,
        True,
    ]
    others = ("Sunny.", '{"degrees": "many"}', calls[name].replace("weather", "whether"))
    assert not any(matches(request.grammar, said) for said in others)


def matches(grammar: Grammar, said: str) -> bool:
    """Whether a shard that is guided by `grammar` can say just that, and end."""
    words = Words([bytes([byte]) for byte in range(256)], size=300)
    matcher = words.matcher(lark(grammar.source))
    assert matcher.error() is None
    return all(matcher.consume(id_) for id_ in [*words.split(said.encode()), EOS])


async def test_an_answer_without_calls_is_text() -> None:
    said = '{"degrees": 20}'
    async with served(said) as edge:
        _, answer, _ = await edge.post(CHAT, {**ASKED, "response_format": AS_SCHEMA})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}


def test_a_piece_of_several_calls_is_a_chunk_each_and_the_end_after_them() -> None:
    """Clients take a finish reason for the end of the call before it."""
    head = ResponseMeta(
        "chat.completion", "chatcmpl", model="m", fingerprint="1", names=Names.new()
    )
    first, rest = CallDelta(0, "call_a", "weather", "{"), CallDelta(0, None, None, "}")
    piece = ChatDelta(
        "So.", "tool_calls", 9, None, (first, rest, CallDelta(1, "call_b", "clock", "{}"))
    )
    chunks = ChatRenderer(head).chunks(2, piece)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"content": "So."},
        {"tool_calls": [{"index": 0, "id": "call_a", **called("weather", "")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_b", **called("clock", "")}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["tool_calls"]
    assert {choice["index"] for choice in choices} == {2}


def test_special_tokens_around_calls_are_seen_but_not_shown() -> None:
    written = format_of("[TOOL_CALLS]", special_ids={"[TOOL_CALLS]": 5})
    tools = [Tool("clock", None, {}, strict=False)]
    text = ChoiceText(
        [],
        parser=written.parser(tools, ToolChoice("auto")),
        markers=sorted(written.markers),
    )
    said = ["Hm.", "[TOOL_CALLS]", '[{"name": "clock",', ' "arguments": {}}]', "</s>"]
    pieces = [
        text.push(
            TokenEvent(
                index,
                Token(index, one, -0.5, special=one in {"[TOOL_CALLS]", "</s>"}),
                finished=Finished(FinishReason.EOS_TOKEN, "", index, None)
                if one == "</s>"
                else None,
            )
        )
        for index, one in enumerate(said, start=1)
    ]
    assert "".join(piece.text for piece in pieces) == "Hm."
    calls = [delta for piece in pieces for delta in piece.calls]
    assert [delta.name for delta in calls if delta.id] == ["clock"]
    assert "".join(delta.arguments for delta in calls) == "{}"
    assert pieces[-1].finish_reason == "tool_calls"


async def test_log_probabilities_are_of_all_tokens() -> None:
    async with served(f"So. {PARIS}", f"So. {PARIS}") as edge:
        _, answer, _ = await edge.post(CHAT, {**ASKED, "logprobs": True})
        chunks = await edge.chunks(CHAT, {**ASKED, "logprobs": True})
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == f"So. {PARIS}"
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in told if logprobs for entry in logprobs["content"]] == content


async def test_log_probabilities_of_an_empty_answer_are_none() -> None:
    async with served("") as edge:
        answer = await edge.answer(CHAT, {**ASKED, "logprobs": True})
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["logprobs"]) == ("", {"content": []})


async def test_a_stop_string_cuts_within_calls_too() -> None:
    async with served(PARIS, PARIS) as edge:
        _, cut, _ = await edge.post(CHAT, {**ASKED, "stop": "Paris"})
        _, whole, _ = await edge.post(CHAT, {**ASKED, "stop": "</tool"})
    assert cut["choices"][0]["message"]["content"] == PARIS.partition("Paris")[0]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"functions": [WEATHER["function"]]}, "`functions` is not supported: use `tools`"),
        ({"function_call": "auto"}, "`function_call` is not supported: use `tool_choice`"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "clock"}}]},
            "`messages[0]` is not valid: `function_call` is not supported: use `tool_calls`",
        ),
        (
            {"messages": [{"role": "function", "name": "clock", "content": "noon"}]},
            "`messages[0]` is not valid: the role `function` is not supported: use `tool`",
        ),
    ],
)
async def test_function_calling_is_refused_in_favour_of_tools(
    fields: dict[str, Any], where: str, *, stream: bool
) -> None:
    async with served(PARIS) as edge:
        status, answer, _ = await edge.post(CHAT, {**ASKED, **fields, "stream": stream})
        assert not edge.batcher.requests
    assert (status, answer["error"]["type"]) == (422, "validation")
    assert answer["error"]["message"].endswith(where)


async def test_nulls_in_tools_are_taken() -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    body = {**ASKED, "tools": [{"type": None, "function": function}], "parallel_tool_calls": None}
    async with served(NOON.replace("clock", "f")) as edge:
        answer = await edge.answer(CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("key", ["parameters", "arguments"])
async def test_parameters_have_tgi_s_name_as_well(key: str) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", key: {"type": "object", "required": ["x"]}},
    }
    async with served(NOON) as edge:
        await edge.post(CHAT, {**ASKED, "tools": [tool], "tool_choice": "required"})
        (request,) = edge.batcher.requests
    assert request.grammar is not None
    assert json.dumps("x") in request.grammar.source


async def test_a_template_without_tools_gets_them_in_tgi_s_text() -> None:
    template = TEMPLATE.partition("{% endif %}")[2]
    async with served(template=template) as edge:
        prompt = await prompt_of(edge, {**ASKED, "tools": [CLOCK]})
        worded = await prompt_of(edge, {**ASKED, "tools": [CLOCK], "tool_prompt": "Call."})
        none = await prompt_of(edge, {**ASKED, "tool_choice": "none", "tool_prompt": "Call."})
    listed = '[{"type":"function","function":{"description":null,"name":"clock","arguments":'
    assert prompt.startswith(f"user hello\n---\n{listed}")
    assert "respond with a JSON for a function call" in prompt
    assert worded.startswith(f"user hello\n---\n{listed}")
    assert worded.endswith("\nCall. bot")
    assert none == "user hello bot"


async def test_a_tool_prompt_follows_the_template() -> None:
    async with served() as edge:
        prompt = await prompt_of(edge, {**ASKED, "tool_prompt": "Call."})
    assert prompt == "<tool_call> weather,clock user hello\n---\nCall. bot"


STRICT_TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
)
STRICT_LIMITS = limits_with(max_input_tokens=100, max_total_tokens=300)
STRICT_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def serving_dialect(*texts: str, strict_tgi: bool, script: Any = None) -> Any:
    return serving(
        script or saying(*texts),
        limits=STRICT_LIMITS,
        template=STRICT_TEMPLATE,
        strict_tgi=strict_tgi,
    )


async def choice_of(edge: Edge, **body: Any) -> dict[str, Any]:
    answer = await edge.answer(CHAT, {**STRICT_CHAT, **body})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.parametrize(("strict_tgi", "reason"), [(False, "tool_calls"), (True, "stop")])
async def test_calls_have_tgis_ids_and_reasons_only_in_strict_tgi(
    reason: str, *, strict_tgi: bool
) -> None:
    async with serving_dialect(CALL, CALL, strict_tgi=strict_tgi) as edge:
        choice = await choice_of(edge, tools=TOOLS)
        chunks = await edge.chunks(CHAT, {**STRICT_CHAT, "tools": TOOLS})
    (call,) = choice["message"]["tool_calls"]
    streamed = [chunk["choices"][0] for chunk in chunks]
    (first,) = next(one["delta"]["tool_calls"] for one in streamed if "tool_calls" in one["delta"])
    assert [call["id"] == "0", first["id"] == "0"] == [strict_tgi] * 2
    assert [choice["finish_reason"], streamed[-1]["finish_reason"]] == [reason] * 2


@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_images_become_markdown_only_in_strict_tgi(*, strict_tgi: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://h/i.png"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see "}, part]}]}
    async with serving_dialect(strict_tgi=strict_tgi) as edge:
        status, answer, _ = await edge.post("/chat_tokenize", body)
    assert status == (200 if strict_tgi else 422)
    if strict_tgi:
        assert answer["templated_text"] == "user see ![](https://h/i.png) bot"
