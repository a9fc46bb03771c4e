"""The `openai` package against `/v1`."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial

import openai
from cases import MESSAGES, PROMPT, raised, run
from kinds import Mill

MODEL = "tgi"


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def models_lists_what_is_served(base_url: str) -> None:
    models = client(base_url).models.list().data
    assert len(models) >= 1
    assert models[0].id


def chat_answers_once(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    first = create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=8)
    second = create(model="any/name", messages=MESSAGES, temperature=0, max_tokens=8)
    choice = first.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in {"stop", "length"}
    assert choice.message.content == second.choices[0].message.content
    assert second.model == "any/name"
    assert first.usage.completion_tokens <= 8
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.id != second.id


def chat_stream_says_what_the_whole_answer_says(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    whole = create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=12)
    stream = create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *deltas, usage = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == whole.choices[0].message.content
    assert deltas[0].choices[0].delta.role == "assistant"
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == []
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def chat_takes_content_in_parts(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    plain = create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=6)
    in_parts = create(model=MODEL, messages=parts, temperature=0, max_tokens=6)
    assert plain.choices[0].message.content == in_parts.choices[0].message.content


def chat_gives_log_probabilities(base_url: str) -> None:
    answer = client(base_url).chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) >= 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def a_stop_string_is_cut(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    whole = (
        create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
        .choices[0]
        .message.content
    )
    stop = whole[len(whole) // 2 :][:3]
    cut = create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, stop=[stop]).choices[
        0
    ]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    chunks = create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, stop=[stop], stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == cut.message.content


def completions_answers_and_streams(base_url: str) -> None:
    create = client(base_url).completions.create
    whole = create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=10)
    assert whole.choices[0].text
    assert whole.usage.completion_tokens <= 10
    stream = create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=10, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == whole.choices[0].text


def completions_takes_several_prompts(base_url: str) -> None:
    create = client(base_url).completions.create
    both = create(model=MODEL, prompt=[PROMPT, "Once"], temperature=0, max_tokens=4)
    assert [choice.index for choice in both.choices] == [0, 1]
    alone = create(model=MODEL, prompt="Once", temperature=0, max_tokens=4)
    assert both.choices[1].text == alone.choices[0].text


def the_same_seed_samples_the_same(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    answers = {
        create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=1.0, seed=7)
        .choices[0]
        .message.content
        for _ in range(3)
    }
    assert len(answers) == 1


def a_bad_request_is_an_error_with_its_reason(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    for stream in (False, True):
        error = raised(
            openai.UnprocessableEntityError,
            partial(create, model=MODEL, messages=MESSAGES, temperature=-1.0, stream=stream),
        )
        assert error.status_code == 422
        assert "temperature" in str(error.body)


def parse_gives_an_object_of_the_asked_kind(base_url: str) -> None:
    parse = client(base_url).chat.completions.parse
    answer = parse(model=MODEL, messages=MESSAGES, max_tokens=200, response_format=Mill, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Mill)
    assert answer.choices[0].finish_reason == "stop"


def a_schema_binds_a_stream_too(base_url: str) -> None:
    schema = {"name": "mill", "strict": True, "schema": Mill.model_json_schema()}
    stream = client(base_url).chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": schema},
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    Mill.model_validate_json(text)


def json_mode_begins_an_object(base_url: str) -> None:
    answer = client(base_url).chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_object"},
    )
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def a_schema_that_is_none_is_an_error_with_its_reason(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    schema = {"name": "mill", "schema": {"type": "no such type"}}
    error = raised(
        openai.UnprocessableEntityError,
        partial(
            create,
            model=MODEL,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": schema},
        ),
    )
    assert "grammar is not valid" in str(error.body)


def several_choices_differ_and_share_the_prompt(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 5, "temperature": 2}
    one = create(**options)
    three = create(n=3, **options)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in three.choices]
    assert len(set(texts)) > 1
    assert texts[0] == one.choices[0].message.content
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    stream = create(n=3, stream=True, **options)
    streamed = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def completions_choose_among_samples(base_url: str) -> None:
    create = client(base_url).completions.create
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "seed": 5}
    both = create(n=2, **options)
    best = create(best_of=2, **options)
    assert len(best.choices) == 1
    assert best.choices[0].text in {choice.text for choice in both.choices}


def a_bias_bans_a_token(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "temperature": 0}
    tokens = openai.OpenAI(base_url=base_url, api_key="-").post(
        "/tokenize", body={"inputs": " mill"}, cast_to=object
    )
    wanted = tokens[-1]["id"]
    forced = create(logit_bias={str(wanted): 100}, **options).choices[0].message.content
    assert forced.strip() == tokens[-1]["text"].strip()
    assert create(logit_bias={str(wanted): -100}, **options).choices[0].message.content != forced


def tgi_s_regular_expression_is_taken(base_url: str) -> None:
    answer = client(base_url).chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=20,
        extra_body={"response_format": {"type": "regex", "value": "[0-9]{3}"}, "min_p": 0.05},
    )
    assert re.fullmatch("[0-9]{3}", answer.choices[0].message.content)


def streams_run_side_by_side(base_url: str) -> None:
    async def one(asynchronous: openai.AsyncOpenAI, number: int) -> int:
        stream = await asynchronous.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Count to {number}"}],
            max_tokens=8,
            stream=True,
        )
        return len([chunk async for chunk in stream])

    async def all_of_them() -> list[int]:
        options = {"base_url": f"{base_url}/v1", "api_key": "-", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as asynchronous:
            return await asyncio.gather(*(one(asynchronous, number) for number in range(12)))

    assert all(count >= 1 for count in asyncio.run(all_of_them()))


def a_client_that_leaves_disturbs_no_other_request(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    stream = create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert (
        create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4)
        .choices[0]
        .message.content
    )


run(globals())
