"""`--served-model-name`: the list of models, the names in answers, and which names are an adapter's."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from millrace_router.adapters.names import Registry
from millrace_router.config import RouterConfig
from millrace_router.start.adapters import _register
from millrace_router.start.shards import StartupError
from millrace_testing.router.edge import Edge, serving

NAMES = ("chat-large", "gpt-4:turbo")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}


def serve(**options: Any) -> Any:
    return serving(served_model_name=NAMES, template="hello", **options)


async def listed(edge: Edge) -> list[str]:
    body = orjson.loads((await edge.get("/v1/models"))[1])
    return [one["id"] for one in body["data"]]


async def test_every_name_is_listed_and_described() -> None:
    async with serve() as edge:
        assert await listed(edge) == list(NAMES)
        for name in NAMES:
            status, body, _ = await edge.get(f"/v1/models/{name}")
            assert (status, orjson.loads(body)["id"]) == (200, name)
        assert (await edge.get("/v1/models/org/tiny"))[0] == 404
        assert orjson.loads((await edge.get("/info"))[1])["model_id"] == "org/tiny"
    async with serving() as edge:
        assert await listed(edge) == ["org/tiny"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("tgi", NAMES[0]),
        (NAMES[0], NAMES[0]),
        (NAMES[1], NAMES[1]),
        ("org/tiny", "org/tiny"),
        ("any", "any"),
    ],
)
async def test_answers_have_the_requested_name_or_the_first(
    path: str, asked: str, answered: str
) -> None:
    async with serve() as edge:
        status, body, _ = await edge.post(path, BODIES[path] | {"model": asked})
        assert (status, body["model"]) == (200, answered)


async def test_all_names_are_served_where_others_are_refused() -> None:
    async with serve(unknown_model="refuse") as edge:
        for name in (*NAMES, "org/tiny", "tgi"):
            assert (await edge.post("/v1/chat/completions", CHAT | {"model": name}))[0] == 200
        for name in ("gpt-4", "gpt-4:", "other"):
            assert (await edge.post("/v1/chat/completions", CHAT | {"model": name}))[0] == 404


def test_no_adapter_has_one_of_the_names() -> None:
    flags = ("--model-folder=/m", "--served-model-name=a,b", "--lora-modules=b=/x")
    with pytest.raises(StartupError, match="the LoRA adapter b has the name of the model"):
        _register(RouterConfig.from_args(flags), Registry())
