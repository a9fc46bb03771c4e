"""The table of the platforms' routes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from millrace_router.api.openapi.operation import (
    GENERATING,
    IDEMPOTENT,
    PREDICTING,
    SCHEDULING,
    Operation,
)
from millrace_router.api.platforms.kserve import (
    KserveLiveJson,
    KserveModelJson,
    KserveReadyJson,
    KserveRequest,
    KserveResponseJson,
    KserveServerJson,
)
from millrace_router.api.platforms.sagemaker import (
    SagemakerRequest,
    SagemakerResponse,
    SagemakerStreamResponse,
)
from millrace_router.api.platforms.vertex import VertexRequest, VertexResponse
from millrace_router.api.tgi.info import VersionJson

MODEL = "/v2/models/{model_name}"
VERSION = MODEL + "/versions/{model_version}"
UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE,)


def _get(path: str, id_: str, summary: str, answer: Any, *, may_fail: bool = False) -> Operation:  # noqa: ANN401
    failures = UNAVAILABLE if may_fail else ()
    return Operation(
        method="get",
        path=path,
        id=id_,
        summary=summary,
        answer=answer,
        failures=failures,
        is_open=True,
    )


def _infer(path: str, id_: str) -> Operation:
    return Operation(
        method="post",
        path=path,
        id=id_,
        summary="Generate a text for each text of a tensor",
        body=KserveRequest,
        answer=KserveResponseJson,
        failures=PREDICTING,
        headers=SCHEDULING,
    )


PLATFORM_OPERATIONS = (
    Operation(
        method="post",
        path="/invocations",
        id="sagemaker_compatibility",
        summary="Generate, chat or complete, depending on the body; for SageMaker",
        body=SagemakerRequest,
        answer=SagemakerResponse,
        event=SagemakerStreamResponse,
        has_end=True,
        failures=GENERATING,
        either=True,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path="/vertex",
        id="vertex_compatibility",
        summary="Predict a text for each instance; for Vertex AI",
        body=VertexRequest,
        answer=VertexResponse,
        failures=PREDICTING,
        headers=SCHEDULING,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/version",
        id="show_version",
        summary="The version of the server, as vLLM has it",
        answer=VersionJson,
    ),
    _get("/v2", "kserve_server_metadata", "Describe the server, for KServe", KserveServerJson),
    _get("/v2/health/live", "kserve_health_live", "Whether the router runs", KserveLiveJson),
    _get(
        "/v2/health/ready",
        "kserve_health_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_fail=True,
    ),
    _get(MODEL, "kserve_model", "Describe the tensors of a model", KserveModelJson),
    _get(VERSION, "kserve_model_metadata", "Describe the tensors of a model", KserveModelJson),
    _get(
        f"{MODEL}/ready",
        "kserve_model_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_fail=True,
    ),
    _get(
        f"{VERSION}/ready",
        "kserve_model_metadata_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_fail=True,
    ),
    _infer(f"{MODEL}/infer", "kserve_infer"),
    _infer(f"{VERSION}/infer", "kserve_model_infer"),
)
