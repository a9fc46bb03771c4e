"""Keys, prompts and answers never appear in logs, errors, metrics and public pages; bodies have limits."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError as ShapeError

from millrace_router.adapters.resolver import ClientRules
from millrace_router.api.body.fields import RequestModel
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.platforms.kserve import KserveRequest
from millrace_router.api.platforms.vertex import VertexRequest
from millrace_router.api.tgi.request import GenerateRequest
from millrace_router.errors import (
    AdapterInvalid,
    AdapterUnavailable,
    BodyError,
    RouterError,
    SizeError,
    TemplateError,
    ValidationError,
)
from millrace_router.request.adapter import AdapterReference, MergeRecipe
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server.bodies import MAX_CONTAINERS, MAX_DEPTH, check_structure
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.validation.rules import MAX_STOP_CHARS
from millrace_router.validation.validator import Validator
from millrace_testing.adapters.fake_fetcher import FakeFetcher, Repository, resolver_of
from millrace_testing.router.edge import (
    LIMITS,
    echo,
    fail,
    grammars_of,
    logging_to,
    play,
    serving,
    word_tokenizer,
)
from millrace_testing.text.texts import byte_level, tokenizer

API_KEY = "key-4f1d"
WRONG_KEY = "wrong-9c2e"
PROMPT = "prompt-77aa"
ANSWER = "answer-51bd"
HEADER = "header-c3d9"
SECRETS = (API_KEY, WRONG_KEY, PROMPT, ANSWER, HEADER)
PUBLIC = (
    "/",
    "/health",
    "/metrics",
    "/status",
    "/info",
    "/v1/models",
    "/docs",
    "/api-doc/openapi.json",
)

TEMPLATE = "{% if messages[0].content == 'fail' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"

P: dict[str, Any] = {"max_new_tokens": 2}
MESSAGES = [{"role": "user", "content": PROMPT}]
BODIES: list[tuple[str, Any]] = [
    ("/generate", {"inputs": PROMPT, "parameters": P}),
    ("/generate_stream", {"inputs": PROMPT, "parameters": P}),
    ("/", {"inputs": PROMPT, "parameters": P | {"return_full_text": True}}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": PROMPT, "instructions": PROMPT, "max_output_tokens": 2}),
    ("/v1/responses", {"input": [{"type": PROMPT}], "user": PROMPT}),
    ("/v1/estimate", {"inputs": PROMPT, "parameters": P}),
    ("/tokenize", {"inputs": PROMPT}),
    ("/chat_tokenize", {"messages": MESSAGES}),
    ("/generate", {"inputs": [PROMPT]}),
    ("/generate", {"inputs": PROMPT, "parameters": {"stop": [PROMPT] * 9}}),
    ("/generate", {"inputs": PROMPT, "parameters": {"temperature": PROMPT}}),
    ("/generate", {"inputs": PROMPT, "parameters": {PROMPT: 1, "top_p": 9}}),
    ("/generate", {"inputs": " ".join([PROMPT] * 99), "parameters": P}),
    ("/v1/chat/completions", {"messages": [{"role": PROMPT, "content": [{"type": "text"}]}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{PROMPT: 1}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fail", "name": PROMPT}]}),
    ("/nowhere", {"inputs": PROMPT}),
]


def answer(request: ValidRequest, stream: TokenStream) -> None:
    """Every word of the answer is a secret too."""
    play(stream, ANSWER, ANSWER)


def crash(request: ValidRequest, stream: TokenStream) -> None:
    """A bug whose message says nothing, with secrets in its variables."""
    prompt = PROMPT
    raise AssertionError(len(prompt))


HEADERS = {
    "idempotency-key": HEADER,
    "last-event-id": HEADER,
    "x-tenant": HEADER,
    "cookie": HEADER,
    "x-priority": HEADER,
}


@pytest.mark.parametrize("json_output", [True, False])
@pytest.mark.parametrize("script", [answer, echo, fail, crash])
async def test_nothing_of_a_request_is_logged_or_public(script: Any, json_output: bool) -> None:
    output = io.BytesIO()
    seen = bytearray()
    with logging_to(output, level="trace", json_output=json_output):
        async with serving(script, api_key=API_KEY, template=TEMPLATE, fairness="tenant") as edge:
            for path, body in BODIES:
                for key in (API_KEY, WRONG_KEY):
                    for more in ({}, HEADERS):
                        sent = {"authorization": f"Bearer {key}", **more}
                        where = f"{path}?api_key={key}&q={PROMPT}"
                        _, told, response = await edge.post(where, body, headers=sent)
                        assert key not in f"{told}{response.headers}"
                raw = json.dumps(body).encode()[:-3] + b'"' + PROMPT.encode()
                sent = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
                async with edge.client.post(edge.url + path, data=raw, headers=sent) as response:
                    seen += await response.read()
            for path in PUBLIC:
                seen += (await edge.get(path))[1]
            await no_http(edge.url)
    logged = output.getvalue().decode()
    assert logged.count("request") >= len(BODIES)
    for secret in SECRETS:
        assert secret not in logged
        assert secret.encode() not in seen


async def no_http(url: str) -> None:
    """Bytes that are not a request, with secrets in them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET /{PROMPT} HTTP/1.1\r\nauthorization: {API_KEY}\r\nb\0d {HEADER}\r\n\r\n".encode()
    )
    await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer ", f"Bearer {API_KEY[:-1]}", f"Bearer {API_KEY} ", API_KEY]
)
async def test_a_wrong_key_learns_nothing(key: str) -> None:
    async with serving(api_key=API_KEY) as edge:
        headers = {"authorization": key}
        status, body, response = await edge.post(
            "/generate", {"inputs": PROMPT, "parameters": P}, headers=headers
        )
        assert (status, body) == ((401, "") if key != f"Bearer {API_KEY} " else (200, body))
        assert edge.batcher.requests == [] or status == 200
        assert API_KEY not in str(response.headers)


