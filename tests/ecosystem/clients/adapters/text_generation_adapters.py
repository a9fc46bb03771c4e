"""TGI's own old client knows no adapters: its requests get the base, on a server of many adapters too."""

from __future__ import annotations

from adapter_cases import NEW_TOKENS, PROMPT, expected
from cases import run
from text_generation import Client


def without_an_adapter_it_is_the_base(base_url: str) -> None:
    client = Client(base_url)
    assert client.generate(PROMPT, max_new_tokens=NEW_TOKENS).generated_text == expected()[""]
    *_, last = client.generate_stream(PROMPT, max_new_tokens=NEW_TOKENS)
    assert last.generated_text == expected()[""]


run(globals())
