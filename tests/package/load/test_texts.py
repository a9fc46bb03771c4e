"""Prompts of a file, and made-up ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.load.texts import prompts_of, random_prompts


def test_random_prompts_differ_and_are_the_same_for_a_seed() -> None:
    prompts = random_prompts(20, 5, seed=1)
    assert len(set(prompts)) == 5
    assert {len(prompt.split()) for prompt in prompts} == {20}
    assert prompts == random_prompts(20, 5, seed=1) != random_prompts(20, 5, seed=2)


def test_lines_are_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('one\n\n{"inputs": "two"}\n{"text": "three", "x": 1}\n')
    assert prompts_of(file) == ("one", "two", "three")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "no prompts"), ("a\n{", "line 2 is not JSON"), ('{"x": 1}', "line 1 has no prompt")],
)
def test_what_is_no_prompt_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        prompts_of(file)
