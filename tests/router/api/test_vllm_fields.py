"""vLLM's and SGLang's fields on OpenAI's routes, on a real socket."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from millrace_router.api.body.sampling import one_of
from millrace_router.api.openai.request import OLD_CLIENTS_FIELDS
from millrace_router.request.request import Grammar, GrammarKind
from millrace_testing.router.edge import echo, limits_with, serving
from millrace_testing.router.streams import CHAT
from millrace_testing.text.texts import Generations, saying, tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}{{ documents }}"
WIDE = limits_with(max_input_tokens=100, max_total_tokens=200, vocab_size=300)
BYTES = tokenizer("byte_level")
END = 0
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
USER = {"role": "user", "content": "hello world"}


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text))


def body_of(route: str, **fields: Any) -> dict[str, Any]:
    """A body of the route; names of the length are the route's own."""
    match route:
        case "/v1/chat/completions":
            return {"messages": [USER], **fields}
        case "/v1/completions":
            return {"prompt": "hello world", **fields}
    return {"input": "hello world", **fields}


def text_in(answer: Any) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def said(tokens: list[int], route: str, **fields: Any) -> str:
    """The whole text of a generation of `tokens`, checked to equal the streamed text."""
    script = Generations(tokens, tokens, tokenizer=BYTES)
    async with serving(script, limits=WIDE, template=TEMPLATE) as edge:
        body = body_of(route, **fields)
        answer = await edge.answer(route, body)
        text = text_in(answer)
        if route != "/v1/responses":
            chunks = await edge.chunks(route, body)
            assert "".join(map(added, chunks)) == text
    return text


