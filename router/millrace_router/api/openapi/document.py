"""The OpenAPI document: the table of routes, with the schemas of the types that validate requests and make answers.

Limits that depend on flags, and limits that only some routes check, are in no schema; their violation is a 422.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import TypeAliasType, TypeForm

from millrace_router.api.admin import routes as adapter_routes
from millrace_router.api.anthropic import routes as anthropic_routes
from millrace_router.api.anthropic.protocol import MessagesErrorResponseJson
from millrace_router.api.body.adapters import MAX_TOKEN_LENGTH
from millrace_router.api.body.fields import RequestModel, names_of
from millrace_router.api.body.messages import MessageBody
from millrace_router.api.chat.route import OpenAIErrorResponseJson, StreamErrorJson
from millrace_router.api.openai import completion_routes
from millrace_router.api.openai import routes as openai_routes
from millrace_router.api.pages import routes as page_routes
from millrace_router.api.platforms import kserve, sagemaker, vertex
from millrace_router.api.pooling import routes as pooling_routes
from millrace_router.api.responses import routes as responses_routes
from millrace_router.api.tgi import estimate, probes, tokenizer
from millrace_router.api.tgi import routes as tgi_routes
from millrace_router.api.tgi.info import ErrorResponseJson
from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER
from millrace_router.request.names import FORM, STREAM_HEADER
from millrace_router.request.scheduling import (
    API_KEY_HEADER,
    FAIRNESS_HEADER,
    MAX_PRIORITY,
    MAX_QUEUE_HEADER,
    MAX_QUEUE_MS,
    PRIORITY_HEADER,
    TENANT_HEADER,
)
from millrace_router.server.idempotency import (
    KEY_HEADER,
    LAST_EVENT_HEADER,
    MAX_KEY_LENGTH,
    MAX_LAST_EVENT,
)
from millrace_router.server.idempotent_route import END_OPERATION
from millrace_router.server.operation import Operation
from millrace_router.server.services import SERVICES
from millrace_router.version import VERSION

JSON = "application/json"
END = "[DONE]"
"""Data of the event after the last one of a chat or a completion."""
TAG = "Text Generation Inference"
REFERENCE = "#/components/schemas/"
_MODEL = re.compile(rf"(?<={REFERENCE})\w+")
_PATH_PARAMETER = re.compile(r"{(\w+)}")
NAMES = {
    "BestOfDetailsJson": "Details",
    "CalledFunction": "PastFunction",
    "CalledFunctionJson": "FunctionDefinition",
    "ChatCompletionRequest": "ChatRequest",
    "ChatMessage": "Message",
    "ContentPart": "MessageChunk",
    "FunctionDefinition": "ToolFunction",
    "ModelInfoJson": "ModelsInfo",
    "ModelJson": "ModelInfo",
    "SequenceJson": "SequenceDetails",
    "TokenSpan": "SimpleToken",
    "ToolCall": "PastToolCall",
    "ToolChoiceField": "ToolChoice",
    "ToolDefinition": "Tool",
}
"""TGI's names of its schemas by type; all other schemas have the type's name."""
SECURITY_SCHEMES = {
    "ApiKey": {"type": "http", "scheme": "bearer"},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": API_KEY_HEADER},
}
HEADERS: dict[str, dict[str, object]] = {
    PRIORITY_HEADER: {
        "description": "Priority over other requests; `priority` in the body takes precedence",
        "schema": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    },
    TENANT_HEADER: {
        "description": "Tenant, for servers that share tokens between tenants",
        "schema": {"type": "string"},
    },
    FAIRNESS_HEADER: {
        "description": f"As `{TENANT_HEADER}`, which takes precedence: the tenant as gateways name it",
        "schema": {"type": "string"},
    },
    MAX_QUEUE_HEADER: {
        "description": "Milliseconds that the request may wait in the queue before it is answered 429",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_QUEUE_MS},
    },
    STREAM_HEADER: {
        "description": "Name of the answer's stream: ids, times and seeds follow from it. The answer has it, and one "
        "is made where it is absent",
        "schema": {"type": "string", "pattern": f"^{FORM.pattern}$"},
    },
    ADAPTER_TOKEN_HEADER: {
        "description": "The client's own token for the hub, for adapters that are not public",
        "schema": {"type": "string", "maxLength": MAX_TOKEN_LENGTH, "pattern": "^[ -~]*$"},
    },
    KEY_HEADER: {
        "description": "Key of a request that may be repeated: repetitions get the answer of the first one",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
    },
    LAST_EVENT_HEADER: {
        "description": f"`id` of the last event that was read, from 1 to {MAX_LAST_EVENT}: the stream goes on "
        f"after it, or is 410. Ignored without `{KEY_HEADER}`",
        "schema": {"type": "string"},
    },
}

PATHS = {"/api-doc/openapi.json": "openapi", "/openapi.json": "openapi_alias"}
"""Paths of the document, and the names of their operations."""
OPERATIONS = (
    *tgi_routes.OPERATIONS,
    *tokenizer.OPERATIONS,
    *openai_routes.CHAT_OPERATIONS,
    *completion_routes.OPERATIONS,
    *responses_routes.OPERATIONS,
    *anthropic_routes.OPERATIONS,
    *estimate.OPERATIONS,
    *openai_routes.MODEL_OPERATIONS,
    probes.INFO_OPERATION,
    page_routes.STATUS_OPERATION,
    END_OPERATION,
    page_routes.ROOT_OPERATION,
    *probes.OPERATIONS,
    *(
        Operation(
            method="get",
            path=path,
            is_open=True,
            id=id_,
            summary="This document",
            answer=dict[str, Any],
        )
        for path, id_ in PATHS.items()
    ),
    *page_routes.OPERATIONS,
    *adapter_routes.OPERATIONS,
    *sagemaker.OPERATIONS,
    *vertex.OPERATIONS,
    probes.VERSION_OPERATION,
    *kserve.OPERATIONS,
    *pooling_routes.OPERATIONS,
)
"""Every route, in the order of the document."""


@cache
def openapi_json(*, admin: bool = True, root_path: str = "") -> bytes:
    """Render the document, with the operator's routes if `admin`; `root_path` is where a proxy has the server."""
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return orjson.dumps(openapi(admin=admin) | servers, option=orjson.OPT_INDENT_2)


