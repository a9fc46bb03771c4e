"""`langchain-openai`: pictures in messages and in results of tools."""

from __future__ import annotations

from cases import run
from images.shown import MODEL, base64_of, shown, url_of
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def chat(base_url: str, **more: object) -> ChatOpenAI:
    options = {"temperature": 0, "max_retries": 0, **more}
    return ChatOpenAI(model=MODEL, base_url=f"{base_url}/v1", api_key="-", **options)


def pictures_of_both_forms_are_read(base_url: str) -> None:
    for text, content in shown().items():
        for part in (
            {"type": "image_url", "image_url": {"url": url_of(content)}},
            {"type": "image", "base64": base64_of(content), "mime_type": "image/png"},
        ):
            message = HumanMessage([{"type": "text", "text": "Read it."}, part])
            for model in (chat(base_url), chat(base_url, use_responses_api=True)):
                assert model.invoke([message]).text == text


def a_screenshot_in_the_result_of_a_tool_is_read(base_url: str) -> None:
    for text, content in shown().items():
        part = {"type": "image", "base64": base64_of(content), "mime_type": "image/png"}
        call = {"name": "screenshot", "args": {}, "id": "c1"}
        messages = [
            HumanMessage("What is on the screen?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage([part], tool_call_id="c1"),
        ]
        assert chat(base_url).invoke(messages).text == text


run(globals())
