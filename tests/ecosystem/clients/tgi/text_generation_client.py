"""TGI's own old client, `text-generation`: it sends every parameter, nulls included."""

from __future__ import annotations

import asyncio
import json

from cases import MESSAGES, PROMPT, WIND, WIND_SCHEMA, check_wind, raised, run
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message, Tool

TOO_MANY_STOPS = [f"stop {number}" for number in range(50)]


def generate_gives_text_and_details(base_url: str) -> None:
    answer = Client(base_url).generate(PROMPT, max_new_tokens=8, decoder_input_details=True)
    assert answer.generated_text
    assert answer.details.generated_tokens == len(answer.details.tokens) <= 8
    assert answer.details.finish_reason.value in {"length", "eos_token"}
    assert len(answer.details.prefill) > 1


def a_stream_says_what_the_whole_answer_says(base_url: str) -> None:
    client = Client(base_url)
    whole = client.generate(PROMPT, max_new_tokens=8)
    events = list(client.generate_stream(PROMPT, max_new_tokens=8))
    assert events[-1].generated_text == whole.generated_text
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]


def sampling_parameters_are_taken(base_url: str) -> None:
    client = Client(base_url)
    answers = {
        client.generate(
            PROMPT,
            do_sample=True,
            max_new_tokens=8,
            temperature=0.9,
            top_k=30,
            top_p=0.9,
            typical_p=0.95,
            repetition_penalty=1.1,
            seed=3,
            truncate=4,
        ).generated_text
        for _ in range(2)
    }
    assert len(answers) == 1


def a_grammar_binds_the_text(base_url: str) -> None:
    client = Client(base_url)
    grammar = Grammar(type=GrammarType.Json, value=WIND_SCHEMA)
    whole = client.generate(PROMPT, max_new_tokens=200, grammar=grammar)
    check_wind(json.loads(whole.generated_text))
    digits = Grammar(type=GrammarType.Regex, value="[0-9]{3}")
    *_, last = client.generate_stream(PROMPT, max_new_tokens=8, grammar=digits)
    assert last.generated_text.isdigit()
    assert len(last.generated_text) == 3


def best_of_returns_the_others_too(base_url: str) -> None:
    answer = Client(base_url).generate(PROMPT, do_sample=True, best_of=2, max_new_tokens=6)
    assert len(answer.details.best_of_sequences) == 1
    assert answer.details.best_of_sequences[0].generated_text


def a_chat_answers(base_url: str) -> None:
    asked = [Message(**message) for message in MESSAGES]
    first = Client(base_url).chat(messages=asked, max_tokens=8, seed=1)
    choice = first.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in {"stop", "length"}
    assert first.usage["completion_tokens"] <= 8
    second = asyncio.run(AsyncClient(base_url).chat(messages=asked, max_tokens=8, seed=1))
    assert second.choices[0].message.content == choice.message.content


def a_chat_streams(base_url: str) -> None:
    asked = [Message(**message) for message in MESSAGES]
    whole = Client(base_url).chat(messages=asked, max_tokens=8, seed=1)
    chunks = list(Client(base_url).chat(messages=asked, max_tokens=8, seed=1, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason

    async def streamed() -> str:
        stream = await AsyncClient(base_url).chat(messages=asked, max_tokens=8, seed=1, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(streamed()) == text


def a_call_streams(base_url: str) -> None:
    asked = [Message(**message) for message in MESSAGES]
    chunks = Client(base_url).chat(
        messages=asked, max_tokens=150, tools=[Tool(**WIND)], tool_choice="required", stream=True
    )
    calls = [call for chunk in chunks if (call := chunk.choices[0].delta.tool_calls) is not None]
    first = [call.function for call in calls if call.index == 0]
    assert first[0].name == "wind"
    check_wind(json.loads("".join(function.arguments for function in first)))


def a_tool_is_called(base_url: str) -> None:
    asked = [Message(**message) for message in MESSAGES]
    answer = Client(base_url).chat(
        messages=asked, max_tokens=150, tools=[Tool(**WIND)], tool_choice="required"
    )
    choice = answer.choices[0]
    # It samples, and cannot be told to stop after one call: the limit may cut a later one.
    first, *others = choice.message.tool_calls
    whole = others[:-1] if choice.finish_reason == "length" else others
    for call in (first, *whole):
        assert call["function"]["name"] == "wind"
        check_wind(json.loads(call["function"]["arguments"]))


def a_bad_request_raises_validation_error(base_url: str) -> None:
    client = Client(base_url)
    error = raised(ValidationError, lambda: client.generate(PROMPT, stop_sequences=TOO_MANY_STOPS))
    assert str(error).startswith("Input validation error")


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
