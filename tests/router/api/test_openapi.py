"""The document and the server say the same: of routes, keys, answers, and each way to be refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace_router.__main__ import main
from millrace_router.adapters.resolver import Resolver
from millrace_router.api.anthropic.answers import STATUSES
from millrace_router.api.openapi.document import OPERATIONS, REFERENCE
from millrace_router.errors import (
    AdapterForbidden,
    AdapterNotFound,
    AdapterUnavailable,
    GenerationError,
    IncompleteGeneration,
    RouterError,
    ShardsGone,
)
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.forecast import Estimate, Prediction
from millrace_router.request.request import Task, ValidRequest
from millrace_router.request.scheduling import PRIORITY_HEADER
from millrace_router.request.token_stream import TokenStream
from millrace_router.server import bodies
from millrace_router.server.operation import Operation
from millrace_testing.adapters.fake_fetcher import FakeFetcher, Repository, registered, resolver_of
from millrace_testing.contract import openapi
from millrace_testing.contract.openapi import (
    DOCUMENT,
    EVENTS,
    JSON,
    Schema,
    check_documented,
    described,
    events_of,
    fits,
    path_of,
    resolved,
    schema_of,
)
from millrace_testing.router.edge import (
    Edge,
    break_off,
    echo,
    limits_with,
    plays,
    pooling_of,
    serving,
    token_event,
)

BY_NAME = {operation.id: operation for operation in OPERATIONS}
FOR_CLIENTS = [operation for operation in OPERATIONS if not operation.is_admin]
FOR_ADMINS = [operation for operation in OPERATIONS if operation.is_admin]
GETS = [operation for operation in FOR_CLIENTS if operation.method == "get"]
POSTS = [operation for operation in FOR_CLIENTS if operation.method == "post"]
HEALTH = (
    *("root", "health", "ping", "ready"),
    *("kserve_health_ready", "kserve_model_ready", "kserve_model_metadata_ready"),
)

FEW = {"max_new_tokens": 2}
EVERYTHING = {"details": True, "decoder_input_details": True, "seed": 2**64 - 1, **FEW}
LORAX = {"details": True, "api_token": None, "return_k_alternatives": 2}
NATIVE: dict[str, Any] = {"inputs": "hello world", "parameters": FEW}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": ["hello", "world"], "max_tokens": 2}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
USAGE = {"stream_options": {"include_usage": True}}
STREAM = {"stream": True}
ANTHROPIC: dict[str, Any] = CHAT | {"system": "hello"}
KSERVE: dict[str, Any] = {
    "inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["hello"]}],
    "parameters": FEW,
}
RESPONSES: dict[str, Any] = {"input": "hello", "max_output_tokens": 16}
TEXTS = {"query": "hello", "texts": ["world", "b"]}
DOCUMENTS = {"query": "hello", "documents": ["world", {"text": "b"}]}
SCORE = {"text_1": "hello", "text_2": ["world", "b"]}
BODIES = {
    "compat_generate": NATIVE,
    "generate": NATIVE,
    "generate_stream": NATIVE,
    "tokenize": NATIVE,
    "detokenize": {"tokens": [2, 3]},
    "get_chat_tokenize": CHAT,
    "chat_completions": CHAT,
    "completions": COMPLETION,
    "responses": RESPONSES,
    "responses_input_tokens": RESPONSES,
    "messages": ANTHROPIC,
    "messages_count_tokens": ANTHROPIC,
    "estimate": NATIVE,
    "sagemaker_compatibility": NATIVE,
    "vertex_compatibility": {"instances": [NATIVE, CHAT]},
    "kserve_infer": KSERVE,
    "kserve_model_infer": KSERVE,
    "embeddings": {"input": "hello"},
    "embed": {"inputs": "hello"},
    "rerank": TEXTS,
    "rerank_v1": DOCUMENTS,
    "rerank_v2": DOCUMENTS,
    "score": SCORE,
    "score_v1": SCORE,
}
STREAMS = {
    "generate_stream": NATIVE,
    "chat_completions": CHAT,
    "completions": COMPLETION,
    "responses": RESPONSES,
    "messages": ANTHROPIC,
    "sagemaker_compatibility": CHAT,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("compat_generate", NATIVE | STREAM),
    ("generate", NATIVE | {"parameters": EVERYTHING}),
    ("generate", NATIVE | {"parameters": FEW | {"details": True, "best_of": 2, "top_k": 2}}),
    ("generate_stream", NATIVE | {"parameters": FEW | {"details": True, "top_n_tokens": 2}}),
    ("generate", NATIVE | {"parameters": FEW | LORAX}),
    ("generate_stream", NATIVE | {"parameters": FEW | LORAX}),
    ("chat_completions", CHAT | LOGPROBS),
    ("chat_completions", CHAT | {"n": 2, "response_format": {"type": "json_object"}}),
    ("chat_completions", CHAT | STREAM | {"n": 2}),
    ("completions", COMPLETION | {"n": 2, "logit_bias": {"1": 5}}),
    ("completions", COMPLETION | {"prompt": "a", "best_of": 2}),
    ("chat_completions", CHAT | STREAM),
    ("chat_completions", CHAT | STREAM | LOGPROBS | USAGE),
    ("completions", COMPLETION | STREAM),
    ("completions", COMPLETION | STREAM | USAGE),
    ("responses", RESPONSES | STREAM),
    ("messages", ANTHROPIC | STREAM),
    ("messages", ANTHROPIC | {"stop_sequences": [" x"]}),
    ("sagemaker_compatibility", CHAT),
    ("sagemaker_compatibility", COMPLETION | STREAM),
    ("tokenize", {"prompt": "hello"}),
    ("embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}),
    ("embed", {"inputs": ["hello", "b"], "parameters": {}}),
    ("rerank", TEXTS | {"return_text": True}),
    ("rerank", DOCUMENTS | {"return_documents": False}),
    ("estimate", CHAT),
    ("estimate", {"prompt": "hello"}),
    ("estimate", {"inputs": "hello " * 9}),
]


def generate(request: ValidRequest, stream: TokenStream) -> None:
    """Generate as `echo` does, with candidates if the request asks for them."""
    if request.top_n_tokens:
        stream.token(token_event(1, " x", x=-0.5, y=float("nan")))
    echo(request, stream)


def serve(**options: Any) -> Any:
    """Whatever a route needs to have something to say."""
    limits = limits_with(prefill_logprobs=True, max_concurrent_requests=4, max_total_tokens=32)
    usual: dict[str, Any] = {
        "script": generate,
        "template": "hello",
        "limits": limits,
        "pooling": pooling_of(*Task),
    }
    return serving(**usual | options)


async def ask(
    edge: Edge, operation: Operation, body: object = None, **headers: str
) -> tuple[int, str, bytes, Any]:
    """Status, media type, body and headers of the answer; `body` is sent as it is if it is bytes."""
    data = orjson.dumps(body) if isinstance(body, dict) else body
    headers = ({"content-type": JSON} if body is not None else {}) | headers
    method, url = operation.method.upper(), edge.url + path_of(operation)
    async with edge.client.request(method, url, data=data, headers=headers) as answer:
        return answer.status, answer.content_type, await answer.read(), answer.headers


def references_in(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from references_in(part)


async def test_every_route_is_documented_and_no_other() -> None:
    async with serving() as edge:
        routes = Counter(
            (route.method.lower(), route.resource.canonical)
            for route in edge.runner.app.router.routes()
            if route.method != "HEAD" and route.resource is not None
        )
    assert routes == Counter((operation.method, operation.path) for operation in OPERATIONS)
    assert len(BY_NAME) == len(OPERATIONS)


def test_printing_the_document_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["print-schema", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: millrace-router print-schema ")


async def test_the_document_is_served_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print-schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == DOCUMENT
    async with serving(admin_key="key") as edge:
        for name in ("openapi", "openapi_alias"):
            _, _, body, _ = await ask(edge, BY_NAME[name])
            assert body.decode() + "\n" == printed


async def test_the_operators_routes_are_documented_only_where_they_are_served() -> None:
    async with serving() as edge:
        _, _, body, _ = await ask(edge, BY_NAME["openapi"])
    served = set(json.loads(body)["paths"])
    assert DOCUMENT["paths"].keys() - served == {each.path for each in OPERATIONS if each.is_admin}


def test_references_lead_to_components_and_every_component_is_used() -> None:
    references = set(references_in(DOCUMENT))
    named = [resolved(reference) for reference in references]
    assert len(named) == len(DOCUMENT["components"]["schemas"])


async def test_a_key_is_required_exactly_where_the_document_states_it() -> None:
    async with serving(api_key="secret") as edge:
        for operation in FOR_CLIENTS:
            status, media_type, body, _ = await ask(edge, operation, BODIES.get(operation.id))
            assert ("security" in described(operation)) == (status == 401), operation.path
            if status == 401:
                check_documented(operation, status, media_type, body)


ADMIN_BODIES = {
    "load_lora_adapter": {"lora_name": "b", "lora_path": "org/b"},
    "unload_lora_adapter": {"lora_name": "b"},
    "sglang_load_lora_adapter": {"lora_name": "c", "lora_path": "org/b", "pinned": True},
    "sglang_unload_lora_adapter": {"lora_name": "c"},
}
WITH_KEY = {"authorization": "Bearer boss"}


async def test_answers_to_operators_are_as_documented() -> None:
    resolver = resolver_of(FakeFetcher(hub={"org/b": Repository()}), registered("a", "org/a"))
    async with serving(adapters=resolver, admin_key="boss", api_key="secret") as edge:
        for operation in FOR_ADMINS:
            body = ADMIN_BODIES.get(operation.id)
            status, media_type, answer, _ = await ask(edge, operation, body)
            assert status == 401
            check_documented(operation, status, media_type, answer)
            status, media_type, answer, _ = await ask(edge, operation, body, **WITH_KEY)
            assert status == 200, answer
            check_documented(operation, status, media_type, answer)


@pytest.mark.parametrize("error", [AdapterNotFound("a"), AdapterUnavailable("a", "down")])
async def test_refusals_of_operators_are_as_documented(error: RouterError) -> None:
    resolver = resolver_of(FakeFetcher(error=error))
    async with serving(adapters=resolver, admin_key="boss") as edge:
        for operation in FOR_ADMINS:
            for body in ({}, ADMIN_BODIES.get(operation.id), b"{", b"[]"):
                if operation.method == "post":
                    answer = await ask(edge, operation, body, **WITH_KEY)
                    assert answer[0] in {400, 404, 422, 503}
                    check_documented(operation, *answer[:3])
                    told = described(operation)["responses"][str(answer[0])].get("headers", {})
                    assert ("retry-after" in answer[3]) == ("retry-after" in told)
    async with serving() as edge:
        for operation in FOR_ADMINS:
            status, media_type, answered, _ = await ask(edge, operation, **WITH_KEY)
            assert status == 404
            check_documented(operation, status, media_type, answered)


@pytest.mark.parametrize("operation", GETS, ids=lambda operation: operation.id)
async def test_answers_are_as_documented(operation: Operation) -> None:
    async with serve(cost=CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001))) as edge:
        request = ValidRequest(input_ids=(1, 2), max_new_tokens=3)
        edge.batcher.quarantine.add(request, num_generated=1, reason="lost")
        status, media_type, body, _ = await ask(edge, operation)
    never_there = "{id}" in operation.path
    assert status == (404 if never_there else 200)
    check_documented(operation, status, media_type, body)


@pytest.mark.parametrize(
    ("name", "body"), [*BODIES.items(), *VARIANTS], ids=lambda value: str(value)[:60]
)
async def test_bodies_and_media_types_of_answers_are_as_documented(
    name: str, body: dict[str, Any]
) -> None:
    operation = BY_NAME[name]
    async with serve() as edge:
        prediction = Prediction(queue_seconds=0.1, first_token_seconds=0.2, finish_seconds=0.3)
        edge.batcher.estimated_as = Estimate(
            prediction=prediction, num_cached=1, num_waiting=2, num_running=3
        )
        status, media_type, answer, _ = await ask(edge, operation, body)
    assert status == 200, answer
    assert (media_type == EVENTS) == (body.get("stream", False) or name == "generate_stream")
    check_documented(operation, status, media_type, answer)


def fails(error: RouterError) -> Callable[[ValidRequest, TokenStream], None]:
    """A generation that fails before its first token."""

    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.fail(error)

    return script


def leave(_: Edge) -> None:
    pass


def drain(edge: Edge) -> None:
    edge.services.infer.drain()


def fill(edge: Edge) -> None:
    for permits in (edge.services.infer.permits, edge.services.infer.line_aside):
        permits.take(permits.free)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One way to get a status: a server, what has happened to it, and what is sent."""

    status: HTTPStatus
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Edge], None] = leave
    body: bytes | Callable[[], AsyncIterator[bytes]] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    is_of_adapters: bool = False
    """Whether only routes that resolve an adapter answer so."""

    def of(self, operation: Operation) -> int:
        """Status that the operation answers with."""
        status = STATUSES.get(self.status, self.status) if operation.anthropic else self.status
        if "script" in self.options:
            generates = HTTPStatus.INTERNAL_SERVER_ERROR in operation.failures
            return status if generates else HTTPStatus.OK
        if self.is_of_adapters and not operation.fetches:
            return HTTPStatus.OK
        return status if status in operation.failures else HTTPStatus.OK


