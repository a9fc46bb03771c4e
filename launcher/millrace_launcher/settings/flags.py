"""The launcher's flags, collected from the declarations of launcher, router and shard."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from millrace_launcher.config import LauncherConfig
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

OWNERS: Mapping[str, type[BaseSettings]] = {
    "launcher": LauncherConfig,
    "router": RouterConfig,
    "shard": ShardConfig,
}
# Settings that the launcher passes to its children, and that users cannot give to the launcher.
WIRING: Mapping[str, frozenset[str]] = {
    "launcher": frozenset(),
    "router": frozenset(
        {
            "model_folder",
            "model_id",
            "tokenizer_name",
            "revision",
            "shard_addresses",
            "master_shard_uds_path",
            "supervisor_fd",
            "json_output",
            "log_level",
        }
    ),
    "shard": frozenset(
        {
            "model_folder",
            "uds_path",
            "address",
            "tls_cert",
            "tls_key",
            "tls_ca",
            "rank",
            "world_size",
            "sharded",
            "revision",
            "max_input_tokens",
            "max_total_tokens",
            "otlp_endpoint",
            "otlp_protocol",
            "otlp_service_name",
            "json_output",
            "log_level",
            "logger_level",
        }
    ),
}
SHORTS: Mapping[str, str] = {"port": "-p", "graceful_termination_timeout": "-g"}
SECRETS = frozenset({"api_key", "admin_key", "ngrok_authtoken"})


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as its owner declares it."""

    owner: str
    name: str
    field: FieldInfo

    @property
    def option(self) -> str:
        """The flag's name on the command line, such as `--max-input-tokens`."""
        return option_name(self.name)

    @property
    def help(self) -> str:
        """What it does."""
        return self.field.description or ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether it has no value on the command line."""
        return self.field.annotation is bool

    @property
    def is_repeatable(self) -> bool:
        """Whether it may occur several times."""
        return get_origin(self.field.annotation) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, or empty if any value is allowed."""
        for kind in _alternatives(self.field.annotation):
            if get_origin(kind) is Literal:
                return tuple(map(str, get_args(kind)))
        return ()

    @property
    def type_word(self) -> str:
        """The type for --help: INT, STR, …"""
        kinds = [kind for kind in _alternatives(self.field.annotation) if kind is not type(None)]
        kind = get_args(kinds[0])[0] if get_origin(kinds[0]) is tuple else kinds[0]
        words = {"ByteSize": "BYTES", "bool": "true|false"}
        name = str(kind.__name__)
        return words.get(name, name.upper())

    @property
    def default_text(self) -> str | None:
        """The default as it is written on the command line, or None."""
        return as_text(self.field.default)


def all_flags() -> Iterator[Flag]:
    """All flags of the launcher, as `flags_of`."""
    return flags_of(OWNERS, WIRING)


def flags_of(
    owners: Mapping[str, type[BaseSettings]], hidden: Mapping[str, frozenset[str]]
) -> Iterator[Flag]:
    """The fields of all owners but the `hidden` ones, in the order of declaration; a shared flag appears once."""
    seen: set[str] = set()
    for owner, config in owners.items():
        for name, field in config.model_fields.items():
            if name not in hidden[owner] and name not in seen:
                seen.add(name)
                yield Flag(owner, name, field)


def option_name(name: str) -> str:
    """The flag's name on the command line."""
    return "--" + name.replace("_", "-")


def as_text(value: Any) -> str | None:  # noqa: ANN401
    """A field's value in the form of command line and environment."""
    if value is None or value is PydanticUndefined:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _alternatives(annotation: Any) -> tuple[Any, ...]:  # noqa: ANN401
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
