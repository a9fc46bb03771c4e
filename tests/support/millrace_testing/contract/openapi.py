"""The OpenAPI document as a measure: what fits it, with nothing left undocumented."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from millrace_router.api.openapi.document import REFERENCE, openapi
from millrace_router.server.operation import Operation

DOCUMENT = openapi()
JSON = "application/json"
EVENTS = "text/event-stream"
ENDED = ("chat_completions", "completions")
"""Whose streams have an end that is no JSON."""
END = "[DONE]"
PLACES = {
    "key": "k",
    "model_name": "mill",
    "model_version": "1",
    "id": "resp_1",
    "model": "org/tiny",
}

Schema = dict[str, Any]


def path_of(operation: Operation) -> str:
    """The path, with something in each of its places."""
    return operation.path.format_map(PLACES)


def described(operation: Operation) -> dict[str, Any]:
    """The document's entry for one method of one path."""
    of_path: dict[str, dict[str, Any]] = DOCUMENT["paths"][operation.path]
    return of_path[operation.method]


def schema_of(operation: Operation, status: int, media_type: str) -> Schema:
    """Schema of a response's body, or of the JSON of its events; raises KeyError for what is not documented."""
    response = described(operation)["responses"][str(status)]
    schema: Schema = response["content"][media_type]["schema"]
    if media_type == EVENTS:
        data = schema["properties"]["data"]
        variants: list[Schema] = data.get("anyOf", [data])
        schema = variants[-1]["contentSchema"]
    return schema


def check_documented(operation: Operation, status: int, media_type: str, body: bytes) -> None:
    """Check that the document has this status, with this type, and a schema that the body fits."""
    if "content" not in described(operation)["responses"][str(status)]:
        assert not body
        return
    schema = schema_of(operation, status, media_type)
    if media_type == EVENTS:
        parts = events_of(operation, body)
        assert parts
    else:
        parts = [json.loads(body) if media_type == JSON else body.decode()]
    for part in parts:
        assert fits(part, schema), part


def events_of(operation: Operation, body: bytes) -> list[Any]:
    """The JSON of each event of a stream, whose end is checked."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "", "the last event is not ended"
    data = [block.rpartition("\n")[2].removeprefix("data: ") for block in blocks if block != ":"]
    ends = operation.id in ENDED and not _is_for_old_clients(data[0])
    if ends or (operation.either and data[-1] == END):
        assert data.pop() == END
    return [json.loads(one) for one in data]


def _is_for_old_clients(first: str) -> bool:
    """Whether it is a chunk for TGI's old clients, whose streams have no end of their own."""
    if first == END:
        return False
    deltas = [choice.get("delta", {}) for choice in json.loads(first).get("choices", ())]
    return bool(deltas) and all(
        {"role", "content", "tool_calls"} <= delta.keys() for delta in deltas
    )


def resolved(reference: str) -> Schema:
    """The component that a reference names; raises KeyError."""
    component: Schema = DOCUMENT["components"]["schemas"][reference.removeprefix(REFERENCE)]
    return component


def fits(value: object, schema: Schema) -> bool:
    """Whether JSON is as documented, keys that the document does not name being none of it."""
    return bool(Draft202012Validator({**_closed(schema), **_COMPONENTS}).is_valid(value))


def _closed(schema: Any) -> Any:
    """The same with objects that have no other properties than theirs, unless it says so."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(one) for key, one in schema.items()}
    return {"additionalProperties": False, **closed} if schema.get("type") == "object" else closed


_COMPONENTS = {"components": _closed(DOCUMENT["components"])}
