"""The load generator against a server whose every word is known."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.package.programs import OpenAI, run

from millrace.commands.bench import main
from millrace_testing.router.sse import served_application


async def test_levels_become_lines_and_reports(tmp_path: Path) -> None:
    server = OpenAI(lambda body: "one two three")
    prompts = tmp_path / "prompts"
    prompts.write_text('First?\n{"prompt": "Second?"}\n')
    async with served_application(server.application()) as url:
        words = (
            url,
            "-c",
            "1,2",
            "--requests",
            "3",
            "--max-tokens",
            "5",
            "--prompts",
            str(prompts),
        )
        for name in ("r.json", "r.svg", "r.html"):
            status, out, err = await run("bench", *words, "--report", str(tmp_path / name))
            assert (status, err) == (0, "")
            rows = [line.split()[:3] for line in out.splitlines()[3:]]
            assert rows == [["c=1", "3", "0"], ["c=2", "3", "0"]]
    report = json.loads((tmp_path / "r.json").read_text())
    assert [level["concurrency"] for level in report["levels"]] == [1.0, 2.0]
    # The server counts two tokens a word, and there are three requests.
    assert [level["num_tokens"] for level in report["levels"]] == [18, 18]
    assert {level["prompt_tokens"] for level in report["levels"]} == {7.0}
    assert (report["model"], report["api"]) == ("the-model", "chat")
    assert ET.fromstring((tmp_path / "r.svg").read_text()).tag.endswith("svg")
    page = (tmp_path / "r.html").read_text()
    assert "c=2" in page
    assert "<svg" in page
    bodies = server.bodies[:8]
    assert {body["messages"][0]["content"] for body in bodies} == {"First?", "Second?"}
    assert {body["max_tokens"] for body in bodies} == {5}
    assert all(
        body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in bodies
    )


async def test_failed_requests_are_told_and_end_with_1() -> None:
    server = OpenAI(lambda body: "refuse" if len(server.bodies) % 2 else "yes")
    async with served_application(server.application()) as url:
        status, out, err = await run("bench", url, "-c", "1", "--requests", "4", "--no-ignore-eos")
    assert status == 1
    assert out.splitlines()[-1].split()[:3] == ["c=1", "2", "2"]
    assert "no such thing" in err
    assert "ignore_eos" not in server.bodies[0]


async def test_a_server_that_is_not_there() -> None:
    status, _, err = await run("bench", "http://127.0.0.1:9")
    assert (status, err.startswith("error: http://127.0.0.1:9")) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ["not-a-url"],
        ["http://x", "--rate", "0"],
        ["http://x", "--rate", "1", "-c", "1"],
        ["http://x", "--report", "r.pdf"],
        ["http://x", "--prompts", "/no/file"],
    ],
)
def test_a_wrong_command_line_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
