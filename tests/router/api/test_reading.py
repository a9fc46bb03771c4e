"""Fields that the server does not use are refused by name or named in the answer, and token biases are checked."""

from __future__ import annotations

import io
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError as ShapeError

from millrace_router.api.body.fields import FieldScope
from millrace_router.api.body.foreign_routes import TIPS, foreign_route
from millrace_router.api.body.refused_fields import UNUSED_FIELDS, RefusedField
from millrace_router.api.body.sampling import MAX_BIASES, biases_from
from millrace_router.api.openapi.document import OPERATIONS
from millrace_router.errors import ValidationError
from millrace_router.request.request import Task
from millrace_router.server import bodies
from millrace_router.validation.shape_messages import make_whole
from millrace_testing.project import ROOT
from millrace_testing.router.edge import Edge, limits_with, logging_to, pooling_of, serving

TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
WIDE = limits_with(max_input_tokens=100, max_total_tokens=200)
TURNS = [{"role": "user", "content": "hello world"}]
BODIES: dict[FieldScope, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    FieldScope.GENERATE: ("/generate", {"inputs": "hello"}, ()),
    FieldScope.PARAMETERS: ("/generate", {"inputs": "hello", "parameters": {}}, ("parameters",)),
    FieldScope.CHAT: ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 3}, ()),
    FieldScope.COMPLETION: ("/v1/completions", {"prompt": "hello", "max_tokens": 3}, ()),
    FieldScope.RESPONSE: ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, ()),
    FieldScope.MESSAGE: ("/v1/messages", {"messages": TURNS, "max_tokens": 3}, ()),
    FieldScope.VERTEX: ("/vertex", {"instances": [{"inputs": "hello"}]}, ()),
    FieldScope.EMBEDDINGS: ("/v1/embeddings", {"input": "hello"}, ()),
    FieldScope.EMBED: ("/embed", {"inputs": "hello"}, ()),
    FieldScope.EMBED_PARAMETERS: ("/embed", {"inputs": "hello", "parameters": {}}, ("parameters",)),
    FieldScope.RERANK: ("/rerank", {"query": "hello", "documents": ["b"]}, ()),
    FieldScope.SCORE: ("/v1/score", {"text_1": "hello", "text_2": "b"}, ()),
    FieldScope.STRUCTURED_OUTPUTS: (
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 3, "structured_outputs": {"regex": "a"}},
        ("structured_outputs",),
    ),
}
"""Route, body and the path of the object that has the fields."""
IGNORED = "x-millrace-ignored"


def with_field(scope: FieldScope, name: str, value: object) -> tuple[str, dict[str, Any]]:
    path, body, steps = BODIES[scope]
    body = {**body}
    holder = body
    for step in steps:
        holder[step] = dict(holder[step])
        holder = holder[step]
    holder[name] = value
    return path, body


def served(**options: Any) -> Any:
    return serving(
        **{"limits": WIDE, "template": TEMPLATE, "pooling": pooling_of(*Task), **options}
    )


def asking(field: RefusedField) -> object:
    """A value that requests something."""
    match next(iter(field.neutral), None):
        case bool(value):
            return not value
        case int(value):
            return value + 2
        case str() | None:
            return "something"
        case _:
            return ["something"]


REFUSED = [
    (scope, field) for scope, fields in UNUSED_FIELDS.items() for field in fields.refused.values()
]
WITHOUT_EFFECT = [
    (scope, name) for scope, fields in UNUSED_FIELDS.items() for name in fields.without_effect
]


async def answer_to(
    edge: Edge, scope: FieldScope, name: str, value: object
) -> tuple[int, str, str]:
    path, body = with_field(scope, name, value)
    status, parsed, response = await edge.post(path, body)
    return status, str(parsed), response.headers.get(IGNORED, "")


async def test_refused_fields_are_named() -> None:
    async with served() as edge:
        for scope, field in REFUSED:
            status, text, ignored = await answer_to(edge, scope, field.name, asking(field))
            assert (status, ignored) == (400 if scope is FieldScope.MESSAGE else 422, ""), (
                field.name
            )
            assert field.name.lower() in text.lower(), text


