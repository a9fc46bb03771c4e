"""The first word of `millrace`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.package.programs import PATHS

from millrace.__main__ import COMMANDS, main
from millrace_proto.version import VERSION


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_the_help_tells_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    assert told == list(COMMANDS)


def test_an_unknown_command_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'server'" in captured.err
    assert "serve, chat" in captured.err


def test_a_command_of_ollama_has_a_tip(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "llama3"]) == 2
    assert "tip: `millrace chat MODEL` chats in the terminal" in capsys.readouterr().err


def test_no_command_shows_the_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: millrace" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"millrace {VERSION}\n"


def test_the_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "aiohttp", "pydantic", "grpc", "asyncio"}
    code = (
        "import sys; from millrace.__main__ import main; main(['--help']);"
        f"print(*sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert "usage: millrace" in capsys.readouterr().out
