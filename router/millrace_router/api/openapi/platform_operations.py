"""The routes that platforms want, for the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from millrace_router.api.openapi.operation import (
    GENERATING,
    KEYED,
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

MODEL = "/v2/models/{model_name}"
VERSION = MODEL + "/versions/{model_version}"
UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE,)


def _told(path: str, id_: str, summary: str, answer: Any, *, may_be_ill: bool = False) -> Operation:  # noqa: ANN401
    failures = UNAVAILABLE if may_be_ill else ()
    return Operation(
        method="get",
        path=path,
        id=id_,
        summary=summary,
        answer=answer,
        failures=failures,
        is_open=True,
    )


def _inferred(path: str, id_: str) -> Operation:
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
        summary="Generate, chat or complete, as the body has it; for SageMaker",
        body=SagemakerRequest,
        answer=SagemakerResponse,
        event=SagemakerStreamResponse,
        failures=GENERATING,
        either=True,
        headers=KEYED,
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
    _told("/v2", "kserve_server_metadata", "What this server is, for KServe", KserveServerJson),
    _told("/v2/health/live", "kserve_health_live", "Whether the router runs", KserveLiveJson),
    _told(
        "/v2/health/ready",
        "kserve_health_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_be_ill=True,
    ),
    _told(MODEL, "kserve_model", "What a model takes and gives", KserveModelJson),
    _told(VERSION, "kserve_model_metadata", "What a model takes and gives", KserveModelJson),
    _told(
        f"{MODEL}/ready",
        "kserve_model_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_be_ill=True,
    ),
    _told(
        f"{VERSION}/ready",
        "kserve_model_metadata_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_be_ill=True,
    ),
    _inferred(f"{MODEL}/infer", "kserve_infer"),
    _inferred(f"{VERSION}/infer", "kserve_model_infer"),
)
