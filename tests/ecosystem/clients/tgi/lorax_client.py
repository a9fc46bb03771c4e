"""LoRAX's client: it sends every field, nulls included, and refuses answers without LoRAX's own fields."""

from __future__ import annotations

import asyncio
import json

from cases import PROMPT, WIND_SCHEMA, check_wind, raised, run
from lorax import AsyncClient, Client
from lorax.errors import NotFoundError, ValidationError


def generate_gives_text_and_details(base_url: str) -> None:
    answer = Client(base_url).generate(PROMPT, max_new_tokens=8)
    assert answer.generated_text
    assert answer.details.generated_tokens == len(answer.details.tokens) <= 8
    assert answer.details.prompt_tokens > 1


def a_stream_says_what_the_whole_answer_says(base_url: str) -> None:
    client = Client(base_url)
    whole = client.generate(PROMPT, max_new_tokens=8)
    events = list(client.generate_stream(PROMPT, max_new_tokens=8))
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details.prompt_tokens == whole.details.prompt_tokens
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]


def candidates_are_told(base_url: str) -> None:
    answer = Client(base_url).generate(PROMPT, max_new_tokens=4, return_k_alternatives=2)
    for token in answer.details.tokens:
        assert len(token.alternative_tokens) >= 2
        assert token.id in {one.id for one in token.alternative_tokens}


def a_schema_binds_the_text(base_url: str) -> None:
    format_ = {"type": "json_object", "schema": WIND_SCHEMA}
    answer = Client(base_url).generate(PROMPT, max_new_tokens=200, response_format=format_)
    check_wind(json.loads(answer.generated_text))


def an_unknown_adapter_is_not_found(base_url: str) -> None:
    client = Client(base_url)
    error = raised(NotFoundError, lambda: client.generate(PROMPT, adapter_id="org/none"))
    assert str(error) == "The adapter 'org/none' does not exist"


def another_source_is_refused(base_url: str) -> None:
    client = Client(base_url)
    asked = {"adapter_id": "a", "adapter_source": "s3"}
    error = raised(ValidationError, lambda: client.generate(PROMPT, **asked))
    assert "`adapter_source` s3 is not supported" in str(error)


def the_asynchronous_client_does_the_same(base_url: str) -> None:
    async def both() -> tuple[str | None, str]:
        client = AsyncClient(base_url)
        last = None
        async for event in client.generate_stream(PROMPT, max_new_tokens=6):
            last = event.generated_text
        return last, (await client.generate(PROMPT, max_new_tokens=6)).generated_text

    streamed, whole = asyncio.run(both())
    assert streamed == whole


run(globals())
