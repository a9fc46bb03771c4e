"""Coding agents, and a task of ten turns for each: they write a file, run commands, and some compact the history."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ecosystem import prepare
from tests.ecosystem.agents.scripts import call
from tests.ecosystem.running import run_quietly

NUM_COMMANDS = 8
NUM_LINES = 40
"""Lines that each command prints, so that there is something to compact."""
WORK = "work"
"""The folder that an agent works in, below its own."""


class NotInstalled(Exception):  # noqa: N818
    """An agent that is not installed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """How an agent names its tools, and how it is started."""

    write: Callable[[str, str], str]
    """A call that writes a file, by path and content."""
    run: Callable[[str], str]
    """A call that runs a command."""
    arguments: Sequence[str]
    """Before the prompt."""
    again: Sequence[Sequence[str]] = ()
    """The arguments of runs that compact the history and go on; the prompt of the last follows."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """`@URL` and `@HOME` in values are the server's URL and a folder."""
    files: Mapping[str, object] = field(default_factory=dict)
    """JSON files and texts to write in `@HOME` before it starts."""
    next: str = "sack"
    """The script of the last run of `again`; with `rest` it calls a command before its history is compacted."""
    small: Mapping[str, object] = field(default_factory=dict)
    """Files of the runs of `again`, where the context of the model has to be smaller for them."""


def scripts(folder: Path) -> dict[str, list[str]]:
    """What the model says to each agent, turn by turn: in its task, which has a folder in `folder`, and afterwards."""
    said: dict[str, list[str]] = {}
    for name, agent in CODING_AGENTS.items():
        file = str(folder / f"{name}_task" / WORK / "mill.txt")
        commands = [
            f"echo {name} {turn} >> {file}; seq {NUM_LINES}" for turn in range(NUM_COMMANDS)
        ]
        calls = [agent.write(file, f"{name}\n"), *map(agent.run, commands)]
        said[f"{name}_task"] = [*calls, f"The mill grinds for {name}."]
        # A summary has the name of the script that goes on, and so has each request behind it.
        flour = f"The flour of {name} is in sacks: script:{name}_sack shows them."
        command = agent.run(f"seq 300 # script:{name}_sack follows")
        said[f"{name}_rest"] = [command, f"Behind {name}_rest: {flour}"]
        said[f"{name}_sack"] = [flour]
    return said


class Started:
    """An agent that is installed, and its files for a server."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        """Write the files for the server at `url` in `folder`; raises NotInstalled."""
        program, node = prepare.coding_agent(name), prepare.node()
        if program is None or node is None:
            raise NotInstalled(f"{name} is missing: make test-all SUITE=ecosystem installs it")
        self._agent, self._program, self._url = CODING_AGENTS[name], str(program), url
        self.home, self.work = folder / "home", folder / WORK
        for each in (self.home, self.work):
            each.mkdir(parents=True)
        self.write(self._agent.files)
        path = f"{node.parent}:{os.environ['PATH']}"
        environment = {key: self._filled(value) for key, value in self._agent.environment.items()}
        usual = {"HOME": str(self.home), "PATH": path, "PWD": str(self.work)}
        self._environment = environment | usual

    def _filled(self, text: str) -> str:
        return text.replace("@URL", self._url).replace("@HOME", str(self.home))

    def write(self, files: Mapping[str, object]) -> None:
        """Write files in the agent's home."""
        for name, content in files.items():
            written = self.home / name
            written.parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            written.write_text(self._filled(text))

    def run(self, arguments: Sequence[str]) -> str:
        """Run the agent, and return what it says."""
        command = [self._program, *map(self._filled, arguments)]
        return run_quietly(command, self.work, **self._environment)

    def ask(self, prompt: str) -> str:
        """Run the agent with its usual arguments and a prompt."""
        return self.run([*self._agent.arguments, prompt])


