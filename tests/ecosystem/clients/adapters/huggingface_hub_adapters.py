"""`huggingface_hub`'s InferenceClient passes an adapter's id on, and names adapters as models of chats."""

from __future__ import annotations

from adapter_cases import NEW_TOKENS, PROMPT, expected
from cases import MESSAGES, raised, run
from huggingface_hub import InferenceClient
from huggingface_hub.errors import TextGenerationError


def every_adapter_answers_as_over_plain_http(base_url: str) -> None:
    client = InferenceClient(base_url)
    for name, text in expected().items():
        answer = client.text_generation(
            PROMPT, adapter_id=name or None, max_new_tokens=NEW_TOKENS, return_full_text=False
        )
        assert answer == text, name


def a_stream_has_the_adapter_too(base_url: str) -> None:
    name, text = next((name, text) for name, text in expected().items() if name)
    client = InferenceClient(base_url)
    tokens = client.text_generation(
        PROMPT,
        adapter_id=name,
        max_new_tokens=NEW_TOKENS,
        stream=True,
        details=True,
        return_full_text=False,
    )
    assert list(tokens)[-1].generated_text == text


def an_unknown_adapter_is_refused(base_url: str) -> None:
    client = InferenceClient(base_url)
    asked = {"adapter_id": "org/none"}
    error = raised(TextGenerationError, lambda: client.text_generation(PROMPT, **asked))
    assert "The adapter 'org/none' does not exist" in str(error)


def chats_name_adapters_as_models(base_url: str) -> None:
    client = InferenceClient(base_url=f"{base_url}/v1")
    texts = {
        client.chat_completion(MESSAGES, model=model, max_tokens=16, temperature=0)
        .choices[0]
        .message.content
        for model in ("pirate", "butler")
    }
    assert len(texts) == 2


run(globals())