def added(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stop_token_ends_the_answer(route: str) -> None:
    a, b = ids("a"), ids("b")
    tokens = [*ids("x y"), *a, *b, END]
    assert await said(tokens, route) == "x yab"
    assert await said(tokens, route, stop_token_ids=a) == "x y"
    shown = {"include_stop_str_in_output": True}
    assert await said(tokens, route, stop_token_ids=a, **shown) == "x ya"
    # Also where the model's own end is ignored, and at the last token that may come.
    assert await said(tokens, route, stop_token_ids=b, ignore_eos=True) == "x ya"


async def test_a_stop_token_is_the_reason_of_the_end_also_at_the_limit() -> None:
    script = Generations([*ids("ab")], tokenizer=BYTES)
    async with serving(script, limits=WIDE, template=TEMPLATE) as edge:
        body = body_of("/v1/completions", max_tokens=2, stop_token_ids=ids("b"))
        _, answer, _ = await edge.post("/v1/completions", body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_a_stop_string_is_part_of_the_text_if_requested(route: str, name: str) -> None:
    tokens = [*ids("one STOP two"), END]
    assert await said(tokens, route, stop="STOP") == "one "
    assert await said(tokens, route, stop="STOP", **{name: True}) == "one STOP"


@pytest.mark.parametrize("route", ROUTES)
async def test_special_tokens_are_shown_if_requested(route: str) -> None:
    end = BYTES.token_text(END)
    tokens = [*ids("a"), END, *ids("b"), END]
    fields: dict[str, Any] = {"ignore_eos": True, "stop": "b"}
    assert await said(tokens, route, **fields) == "a"
    assert await said(tokens, route, **fields, skip_special_tokens=False) == f"a{end}"
    # The token that ends the answer is none of its text, unless that is asked for, too.
    ended, shown = [*ids("a"), END], {"skip_special_tokens": False}
    assert await said(ended, route, **shown) == "a"
    assert await said(ended, route, **shown, include_stop_str_in_output=True) == f"a{end}"


async def test_the_prompt_is_cut_to_its_last_tokens() -> None:
    async with serving(echo, limits=limits_with(max_input_tokens=4, max_total_tokens=8)) as edge:
        words = "a b a b hello world"
        for kept, expected in ((2, "hello world"), (-1, "a b hello world")):
            body = {"prompt": words, "max_tokens": 2, "truncate_prompt_tokens": kept}
            answer = await edge.answer("/v1/completions", body)
            kept_ids = tuple(edge.services.tokenizer.encode(expected))
            assert edge.batcher.requests[-1].input_ids == kept_ids
            body["prompt"] = list(edge.services.tokenizer.encode(words))
            assert (await edge.post("/v1/completions", body))[0] == 200
            assert edge.batcher.requests[-1].input_ids == kept_ids
        # As many as fit together with the answer.
        body = {"prompt": words, "max_tokens": 6, "truncate_prompt_tokens": -1}
        assert (await edge.post("/v1/completions", body))[0] == 200
        assert len(edge.batcher.requests[-1].input_ids) == 2
        for wrong in (0, 5, -2):
            body["truncate_prompt_tokens"] = wrong
            status, answer, _ = await edge.post("/v1/completions", body)
            assert (status, "truncate_prompt_tokens" in str(answer)) == (422, True)


async def test_a_salt_parts_the_prefixes() -> None:
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        bodies: list[dict[str, Any]] = [{}, {"cache_salt": "x"}, {"extra_key": "x"}]
        for fields in (*bodies, {"cache_salt": "x", "extra_key": "x"}):
            for _ in range(2):
                await edge.post(ROUTES[0], body_of(ROUTES[0], max_tokens=1, **fields))
        salts = [request.cache_salt for request in edge.batcher.requests]
        assert salts[::2] == salts[1::2]
        assert len(set(salts)) == 4
        status, _, _ = await edge.post(ROUTES[0], body_of(ROUTES[0], cache_salt=""))
        assert status == 422


def json_grammar(source: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, source, closes=True)


GRAMMARS: dict[str, tuple[Any, Grammar]] = {
    "guided_json": ({"type": "integer"}, json_grammar('{"type":"integer"}')),
    "guided_regex": ("[ab]+", Grammar(GrammarKind.REGEX, "[ab]+")),
    "guided_grammar": ('start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
    "json_schema": ('{"type": "null"}', json_grammar('{"type":"null"}')),
    "regex": ("[ab]+", Grammar(GrammarKind.REGEX, "[ab]+")),
    "ebnf": ('start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
    "guided_choice": (["a", "b.c"], Grammar(GrammarKind.REGEX, r"(?:a)|(?:b\.c)")),
}


@pytest.mark.parametrize("route", ROUTES[:2])
async def test_fields_that_guide_the_text_become_grammars(route: str) -> None:
    structured = {
        name.removeprefix("guided_"): GRAMMARS[name] for name in GRAMMARS if "guided" in name
    }
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        for name, (value, grammar) in GRAMMARS.items():
            answer = await edge.answer(route, body_of(route, max_tokens=1, **{name: value}))
            assert edge.batcher.requests[-1].grammar == grammar, name
        for name, (value, grammar) in structured.items():
            body = body_of(route, max_tokens=1, structured_outputs={name: value})
            assert (await edge.post(route, body))[0] == 200
            assert edge.batcher.requests[-1].grammar == grammar, name
        body = body_of(route, max_tokens=1, structured_outputs={"json_object": True})
        assert (await edge.post(route, body))[0] == 200
        request = edge.batcher.requests[-1]
        assert request.grammar == json_grammar('{"type":"object"}')
        body = body_of(route, regex="a", response_format={"type": "json_object"})
        status, answer, _ = await edge.post(route, body)
        assert (status, "`regex`, `response_format` exclude" in str(answer)) == (422, True)


def test_a_choice_is_itself_and_nothing_else() -> None:
    """As Python's own regular expressions read it."""
    texts = ["a", "ab", "", " ", "\n", "\\d", ".*+?()|[]{}^$#&-~", "好", '"', "/"]
    grammar = one_of(texts)
    assert grammar is not None
    pattern = re.compile(grammar.value)
    for text in (*texts, "b", "abc", "1", "  "):
        assert bool(pattern.fullmatch(text)) == (text in texts), text


@pytest.mark.parametrize("route", ROUTES[:2])
async def test_token_ids_come_with_the_texts(route: str) -> None:
    tokens = [*ids("a 好"), END]
    script = Generations(tokens, tokens, tokens, tokenizer=BYTES)
    async with serving(script, limits=WIDE, template=TEMPLATE) as edge:
        prompt = list(edge.services.tokenizer.encode("hello world"))
        _, plain, _ = await edge.post(route, body_of(route))
        assert "token_ids" not in str(plain)
        body = body_of(route, return_token_ids=True)
        _, answer, _ = await edge.post(route, body)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == tokens
        assert answer.get("prompt_token_ids", choice.get("prompt_token_ids")) == prompt
        first, *others = await edge.chunks(route, body)
    held = [first, *first["choices"]]
    assert [one["prompt_token_ids"] for one in held if "prompt_token_ids" in one] == [prompt]
    assert "prompt_token_ids" not in str(others)
    streamed = [chunk["choices"][0].get("token_ids", []) for chunk in (first, *others)]
    assert [id_ for some in streamed for id_ in some] == tokens


@pytest.mark.parametrize("route", ROUTES[:2])
async def test_an_end_token_that_ends_nothing_has_its_log_probability(route: str) -> None:
    tokens = [*ids("a"), END, END]
    asked: dict[str, Any] = {"logprobs": True if "chat" in route else 1, "ignore_eos": True}
    async with serving(
        Generations(tokens, tokenizer=BYTES), limits=WIDE, template=TEMPLATE
    ) as edge:
        answer = await edge.answer(route, body_of(route, **asked, max_tokens=len(tokens)))
    (choice,) = answer["choices"]
    entries = choice["logprobs"].get("content") or choice["logprobs"].get("tokens")
    assert (choice["finish_reason"], len(entries)) == ("length", len(tokens))


@pytest.mark.parametrize("route", ROUTES[:2])
async def test_log_probabilities_may_name_tokens_by_their_ids(route: str) -> None:
    tokens = [*ids("a 好"), END]
    script = Generations(tokens, tokens, tokens, tokenizer=BYTES)
    asked: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": 1} if "chat" in route else {"logprobs": 1}
    )
    async with serving(script, limits=WIDE, template=TEMPLATE) as edge:
        _, plain, _ = await edge.post(route, body_of(route, **asked))
        body = body_of(route, **asked, return_tokens_as_token_ids=True)
        _, answer, _ = await edge.post(route, body)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in await edge.chunks(route, body)]

    def names(logprobs: dict[str, Any]) -> list[str]:
        return (
            logprobs["tokens"]
            if "tokens" in logprobs
            else [one["token"] for one in logprobs["content"]]
        )

    usual, named = (each["choices"][0]["logprobs"] for each in (plain, answer))
    assert names(named) == [f"token_id:{id_}" for id_ in tokens]
    assert [name for one in streamed if one for name in names(one)] == names(named)
    # The end token has an entry only where tokens have ids.
    if "chat" in route:
        assert [one["bytes"] for one in named["content"][:-1]] == [
            one["bytes"] for one in usual["content"]
        ]
        candidates = [top["token"] for one in named["content"] for top in one["top_logprobs"]]
    else:
        assert named["text_offset"][:-1] == usual["text_offset"]
        candidates = [name for one in named["top_logprobs"] for name in one]
    assert all(name.startswith("token_id:") for name in candidates)


async def test_documents_reach_the_template() -> None:
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        body = body_of(ROUTES[0], documents=[{"title": "hello"}])
        _, answer, _ = await edge.post("/chat_tokenize", body)
    assert answer["templated_text"] == "hello world [{'title': 'hello'}]"


async def test_special_tokens_of_the_prompt_are_a_choice() -> None:
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        edge.services.tokenizer._rust.post_processor = TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", 1)]
        )
        for route, usual in ((ROUTES[0], False), (ROUTES[1], True)):
            for given in (None, False, True):
                fields = {} if given is None else {"add_special_tokens": given}
                await edge.post(route, body_of(route, max_tokens=1, **fields))
                has_it = edge.batcher.requests[-1].input_ids[0] == 1
                assert has_it is (usual if given is None else given), (route, given)
        answer = await edge.answer("/chat_tokenize", body_of(ROUTES[0]))
        assert answer["tokenize_response"][0]["id"] != 1


async def test_stop_tokens_that_the_model_lacks_are_refused() -> None:
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        for wrong in ([300], list(range(65))):
            body = body_of(ROUTES[1], max_tokens=1, stop_token_ids=wrong)
            status, answer, _ = await edge.post(ROUTES[1], body)
            assert (status, "stop_token_ids" in str(answer)) == (422, True)


LIMITS = limits_with(max_input_tokens=1000, max_total_tokens=2000, vocab_size=500)
OLD_TEMPLATE = "<tool_call>{% for turn in messages %}{{ turn.content }} {% endfor %}bot"
TOOL = {"type": "function", "function": {"name": "wind", "parameters": {}}}
CALL = '<tool_call>\n{"name": "wind", "arguments": {"place": "sea"}}\n</tool_call>'
SENT: dict[str, Any] = dict.fromkeys(OLD_CLIENTS_FIELDS) | {
    "model": "tgi",
    "messages": [{"role": "user", "content": "hello", "name": None, "tool_calls": None}],
    "max_tokens": 200,
    "stream": True,
}


def serving_text(text: str, **options: Any) -> Any:
    usual = {"limits": LIMITS, "template": OLD_TEMPLATE, "tokenizer": BYTES}
    return serving(saying(text), **usual | options)


async def test_each_delta_has_a_role_and_a_call_or_null_and_all_is_json() -> None:
    async with serving_text("Hi there") as edge:
        chunks = await edge.events(CHAT, SENT)
    choices = [chunk["choices"][0] for chunk in chunks]
    for choice in choices:
        assert choice["delta"].keys() == {"role", "content", "tool_calls"}
        assert (choice["delta"]["role"], choice["delta"]["tool_calls"]) == ("assistant", None)
    assert "".join(choice["delta"]["content"] for choice in choices) == "Hi there"
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]


async def test_a_call_is_an_object() -> None:
    async with serving_text(CALL) as edge:
        sent = {**SENT, "tools": [TOOL], "tool_choice": "auto"}
        chunks = await edge.events(CHAT, sent)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"] for delta in deltas if delta["tool_calls"] is not None]
    assert all(call.keys() == {"index", "id", "type", "function"} for call in calls)
    assert all(call["function"].keys() == {"name", "arguments"} for call in calls)
    assert calls[0]["function"]["name"] == "wind"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"place": "sea"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("without", ["repetition_penalty", "tool_choice", "n"])
async def test_clients_that_send_fewer_fields_are_not_taken_for_old_clients(without: str) -> None:
    async with serving_text("Hi") as edge:
        *chunks, end = await edge.events(CHAT, {k: v for k, v in SENT.items() if k != without})
    assert end == "[DONE]"
    assert set(chunks[-1]["choices"][0]["delta"]) <= {"content"}


async def test_requests_for_another_model_are_not_taken_for_old_clients() -> None:
    async with serving_text("Hi") as edge:
        assert (await edge.events(CHAT, {**SENT, "model": "org/tiny"}))[-1] == "[DONE]"