def run_task(name: str, url: str, folder: Path) -> None:
    """Let an agent do its task with the server at `url`, compact its history and go on; raises NotInstalled."""
    agent, running = CODING_AGENTS[name], Started(name, url, folder)
    said = running.ask(f"script:{name}_task Grind.")
    file = running.work / "mill.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    assert lines == [name, *(f"{name} {turn}" for turn in range(NUM_COMMANDS))], said
    running.write(agent.small)
    for index, arguments in enumerate(agent.again, 1):
        prompt = [f"script:{name}_{agent.next} Go on."] if index == len(agent.again) else []
        said = running.run([*arguments, *prompt])
    assert f"The flour of {name} is in sacks" in said, said


CLINE_SETTINGS = ".cline/data/settings/providers.json"


def cline_settings(**more: object) -> object:
    """Return Cline's settings of the server."""
    usual = {"provider": "openai-compatible", "apiKey": "-", "model": "tgi", "baseUrl": "@URL/v1"}
    provider = {
        "settings": usual | more,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    return {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {"openai-compatible": provider},
    }


CODEX = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
CODING_AGENTS = {
    "claude_code": CodingAgent(
        write=lambda path, text: call("Write", file_path=path, content=text),
        run=lambda command: call("Bash", command=command, description="grind"),
        arguments=["--model", "tgi", "--allowedTools", "Write,Bash", "-p"],
        again=[
            ["--model", "tgi", "--continue", "-p", "/compact"],
            ["--model", "tgi", "--continue", "-p"],
        ],
        environment={
            "ANTHROPIC_BASE_URL": "@URL",
            "ANTHROPIC_AUTH_TOKEN": "-",
            "ANTHROPIC_SMALL_FAST_MODEL": "tgi",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": "@HOME/claude",
        },
    ),
    "cline": CodingAgent(
        write=lambda path, text: call("editor", path=path, new_text=text),
        run=lambda command: call("run_commands", commands=[command]),
        arguments=["--json"],
        # It goes on with a session only in a terminal.
        again=[["--json", "--compaction", "agentic"]],
        next="rest",
        files={CLINE_SETTINGS: cline_settings()},
        small={CLINE_SETTINGS: cline_settings(contextWindow=6000)},
    ),
    "codex": CodingAgent(
        write=lambda path, text: call("exec_command", cmd=f"printf '{text}' > {path}"),
        run=lambda command: call("exec_command", cmd=command, yield_time_ms=1000),
        arguments=["exec", *CODEX],
        again=[["exec", "-c", "model_auto_compact_token_limit=15000", *CODEX, "resume", "--last"]],
        environment={"CODEX_HOME": "@HOME/codex"},
        files={
            "codex/config.toml": 'model = "tgi"\nmodel_provider = "millrace"\n'
            "[model_providers.millrace]\n"
            'name = "Millrace"\nbase_url = "@URL/v1"\nwire_api = "responses"\n'
        },
    ),
    "qwen_code": CodingAgent(
        write=lambda path, text: call("write_file", file_path=path, content=text),
        run=lambda command: call("run_shell_command", command=command, is_background=False),
        arguments=["--auth-type", "openai", "--yolo", "-p"],
        again=[
            ["--auth-type", "openai", "--yolo", "--continue", "-p", "/compress"],
            ["--auth-type", "openai", "--yolo", "--continue", "-p"],
        ],
        environment={
            "OPENAI_BASE_URL": "@URL/v1",
            "OPENAI_API_KEY": "-",
            "OPENAI_MODEL": "tgi",
        },
    ),
    "opencode": CodingAgent(
        write=lambda path, text: call("write", filePath=path, content=text),
        run=lambda command: call("bash", command=command, description="grind"),
        arguments=["run", "--model", "millrace/tgi"],
        again=[["run", "--model", "millrace/small", "--continue"]],
        environment={
            "OPENCODE_CONFIG": "@HOME/opencode.json",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        },
        files={
            "opencode.json": {
                "provider": {
                    "millrace": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "@URL/v1", "apiKey": "-"},
                        "models": {
                            "tgi": {"limit": {"context": 65536, "output": 8192}},
                            "small": {"limit": {"context": 15000, "output": 1000}},
                        },
                    }
                },
                "compaction": {"reserved": 1000, "tail_turns": 0},
            }
        },
    ),
}
