"""What agents sent in the last turn of a conversation, recorded from their packages, is taken as it is.

`python -m tests.ecosystem.agents.record` writes the recordings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace_router.request.generation_request import GenerationRequest
from millrace_router.validation.validator import Validated
from millrace_testing.router.edge import limits_with, serving
from millrace_testing.text.texts import Generations, tokenizer

FOLDER = Path(__file__).parent / "recorded"
BYTES = tokenizer("byte_level")
LIMITS = limits_with(max_input_tokens=60_000, max_total_tokens=64_000)
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}"
    "{% for call in turn.tool_calls %}:{{ call.function.name }}{% endfor %} {% endfor %}"
    "{{ tools | map(attribute='function.name') | join(' ') if tools }}"
)
IGNORED = "x-millrace-ignored"
MILL = "assistant:wind tool assistant:grind tool wind grind"
CODEX = (
    "exec_command write_stdin request_user_input view_image multi_agent_v1__close_agent "
    "multi_agent_v1__resume_agent multi_agent_v1__send_input multi_agent_v1__spawn_agent "
    "multi_agent_v1__wait_agent get_goal create_goal update_goal"
)
CODEX_CUSTOM = (
    "functions__exec functions__wait functions__request_user_input collaboration__followup_task "
    "collaboration__interrupt_agent collaboration__list_agents collaboration__send_message "
    "collaboration__spawn_agent collaboration__wait_agent"
)
EXPECTED: dict[str, tuple[str, str]] = {
    "aider": ("", f"system {'user assistant ' * 7}user "),
    "anthropic": (
        "tools.web_search_20250305, tools.bash_20250124",
        f"system user {MILL}",
    ),
    "codex": (
        "tools.web_search",
        f"system system user user {'assistant:exec_command tool ' * 2}{CODEX}",
    ),
    "codex_custom": (
        "reasoning.context, text.verbosity",
        f"{'system ' * 4}user user {'assistant:functions__exec tool ' * 2}{CODEX_CUSTOM}",
    ),
    "langgraph": ("", f"system user {MILL}"),
    "langgraph_responses": ("", f"system user {MILL}"),
    "mcp": ("", f"user {MILL}"),
    "openai_agents": ("tools.web_search, text.verbosity", f"system user {MILL}"),
    "openai_agents_chat": ("", f"system user {MILL}"),
    "openai_agents_custom": ("", "system user assistant:note tool note"),
    "openai_agents_streamed": ("", f"system user {MILL}"),
    "pydantic_ai": ("", f"system user {MILL}"),
    "pydantic_ai_responses": ("", f"system user {MILL}"),
}
"""By recording: what is named as left out, and the turns and tools of the prompt."""
STORED = "openai_agents_stored"
"""It refers to an earlier response."""


async def replayed(name: str, **options: Any) -> tuple[int, str, str, str]:
    """Status, ignored header, prompt and body of the answer to a recording."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    prompts: list[str] = []
    script = Generations([*BYTES.encode("a"), 0], tokenizer=BYTES)
    usual = {"limits": LIMITS, "template": TEMPLATE, "tool_call_parser": "hermes"}
    async with serving(script, **usual | options) as edge:
        validator = edge.services.validator
        validate = validator.validate

        async def spy(request: GenerationRequest) -> Validated:
            prompts.append(request.text)
            return await validate(request)

        validator.validate = spy  # type: ignore[method-assign]
        url = edge.url + kept["path"]
        async with edge.client.post(url, json=kept["body"], headers=kept["headers"]) as answer:
            ignored = answer.headers.get(IGNORED, "")
            return answer.status, ignored, "".join(prompts), await answer.text()


def test_every_recording_is_replayed() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {*EXPECTED, STORED}


@pytest.mark.parametrize("name", EXPECTED)
async def test_a_recorded_request_is_taken(name: str) -> None:
    ignored, prompt = EXPECTED[name]
    status, named, rendered, answer = await replayed(name)
    assert status == 200, answer
    assert named == ignored
    assert rendered == prompt


async def test_a_reference_to_what_is_not_stored_says_so() -> None:
    for options in ({}, {"responses_store": 1}):
        status, _, _, answer = await replayed(STORED, **options)
        assert status == 400
        assert "previous_response" in answer