async def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the standard library's function, over both headers whole: nothing stops at the first difference."""
    compared: list[tuple[bytes, bytes]] = []

    def watching(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return compare_digest(given, expected)

    monkeypatch.setattr("millrace_router.access.keys.compare_digest", watching)
    async with serving(api_key=API_KEY) as edge:
        keys = ("", "B", f"Bearer {API_KEY}", "x" * 4000)
        for key in keys:
            await edge.get("/tokenize", headers={"authorization": key})
            await edge.post("/tokenize", {"inputs": "a"}, headers={"authorization": key})
    bearer, bare = f"Bearer {API_KEY}".encode(), API_KEY.encode()
    assert compared == [pair for key in keys for pair in ((key.encode(), bearer), (b"", bare))]


MARK = "escaped"

# Ways out that sandboxes have known: through types, functions' globals, frames, format strings, filters and tests.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('\\x5f\\x5fmro\\x5f\\x5f') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ range.__self__ }}{{ range.__self__.x }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ self.__class__.__base__.x }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages.sort(key=x) }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '%s'|format(raise_exception.__globals__) }}",
    "{{ '{x.__class__.__init__.__globals__}'.format_map({'x': raise_exception}) }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ messages|map('attr', '__class__')|map('attr', '__mro__')|list|first|first }}",
    "{{ [''.__class__]|first|attr('mro')() }}",
    "{% set x = ''.__class__.__base__ %}{{ x.__subclasses__() }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% from '/etc/passwd' import x %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    """Refused; where the sandbox stands an undefined name in for a private one, nothing of it is shown."""
    message = {"role": "user", "content": "hi"}
    try:
        shown = ChatTemplate(source, special_tokens={}).render([message])
    except TemplateError:
        pass
    else:
        assert shown.strip("[]' ") == "" or shown == "{0.__class__.__mro__}"
    assert message == {"role": "user", "content": "hi"}


CLIENTS = [
    "{{ 7 * 191 }}",
    "{% raise_exception('" + MARK + "') %}",
    "{{ raise_exception('" + MARK + "') }}",
    "{# hidden #}",
    "{%- set messages = [] -%}",
    "{{ messages[0].__class__ }}",
    "{% raw %}",
    "${7*191}",
    "#{7*191}",
    "%(x)s {0} {x.__class__}",
    "{% endfor %}{{ bos_token }}{% for m in messages %}",
]


@pytest.mark.parametrize("text", CLIENTS)
async def test_text_of_clients_is_never_run_as_a_template(text: str) -> None:
    """Through the whole route: as content, part, name, role, argument and variable. Only TGI takes any role."""
    source = (
        "{% for m in messages %}{{ m.role }}|{{ m.name }}|{{ m.content }}|{% endfor %}{{ extra }}"
    )
    call = {"id": text, "function": {"name": text, "arguments": {text: text}}}
    body: dict[str, Any] = {
        "messages": [
            {"role": text, "name": text, "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "user", "tool_calls": [call]},
        ],
        "chat_template_kwargs": {"extra": text, text: text},
    }
    async with serving(template=source, strict_tgi=True) as edge:
        answer = await edge.answer("/chat_tokenize", body)
    prompt = answer["templated_text"]
    assert prompt.startswith(f"{text}|{text}|{text}|user||{text}|user||")
    assert prompt.endswith(text)
    (rendered_call,) = json.loads(prompt.removesuffix(text).rsplit("||", 1)[1].removesuffix("|"))
    assert json.loads(rendered_call["function"]["arguments"]) == {text: text}
    assert "1337" not in prompt


@pytest.mark.parametrize(
    "name", ["range", "namespace", "raise_exception", "strftime_now", "self", "messages", "tools"]
)
def test_a_variable_with_a_function_s_name_harms_only_its_request(name: str) -> None:
    template = ChatTemplate("{{ range(2)|list }}{{ messages[0].content }}", special_tokens={})
    message = [{"role": "user", "content": "hi"}]
    with suppress(TemplateError):
        template.render(message, variables={name: {"__class__": "x"}})
    assert template.render(message) == "[0, 1]hi"


TOKEN = "hf_token-5e8b"
WRONG = "hf_wrong-77c1"
ADMIN = "admin-90ab"
TOKENS = (TOKEN, WRONG, ADMIN)
ADAPTER_TEMPLATE = "{{ messages[0].content }}"
NAME = "org/private"
ADAPTER_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PAGES = ("/v1/models", "/info", "/metrics", "/adapters", "/v1/quarantine")


def bodies(token: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests with the token in the body, right and wrong ones."""
    own = {"adapter_id": NAME, "api_token": token, "max_new_tokens": 2}
    merged = {"merged_adapters": {"ids": [NAME, "none"]}, "api_token": token}
    return [
        ("/generate", {"inputs": "hello", "parameters": own}),
        ("/generate_stream", {"inputs": "hello", "parameters": own}),
        ("/generate", {"inputs": "hello", "parameters": merged}),
        ("/generate", {"inputs": "hello", "parameters": own | {"top_p": 9}}),
        ("/generate", {"inputs": "hello", "parameters": own | {"adapter_id": 5}}),
        ("/generate", {"inputs": "hello", "parameters": own | {"api_token": [token]}}),
        ("/generate", {"inputs": "hello", "parameters": own | {"api_token": f"{token}\n"}}),
        ("/v1/estimate", {"inputs": "hello", "parameters": own}),
        ("/v1/chat/completions", ADAPTER_CHAT | {"model": NAME, "api_token": token}),
        ("/v1/completions", {"prompt": "a", "model": NAME, "api_token": token, "max_tokens": 1}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "org/none", "token": token}),
    ]


