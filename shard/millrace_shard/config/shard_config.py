"""All flags of the shard."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from millrace_shard.config.device import DeviceFlags
from millrace_shard.config.logs import LogFlags
from millrace_shard.config.place import PlaceFlags
from millrace_shard.config.requests import RequestFlags
from millrace_shard.config.weights import WeightFlags


@contextmanager
def _printable_help() -> Iterator[None]:
    """Remove the default None from the help: its placeholder cannot be typed or printed."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            yield
    finally:
        sys.stdout.write(re.sub(r"\s*\(default:\s*\0\)", "", shown.getvalue()))


class ShardConfig(
    # The help shows the flags of the last class first.
    LogFlags,
    RequestFlags,
    WeightFlags,
    DeviceFlags,
    PlaceFlags,
    BaseSettings,
):
    """The settings of a shard. Environment variables have the field names in capitals; flags override them."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        # No warning about the name of `model_folder`, which is a positional argument.
        protected_namespaces=(),
        cli_prog_name="millrace-shard serve",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        # No word that a user can type means None.
        cli_parse_none_str="\0",
    )

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> Self:
        """Read the command line and the environment; exit 2 with a message when either is wrong."""
        try:
            with _printable_help():
                return cls(_cli_parse_args=list(argv))  # type: ignore[call-arg]
        except ValidationError as error:
            for problem in error.errors():
                flag = "--" + "-".join(map(str, problem["loc"])).replace("_", "-")
                sys.stderr.write(f"error: {flag}: {problem['msg']}\n")
            raise SystemExit(2) from None
