"""`smolagents`' two models: `OpenAIModel` on `/v1`, `InferenceClientModel` on the base URL."""

from __future__ import annotations

import json

from cases import QUESTION, check_wind, run
from smolagents import ChatMessage, InferenceClientModel, MessageRole, Model, OpenAIModel, Tool
from smolagents.models import ChatMessageToolCall

MESSAGES = [
    ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION[0]["content"]}])
]


class Wind(Tool):
    """The wind at a place."""

    name = "wind"
    description = "The wind's direction."
    inputs = {  # noqa: RUF012
        "place": {"type": "string", "description": "Where.", "enum": ["river", "sea"]},
        "strong": {"type": "boolean", "description": "Whether it blows."},
    }
    output_type = "string"

    def forward(self, place: str, strong: bool) -> str:
        """Never more than the place."""
        return place


def models(base_url: str, max_tokens: int) -> list[Model]:
    options = {"temperature": 0, "max_tokens": max_tokens}
    return [
        OpenAIModel(model_id="tgi", api_base=f"{base_url}/v1", api_key="-", **options),
        InferenceClientModel(model_id=base_url, api_key="-", **options),
    ]


def the_answer_and_the_stream_agree(base_url: str) -> None:
    for model in models(base_url, 12):
        whole = model.generate(MESSAGES)
        assert whole.content
        assert whole.token_usage.output_tokens <= 12
        deltas = list(model.generate_stream(MESSAGES))
        assert "".join(delta.content or "" for delta in deltas) == whole.content
        counted = sum(delta.token_usage.output_tokens for delta in deltas if delta.token_usage)
        assert counted == whole.token_usage.output_tokens


def called(calls: list[ChatMessageToolCall]) -> list[str]:
    for call in calls:
        assert call.function.name == "wind"
        check_wind(json.loads(call.function.arguments))
    return [call.id for call in calls]


def a_tool_is_called(base_url: str) -> None:
    for model in models(base_url, 150):
        first = model.generate(MESSAGES, tools_to_call_from=[Wind()])
        second = model.generate(MESSAGES, tools_to_call_from=[Wind()])
        ids = called(first.tool_calls) + called(second.tool_calls)
        assert len(ids) >= 2
        assert len(set(ids)) == len(ids)


run(globals())
