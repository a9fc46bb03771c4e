"""The commands `env`, `serve`, `download` and `bench`, and the names of the package."""

from __future__ import annotations

import ast
import getpass
import importlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from tests.package.programs import PATHS, OpenAI, run

import millrace
from millrace.__main__ import COMMANDS, main
from millrace.commands.bench import main as bench_main
from millrace.commands.env import main as env_main
from millrace.commands.env import memory
from millrace.commands.serve import launcher_arguments
from millrace.commands.serve import main as serve_main
from millrace_launcher.demo import demo_folder
from millrace_launcher.settings.arguments import read_settings
from millrace_proto.version import VERSION
from millrace_testing.project import ROOT
from millrace_testing.router.sse import served_application


def test_the_facts_contain_no_secrets_or_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("API_KEY", "my_secret")
    assert env_main(["--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["millrace"] == VERSION
    assert found["torch"] == torch.__version__
    assert {"CPU", "CPU features", "cores", "memory", "GPUs", "CPU kernels"} <= found.keys()
    hidden = ("secret", str(Path.home()), socket.gethostname(), f"/{getpass.getuser()}/")
    assert [word for word in hidden if word in text] == []


def test_memory_is_shown_with_its_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\n")
    assert memory(meminfo, tmp_path) == "4.0 GiB, 1.0 GiB available"
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    assert memory(meminfo, tmp_path) == "4.0 GiB, 1.0 GiB available"
    limit.write_text(str(2**31))
    assert memory(meminfo, tmp_path).endswith("limited to 2.0 GiB")


def test_the_first_word_names_the_model() -> None:
    settings = read_settings(launcher_arguments(["a/b", "--port", "81"]), {})
    assert (settings.launcher.model_id, settings.router.port) == ("a/b", 81)


def test_an_error_is_that_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        serve_main(["a/b", "--prot", "81"])
    assert end.value.code == 2
    assert "'--port'" in capsys.readouterr().err


async def test_a_local_folder_is_itself_and_stdout_has_nothing_else() -> None:
    status, out, err = await run("download", str(demo_folder()))
    assert (status, out) == (0, f"{demo_folder()}\n")
    assert "Successfully resolved" in err


async def test_a_model_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    status, out, err = await run("download", str(tmp_path / "none"))
    assert (status, out) == (1, "")
    assert "does not exist" in err


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


async def test_failed_requests_are_reported_and_end_with_1() -> None:
    server = OpenAI(lambda body: "refuse" if len(server.bodies) % 2 else "yes")
    async with served_application(server.application()) as url:
        status, out, err = await run("bench", url, "-c", "1", "--requests", "4", "--no-ignore-eos")
    assert status == 1
    assert out.splitlines()[-1].split()[:3] == ["c=1", "2", "2"]
    assert "no such thing" in err
    assert "ignore_eos" not in server.bodies[0]


async def test_an_unreachable_server_is_an_error() -> None:
    status, _, err = await run("bench", "http://127.0.0.1:9")
    assert (status, err.startswith("error: no server at http://127.0.0.1:9")) == (1, True)


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
def test_a_wrong_command_line_exits_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench_main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_the_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
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


NAMES = sorted(set(dir(millrace)) - set(vars(millrace)))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "package" / "millrace" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_exported(name: str) -> None:
    found = getattr(millrace, name)
    assert getattr(importlib.import_module(found.__module__), name) is found
