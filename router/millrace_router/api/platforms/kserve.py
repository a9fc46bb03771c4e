"""KServe's open inference protocol, version 2.

Texts are tensors of bytes, and every model name means the served model.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, NotRequired

from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from millrace_router.api.body.fields import NullIs, RequestModel
from millrace_router.api.body.reading import read_request
from millrace_router.api.platforms.common import (
    IncompletePrediction,
    LengthMismatch,
    NotUtf8,
    check_count,
    gather,
)
from millrace_router.api.tgi.probes import readyz
from millrace_router.api.tgi.request import GenerateParameters, GenerateRequest, sampling_parameters
from millrace_router.api.tgi.routes import generated
from millrace_router.errors import RouterError
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import names_of
from millrace_router.server.operation import NAMED, PREDICTING, Operation
from millrace_router.server.services import SERVICES, Services, counting_refusals, scheduling_of
from millrace_router.version import VERSION

BYTES = "BYTES"
Byte = Annotated[int, Field(ge=0, le=255)]
SERVER = "/v2"
MODEL = "/v2/models/{model_name}"
MODEL_VERSION = MODEL + "/versions/{model_version}"
PLATFORM = "text-generation-inference"


class KserveInput(RequestModel):
    """Texts as the protocol has them, or one text as the numbers of its UTF-8 bytes, as TGI has it.

    `shape` and `datatype` are ignored, because every tensor holds texts.
    """

    name: str
    shape: Annotated[list[int], Field(fail_fast=True)] | None = None
    datatype: str | None = None
    data: Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Byte], Field(fail_fast=True)]

    def texts(self) -> list[str]:
        """Return the texts; raises NotUtf8."""
        if texts := [text for text in self.data if isinstance(text, str)]:
            return texts
        try:
            return [bytes(byte for byte in self.data if isinstance(byte, int)).decode()]
        except UnicodeDecodeError as error:
            raise NotUtf8(str(error)) from None

    def answered(self, name: str, texts: Sequence[str]) -> KserveAnswerJson:
        """Render answers in the form of the input."""
        if any(isinstance(item, str) for item in self.data):
            shape = [len(texts)]
            return {"name": name, "shape": shape, "datatype": BYTES, "data": list(texts)}
        data = list("".join(texts).encode())
        return {"name": name, "shape": [1, len(data)], "datatype": BYTES, "data": data}


class KserveOutput(RequestModel):
    """The name of the answer to an input."""

    name: str


class KserveRequest(RequestModel):
    """Body of `/v2/models/{model_name}/infer`."""

    id: str | None = None
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )
    inputs: Annotated[list[KserveInput], Field(fail_fast=True)]
    outputs: Annotated[list[KserveOutput], Field(fail_fast=True)] | None = None
    """A name for each answer; without them the answers have the names of the inputs."""

    def output_names(self) -> list[str]:
        """Return the names of the answers, by input."""
        return [tensor.name for tensor in self.outputs or self.inputs]


class KserveAnswerJson(TypedDict):
    """A tensor of answers."""

    name: str
    shape: list[int]
    datatype: str
    data: list[str] | list[int]


class KserveResponseJson(TypedDict):
    """Answer of `/v2/models/{model_name}/infer`; `id` is the request's."""

    model_name: str
    model_version: NotRequired[str]
    id: NotRequired[str]
    outputs: list[KserveAnswerJson]


class KserveLiveJson(TypedDict):
    """Answer of `/v2/health/live`."""

    live: bool


class KserveReadyJson(KserveLiveJson):
    """Answer of `/v2/health/ready` and of a model's `ready`; TGI has `live` there, the protocol `ready`."""

    ready: bool
    name: NotRequired[str]
    """Name of the model in the path."""


class KserveServerJson(TypedDict):
    """Answer of `/v2`."""

    name: str
    version: str
    extensions: list[str]


class KserveTensorJson(TypedDict):
    """Description of a tensor."""

    name: str
    datatype: str
    shape: list[int]


class KserveModelJson(TypedDict):
    """Answer of `/v2/models/{model_name}`; TGI has `name`, `version` and `extensions`, the protocol has the others."""

    name: str
    version: NotRequired[str]
    extensions: list[str]
    versions: list[str]
    platform: str
    inputs: list[KserveTensorJson]
    outputs: list[KserveTensorJson]


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
        headers=NAMED,
    )