async def hangs() -> AsyncIterator[bytes]:
    """A body that does not come to its end."""
    yield b"{"
    await asyncio.Event().wait()


def without_access(error: RouterError) -> Resolver:
    """Adapters whose default cannot be used."""
    return resolver_of(FakeFetcher(error=error), registered("a", "org/a"), default="a")


REFUSALS = [
    Refusal(
        status=HTTPStatus.NOT_FOUND, options={"adapters": without_access(AdapterNotFound("a"))}
    ),
    Refusal(
        status=HTTPStatus.FORBIDDEN, options={"adapters": without_access(AdapterForbidden("a"))}
    ),
    Refusal(
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        options={"adapters": without_access(AdapterUnavailable("a", "down"))},
        is_of_adapters=True,
    ),
    Refusal(status=HTTPStatus.BAD_REQUEST, body=b"{"),
    Refusal(status=HTTPStatus.REQUEST_TIMEOUT, body=hangs),
    Refusal(status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, options={"payload_limit": 10}),
    Refusal(status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE, headers={"content-type": "text/plain"}),
    Refusal(status=HTTPStatus.UNPROCESSABLE_ENTITY, body=b"[]"),
    Refusal(status=HTTPStatus.TOO_MANY_REQUESTS, prepare=fill),
    Refusal(status=HTTPStatus.SERVICE_UNAVAILABLE, prepare=drain),
    Refusal(status=HTTPStatus.SERVICE_UNAVAILABLE, options={"script": fails(ShardsGone("gone"))}),
    Refusal(status=HTTPStatus.GONE, headers={"idempotency-key": "k", "last-event-id": "1"}),
    Refusal(status=HTTPStatus.FAILED_DEPENDENCY, options={"script": fails(GenerationError("no"))}),
    Refusal(
        status=HTTPStatus.INTERNAL_SERVER_ERROR, options={"script": fails(IncompleteGeneration())}
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.status.name)
async def test_a_refusal_is_documented_where_it_happens_and_nowhere_else(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refusal.body is hangs:
        monkeypatch.setattr(bodies, "BODY_SECONDS", 0.01)
    async with serve(**refusal.options) as edge:
        refusal.prepare(edge)
        for operation in POSTS:
            body = refusal.body() if callable(refusal.body) else refusal.body
            status, media_type, answer, headers = await ask(
                edge, operation, body or BODIES[operation.id], **refusal.headers
            )
            assert status == refusal.of(operation), (operation.path, answer)
            check_documented(operation, status, media_type, answer)
            documented = described(operation)["responses"][str(status)].get("headers", {})
            told = documented.get("retry-after", {"required": False})
            assert told.get("required", "retry-after" in headers) == ("retry-after" in headers)
            assert int(headers.get("retry-after", 1)) >= 1


async def test_a_header_that_is_not_as_documented_is_refused_wherever_it_is_read() -> None:
    least = {name: KSERVE | {"inputs": []} for name in ("kserve_infer", "kserve_model_infer")}
    async with serve() as edge:
        for operation in POSTS:
            body = (BODIES | least)[operation.id]
            status, _, answer, _ = await ask(edge, operation, body, **{PRIORITY_HEADER: "11"})
            assert (status in {400, 422}) == (PRIORITY_HEADER in operation.headers), answer


def test_no_failure_is_documented_that_nothing_provokes() -> None:
    known = {refusal.status for refusal in REFUSALS}
    assert {failure for operation in POSTS for failure in operation.failures} == known


@pytest.mark.parametrize("name", STREAMS)
async def test_a_failure_in_mid_stream_is_an_event_as_documented(name: str) -> None:
    operation = BY_NAME[name]
    async with serve(script=break_off) as edge:
        status, media_type, body, _ = await ask(edge, operation, STREAMS[name] | STREAM)
    assert (status, media_type) == (200, EVENTS)
    assert b"Server error: out of luck" in body
    assert events_of(operation, body)
    check_documented(operation, status, media_type, body)


@pytest.mark.parametrize("operation", GETS, ids=lambda operation: operation.id)
async def test_unhealthy_answers_are_documented(operation: Operation) -> None:
    async with serving() as edge:
        edge.batcher.status.give_up("the shards are lost")
        status, media_type, body, _ = await ask(edge, operation)
    assert (status == 503) == (operation.id in HEALTH)
    assert (status == 503) == (HTTPStatus.SERVICE_UNAVAILABLE in operation.failures)
    if status == 503:
        assert "the shards are lost" in json.loads(body)["reason"]
        check_documented(operation, status, media_type, body)


async def test_undocumented_keys_and_types_do_not_fit() -> None:
    """The measure itself: a key too many, one too few, another type."""
    schema = schema_of(BY_NAME["generate_stream"], 200, EVENTS)

    async with serve(script=plays(" x")) as edge:
        _, _, body, _ = await ask(edge, BY_NAME["generate_stream"], NATIVE)
    (event,) = events_of(BY_NAME["generate_stream"], body)
    assert fits(event, schema)
    assert not fits(event | {"more": 1}, schema)
    assert not fits(event | {"index": "1"}, schema)
    assert not fits(event | {"index": True}, schema)
    assert not fits({key: value for key, value in event.items() if key != "token"}, schema)


NAMES = json.loads(Path(openapi.__file__).with_name("tgi_openapi_names.json").read_text())
TGI_OPERATIONS: dict[str, str] = NAMES["operations"]
SCHEMAS: dict[str, list[str]] = NAMES["schemas"]
"""TGI's schemas, and the properties of each and of its variants."""
EXCEPTIONS = {
    "TextMessage.tool_call_id": "no answer has it in TGI either, whose server leaves out what is null",
}


def properties_of(schema: Schema) -> set[str]:
    """Names of the properties of a schema and of its variants."""
    if "$ref" in schema:
        schema = resolved(schema["$ref"])
    variants = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return set(schema.get("properties", ())).union(*map(properties_of, variants))


@pytest.mark.parametrize("route", TGI_OPERATIONS)
def test_every_operation_of_tgi_has_its_name(route: str) -> None:
    method, path = route.split()
    assert DOCUMENT["paths"][path][method]["operationId"] == TGI_OPERATIONS[route]


@pytest.mark.parametrize("route", TGI_OPERATIONS)
def test_every_status_of_tgi_is_there(route: str) -> None:
    method, path = route.split()
    assert set(NAMES["statuses"][route]) <= {
        int(status) for status in DOCUMENT["paths"][path][method]["responses"]
    }


def test_choices_of_tools_have_their_values() -> None:
    (words,) = (one["enum"] for one in resolved(REFERENCE + "ToolChoice")["anyOf"] if "enum" in one)
    assert words == NAMES["tool_choice"]


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - EXCEPTIONS.keys()))
def test_every_schema_of_tgi_is_there_with_its_properties(name: str) -> None:
    missing = set(SCHEMAS[name]) - properties_of({"$ref": REFERENCE + name})
    assert {prop for prop in missing if f"{name}.{prop}" not in EXCEPTIONS} == set()


