"""Parses the launcher's command line: TGI's flags and Millrace's own. Errors end with exit code 2."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from millrace_launcher.config import LauncherConfig
from millrace_launcher.host.runtime import millrace_version
from millrace_launcher.settings.flags import SECRETS, SHORTS, all_flags, grouped
from millrace_launcher.settings.foreign_flags import tip_for
from millrace_proto.flags import Flag, as_text, option_name
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

Config = TypeVar("Config", bound=BaseSettings)

PROGRAM = "millrace-launcher"
# Placeholders until the model is resolved and the number of shards is known; torchrun and others export RANK.
ROUTER_LATER = {"model_folder": Path()}
SHARD_LATER = {
    "model_folder": Path(),
    "revision": None,
    "rank": 0,
    "world_size": 1,
    "sharded": False,
    "max_input_tokens": None,
    "otlp_endpoint": None,
    "otlp_protocol": None,
    "otlp_service_name": None,
    "logger_level": None,
}
ADAPTER_FLAGS = frozenset(
    {
        "lora_adapters",
        "lora_modules",
        "lora_paths",
        "adapter_id",
        "preloaded_adapter_ids",
        "adapter_root",
        "adapter_allow",
        "max_loras",
        "max_loras_per_batch",
        "max_active_adapters",
        "max_cpu_loras",
        "max_lora_rank",
        "adapter_memory",
        "adapter_memory_fraction",
    }
)
"""Flags that imply --enable-lora."""
EXAMPLES = (
    ("", "the demo model on port 3000"),
    ("--model-id smollm2", "a small published chat model"),
    (
        "--model-id Qwen/Qwen3-0.6B --quantize int4 --port 8080",
        "from the hub, with weights of 4 bits",
    ),
    (
        "--model-id ./model --num-shard 2 --api-key SECRET",
        "a folder, on two devices, for clients with the key",
    ),
)
WIDEST = 200
HELP_COLUMN = 36
SHORT_CHOICES = 36
"""Most characters of alternatives that --help shows next to a flag; longer ones are listed for a wrong value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the user. Folders and addresses of router and shards are not resolved yet."""

    launcher: LauncherConfig
    router: RouterConfig
    shard: ShardConfig
    given: frozenset[str]
    """Fields from the command line."""
    from_environment: frozenset[str]
    """Fields from the environment."""
    show_env: bool = False

    @property
    def chosen(self) -> frozenset[str]:
        return self.given | self.from_environment

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have LoRA adapters: a flag about adapters is set."""
        return self.shard.enable_lora or bool(self.chosen & ADAPTER_FLAGS)

    def configured(self) -> list[tuple[str, str, str]]:
        """(field, value, origin) of every flag without secrets; the origin is flag, environment or default."""
        configs: Mapping[str, BaseSettings] = {
            "launcher": self.launcher,
            "router": self.router,
            "shard": self.shard,
        }
        rows = []
        for flag in all_flags():
            value = getattr(configs[flag.owner], flag.name)
            text = "***" if flag.name in SECRETS and value else as_text(value) or "-"
            origin = "environment" if flag.name in self.from_environment else "default"
            rows.append((flag.name, text, "flag" if flag.name in self.given else origin))
        return rows


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One line for each flag where the terminal is wide."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, max_help_position=HELP_COLUMN, width=width)