def openapi(*, admin: bool = True) -> dict[str, Any]:
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.is_admin and not admin:
            continue
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    schemas.components["Message"]["allOf"] = [schemas.of(MessageBody)]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "description": "Text generation with the APIs of TGI, OpenAI and Anthropic",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "version": VERSION,
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": SECURITY_SCHEMES,
        },
        "tags": [{"name": TAG}],
    }


class _Schema(GenerateJsonSchema):
    """Leaves out the titles that pydantic makes of names, and describes fields by their docstrings."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        generated, model = super().model_schema(schema), schema["cls"]
        attributes = names_of(model) if issubclass(model, RequestModel) else {}
        for name, field in generated.get("properties", {}).items():
            text = _docstring(model, attributes.get(name, name))
            if text is not None:
                field.setdefault("description", text)
        return generated


def _docstring(model: type, attribute: str) -> str | None:
    """Return the docstring of a field, of the class that defines it."""
    owner = next(base for base in model.__mro__ if attribute in inspect.get_annotations(base))
    return _docstrings(owner.__module__).get((owner.__name__, attribute))


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of all attributes in a module, by the names of class and attribute."""
    docstrings = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            for pair in pairwise(node.body):
                match pair:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        docstrings[node.name, name] = text
    return docstrings


class _Schemas:
    """Collects schemas and the schemas that they refer to."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def of(self, type_: TypeForm[Any]) -> dict[str, Any]:
        """Return the schema of a type, and collect those it refers to."""
        generated = TypeAdapter(type_).json_schema(
            ref_template=REFERENCE + "{model}", schema_generator=_Schema
        )
        schema: dict[str, Any] = orjson.loads(
            _MODEL.sub(lambda match: _public(match[0]), orjson.dumps(generated).decode())
        )
        for name, component in schema.pop("$defs", {}).items():
            self._add(name, component)
        # pydantic inlines an alias at the top; it gets its name here.
        alias: object = type_
        name = alias.__name__ if isinstance(alias, TypeAliasType) else schema.get("title")
        return schema if name is None else self._add(name, schema)

    def _add(self, name: str, component: dict[str, Any]) -> dict[str, Any]:
        component.pop("title", None)
        for described in component.get("properties", {}).values():
            if "description" in described:
                described["description"] = " ".join(described["description"].split())
        assert self.components.get(_public(name), component) == component, name
        self.components[_public(name)] = component
        return {"$ref": REFERENCE + _public(name)}


def _public(name: str) -> str:
    return NAMES.get(name, name.removesuffix("Json"))


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [TAG],
        "summary": operation.summary,
        "operationId": operation.id,
        "responses": _responses(operation, schemas),
    }
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_PARAMETER.findall(operation.path)
        ),
        *(
            {"name": name, "in": "header", "required": False, **HEADERS[name]}
            for name in operation.headers
        ),
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schemas.of(operation.body)}},
        }
    if not operation.is_open:
        # A server without `--api-key` needs none.
        described["security"] = [{}, *({name: []} for name in SECURITY_SCHEMES)]
    return described


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    failure = schemas.of(_failures(operation).whole)
    responses = {"200": {"description": "OK", **_content(operation, schemas)}}
    for status in sorted({*operation.failures, *operation.foreign}):
        responses[str(status.value)] = {
            "description": status.phrase,
            **_retry_after(operation, status),
            "content": {JSON: {"schema": failure}},
        }
    if not operation.is_open:
        unauthorized = HTTPStatus.UNAUTHORIZED
        responses[str(unauthorized.value)] = {
            "description": unauthorized.phrase,
            **({"content": {JSON: {"schema": failure}}} if operation.anthropic else {}),
        }
    return responses


def _retry_after(operation: Operation, status: HTTPStatus) -> dict[str, object]:
    """Describe the header that gives the time to the next try."""
    schema = {"type": "integer", "minimum": 1}
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        header = {"description": "Seconds until there may be room", "required": True}
    elif status is HTTPStatus.SERVICE_UNAVAILABLE and operation.fetches:
        # The shards may be down, too, for a time that is not known.
        header = {"description": "Seconds until the adapter may be fetched again"}
    else:
        return {}
    return {"headers": {"retry-after": {**header, "schema": schema}}}


class _Failures(NamedTuple):
    """Types of failures."""

    whole: Any
    """Before the first byte."""
    event: Any
    """In mid-stream."""


def _failures(operation: Operation) -> _Failures:
    if operation.failure is not None:
        whole = operation.failure | OpenAIErrorResponseJson
        return _Failures(whole, whole)
    if operation.openai:
        return _Failures(OpenAIErrorResponseJson, StreamErrorJson)
    if operation.either:
        return _Failures(
            ErrorResponseJson | OpenAIErrorResponseJson, ErrorResponseJson | StreamErrorJson
        )
    of_route = MessagesErrorResponseJson if operation.anthropic else ErrorResponseJson
    return _Failures(of_route, of_route)


def _content(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is bytes:
        content[operation.text_type] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        content[JSON] = {"schema": schemas.of(operation.answer)}
    if operation.event is not None:
        failure = _failures(operation).event
        of_data = schemas.of(operation.event | failure)
        content["text/event-stream"] = {"schema": _event(of_data, has_end=operation.has_end)}
    return {"content": content} if content else {}


def _event(of_data: dict[str, Any], *, has_end: bool) -> dict[str, Any]:
    """Describe one event of a stream by its fields, as tools read the schema of this media type."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": of_data}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": END}, data]} if has_end else data},
        "required": ["data"],
    }


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    for path in PATHS:
        app.router.add_get(path, schema)


async def schema(request: web.Request) -> web.Response:
    """`GET /openapi.json`: the routes that this server has."""
    config = request.app[SERVICES].config
    body = openapi_json(admin=config.admin_key is not None, root_path=config.root_path)
    return web.Response(body=body, content_type="application/json")
