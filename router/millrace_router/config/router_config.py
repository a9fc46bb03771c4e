"""All flags of the router, and variables without a flag."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from millrace_proto.flags import read_arguments, refuse
from millrace_router.config.adapters import AdapterFlags
from millrace_router.config.limits import LimitFlags
from millrace_router.config.listening import ListeningFlags
from millrace_router.config.logs import LogFlags
from millrace_router.config.model import ModelFlags
from millrace_router.config.recovery import RecoveryFlags
from millrace_router.config.scheduling import SchedulingFlags
from millrace_router.config.text import TextFlags

COMMANDS = """other commands:
  millrace-router replay JOURNAL
                        Have shards compute the steps of a journal again.
  millrace-router print-schema
                        Print the description of the API, as /openapi.json has
                        it.
"""
KEYS = frozenset({"api_key", "admin_key"})


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
        values = read_arguments(
            cls.model_fields,
            argv,
            program="millrace-router",
            description=cls.__doc__,
            epilog=COMMANDS,
            shorts={"port": "-p"},
        )
        # An empty value counts as absent, but an empty key must be refused.
        chosen = {name: value for name, value in values.items() if value != "" or name in KEYS}
        try:
            return cls(**chosen)
        except ValidationError as error:
            refuse(error.errors())

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
