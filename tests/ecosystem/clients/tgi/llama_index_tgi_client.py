"""`llama-index-llms-text-generation-inference`, over TGI's client `tgi`."""

from __future__ import annotations

import asyncio

from cases import PROMPT, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.text_generation_inference import TextGenerationInference

MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage("What does a mill do?")]


def llm(base_url: str) -> TextGenerationInference:
    return TextGenerationInference(
        model_url=base_url, max_tokens=8, temperature=0.5, additional_kwargs={"seed": 1}
    )


def a_chat_answers(base_url: str) -> None:
    answer = llm(base_url).chat(MESSAGES)
    assert answer.message.content


def a_chat_streams(base_url: str) -> None:
    whole = llm(base_url).chat(MESSAGES).message.content
    *_, last = llm(base_url).stream_chat(MESSAGES)
    assert last.message.content == whole

    async def streamed() -> str | None:
        text = None
        async for part in await llm(base_url).astream_chat(MESSAGES):
            text = part.message.content
        return text

    assert asyncio.run(streamed()) == whole


def a_text_is_completed(base_url: str) -> None:
    whole = llm(base_url).complete(PROMPT).text
    *_, last = llm(base_url).stream_complete(PROMPT)
    assert whole
    assert last.text == whole


run(globals())
