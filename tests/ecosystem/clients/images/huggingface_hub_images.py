"""`huggingface_hub`: pictures in chats, and in TGI's Markdown."""

from __future__ import annotations

from cases import run
from huggingface_hub import InferenceClient
from images.shown import shown, url_of


def a_picture_is_read_in_a_chat(base_url: str) -> None:
    for text, content in shown().items():
        parts = [
            {"type": "image_url", "image_url": {"url": url_of(content)}},
            {"type": "text", "text": "Read it."},
        ]
        answer = InferenceClient(base_url).chat_completion(
            [{"role": "user", "content": parts}], temperature=0.01, seed=1
        )
        assert answer.choices[0].message.content == text


def a_picture_in_markdown_is_read(base_url: str) -> None:
    for text, content in shown().items():
        prompt = f"<|user|>![]({url_of(content)})<|end|><|assistant|>"
        answer = InferenceClient(base_url).text_generation(
            prompt, max_new_tokens=9, return_full_text=False
        )
        assert answer == text


run(globals())
