"""`instructor` over the `openai` package: objects by a forced tool, and by JSON of either form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import instructor
import openai
from cases import MESSAGES, raised, run
from kinds import Wind
from pydantic import BaseModel, ConfigDict

OPTIONS: dict[str, Any] = {
    "model": "tgi",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 150,
    "max_retries": 0,
}
BOUND = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


class Anything(BaseModel):
    """Whatever object it is."""

    model_config = ConfigDict(extra="allow")


def patched(base_url: str, mode: instructor.Mode) -> instructor.Instructor:
    bare = openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)
    return instructor.from_openai(bare, mode=mode)


def every_bound_mode_gives_the_asked_kind(base_url: str) -> None:
    for mode in BOUND:
        create = patched(base_url, mode).chat.completions.create
        assert isinstance(create(response_model=Wind, **OPTIONS), Wind), mode


def the_raw_answer_comes_along(base_url: str) -> None:
    create = patched(base_url, instructor.Mode.TOOLS).chat.completions.create_with_completion
    wind, answer = create(response_model=Wind, **OPTIONS)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Wind"
    assert json.loads(call.function.arguments) == wind.model_dump()
    assert answer.usage.completion_tokens > 0


def a_stream_grows_into_the_object(base_url: str) -> None:
    for mode in BOUND:
        chat = patched(base_url, mode).chat.completions
        options = {name: value for name, value in OPTIONS.items() if name != "max_retries"}
        partials = list(chat.create_partial(response_model=Wind, **options))
        whole = chat.create(response_model=Wind, **OPTIONS)
        assert len(partials) > 1
        assert partials[-1].model_dump() == whole.model_dump(), mode


def json_mode_gives_an_object(base_url: str) -> None:
    # The schema stands in the prompt alone here: what binds the answer is that it be any object.
    create = patched(base_url, instructor.Mode.JSON).chat.completions.create
    assert create(response_model=Anything, **OPTIONS).model_extra


def the_asynchronous_client_does_the_same(base_url: str) -> None:
    bare = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)
    chat = instructor.from_openai(bare, mode=instructor.Mode.TOOLS).chat.completions
    wind = asyncio.run(chat.create(response_model=Wind, **OPTIONS))
    assert isinstance(wind, Wind)


def a_bad_request_is_the_client_s_error(base_url: str) -> None:
    create = patched(base_url, instructor.Mode.TOOLS).chat.completions.create
    error = raised(Exception, lambda: create(response_model=Wind, **{**OPTIONS, "temperature": -1}))
    assert "temperature" in str(error)


run(globals())
