"""KServe's open inference protocol, version 2; every model name stands for the one model."""

from __future__ import annotations

from aiohttp import web

from millrace_router.api.body.request_fields.reading import read_request
from millrace_router.api.platforms.errors import IncompletePrediction, LengthMismatch
from millrace_router.api.platforms.gather import check_count, gather
from millrace_router.api.platforms.kserve import (
    BYTES,
    KserveAnswerJson,
    KserveLiveJson,
    KserveModelJson,
    KserveReadyJson,
    KserveRequest,
    KserveResponseJson,
    KserveServerJson,
)
from millrace_router.api.tgi.probes import readyz
from millrace_router.api.tgi.request import GenerateParameters, GenerateRequest
from millrace_router.api.tgi.routes import generated
from millrace_router.errors import RouterError
from millrace_router.server.bodies import json_response
from millrace_router.server.request_start import counting_refusals, scheduling_of
from millrace_router.server.services import SERVICES, Services
from millrace_router.version import VERSION

SERVER = "/v2"
MODEL = "/v2/models/{model_name}"
MODEL_VERSION = MODEL + "/versions/{model_version}"
PLATFORM = "text-generation-inference"


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
    """`POST /v2/models/{model_name}/infer`: each text of each tensor is a prompt of its own."""
    services = request.app[SERVICES]
    body = await read_request(request, KserveRequest)
    with counting_refusals(services.metrics):
        texts = _texts(body, services)
        # A body without prompts has its headers checked here alone.
        scheduling_of(request, body.parameters.priority)
    prompts = [text for tensor in texts for text in tensor]
    answers = iter(await gather([_answer(request, text, body.parameters) for text in prompts]))
    outputs = [
        tensor.answered(name, [next(answers) for _ in asked])
        for tensor, name, asked in zip(body.inputs, body.output_names(), texts, strict=True)
    ]
    return json_response(_response(request, body, outputs))


def _texts(body: KserveRequest, services: Services) -> list[list[str]]:
    """Return the prompts by tensor; raises RouterError."""
    texts = [tensor.texts() for tensor in body.inputs]
    if len(body.output_names()) != len(body.inputs):
        raise LengthMismatch
    check_count(sum(map(len, texts)), services.limits)
    return texts


async def _answer(request: web.Request, text: str, parameters: GenerateParameters) -> str:
    try:
        answer, _ = await generated(request, GenerateRequest(inputs=text, parameters=parameters))
    except RouterError as error:
        if request.app[SERVICES].dialect.hides_platform_errors:
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
