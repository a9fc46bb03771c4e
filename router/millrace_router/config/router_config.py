"""All flags of the router, and variables without a flag."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from millrace_router.config.adapters import AdapterFlags
from millrace_router.config.limits import LimitFlags
from millrace_router.config.listening import ListeningFlags
from millrace_router.config.logs import LogFlags
from millrace_router.config.model import ModelFlags
from millrace_router.config.recovery import RecoveryFlags
from millrace_router.config.scheduling import SchedulingFlags
from millrace_router.config.text import TextFlags

COMMANDS = """
other commands:
  millrace-router replay JOURNAL
                        Have shards compute the steps of a journal again.
  millrace-router print-schema
                        Print the description of the API, as /openapi.json has
                        it.
"""


@contextmanager
def _printable_help() -> Iterator[None]:
    """Show the other commands, and no default where it is None: the stand-in for None cannot be printed."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            yield
    finally:
        if text := shown.getvalue():
            sys.stdout.write(re.sub(r"\s*\(default:\s*\0\)", "", text) + COMMANDS)


class RouterConfig(
    # The help shows the flags of the last class first.
    LogFlags,
    AdapterFlags,
    TextFlags,
    RecoveryFlags,
    SchedulingFlags,
    LimitFlags,
    ListeningFlags,
    ModelFlags,
    BaseSettings,
):
    """Settings of the router; a field's environment variable is its name in capitals, and the command line beats it."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        cli_prog_name="millrace-router",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        # A stand-in for None that no user can type.
        cli_parse_none_str="\0",
        cli_shortcuts={"port": "p"},
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let Vertex AI's AIP_HTTP_PORT beat PORT, which images set, but not the command line."""
        port = os.environ.get("AIP_HTTP_PORT")
        vertex = InitSettingsSource(settings_cls, {"port": port} if port else {})
        return init_settings, vertex, env_settings

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> Self:
        """Read the command line and the environment; exit 2 with a message when one of them is wrong."""
        # Empty values count as absent everywhere else.
        values: dict[str, Any] = {
            name: ""
            for name, flag in (("api_key", "--api-key"), ("admin_key", "--admin-key"))
            if f"{flag}=" in argv or (flag, "") in pairwise(argv)
        }
        try:
            with _printable_help():
                return cls(_cli_parse_args=list(argv), **values)  # type: ignore[call-arg]
        except ValidationError as error:
            for problem in error.errors():
                flag = "--" + "-".join(map(str, problem["loc"])).replace("_", "-")
                sys.stderr.write(f"error: {flag}: {problem['msg']}\n")
            raise SystemExit(2) from None

    @property
    def compute_type(self) -> str | None:
        """Value of the `x-compute-type` header, from COMPUTE_TYPE; the launcher sets it where it knows the card."""
        return os.environ.get("COMPUTE_TYPE") or None

    @property
    def docker_label(self) -> str | None:
        """Name of the image, from DOCKER_LABEL."""
        return os.environ.get("DOCKER_LABEL") or None

    @property
    def profile_path(self) -> str | None:
        """File for a profile of the main thread, from MILLRACE_PROFILE; for developers."""
        return os.environ.get("MILLRACE_PROFILE")

    @property
    def hub_cache(self) -> Path:
        """The hub's local cache, by the variables that its client and TGI read."""
        given = {name: value for name, value in os.environ.items() if value}
        home = given.get("HF_HOME") or f"{given.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
        cache = given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
        return Path(cache).expanduser()

    @property
    def hub_token(self) -> str | None:
        """The server's own token for the hub, by the variables that its client and TGI read."""
        names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")
        return next((value for name in names if (value := os.environ.get(name))), None)

    @property
    def hub_endpoint(self) -> str:
        """Address of the hub, from HF_ENDPOINT."""
        return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
