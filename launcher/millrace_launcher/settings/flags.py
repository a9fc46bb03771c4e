"""The launcher's flags, collected from the declarations of launcher, router and shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic_settings import BaseSettings

from millrace_launcher.config import LauncherConfig
from millrace_proto.flags import Flag, flags_in
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


def all_flags() -> Iterator[Flag]:
    """All flags of the launcher, as `flags_of`."""
    return flags_of(OWNERS, WIRING)


def flags_of(
    owners: Mapping[str, type[BaseSettings]], hidden: Mapping[str, frozenset[str]]
) -> Iterator[Flag]:
    """The fields of all owners but the `hidden` ones, in the order of declaration; a shared flag appears once."""
    seen: set[str] = set()
    for owner, config in owners.items():
        for flag in flags_in(owner, config.model_fields):
            if flag.name not in hidden[owner] and flag.name not in seen:
                seen.add(flag.name)
                yield flag