@pytest.mark.parametrize("json_output", [True, False])
@pytest.mark.parametrize(
    "error", [None, AdapterInvalid(NAME, "NaN"), AdapterUnavailable(NAME, "down")]
)
async def test_an_adapter_token_reaches_no_log_answer_or_shard(
    error: RouterError | None, *, json_output: bool
) -> None:
    fetcher = FakeFetcher(hub={NAME: Repository(tokens=frozenset({TOKEN}))}, error=error)
    resolver = resolver_of(fetcher, rules=ClientRules(patterns=("hub:org/*",)))
    output, seen = io.BytesIO(), []
    with logging_to(output, json_output=json_output):
        async with serving(adapters=resolver, template=ADAPTER_TEMPLATE, admin_key=ADMIN) as edge:
            for token in (TOKEN, WRONG):
                for path, body in bodies(token):
                    headers = {"x-adapter-token": token, "authorization": f"Bearer {ADMIN}"}
                    _, answer, response = await edge.post(path, body, headers=headers)
                    seen.append(f"{answer} {response.headers}")
            for page in PAGES:
                shown = {"x-adapter-token": TOKEN, "authorization": f"Bearer {ADMIN}"}
                _, content, response = await edge.get(page, headers=shown)
                seen.append(f"{content!r} {response.headers}")
            # All that the batcher, the journal and the shards ever know of a request.
            seen.extend(map(repr, [*edge.batcher.requests, *edge.batcher.estimated]))
            assert bool(edge.batcher.requests) == (error is None)
    seen.append(output.getvalue().decode())
    assert NAME in seen[-1] or error is not None
    assert fetcher.asked
    for secret in TOKENS:
        assert [text for text in seen if secret in text] == []


def test_a_reference_does_not_show_its_token() -> None:
    recipe = MergeRecipe(ids=("a",), weights=(1.0,))
    for reference in (
        AdapterReference(name="a", token=TOKEN),
        AdapterReference(merged=recipe, token=TOKEN),
    ):
        assert TOKEN not in repr(reference)