def _description(program: str) -> str:
    """Examples, and what holds for every flag."""
    positional = program != PROGRAM
    lines = ["Serves a language model over HTTP.", "", "examples:"]
    for flags, meaning in EXAMPLES:
        command = f"{program} {flags.replace('--model-id ', '') if positional else flags}".rstrip()
        lines += [f"  {command:<75} {meaning}"]
    lines += [
        "",
        "Defaults stand in brackets. Every flag may also be set by the environment variable of its name, such as",
        "MODEL_ID; the command line beats the environment.",
    ]
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name every unknown flag, each with what to do instead."""

    def __init__(self, flags: Sequence[Flag], program: str, description: str) -> None:
        model = "[--model-id MODEL]" if program.startswith(PROGRAM) else "[MODEL]"
        super().__init__(
            prog=program,
            usage=f"{program} {model} [FLAG ...]",
            description=description,
            formatter_class=_Formatter,
            epilog="Exit codes: 0 after SIGTERM or SIGINT; 1 when something is missing or does not start, or the"
            " router dies repeatedly; 2 for a wrong command line; 3 when the shards die repeatedly.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.add_argument(
            "-e", "--env", action="store_true", help="Show the runtime environment, then start."
        )
        self.add_argument(
            "-V", "--version", action="version", version=f"millrace {millrace_version()}"
        )
        for title, members in grouped(flags):
            group = self.add_argument_group(title)
            for flag in members:
                _add(group, flag)
        self._options = ["--env", "--version", "--help", *(flag.option for flag in flags)]

    def parse(self, argv: Sequence[str]) -> dict[str, str | list[str]]:
        """Parse to unchecked values by field name."""
        # A second dash keeps argparse from reading -hf as -h, and -p8 is -p 8.
        long = {f"-{word}": word for word in argv if LETTERS.fullmatch(word)}
        words = [f"-{word}" if f"-{word}" in long else word for word in argv]
        known, unknown = self.parse_known_args(words)
        problems = [self._unexpected(long.get(word, word)) for word in _without_values(unknown)]
        if problems:
            self.error("\n\nerror: ".join(dict.fromkeys(problems)))
        return dict(vars(known))

    def error(self, message: str) -> NoReturn:
        """Print `message` and end with exit code 2."""
        sys.stderr.write(f"error: {message}\n\nFor more information, try '--help'.\n")
        raise SystemExit(2)

    def _unexpected(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if known := tip_for(name):
            return f"unexpected argument '{name}' found\n\n  tip: {known}"
        if not name.startswith("-"):
            return f"unexpected argument '{argument}' found\n\n  tip: a model is given by '--model-id {argument}'"
        near = self._similar(name.lstrip("-").replace("_", "-").lower())
        tip = f"\n\n  tip: a similar argument exists: '{near}'" if near else ""
        return f"unexpected argument '{name}' found{tip}"

    def _similar(self, name: str) -> str | None:
        """The flag that is a misspelling away: one edit from 4 letters on, two from 8 on."""
        edits = sum(len(name) >= letters for letters in (4, 8))
        names = {option.lstrip("-"): option for option in self._options}
        cutoff = 1 - edits / max(len(name), 1)
        near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
        return names[near[0]] if near else None


LETTERS = re.compile(r"-[a-z]{2,}")
"""Short flags of llama.cpp, which has some of several letters."""


def _without_values(unknown: Sequence[str]) -> Iterator[str]:
    """Unknown flags and stray words, without the words behind a flag, which are its values."""
    is_behind_flag = False
    for word in unknown:
        is_flag = word.startswith("-") and not word[1:2].isdigit()
        if is_flag or not is_behind_flag:
            yield word
        is_behind_flag = (is_flag and "=" not in word) or (is_behind_flag and not is_flag)


def read_settings(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, *, program: str = PROGRAM
) -> Settings:
    """Parse and check the command line and `os.environ`; SystemExit 2 with a message if either is wrong."""
    environ = os.environ if environ is None else environ
    parser = Parser(list(all_flags()), program, _description(program))
    given = parser.parse(argv)
    show_env = bool(given.pop("env", False))
    problems: list[str] = []
    launcher = build(LauncherConfig, given, problems)
    router = build(RouterConfig, {**given, **ROUTER_LATER}, problems)
    shard = build(ShardConfig, {**given, **SHARD_LATER}, problems)
    if launcher is None or router is None or shard is None:
        parser.error("\n       ".join(dict.fromkeys(problems)))
    if "hostname" in given:
        try:
            router = resolved(router)
        except OSError:
            parser.error(
                f"invalid value '{router.hostname}' for '--hostname': it has no address on this machine"
            )
    set_names = {flag.name for flag in all_flags() if environ.get(flag.variable)}
    return Settings(
        launcher=launcher,
        router=router,
        shard=shard,
        given=frozenset(given),
        from_environment=frozenset(set_names - set(given)),
        show_env=show_env,
    )


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    options = [flag.option]
    if flag.name in SHORTS:
        options.insert(0, SHORTS[flag.name])
    default = f" [{flag.default_text}]" if flag.default_text and not flag.is_switch else ""
    text = f"{flag.help}{default}".replace("%", "%%")
    if flag.is_switch:
        group.add_argument(*options, dest=flag.name, action="store_const", const="true", help=text)
        return
    words = "|".join(flag.choices)
    metavar = (words if len(words) <= SHORT_CHOICES else "WORD") if words else flag.type_word
    if flag.is_repeatable:
        group.add_argument(
            *options, dest=flag.name, action="extend", nargs="+", metavar=metavar, help=text
        )
        return
    group.add_argument(*options, dest=flag.name, metavar=metavar, help=text)


def build(config: type[Config], given: Mapping[str, object], problems: list[str]) -> Config | None:
    """The owner's settings from arguments and environment; messages about errors are appended to `problems`."""
    try:
        return config(**_owned(config, given))
    except ValidationError as error:
        for problem in error.errors():
            name = str(problem["loc"][0]) if problem["loc"] else ""
            where = "" if name in given else f" (from the environment variable {name.upper()})"
            value = "***" if name in SECRETS else problem["input"]
            problems.append(
                f"invalid value '{value}' for '{option_name(name)}'{where}: {problem['msg']}"
            )
        return None


def _owned(config: type[BaseSettings], given: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in config.model_fields}


def resolved(config: RouterConfig) -> RouterConfig:
    """Return the settings with the name's address in its place; raises OSError for a name without one.

    This is for a name from the command line. One from the environment means any address: containers export their own
    name as HOSTNAME.
    """
    name = config.hostname
    if name == "localhost":
        return config
    try:
        ipaddress.ip_address(name)
    except ValueError:
        address = socket.gethostbyname(name)
        return config.model_copy(update={"hostname": address})
    return config
