"""LoRAX's client names adapters, merges them, and streams."""

from __future__ import annotations

from adapter_cases import NEW_TOKENS, PROMPT, expected
from cases import raised, run
from lorax import Client
from lorax.errors import NotFoundError
from lorax.types import MergedAdapters


def every_adapter_answers_as_over_plain_http(base_url: str) -> None:
    client = Client(base_url)
    for name, text in expected().items():
        answer = client.generate(PROMPT, adapter_id=name or None, max_new_tokens=NEW_TOKENS)
        assert answer.generated_text == text, name
    assert len(set(expected().values())) > 10


def a_stream_has_the_adapter_too(base_url: str) -> None:
    name, text = next((name, text) for name, text in expected().items() if name)
    events = list(
        Client(base_url).generate_stream(PROMPT, adapter_id=name, max_new_tokens=NEW_TOKENS)
    )
    assert events[-1].generated_text == text


def a_merge_of_one_adapter_is_the_adapter(base_url: str) -> None:
    name, text = next((name, text) for name, text in expected().items() if name)
    merged = MergedAdapters(ids=[name], weights=[1.0], merge_strategy="linear", density=1.0)
    answer = Client(base_url).generate(PROMPT, merged_adapters=merged, max_new_tokens=NEW_TOKENS)
    assert answer.generated_text == text


def two_adapters_are_merged(base_url: str) -> None:
    names = [name for name in expected() if name][:2]
    merged = MergedAdapters(ids=names, weights=[0.5, 0.5], merge_strategy="ties", density=0.5)
    client = Client(base_url)
    texts = {
        client.generate(PROMPT, merged_adapters=merged, max_new_tokens=NEW_TOKENS).generated_text
        for _ in range(2)
    }
    assert len(texts) == 1


def an_unknown_adapter_is_not_found(base_url: str) -> None:
    client = Client(base_url)
    error = raised(NotFoundError, lambda: client.generate(PROMPT, adapter_id="org/none"))
    assert str(error) == "The adapter 'org/none' does not exist"


run(globals())
