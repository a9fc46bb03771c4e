"""`huggingface_hub`'s InferenceClient against a base URL, as one points it at TGI."""

from __future__ import annotations

import asyncio
import json
import re

from cases import MESSAGES, PROMPT, raised, run
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

NO_PROMPT = {"return_full_text": False}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["river", "sea"]}, "wheel": {"type": "boolean"}},
    "required": ["place", "wheel"],
    "additionalProperties": False,
}


def text_generation_gives_text(base_url: str) -> None:
    client = InferenceClient(base_url)
    text = client.text_generation(PROMPT, max_new_tokens=8, **NO_PROMPT)
    assert isinstance(text, str)
    assert text
    # On this route TGI repeats the prompt unless told not to.
    assert client.text_generation(PROMPT, max_new_tokens=8) == PROMPT + text


def details_agree_with_the_text(base_url: str) -> None:
    answer = InferenceClient(base_url).text_generation(
        PROMPT,
        max_new_tokens=8,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        **NO_PROMPT,
    )
    details = answer.details
    assert details.generated_tokens == len(details.tokens) <= 8
    assert details.finish_reason in {"length", "eos_token"}
    shown = "".join(token.text for token in details.tokens if not token.special)
    assert shown.strip() == answer.generated_text.strip()
    assert len(details.prefill) > 1
    assert details.prefill[0].logprob is None
    assert all(token.logprob <= 0 for token in details.prefill[1:])
    assert len(details.top_tokens) == details.generated_tokens


def a_stream_says_what_the_whole_answer_says(base_url: str) -> None:
    client = InferenceClient(base_url)
    options = {"max_new_tokens": 10, **NO_PROMPT}
    whole = client.text_generation(PROMPT, **options)
    events = list(client.text_generation(PROMPT, stream=True, details=True, **options))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert all(event.generated_text is None for event in events[:-1])
    assert events[-1].generated_text == whole
    assert events[-1].details.generated_tokens == len(events)
    plain = list(client.text_generation(PROMPT, stream=True, **options))
    # The client passes an end token on like any other.
    assert "".join(plain).startswith(whole)


def a_stop_sequence_stays_in_the_text(base_url: str) -> None:
    client = InferenceClient(base_url)
    whole = client.text_generation(PROMPT, max_new_tokens=16, **NO_PROMPT)
    stop = whole[len(whole) // 2 :][:3]
    answer = client.text_generation(
        PROMPT, max_new_tokens=16, stop=[stop], details=True, **NO_PROMPT
    )
    assert stop in answer.generated_text
    assert whole.startswith(answer.generated_text)
    assert answer.details.finish_reason == "stop_sequence"


def the_same_seed_samples_the_same(base_url: str) -> None:
    client = InferenceClient(base_url)
    answers = {
        client.text_generation(
            PROMPT, max_new_tokens=12, do_sample=True, temperature=1.2, top_k=20, seed=11
        )
        for _ in range(3)
    }
    assert len(answers) == 1


def best_of_returns_the_others_too(base_url: str) -> None:
    answer = InferenceClient(base_url).text_generation(
        PROMPT, max_new_tokens=6, do_sample=True, best_of=2, details=True
    )
    assert len(answer.details.best_of_sequences) == 1


def chat_answers_and_streams(base_url: str) -> None:
    client = InferenceClient(base_url)
    whole = client.chat_completion(MESSAGES, temperature=0, max_tokens=10)
    assert whole.choices[0].message.role == "assistant"
    chunks = client.chat_completion(MESSAGES, temperature=0, max_tokens=10, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def is_as_described(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"place", "wheel"} and value["place"] in {"river", "sea"}


def a_grammar_binds_the_text(base_url: str) -> None:
    client = InferenceClient(base_url)
    options = {"max_new_tokens": 60, **NO_PROMPT}
    for value in (SCHEMA, json.dumps(SCHEMA)):
        grammar = {"type": "json", "value": value}
        assert is_as_described(client.text_generation(PROMPT, grammar=grammar, **options))
    events = client.text_generation(PROMPT, grammar=grammar, stream=True, details=True, **options)
    last = list(events)[-1]
    assert is_as_described(last.generated_text)
    assert last.details.finish_reason == "eos_token"
    regex = {"type": "regex", "value": "[0-9]{2}-[a-f]+"}
    text = client.text_generation(PROMPT, grammar=regex, max_new_tokens=10, **NO_PROMPT)
    assert re.match("[0-9]{2}(-|$)", text)


def a_bad_grammar_raises_validation_error(base_url: str) -> None:
    client = InferenceClient(base_url)
    for grammar in (
        {"type": "regex", "value": "(" * 3},
        {"type": "json", "value": "no schema"},
        {"type": "json", "value": {"type": "no such type"}},
    ):
        error = raised(
            ValidationError, lambda bad=grammar: client.text_generation(PROMPT, grammar=bad)
        )
        assert "grammar is not valid" in str(error)


def a_response_format_binds_a_chat(base_url: str) -> None:
    client = InferenceClient(base_url)
    for response_format in (
        {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ):
        answer = client.chat_completion(MESSAGES, max_tokens=200, response_format=response_format)
        assert is_as_described(answer.choices[0].message.content)


def several_choices_come_in_order(base_url: str) -> None:
    answer = InferenceClient(base_url).chat_completion(MESSAGES, max_tokens=6, n=2, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1]


def watermarks_are_taken(base_url: str) -> None:
    client = InferenceClient(base_url)
    options = {"max_new_tokens": 12, "do_sample": True, "seed": 1, **NO_PROMPT}
    plain = client.text_generation(PROMPT, **options)
    assert client.text_generation(PROMPT, watermark=True, **options) != plain


def a_bad_request_raises_validation_error(base_url: str) -> None:
    client = InferenceClient(base_url)
    bad = {"repetition_penalty": -1.0}
    whole = raised(ValidationError, lambda: client.text_generation(PROMPT, **bad))
    assert "repetition_penalty" in str(whole)
    streamed = raised(
        ValidationError, lambda: list(client.text_generation(PROMPT, stream=True, **bad))
    )
    assert "repetition_penalty" in str(streamed)


def info_and_health_answer(base_url: str) -> None:
    client = InferenceClient(base_url, provider="hf-inference")
    info = client.get_endpoint_info()
    assert {"model_id", "max_total_tokens", "max_input_tokens", "version"} <= info.keys()
    assert client.health_check()


def the_asynchronous_client_does_the_same(base_url: str) -> None:
    async def both() -> tuple[str, str]:
        client = AsyncInferenceClient(base_url)
        options = {"max_new_tokens": 6, **NO_PROMPT}
        stream = await client.text_generation(PROMPT, stream=True, details=True, **options)
        events = [event async for event in stream]
        return events[-1].generated_text, await client.text_generation(PROMPT, **options)

    streamed, whole = asyncio.run(both())
    assert streamed == whole


run(globals())