def test_every_exception_is_needed() -> None:
    for name in EXCEPTIONS:
        schema, _, prop = name.partition(".")
        assert schema in SCHEMAS
        there = schema in DOCUMENT["components"]["schemas"]
        assert there == bool(prop)
        if prop:
            assert prop in SCHEMAS[schema]
            assert prop not in properties_of({"$ref": REFERENCE + schema})


FIELD_SCHEMAS = DOCUMENT["components"]["schemas"]
WHOLE = ("ChatRequest", "GenerateParameters", "GenerateRequest", "CompatGenerateRequest")
ABSENT: tuple[Schema, ...] = (
    {"messages": [{"role": "user", "content": None}]},
    {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "a"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": None}],
            },
        ]
    },
    {"messages": [{"role": "user", "content": "hello"}], "system": None},
)
"""Conversations that lack texts, as clients' do."""
FORM = re.compile(r"[A-Z`].+\. Range: .+\. Default: .+\.", re.DOTALL)
BOUNDS = re.compile(r"Range: (-?[\d.]+) to (-?[\d]+(?:\.\d+)?)(?:;|\. )")
TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("body", ABSENT)
async def test_texts_that_are_null_are_taken_and_documented(body: Schema) -> None:
    async with serving(echo, template="hello") as edge:
        assert (await edge.post("/v1/messages/count_tokens", body))[0] == 200
    assert fits(body, {"$ref": REFERENCE + "CountTokensRequest"})


