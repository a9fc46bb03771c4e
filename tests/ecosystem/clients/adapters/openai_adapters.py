"""The `openai` package lists adapters and names them as models."""

from __future__ import annotations

import openai
from adapter_cases import NEW_TOKENS, PROMPT, expected
from cases import MESSAGES, raised, run


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def models_have_roots_and_parents(base_url: str) -> None:
    base, *adapters = client(base_url).models.list().data
    assert {model.id for model in adapters} == {name for name in expected() if name}
    assert all(model.parent == base.id and model.root for model in adapters)


def every_adapter_completes_as_over_plain_http(base_url: str) -> None:
    create = client(base_url).completions.create
    base = client(base_url).models.list().data[0].id
    for name, text in expected().items():
        for model in (name or base, f"{base}:{name}" if name else "tgi"):
            answer = create(model=model, prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0)
            assert answer.choices[0].text == text, model


def a_chat_and_its_stream_have_the_adapter(base_url: str) -> None:
    create = client(base_url).chat.completions.create
    texts = set()
    for model in ("pirate", "butler", "tgi"):
        asked = {"model": model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        whole = create(**asked).choices[0].message.content
        chunks = create(**asked, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
        texts.add(whole)
    assert len(texts) == 3


def an_unknown_model_is_not_found(base_url: str) -> None:
    create = client(base_url).completions.create
    error = raised(openai.NotFoundError, lambda: create(model="no-such-adapter", prompt=PROMPT))
    assert error.code == "model_not_found"


run(globals())