async def test_neutral_values_are_accepted() -> None:
    async with served() as edge:
        for scope, field in REFUSED:
            for value in (None, *field.neutral):
                status, text, ignored = await answer_to(edge, scope, field.name, value)
                assert (status, ignored) == (200, ""), (field.name, value, text)


async def test_fields_without_effect_are_accepted() -> None:
    """The values have the type of the field where a model reads it."""
    values: dict[str, object] = {"metadata": {}, "store": False}
    async with served() as edge:
        for scope, name in WITHOUT_EFFECT:
            value = values.get(name, "low")
            status, text, ignored = await answer_to(edge, scope, name, value)
            assert (status, ignored) == (200, ""), (name, text)


def refused_section() -> str:
    """Write the table of docs/api.md: the refused fields by their reason and the bodies that may have them."""
    scopes: dict[tuple[str, str], list[FieldScope]] = {}
    for scope, field in REFUSED:
        scopes.setdefault((field.name, field.reason), []).append(scope)
    rows: dict[tuple[str, tuple[FieldScope, ...]], list[str]] = {}
    for (name, reason), owners in scopes.items():
        rows.setdefault((reason or "not supported", tuple(owners)), []).append(name)
    lines = ["| field | body | reason |", "|---|---|---|"]
    for (reason, scopes_of_row), names in rows.items():
        cells = (
            ", ".join(f"`{one}`" for one in names),
            ", ".join(one.name.lower() for one in scopes_of_row),
        )
        lines.append(f"| {' | '.join(cells)} | {reason} |")
    return "\n".join(lines)


def test_the_api_page_lists_every_refused_field() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    _, section, _ = re.split("<!-- /?refused fields -->\n", page)
    table = refused_section()
    assert section == f"{table}\n", f"replace what is between the markers in docs/api.md:\n{table}"


@pytest.mark.parametrize("scope", FieldScope)
async def test_an_unknown_field_is_named(scope: FieldScope) -> None:
    steps = "".join(f"{step}." for step in BODIES[scope][2])
    async with served() as edge:
        status, _, ignored = await answer_to(edge, scope, "made_up", 1)
        assert (status, ignored) == (200, f"{steps}made_up")
        assert (await answer_to(edge, scope, "made_up", None))[2] == ""


@pytest.mark.parametrize("scope", FieldScope)
async def test_strict_fields_refuse_an_unknown_field(scope: FieldScope) -> None:
    async with served(strict_fields=True) as edge:
        status, text, _ = await answer_to(edge, scope, "made_up", 1)
        assert status == (400 if scope is FieldScope.MESSAGE else 422)
        assert "made_up` is not a field of this route" in text
        path, body, _ = BODIES[scope]
        assert (await edge.post(path, body))[0] == 200


async def test_fields_of_messages_and_tools_are_named_by_their_path() -> None:
    tool = {"type": "function", "function": {"name": "f", "made_up": 1, "parameters": {"x": 1}}}
    turn = {"role": "user", "content": [{"type": "text", "text": "hello", "other": 2}]}
    body = {"messages": [turn, turn], "tools": [tool], "max_tokens": 3}
    async with served() as edge:
        status, _, response = await edge.post("/v1/chat/completions", body)
        assert status == 200
        names = response.headers[IGNORED]
        assert names == "messages.content.other, tools.function.made_up"


async def test_a_stream_and_a_repeated_answer_name_them_too() -> None:
    body = {"inputs": "hello", "made_up": 1}
    async with served() as edge:
        for path in ("/generate", "/generate_stream"):
            for headers in ({}, {"idempotency-key": path}, {"idempotency-key": path}):
                _, _, response = await edge.post(path, body, headers=headers)
                assert response.headers[IGNORED] == "made_up", (path, headers)


async def test_strict_tgi_ignores_fields_of_other_servers() -> None:
    async with served(strict_tgi=True) as edge:
        status, _, ignored = await answer_to(edge, FieldScope.CHAT, "use_beam_search", True)
        assert (status, ignored) == (200, "use_beam_search")