async def test_remembered_access_contains_no_token() -> None:
    fetcher = FakeFetcher(hub={NAME: Repository(tokens=frozenset({TOKEN}))})
    resolver = resolver_of(fetcher, rules=ClientRules(patterns=("hub:org/*",)))
    await resolver.resolve(AdapterReference(name=NAME, token=TOKEN), "me")
    kept = [
        resolver._grants.__dict__,
        resolver._refusals.__dict__,
        resolver._clients.__dict__,
    ]
    grants = [resolver._grants._values, resolver._clients._values]
    assert TOKEN not in f"{kept} {grants}"
    assert grants[0]


TWO_MB = 2_000_000


def depth_and_count(value: object) -> tuple[int, int]:
    """Levels and number of arrays and objects, by walking what was parsed."""
    if not isinstance(value, dict | list):
        return 0, 0
    inside = [depth_and_count(v) for v in (value.values() if isinstance(value, dict) else value)]
    return 1 + max((d for d, _ in inside), default=0), 1 + sum(n for _, n in inside)


def nested(value: object, depth: int) -> object:
    for level in range(depth):
        value = [value] if level % 2 else {'b"[{\\': value}
    return value


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('[]{}"\\ax,:')),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('[{"\\a')), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(JSON, st.integers(min_value=185, max_value=205), st.booleans())
def test_levels_of_json_do_not_depend_on_the_content_of_strings(
    value: object, more: int, escaped: bool
) -> None:
    value = nested(value, more)
    body = json.dumps(value, ensure_ascii=escaped).encode()
    if depth_and_count(value)[0] > MAX_DEPTH:
        with pytest.raises(BodyError, match="more than 200 levels deep"):
            check_structure(body)
    else:
        check_structure(body)


def test_containers_are_counted_and_brackets_in_strings_are_not() -> None:
    check_structure(json.dumps(["[{" * 100_000, *[[]] * (MAX_CONTAINERS - 1)]).encode())
    with pytest.raises(BodyError, match="more than 20000 arrays and objects"):
        check_structure(json.dumps([*[{}] * MAX_CONTAINERS]).encode())


@pytest.mark.parametrize(
    "body", [b"[" * TWO_MB, b'{"a":' * 400_000, b'"' + b"[" * TWO_MB, b"]" * 999 + b"[" * 999]
)
def test_malformed_json_is_left_to_the_parser_or_refused(body: bytes) -> None:
    try:
        check_structure(body)
    except BodyError:
        return
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(body)


@pytest.mark.parametrize(
    "literal",
    ["1e400", "-1e400", "9" * 400, "NaN", "Infinity", '"\\ud800"', '"\\udc00\\ud800"', "01", "1_0"],
)
def test_numbers_and_texts_that_are_none_are_no_json(literal: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(literal)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateRequest, lambda bad: {"inputs": "x", "parameters": {"stop": bad}}),
        (ChatCompletionRequest, lambda bad: {"messages": bad}),
        (ChatCompletionRequest, lambda bad: {"messages": [{"role": "user", "content": bad}]}),
        (ChatCompletionRequest, lambda bad: {"messages": [{"role": "user", "tool_calls": bad}]}),
        (ChatCompletionRequest, lambda bad: {**CHAT, "tools": bad}),
        (ChatCompletionRequest, lambda bad: {**CHAT, "stop": bad}),
        (CompletionRequest, lambda bad: {"prompt": ["x"], "stop": bad}),
    ],
)
def test_of_a_million_mistakes_one_is_looked_at(
    model: type[RequestModel], body: Callable[[list[object]], object]
) -> None:
    with pytest.raises(ShapeError) as refused:
        model.model_validate(body([1] * 1_000_000))
    # One for each kind of value that the field takes.
    assert refused.value.error_count() <= 2


def test_no_list_of_a_body_collects_mistakes() -> None:
    """Whatever field is added, a list in it fails at its first bad item."""
    models: tuple[type[RequestModel], ...] = (
        *(GenerateRequest, ChatCompletionRequest, CompletionRequest),
        *(VertexRequest, KserveRequest),
    )
    for model in models:
        assert _slow_lists(model.__pydantic_core_schema__) == []


def _slow_lists(schema: object, path: str = "") -> list[str]:
    """Places of a pydantic core schema that hold lists, or objects, of checked items without `fail_fast`."""
    found = []
    if isinstance(schema, dict):
        kind = schema.get("type")
        items = schema.get("items_schema") or schema.get("values_schema")
        checked = isinstance(items, dict) and items.get("type") != "any"
        if kind in ("list", "dict") and checked and not schema.get("fail_fast"):
            found.append(path)
        for key, value in schema.items():
            found += _slow_lists(value, f"{path}.{key}")
    elif isinstance(schema, list | tuple):
        for index, value in enumerate(schema):
            found += _slow_lists(value, f"{path}[{index}]")
    return found


