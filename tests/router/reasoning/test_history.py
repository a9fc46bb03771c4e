"""Past thoughts in the places where templates of each family look for them."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_router.text.chat_template import ChatTemplate

TURNS = "{% for turn in messages %}"
TEMPLATES = {
    "qwen3": TURNS + "{% if turn.reasoning_content is string %}<think>\n"
    "{{ turn.reasoning_content }}\n</think>\n\n{% endif %}{{ turn.content }}{% endfor %}",
    "gpt_oss": TURNS + "{% if 'thinking' in turn %}<think>\n{{ turn.thinking }}\n</think>\n\n"
    "{% endif %}{{ turn.content }}{% endfor %}",
    "reasoning": TURNS + "{% if turn.reasoning %}<think>\n{{ turn['reasoning'] }}\n</think>\n\n"
    "{% endif %}{{ turn.content }}{% endfor %}",
    "mistral": TURNS + "{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for block in turn.content %}{% if block.type == 'text' %}{{ block.text }}"
    "{% elif block.type == 'thinking' %}[THINK]{{ block.thinking }}[/THINK]{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}",
    "none": TURNS + "{{ turn.content }}{% endfor %}",
}
WRITTEN = {"mistral": "[THINK]Why?[/THINK]So.", "none": "So."}
USER = {"role": "user", "content": ""}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["So.", [{"type": "text", "text": "So."}]])
def test_a_thought_is_where_its_template_looks(name: str, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "reasoning_content": "Why?"}
    prompt = ChatTemplate(TEMPLATES[name], special_tokens={}).render([turn, USER])
    assert prompt == WRITTEN.get(name, "<think>\nWhy?\n</think>\n\nSo.")


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_a_thought_nothing_is_added(name: str) -> None:
    turn = {"role": "assistant", "content": "So."}
    prompt = ChatTemplate(TEMPLATES[name], special_tokens={}).render([turn, USER])
    assert prompt == "So."