async def test_names_are_bounded_and_printable() -> None:
    body = {"inputs": "hello", **{f"f{i}": 1 for i in range(25)}}
    async with served() as edge:
        _, _, response = await edge.post("/generate", body)
        assert response.headers[IGNORED].split(", ") == [f"f{i}" for i in range(20)] + ["+5"]
        body = {"inputs": "hello", "ä,\r\nx-evil: 1" + "y" * 100: 1}
        _, _, response = await edge.post("/generate", body)
        assert response.headers[IGNORED] == "????x-evil: 1" + "y" * 51
        assert "x-evil" not in response.headers


async def test_the_log_names_each_once() -> None:
    lines = io.BytesIO()
    with logging_to(lines):
        async with served() as edge:
            for _ in range(2):
                await edge.post("/generate", {"inputs": "hello", "made_up": 1})
            # What is no identifier may be a text.
            await edge.post("/generate", {"inputs": "hello", "a secret": 1, "another one": 2})
    logged = lines.getvalue()
    assert logged.count(b"request field ignored") == 2
    assert b"made_up" in logged
    assert b"secret" not in logged


async def test_platform_routes_and_estimates_report_unused_fields() -> None:
    async with served() as edge:
        body = {"instances": [{"inputs": "hello", "parameters": {"made_up": 1}}]}
        _, _, response = await edge.post("/vertex", body)
        assert response.headers[IGNORED] == "instances.parameters.made_up"
        status, parsed, _ = await edge.post(
            "/v1/estimate", {"prompt": "hello", "max_tokens": 3, "mirostat": 2}
        )
        assert (status, "`mirostat`" in str(parsed)) == (422, True)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("instance", "place"),
    [
        ({"messages": [USER], "stop": ["a", 5]}, "instances[1].stop"),
        ({"messages": [USER, {"role": 5}]}, "instances[1].messages[1].role"),
        ({"messages": [USER, {"content": "a"}]}, "instances[1].messages[1].role"),
        ({"messages": [USER], "tools": [{}, {"function": {"name": []}}]}, "tools[1].function.name"),
        ({"messages": 5}, "instances[1].messages"),
        ({"inputs": ["a"]}, "instances[1].inputs"),
        ({"inputs": "a", "parameters": {"stop": [[]]}}, "instances[1].parameters.stop[0]"),
    ],
)
async def test_an_error_in_an_instance_names_its_place(
    instance: dict[str, Any], place: str
) -> None:
    async with served() as edge:
        body = {"instances": [{"inputs": "a"}, instance]}
        status, parsed, _ = await edge.post("/vertex", body)
    assert (status, f"{place}`" in str(parsed) or f"{place}:" in str(parsed)) == (422, True), parsed


WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4.0, "n": 1.0, "top_k": 3.0}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4.0, "seed": 1.0, "logprobs": 2.0}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4.0}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 4.0, "top_k": 3.0}),
    ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 4.0, "seed": 2.0}}),
    ("/vertex", {"instances": [{"messages": [USER], "max_tokens": 4.0}]}),
    ("/detokenize", {"tokens": [1.0, 2]}),
]


@pytest.mark.parametrize(("path", "body"), WHOLE, ids=[path for path, _ in WHOLE])
async def test_whole_numbers_with_a_fraction_are_integers(path: str, body: dict[str, Any]) -> None:
    async with served() as edge:
        status, parsed, _ = await edge.post(path, body)
        assert status == 200, parsed
        broken = {**body, "max_tokens": 4.5, "tokens": [1.5], "max_output_tokens": 4.5}
        broken |= {"instances": 4.5, "inputs": 4.5}
        assert (await edge.post(path, broken))[0] in {400, 422}


