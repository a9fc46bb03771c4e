"""The routes about the server itself in the table of routes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from millrace_router.api.openapi.operation import Operation
from millrace_router.api.tgi.info import InfoJson, QuarantineJson
from millrace_router.api.tgi.probes import StatusJson

SERVER_OPERATIONS = (
    Operation(
        method="get",
        is_open=True,
        path="/info",
        id="get_model_info",
        summary="The model and every limit; with `?costs=true` also what steps cost, for the simulator",
        answer=InfoJson,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/status",
        id="status",
        summary="How busy the server is, in a few figures; a page for browsers",
        answer=StatusJson,
    ),
    Operation(
        method="delete",
        path="/v1/requests/{key}",
        id="end_request",
        summary="End the request with this `Idempotency-Key`",
        failures=(HTTPStatus.GONE, HTTPStatus.UNPROCESSABLE_ENTITY),
    ),
    *(
        Operation(
            method="get",
            is_open=True,
            path=path,
            id=id_,
            summary="Whether the server can do its work",
            failures=(HTTPStatus.SERVICE_UNAVAILABLE,),
        )
        for path, id_ in (
            ("/", "root"),
            ("/health", "health"),
            ("/ping", "ping"),
            ("/readyz", "ready"),
        )
    ),
    Operation(
        method="get",
        is_open=True,
        path="/livez",
        id="live",
        summary="Whether the router runs, whatever its shards do",
    ),
    Operation(
        method="get",
        path="/v1/quarantine",
        id="quarantine",
        summary="The requests that broke the shards, without their text",
        answer=QuarantineJson,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/metrics",
        id="metrics",
        summary="Metrics in Prometheus' text format",
        answer=bytes,
    ),
    *(
        Operation(
            method="get",
            path=path,
            is_open=True,
            id=id_,
            summary="This document",
            answer=dict[str, Any],
        )
        for path, id_ in (("/api-doc/openapi.json", "openapi"), ("/openapi.json", "openapi_alias"))
    ),
    *(
        Operation(
            method="get",
            path=path,
            is_open=True,
            id=id_,
            summary="This document, for people with a browser",
            answer=bytes,
            text_type="text/html",
        )
        for path, id_ in (("/docs", "docs"), ("/docs/", "docs_alias"))
    ),
)