def validator(of: Tokenizer) -> Validator:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    return Validator(of, LIMITS, metrics, grammars_of())


async def check(of: Tokenizer, inputs: str, **parameters: Any) -> None:
    asked = GenerationRequest(prompt=inputs, max_new_tokens=1, **parameters)
    await validator(of).check(asked)


class Untouched(Tokenizer):
    """A tokenizer that fails if it is called."""

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        raise AssertionError("the text was tokenized")


def untouched() -> Untouched:
    return Untouched(byte_level(), validation_workers=1)


@pytest.mark.parametrize("text", ["a" * TWO_MB, "日" * 600_000, " " * TWO_MB])
async def test_text_that_cannot_fit_is_refused_without_tokenizing_it(text: str) -> None:
    of = untouched()
    with pytest.raises(SizeError, match=r"must have less than 8 tokens\. Given: at least") as e:
        await check(of, text)
    real = len(tokenizer("byte_level").encode(text))
    assert 8 < e.value.num_prompt_tokens <= real


async def test_text_that_may_fit_is_tokenized() -> None:
    of = tokenizer("byte_level")
    assert of.longest_token is not None
    bound = LIMITS.max_input_tokens * of.longest_token
    with pytest.raises(AssertionError, match="was tokenized"):
        await check(untouched(), "x" * bound)
    with pytest.raises(AssertionError, match="was tokenized"):
        await check(untouched(), "x" * TWO_MB, truncate=4)
    # One unknown word is one token, however long it is.
    await check(word_tokenizer(), "x" * TWO_MB)


async def test_stop_sequences_have_a_greatest_length() -> None:
    await check(word_tokenizer(), "a", stop=["s" * MAX_STOP_CHARS])
    with pytest.raises(ValidationError, match=r"at most 4096 characters\. Given: 4097"):
        await check(word_tokenizer(), "a", stop=["x", "s" * (MAX_STOP_CHARS + 1)])


def test_indented_json_does_not_grow_without_bound() -> None:
    """In a template of Llama 3.1's kind, two megabytes of the client's would become 800."""
    template = ChatTemplate("{{ custom | tojson(indent=4) }}", special_tokens={})
    deep = nested([1] * 500_000, 190)
    with pytest.raises(TemplateError, match="characters of indented JSON"):
        template.render([{"role": "user", "content": "x"}], variables={"custom": deep})
    # Without indentation it is as long as it came.
    plain = ChatTemplate("{{ custom | tojson }}", special_tokens={})
    assert json.loads(plain.render([], variables={"custom": deep})) == deep


@pytest.mark.parametrize("name", ["tools", "variables"])
async def test_large_arguments_of_a_template_are_rendered_in_another_thread(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    template = ChatTemplate("{{ strftime_now('x') }}", special_tokens={})

    def render(*_: object, **__: object) -> str:
        seen.append(threading.get_ident())
        return "prompt"

    monkeypatch.setattr(template, "render", render)
    large = {"x": ["y"] * 20_000}
    given: dict[str, Any] = {name: [large] if name == "tools" else large}
    await template.render_async([{"role": "user", "content": "x"}], **given)
    await template.render_async([{"role": "user", "content": "x"}])
    assert seen[0] != threading.get_ident() == seen[1]


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"a" * 100_000,
        b"a" * 100_000 + b": x",
        b"\r\n".join(b"x%d: y" % i for i in range(9999)),
    ],
    ids=["value", "name", "number"],
)
async def test_headers_have_bounds_too(head: bytes) -> None:
    async with serving() as edge:
        reader, writer = await edge.send(
            b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n"
        )
        assert b" 431 " in await reader.readline()
        writer.close()
        assert (await edge.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/chat/completions", "/v1/completions", "/tokenize"]
)
async def test_each_route_refuses_with_a_type(path: str) -> None:
    deep = b"[" * 150 + b"]" * 150
    many = b'{"x":[' + b",".join([deep] * 500) + b"]}"
    async with serving() as edge:
        sent = {"data": many, "headers": {"content-type": "application/json"}}
        status, answer, _ = await edge.post(path, **sent)
        assert status == 400
        assert b"more than 20000 arrays and objects" in orjson.dumps(answer)
        assert edge.services.infer.permits.taken == 0
        assert (await edge.get("/health"))[0] == 200