async def test_too_many_whole_numbers_with_a_fraction_are_refused() -> None:
    tensor = {"name": "a", "shape": [1.0], "datatype": "BYTES", "data": ["hello"]}
    async with served() as edge:
        status, parsed, _ = await edge.post("/v2/models/a/infer", {"inputs": [tensor] * 200})
    assert (status, "too many whole numbers" in str(parsed)) == (422, True), parsed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [1.0] * 5000}),
        ("/v1/completions", {"prompt": [2.0, 3.0], "max_tokens": 2}),
        (
            "/v1/completions",
            {"prompt": [[2.0, 3.0]] * 4, "max_tokens": 2, "stop_token_ids": [1.0] * 9},
        ),
    ],
)
async def test_whole_numbers_with_a_fraction_in_a_list_take_one_more_check(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[object] = []

    def counted(error: ShapeError, parsed: object) -> bool:
        checks.append(error)
        return make_whole(error, parsed)

    monkeypatch.setattr(bodies, "make_whole", counted)
    async with served() as edge:
        status, parsed, _ = await edge.post(path, body)
    assert (status, len(checks) <= 2) == (200, True), parsed


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    async with served() as edge:
        data, headers = b'\xef\xbb\xbf{"inputs": "hello"}', {"content-type": "application/json"}
        status, parsed, _ = await edge.post("/generate", data=data, headers=headers)
    assert status == 200, parsed


async def test_headers_of_gateways_may_be_long() -> None:
    async with served() as edge:
        headers = {"x-forwarded-access-token": "t" * 40_000}
        status, parsed, _ = await edge.post("/generate", {"inputs": "hello"}, headers=headers)
    assert status == 200, parsed


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        biases_from(given)
    return str(caught.value).removeprefix("Input validation error: ")


def test_biases_are_read_by_token_id() -> None:
    given = {"5": 1, "0": -100, "70000": 0.1, "9": 100.0, "8": 0}
    # The wire has single precision.
    nearest = 0.10000000149011612
    assert biases_from(given) == ((5, 1.0), (0, -100.0), (70000, nearest), (9, 100.0), (8, 0.0))
    assert biases_from({}) == ()


@pytest.mark.parametrize(
    "key",
    ["", "-1", "+1", "05", "00", "1.0", "1e3", "1_0", " 1", "a", "²", "٣", "9" * 11, "9" * 5000],
)
def test_wrong_token_ids_are_refused(key: str) -> None:
    assert refusal({key: 1}) == f"`logit_bias` must have token ids for keys. Given: {key[:20]}"


@pytest.mark.parametrize(
    "value", [None, True, "1", [], {}, 100.1, -101, 10**400, float("nan"), float("inf")]
)
def test_wrong_biases_are_refused(value: object) -> None:
    assert refusal({"3": value}) == (
        "`logit_bias` must have numbers from -100 to 100 for values. Token 3 has another"
    )


def test_the_number_of_biases_has_a_limit() -> None:
    assert len(biases_from({str(id_): 1 for id_ in range(MAX_BIASES)})) == MAX_BIASES == 300
    given = {str(id_): "wrong too" for id_ in range(MAX_BIASES + 1)}
    assert refusal(given) == "`logit_bias` must have at most 300 tokens. Given: 301"


@given(st.dictionaries(st.text("0123456789", min_size=1, max_size=4), st.floats(-100, 100)))
def test_no_token_id_has_two_biases(given: dict[str, float]) -> None:
    try:
        ids = [id_ for id_, _ in biases_from(given)]
    except ValidationError:
        assert any(key != str(int(key)) for key in given)
    else:
        assert sorted(ids) == sorted(map(int, given))
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("path", "tip"),
    [
        ("/api/tags", "/v1/models lists"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/embed", "/v1/embeddings"),
        ("/api/embeddings", "/v1/embeddings"),
        ("/completion", "/generate"),
        ("/v1/files/file-1/content", "run-batch"),
        ("/chat/completions", "base URL"),
        ("/v1/chat/completions/chat/completions", "base URL"),
    ],
)
async def test_a_route_of_another_server_has_a_tip(path: str, tip: str) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post(path, {})
        assert (await edge.get(path))[:2] == (404, orjson.dumps(answer))
    assert (status, answer["error_type"]) == (404, "not_found")
    message = answer["error"]["message"] if path.startswith("/v1") else answer["error"]
    assert message.startswith(f"Unknown path: {path}. This is Millrace")
    assert tip in message


async def test_strict_tgi_has_no_tips() -> None:
    async with serving(strict_tgi=True) as edge:
        status, answer, _ = await edge.get("/api/tags")
    assert (status, answer) == (404, b"")


@pytest.mark.parametrize("path", ["/", "", "/foo", "/apiary", "/v1", "/v1/models/api/tags"])
def test_other_paths_get_no_tip(path: str) -> None:
    assert foreign_route(path) is None


def test_no_route_of_ours_is_foreign() -> None:
    assert not TIPS.keys() & {operation.path for operation in OPERATIONS}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KEYWORDS = {"properties": SCHEMA["properties"], "required": ["a"]}
NAMED = {"name": "x", "schema": SCHEMA}
LOST: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, {"response_format": form}, name)
        for path in ("/v1/chat/completions", "/v1/completions")
        for form, name in [
            ({"type": "json_schema", "json_schema": SCHEMA}, "properties"),
            ({"type": "json_schema", "schema": NAMED}, "schema"),
            ({"type": "json_schema", "json_schema": {"name": "x", "parameters": SCHEMA}}, "parameters"),
            ({"type": "json_schema", "jsonSchema": NAMED}, "jsonSchema"),
            ({"type": "json_object", "json_schema": NAMED}, "json_schema"),
            ({"type": "json_object", "response_schema": SCHEMA}, "response_schema"),
            ({"type": "json_object", **KEYWORDS}, "properties"),
            ({"type": "text", "schema": SCHEMA}, "schema"),
            ({"type": "regex", "regex": "a"}, "regex"),
        ]
    ),
    *(
        (path, {name: value}, name)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
        for name, value in [
            ("extra_body", {"guided_json": SCHEMA}),
            ("nvext", {"guided_json": SCHEMA}),
            ("parameters", {"grammar": {"type": "json", "value": SCHEMA}}),
            ("generationConfig", {"responseSchema": SCHEMA}),
            ("responseSchema", SCHEMA),
            ("guided_decoding", {"json": SCHEMA}),
            ("output_format", {"type": "json_schema", "schema": SCHEMA}),
            ("structural_tag", "x"),
        ]
    ),
    ("/v1/chat/completions", {"guided_json": NAMED}, "schema"),
    ("/v1/completions", {"structured_outputs": {"json": NAMED}}, "schema"),
    ("/v1/completions", {"structured_outputs": {"json_schema": SCHEMA}}, "json_schema"),
    ("/v1/completions", {"structured_outputs": KEYWORDS}, "properties"),
    ("/v1/responses", {"text": {"type": "json_schema", "schema": SCHEMA}}, "schema"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "json_schema": NAMED}}}, "json_schema"),
    ("/v1/messages", {"output_config": {"type": "json_schema", "schema": SCHEMA}}, "schema"),
    ("/generate", {"parameters": {"grammar": {"type": "json_object", "json_schema": SCHEMA}}}, "json_schema"),
    ("/generate", {"parameters": {"guided_decoding": {"json": SCHEMA}}}, "parameters.guided_decoding"),
    ("/vertex", {"parameters": {"max_new_tokens": 2}}, "parameters"),
    *(
        ("/v1/chat/completions", {"tools": [{"function": {"name": "f", **odd}, **outer}]}, name)
        for odd, outer, name in [
            ({}, {"parameters": SCHEMA}, "parameters"),
            ({"schema": SCHEMA}, {}, "schema"),
            ({"args_schema": SCHEMA}, {}, "args_schema"),
        ]
    ),
]  # fmt: skip
REQUIRED: dict[str, dict[str, Any]] = {
    path: body for path, body, steps in BODIES.values() if not steps
}


@pytest.mark.parametrize(("path", "fields", "name"), LOST)
async def test_a_schema_where_it_is_not_read_is_refused_by_the_name_of_its_place(
    path: str, fields: dict[str, Any], name: str
) -> None:
    async with served() as edge:
        status, parsed, _ = await edge.post(path, {**REQUIRED[path], **fields})
        assert (status, f"`{name}`" in str(parsed)) in {(422, True), (400, True)}, parsed
        assert edge.batcher.requests == []