OPERATIONS = (
    _get(SERVER, "kserve_server_metadata", "Describe the server, for KServe", KserveServerJson),
    _get(f"{SERVER}/health/live", "kserve_health_live", "Whether the router runs", KserveLiveJson),
    _get(
        f"{SERVER}/health/ready",
        "kserve_health_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_fail=True,
    ),
    _get(MODEL, "kserve_model", "Describe the tensors of a model", KserveModelJson),
    _get(
        MODEL_VERSION, "kserve_model_metadata", "Describe the tensors of a model", KserveModelJson
    ),
    _get(
        f"{MODEL}/ready",
        "kserve_model_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_fail=True,
    ),
    _get(
        f"{MODEL_VERSION}/ready",
        "kserve_model_metadata_ready",
        "Whether a request would run at once",
        KserveReadyJson,
        may_fail=True,
    ),
    _infer(f"{MODEL}/infer", "kserve_infer"),
    _infer(f"{MODEL_VERSION}/infer", "kserve_model_infer"),
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_get(SERVER, server)
    app.router.add_get(f"{SERVER}/health/live", live)
    app.router.add_get(f"{SERVER}/health/ready", ready)
    for path in (MODEL, MODEL_VERSION):
        app.router.add_get(path, model)
        app.router.add_get(f"{path}/ready", ready)
        app.router.add_post(f"{path}/infer", infer)


async def server(_: web.Request) -> web.StreamResponse:
    """`GET /v2`."""
    answer: KserveServerJson = {
        "name": PLATFORM,
        "version": VERSION,
        "extensions": ["health", "models", "metrics"],
    }
    return json_response(answer)


async def live(_: web.Request) -> web.StreamResponse:
    """`GET /v2/health/live`: as `/livez`."""
    answer: KserveLiveJson = {"live": True}
    return json_response(answer)


async def ready(request: web.Request) -> web.StreamResponse:
    """`GET /v2/health/ready`, and a model's: as `/readyz`; TGI always answers that it is ready."""
    await readyz(request)
    answer: KserveReadyJson = {"live": True, "ready": True}
    if "model_name" in request.match_info:
        answer["name"] = request.match_info["model_name"]
    return json_response(answer)


async def model(request: web.Request) -> web.StreamResponse:
    """`GET /v2/models/{model_name}`: the inputs and outputs; tensors may have any names."""
    version = request.match_info.get("model_version")
    answer: KserveModelJson = {
        "name": request.match_info["model_name"],
        "extensions": ["infer", "ready"],
        "versions": [] if version is None else [version],
        "platform": PLATFORM,
        "inputs": [{"name": "input", "datatype": BYTES, "shape": [-1]}],
        "outputs": [{"name": "output", "datatype": BYTES, "shape": [-1]}],
    }
    if version is not None:
        answer["version"] = version
    return json_response(answer)


async def infer(request: web.Request) -> web.StreamResponse:
    """`POST /v2/models/{model_name}/infer`: each text of each tensor is one prompt."""
    services = request.app[SERVICES]
    body = await read_request(request, KserveRequest)
    with counting_refusals(services.metrics):
        texts = _texts(body, services)
        # The headers of a body without prompts are checked only here.
        scheduling_of(request, body.parameters.priority)
        names_of(request)
    prompts = [text for tensor in texts for text in tensor]
    works = [_answer(request, one, body.parameters, index) for index, one in enumerate(prompts)]
    answers = iter(await gather(works))
    outputs = [
        tensor.answered(name, [next(answers) for _ in tensor_texts])
        for tensor, name, tensor_texts in zip(body.inputs, body.output_names(), texts, strict=True)
    ]
    return json_response(_response(request, body, outputs))


def _texts(body: KserveRequest, services: Services) -> list[list[str]]:
    """Return the prompts by tensor; raises RouterError."""
    texts = [tensor.texts() for tensor in body.inputs]
    if len(body.output_names()) != len(body.inputs):
        raise LengthMismatch
    check_count(sum(map(len, texts)), services.limits)
    return texts


async def _answer(
    request: web.Request, text: str, parameters: GenerateParameters, index: int
) -> str:
    services = request.app[SERVICES]
    try:
        with counting_refusals(services.metrics):
            answer, _ = await generated(
                request, GenerateRequest(inputs=text, parameters=parameters), index
            )
    except RouterError as error:
        if services.dialect.hides_platform_errors:
            raise IncompletePrediction from error
        raise
    return answer["generated_text"]


def _response(
    request: web.Request, body: KserveRequest, outputs: list[KserveAnswerJson]
) -> KserveResponseJson:
    response: KserveResponseJson = {
        "model_name": request.match_info["model_name"],
        "outputs": outputs,
    }
    if "model_version" in request.match_info:
        response["model_version"] = request.match_info["model_version"]
    if body.id is not None:
        response["id"] = body.id
    return response
