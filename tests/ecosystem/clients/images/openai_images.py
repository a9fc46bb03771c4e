"""The `openai` package: pictures in chats, responses and results of tools."""

from __future__ import annotations

import openai
from cases import raised, run
from images.shown import MODEL, shown, url_of


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def a_picture_is_read_in_a_chat(base_url: str) -> None:
    chats = client(base_url).chat.completions
    for text, content in shown().items():
        part = {"type": "image_url", "image_url": {"url": url_of(content), "detail": "high"}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Read it."}]}]
        options = {"model": MODEL, "messages": messages, "temperature": 0}
        answer = chats.create(**options)
        assert answer.choices[0].message.content == text
        assert answer.usage.prompt_tokens > 9
        pieces = chats.create(**options, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text


def a_picture_is_read_in_a_response(base_url: str) -> None:
    responses = client(base_url).responses
    for text, content in shown().items():
        parts = [
            {"type": "input_text", "text": "Read it."},
            {"type": "input_image", "image_url": url_of(content), "detail": "auto"},
        ]
        answer = responses.create(
            model=MODEL, input=[{"role": "user", "content": parts}], temperature=0
        )
        assert answer.output_text == text


def a_picture_in_the_result_of_a_call_is_read(base_url: str) -> None:
    responses = client(base_url).responses
    for text, content in shown().items():
        picture = {"type": "input_image", "image_url": url_of(content), "detail": "auto"}
        call = {"type": "function_call", "call_id": "c1", "name": "screenshot", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c1", "output": [picture]}
        answer = responses.create(
            model=MODEL,
            input=[{"role": "user", "content": "What is on the screen?"}, call, result],
            temperature=0,
        )
        assert answer.output_text == text


def the_last_of_several_pictures_is_read(base_url: str) -> None:
    messages = []
    for text, content in list(shown().items())[:2]:
        part = {"type": "image_url", "image_url": {"url": url_of(content)}}
        messages.append({"role": "user", "content": [part]})
        answer = client(base_url).chat.completions.create(
            model=MODEL, messages=messages, temperature=0
        )
        assert answer.choices[0].message.content == text
        messages.append({"role": "assistant", "content": text})


def a_bad_picture_is_an_error_that_names_its_part(base_url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url_of(b"no picture")}}
    error = raised(
        openai.UnprocessableEntityError,
        lambda: client(base_url).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [part]}]
        ),
    )
    assert error.code == "invalid_image"
    assert "messages.0.content.0" in error.message


run(globals())
