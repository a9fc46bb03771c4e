"""The recorded page is whole: each block is one that the recorder writes, short, and says what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.ecosystem.operating.first_hour import BLOCKS as TEXTS
from tests.ecosystem.operating.first_hour import (
    MOST_LINES,
    PAGE,
    recorded_answer,
    shortened,
    written,
)

from millrace_testing.project import ROOT

SAYS = {
    "first-answer": '{"generated_text":',
    "smollm2": "Paris",
    "port": "Error: cannot listen on 0.0.0.0 port 3000",
    "flag": "--max-batch-prefill-tokens",
    "offline": "HF_HUB_OFFLINE=1",
    "folder": "Error: folder ./Qwen3 does not exist",
    "kv-memory": "The KV cache needs at least 262144 bytes on each shard",
    "ctrl-c": "SIGINT received, shutting down",
}
BLOCKS = {name: text.splitlines() for name, text in TEXTS.items()}
SESSION = re.compile(r"^ *```\w*\n(?=(?:(?!^ *```).*\n)*?\$ )", re.MULTILINE)
"""A fence around commands after a prompt, and so their output."""


def test_the_page_has_all_recordings() -> None:
    assert BLOCKS.keys() == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_a_recording_is_short_and_to_the_point(name: str) -> None:
    lines = BLOCKS[name]
    assert lines[0].startswith("$ ")
    assert len(lines) <= MOST_LINES
    assert any(SAYS[name] in line for line in lines)


@pytest.mark.parametrize("name", ["first-answer", "smollm2"])
def test_a_recorded_answer_has_its_request(name: str) -> None:
    """What replays them reads both from the page."""
    body, answer = recorded_answer(TEXTS[name])
    assert body
    assert SAYS[name] in answer


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_every_session_of_a_page_is_recorded(page: Path) -> None:
    text = page.read_text()
    for fence in SESSION.finditer(text):
        assert page == PAGE
        assert text[: fence.start()].splitlines()[-1].startswith("<!-- recorded: ")


def test_long_outputs_keep_their_beginning_and_their_end() -> None:
    assert shortened(list("abcdefgh"), first=2, most=5) == ["a", "b", "…", "g", "h"]
    assert shortened(list("abc"), first=2, most=3) == ["a", "b", "c"]


def test_only_the_blocks_are_written() -> None:
    page = "# A\n<!-- recorded: x -->\n```text\nold\n```\n```text\nmine\n```\n"
    new = written(page, {"x": ["$ a", "b"]})
    assert new == page.replace("old\n", "$ a\nb\n")
