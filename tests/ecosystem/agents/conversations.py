"""The agents and the conversation of each with a server of the scripted model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.ecosystem import prepare
from tests.ecosystem.agents.coding import CODING_AGENTS, NotInstalled, run_task
from tests.ecosystem.running import run_cases, run_quietly

HERE = Path(__file__).parent
PROGRAMS = prepare.CLIENTS / "agents"
SCRIPTED: Mapping[str, str] = {
    "anthropic_agent": "anthropic",
    "langgraph_agent": "langchain",
    "mcp_host": "openai_agents",
    "openai_agents_agent": "openai_agents",
    "pydantic_ai_agent": "pydantic_ai",
}
"""Programs of agents, and their environments."""
CODEX = {"codex": "tgi", "codex_custom": "gpt-5.6-sol"}
"""Scripts of the model for Codex, and names of models: by the name, Codex chooses its tools."""


def python_of(environment: str) -> str:
    """The Python of an environment."""
    python = prepare.interpreter(environment)
    if python is None:
        raise NotInstalled(f"no .venvs/{environment}: make test-all SUITE=ecosystem makes it")
    return str(python)


def run_client(name: str, url: str) -> None:
    """Run the cases of a client's script."""
    modules = os.pathsep.join(map(str, (HERE, prepare.CLIENTS)))
    command = [python_of(SCRIPTED[name]), f"{name}.py", url]
    run_cases(command, PROGRAMS, PYTHONPATH=modules)


def run_codex(script: str, url: str, folder: Path) -> None:
    """Let Codex write a file with a command, and read it."""
    program, node = prepare.coding_agent("codex"), prepare.node()
    if program is None or node is None:
        raise NotInstalled("Codex is missing: make test-all SUITE=ecosystem installs it")
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    provider = f'name = "Millrace"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (home / "config.toml").write_text(
        f'model = "{CODEX[script]}"\nmodel_provider = "millrace"\n[model_providers.millrace]\n{provider}'
    )
    options = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    said = run_quietly(
        [str(node), str(program), "exec", *options, f"script:{script} Grind."],
        work,
        CODEX_HOME=str(home),
    )
    events = [json.loads(line) for line in said.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    told = [item["text"] for item in items if item["type"] == "agent_message"]
    assert events[-1]["type"] == "turn.completed", said
    if script == "codex":
        commands = [item for item in items if item["type"] == "command_execution"]
        assert [item["aggregated_output"] for item in commands] == ["mill.txt\n", "rye\n"]
        assert [item["text"] for item in items if item["type"] == "reasoning"] == [
            "I write the file first."
        ]
        assert told == ["The mill grinds rye."]
    else:
        assert (work / "grain.txt").read_text() == "wheat\n"
        assert told[-2:] == ["Once more.", "The grain is wheat."], told


def run_aider(url: str, folder: Path) -> None:
    """Let aider change a file until a test passes."""
    python = python_of("aider")
    (folder / "mill.txt").write_text("rye\n")
    check = f"{sys.executable} -c \"assert open('mill.txt').read() == 'wheat\\\\n'\""
    command = [python, "-m", "aider", "mill.txt", "--model", "openai/tgi", "--edit-format", "diff"]
    command += [
        "--openai-api-base",
        f"{url}/v1",
        "--openai-api-key",
        "-",
        "--no-git",
        "--yes-always",
    ]
    command += ["--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]
    command += [
        "--no-pretty",
        "--no-gitignore",
        "--map-tokens",
        "0",
        "--auto-test",
        "--test-cmd",
        check,
    ]
    said = run_quietly([*command, "--message", "script:aider Grind."], folder, HOME=str(folder))
    assert (folder / "mill.txt").read_text() == "wheat\n", said


def conversations() -> dict[str, Callable[[str, Path], None]]:
    """Every conversation by its name: it gets the server's URL and an empty folder, and raises NotInstalled."""
    made: dict[str, Callable[[str, Path], None]] = {
        name: lambda url, _, name=name: run_client(name, url)  # type: ignore[misc]
        for name in SCRIPTED
    }
    made |= {
        script: lambda url, folder, script=script: run_codex(script, url, folder)  # type: ignore[misc]
        for script in CODEX
    }
    made |= {
        f"{name}_task": lambda url, folder, name=name: run_task(name, url, folder)  # type: ignore[misc]
        for name in CODING_AGENTS
    }
    return made | {"aider": run_aider}
