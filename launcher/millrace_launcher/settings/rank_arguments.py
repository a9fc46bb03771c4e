"""The command line of `millrace-launcher shards`, which runs some ranks of a model for a router elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pydantic_settings import BaseSettings

from millrace_launcher.config import HostVariables, LauncherConfig, RankConfig
from millrace_launcher.demo import demo_folder
from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.logs import log
from millrace_launcher.settings.arguments import (
    PROGRAM,
    ROUTER_LATER,
    SHARD_LATER,
    Parser,
    Settings,
    build,
)
from millrace_launcher.settings.checks import LAST_PORT, is_loopback, split_address
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.flags import WIRING, flags_of
from millrace_launcher.settings.prepare import model_name, plan_for
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

COMMAND = "shards"
OWNERS: Mapping[str, type[BaseSettings]] = {
    "rank": RankConfig,
    "shard": ShardConfig,
    "launcher": LauncherConfig,
}
SHOWN = frozenset(
    {"address", "tls_cert", "tls_key", "tls_ca", "world_size", "max_total_tokens", "otlp_endpoint"}
    | {"otlp_protocol", "otlp_service_name"}
)
"""Wiring of shards that is given by hand here."""
HIDDEN: Mapping[str, frozenset[str]] = {
    "rank": frozenset(),
    "shard": WIRING["shard"] - SHOWN | {"uds_path"},
    "launcher": frozenset(
        {"tokenizer_name", "sharded", "max_input_length", "shard_uds_path", "remote_shards"}
        | {"cluster", "shards_per_node"}
    ),
}
DESCRIPTION = """Runs some ranks of a model, for a router that is elsewhere.

examples: ranks 0 and 1, and 2 and 3, of four, on two hosts; then the router
  {program} --model-id MODEL --world-size 4 --num-shard 2 --master-addr host1 --address 0.0.0.0:9000 TLS
  {program} --model-id MODEL --world-size 4 --num-shard 2 --master-addr host1 --address 0.0.0.0:9000 TLS --first-rank 2
  millrace-launcher --model-id MODEL --remote-shards host1:9000,host1:9001,host2:9000,host2:9001 TLS"""


def read_rank_settings(
    argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Settings, RankConfig]:
    """Parse and check the command line and `os.environ`; SystemExit 2 with a message if either is wrong."""
    environ = os.environ if environ is None else environ
    flags = list(flags_of(OWNERS, HIDDEN))
    program = f"{PROGRAM} {COMMAND}"
    parser = Parser(flags, program, DESCRIPTION.format(program=program))
    given = parser.parse(argv)
    show_env = bool(given.pop("env", False))
    problems: list[str] = []
    later = {name: value for name, value in SHARD_LATER.items() if name not in SHOWN}
    rank = build(RankConfig, given, problems)
    router = build(RouterConfig, ROUTER_LATER, problems)
    launcher = build(LauncherConfig, given, problems)
    shard = build(ShardConfig, {**given, **later}, problems)
    if rank is None or router is None or launcher is None or shard is None:
        parser.error("\n       ".join(dict.fromkeys(problems)))
    set_names = {flag.name for flag in flags if environ.get(flag.variable)}
    settings = Settings(
        launcher=launcher,
        router=router,
        shard=shard,
        given=frozenset(given),
        from_environment=frozenset(set_names - set(given)),
        show_env=show_env,
    )
    return settings, rank


def prepare_ranks(settings: Settings, rank: RankConfig, programs: Programs) -> Commands:
    """Check the settings and choose devices and threads. Raises LaunchError."""
    launcher, shard = settings.launcher, settings.shard
    plan = plan_for(settings, HostVariables(), programs, num_shard=None)
    addresses = _addresses(shard, plan.num_shard)
    last = rank.first_rank + plan.num_shard - 1
    if last >= shard.world_size:
        raise ArgumentValidation(
            f"ranks {rank.first_rank} to {last} are outside a group of {shard.world_size};"
            " give --world-size the ranks of all hosts"
        )
    is_apart = not is_loopback(split_address(addresses[0], "address")[0])
    if is_apart and not (
        shard.tls_cert or shard.tls_key or shard.tls_ca or shard.allow_insecure_tcp
    ):
        raise ArgumentValidation(
            f"`address` {shard.address} can be reached from other hosts: give --tls-cert, --tls-key and --tls-ca, or"
            " --allow-insecure-tcp if all who reach it may use the model"
        )
    if is_apart and shard.world_size > plan.num_shard and is_loopback(shard.master_addr):
        raise ArgumentValidation("`master_addr` must be the host of rank 0")
    log.info("Ranks %d to %d of %d at %s", rank.first_rank, last, shard.world_size, addresses)
    return Commands(
        settings=settings,
        model_id=launcher.model_id or str(demo_folder()),
        model_name=model_name(launcher.model_id),
        num_shard=plan.num_shard,
        shard_uds_path=launcher.shard_uds_path,
        master_port=shard.master_port,
        threads=plan.threads,
        environ=os.environ,
        programs=programs,
        first_rank=rank.first_rank,
        world_size=shard.world_size,
        addresses=addresses,
    )


def _addresses(shard: ShardConfig, num_shard: int) -> tuple[str, ...]:
    """One address for each rank here: the ports follow the given one."""
    if shard.address is None:
        raise ArgumentValidation("`address` must be given: HOST:PORT of the first shard here")
    host, port = split_address(shard.address, "address")
    if port + num_shard - 1 > LAST_PORT:
        raise ArgumentValidation(
            f"`address` {shard.address} leaves no ports for {num_shard} shards"
        )
    if ":" in host:
        host = f"[{host}]"
    return tuple(f"{host}:{port + place}" for place in range(num_shard))
