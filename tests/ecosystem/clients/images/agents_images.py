"""`openai-agents`: an agent whose tool takes screenshots."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)
from cases import run
from images.shown import MODEL, shown, url_of
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)


def screenshots_are_read(base_url: str) -> None:
    for text, content in shown().items():

        @function_tool
        def screenshot() -> ToolOutputImage:
            """Shows the screen."""
            return ToolOutputImage(image_url=url_of(content))  # noqa: B023

        client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)
        agent = Agent(
            name="reader",
            instructions="Read the screen.",
            model=OpenAIResponsesModel(MODEL, client),
            tools=[screenshot],
            # The first answer has to be a call; the agent takes the choice back then.
            model_settings=ModelSettings(temperature=0, tool_choice="required"),
        )
        assert Runner.run_sync(agent, "What is on the screen?").final_output == text


run(globals())