@pytest.mark.parametrize("name", WHOLE)
def test_every_field_has_a_sentence_a_range_and_a_default(name: str) -> None:
    fields = FIELD_SCHEMAS[name]["properties"]
    assert [field for field in fields if not FORM.fullmatch(fields[field]["description"])] == []


def bounded(name: str) -> list[tuple[str, float, float]]:
    """Fields of a schema whose description has a range of numbers."""
    fields = FIELD_SCHEMAS[name]["properties"]
    matches = [(field, BOUNDS.search(fields[field]["description"])) for field in fields]
    return [
        (field, float(match[1]), float(match[2]))
        for field, match in matches
        if match and field not in {"seed", "logit_bias"}
    ]


async def test_ranges_are_those_that_the_server_checks() -> None:
    async with serving(echo, template="hello", limits=limits_with(max_total_tokens=32)) as edge:

        async def status(path: str, name: str, value: float) -> int:
            given = {name: int(value) if value.is_integer() else value, "seed": 1}
            body = TURN | given if "chat" in path else {"inputs": "a", "parameters": given}
            code: int = (await edge.post(path, body))[0]
            return code

        chat, parameters = bounded("ChatRequest"), bounded("GenerateParameters")
        assert {name for name, *_ in chat} >= {
            "min_p",
            "priority",
            "presence_penalty",
        }
        assert {name for name, *_ in parameters} >= {"min_p", "priority", "frequency_penalty"}
        for path, fields in (("/v1/chat/completions", chat), ("/generate", parameters)):
            for name, least, most in fields:
                assert await status(path, name, least) == 200, name
                assert await status(path, name, most) == 200, name
                step = 0.5 if name not in {"priority", "top_logprobs"} else 1.0
                assert await status(path, name, least - step) in {400, 422}, name
                assert await status(path, name, most + step) in {400, 422}, name
