"""Our OpenAPI document has whatever TGI 3.3's has: generated clients find their routes, schemas and properties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace_router.api.openapi.document import REFERENCE
from millrace_testing.contract import openapi
from millrace_testing.contract.openapi import DOCUMENT, Schema, resolved

NAMES = json.loads(Path(openapi.__file__).with_name("tgi_openapi_names.json").read_text())
OPERATIONS: dict[str, str] = NAMES["operations"]
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


@pytest.mark.parametrize("route", OPERATIONS)
def test_every_operation_of_tgi_has_its_name(route: str) -> None:
    method, path = route.split()
    assert DOCUMENT["paths"][path][method]["operationId"] == OPERATIONS[route]


@pytest.mark.parametrize("route", OPERATIONS)
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
