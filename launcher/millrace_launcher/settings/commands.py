"""The command line and environment of each child."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic_settings import BaseSettings

from millrace_launcher.host.claims import socket_paths
from millrace_launcher.host.threads import ThreadPlan
from millrace_launcher.settings.arguments import Settings
from millrace_launcher.settings.flags import OWNERS, SECRETS
from millrace_proto.flags import as_options
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Local folders that the download found."""

    model: Path
    draft: Path | None = None
    """The folder of a draft model or of heads, or `mtp`."""


COMMIT = re.compile(r"[0-9a-f]{40}")
BAR_SECONDS = 0.5
PLACE_SECONDS = 60.0
"""Time for a cluster to place the shards at first."""
GUARD_VARIABLES = (
    "PATH",
    "PYTHON",
    "LD_",
    "DYLD_",
    "VIRTUAL_ENV",
    "LANG",
    "LC_",
    "HOME",
    "COVERAGE_",
)
# The hub's client and the download read these variables, which have names of flags.
KEPT_VARIABLES = frozenset({"HUGGINGFACE_HUB_CACHE", "WEIGHTS_CACHE_OVERRIDE"})


@dataclass(frozen=True, slots=True)
class Command:
    """A program by absolute path with arguments, its environment, and inherited file descriptors."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    inherited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a cluster has the shards, and the files with which the router reaches them."""

    addresses: tuple[str, ...]
    cert: Path
    key: Path
    ca: Path

    @property
    def settings(self) -> dict[str, object]:
        return {
            "shard_addresses": self.addresses,
            "shard_tls_cert": self.cert,
            "shard_tls_key": self.key,
            "shard_tls_ca": self.ca,
        }


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of the children."""

    shard: tuple[str, ...] = (sys.executable, "-m", "millrace_shard")
    router: tuple[str, ...] = (sys.executable, "-m", "millrace_router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Builds the commands of one launch; `environ` is the launcher's environment."""

    settings: Settings
    model_id: str
    model_name: str
    num_shard: int
    shard_uds_path: str
    master_port: int
    threads: ThreadPlan
    environ: Mapping[str, str]
    compute_type: str | None = None
    programs: Programs = Programs()
    first_rank: int = 0
    world_size: int | None = None
    """Ranks of the model where other hosts have some of them; None: `num_shard`."""
    addresses: tuple[str, ...] = ()
    """TCP addresses at which the shards listen in place of their sockets."""

    def download(self, *, has_bar: bool = False) -> Command:
        """The command that resolves model and draft model; its last line of stdout has their folders.

        With `has_bar` it reports its progress as often as a bar moves.
        """
        launcher, draft_model = self.settings.launcher, self.settings.shard.draft_model
        revision = (f"--revision={launcher.revision}",) if launcher.revision else ()
        draft = (f"--draft-model={draft_model}",) if draft_model else ()
        name = launcher.tokenizer_name
        tokenizer = (f"--tokenizer-name={name}",) if name else ()
        images = (f"--mmproj={launcher.mmproj}",) if launcher.mmproj else ()
        program = (*self.programs.shard, "download-weights")
        progress = (f"--progress-seconds={BAR_SECONDS}",) if has_bar else ()
        small = ("--without-weights",) if launcher.has_shards_elsewhere else ()
        options = (*revision, *draft, *tokenizer, *images, *progress, *small)
        argv = (*program, self.model_id, "--json-output", *options)
        return Command("download", argv, self._environment())

    def shard(
        self, rank: int, folder: Path, draft: Path | None = None, launcher_fd: int | None = None
    ) -> Command:
        """The command of one rank of the tensor-parallel group; `draft` is what drafts: a folder or `mtp`.

        With `launcher_fd`, which it inherits, it forks the rank at requests on this socket.
        """
        config = self._shard_config(rank, draft).model_copy(update={"launcher_fd": launcher_fd})
        argv = (
            *self.programs.shard,
            "serve" if launcher_fd is None else "fork-server",
            *options(config, leave_out={"model_folder"}),
            str(folder),
        )
        environment = self._environment() | dict(self.threads.environment)
        inherited = () if launcher_fd is None else (launcher_fd,)
        return Command(f"shard-{rank}", argv, environment, inherited)

    def _shard_config(self, rank: int, draft: Path | None) -> ShardConfig:
        router = self.settings.router
        traces = router.trace_target
        usual = type(router).model_fields["otlp_service_name"].default
        named = traces is not None and traces.service_name != usual
        return self.settings.shard.model_copy(
            update={
                "uds_path": self.shard_uds_path,
                "master_port": self.master_port,
                "address": self.addresses[rank - self.first_rank] if self.addresses else None,
                "rank": rank,
                "world_size": self.world_size or self.num_shard,
                "draft_model": None if draft is None else str(draft),
                "speculator": None,
                "enable_lora": self.settings.has_adapters,
                "adapter_cache": self._adapter_cache(),
                "cpu_threads": self.threads.threads,
                "max_total_tokens": router.max_total_tokens,
                "otlp_endpoint": traces and traces.endpoint,
                "otlp_protocol": traces and traces.protocol,
                "otlp_service_name": traces.service_name if traces and named else None,
                "trust_remote_code": False,
                "json_output": True,
                "log_level": self.settings.launcher.log_level,
            }
        )

    def cluster(self, folder: Path, draft: Path | None, certificates: Path) -> Command:
        """The command that places the ranks on a cluster's hosts and writes the router's files to `certificates`."""
        launcher = self.settings.launcher
        commit = COMMIT.search(folder.name)
        # A name of the hub is resolved on each host, to the same commit.
        model = (f"--model-id={self.model_id}", f"--revision={commit.group()}") if commit else ()
        config = self._shard_config(0, draft)
        wiring = {"model_folder", "uds_path", "master_addr", "master_port", "rank", "world_size"}
        kept = wiring | {"address", "json_output", "log_level", "cpu_threads", "sharded"}
        argv = (
            *(model or (f"--model-id={folder}",)),
            *options(config, leave_out=kept),
            f"--log-level={launcher.log_level}",
        )
        spec = {
            "num_shard": self.num_shard,
            "shards_per_node": launcher.shards_per_node,
            "on_gpus": self.settings.shard.device == "cuda",
            "cpus_per_shard": self.settings.shard.cpu_threads or 1,
            "argv": argv,
            "folder": str(certificates),
            "timeout_seconds": PLACE_SECONDS,
        }
        program = (sys.executable, "-m", "millrace_ray", json.dumps(spec))
        return Command("cluster", program, self._environment())

    def router(
        self,
        folder: Path,
        descriptors: Mapping[str, int] = MappingProxyType({}),
        placed: Placed | None = None,
        *,
        is_successor: bool = False,
    ) -> Command:
        """The command of the HTTP server, which inherits `descriptors`, each by the name of its flag.

        `placed`: where a cluster has the shards. With `is_successor` it replaces a router that serves.
        """
        config = self._router_config(folder, descriptors, placed)
        config = config.model_copy(update={"is_successor": is_successor})
        argv = (*self.programs.router, *options(config, leave_out=SECRETS))
        inherited = tuple(descriptors.values())
        return Command("router", argv, self._router_environment(config), inherited)

    def _router_config(
        self, folder: Path, descriptors: Mapping[str, int], placed: Placed | None
    ) -> RouterConfig:
        launcher, router = self.settings.launcher, self.settings.router
        commit = COMMIT.search(folder.name)
        return router.model_copy(
            update={
                "model_folder": folder,
                "model_id": self.model_name,
                "tokenizer_name": None,
                "revision": commit.group() if commit else launcher.revision,
                "shard_addresses": launcher.remote_shards
                or tuple(f"unix:{path}" for path in self.socket_paths()),
                **({} if placed is None else placed.settings),
                "max_input_tokens": router.max_input_tokens or launcher.max_input_length,
                "trust_remote_code": self.settings.shard.trust_remote_code,
                **descriptors,
                "adapter_cache": self._adapter_cache(),
                "json_output": True,
                "log_level": launcher.log_level,
            }
        )

    def _router_environment(self, config: RouterConfig) -> Mapping[str, str]:
        environment = self._environment()
        for name in SECRETS:
            value = getattr(config, name)
            if value is not None:
                environment[name.upper()] = value
        # The start of a router would look for them in all installed packages.
        environment.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        if self.compute_type is not None:
            environment.setdefault("COMPUTE_TYPE", self.compute_type)
        return environment

    def guard(self) -> Command:
        """The command of the guard, which removes the sockets after the launcher's end."""
        argv = (
            sys.executable,
            "-m",
            "millrace_launcher.processes.guard",
            *map(str, self.socket_paths()),
        )
        # Only what starts Python: the guard lives as long as the launcher, and needs no key.
        environment = {
            name: value for name, value in self.environ.items() if name.startswith(GUARD_VARIABLES)
        }
        return Command("guard", argv, environment)

    def socket_paths(self) -> list[Path]:
        """The paths of the shards' sockets by rank; none where they are elsewhere, or listen at addresses."""
        if self.addresses or self.settings.launcher.has_shards_elsewhere:
            return []
        return socket_paths(self.shard_uds_path, self.num_shard)

    def _adapter_cache(self) -> Path | None:
        """The folder of adapters that router and shards share; None without adapters."""
        router = self.settings.router
        return router.adapter_cache_folder if self.settings.has_adapters else None

    def _environment(self) -> dict[str, str]:
        """The launcher's environment without forwarded flags, with the hub client's variables."""
        forwarded = {name.upper() for config in OWNERS.values() for name in config.model_fields}
        dropped = forwarded - KEPT_VARIABLES
        environment = {name: value for name, value in self.environ.items() if name not in dropped}
        environment["PYTHONUNBUFFERED"] = "1"
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        if environment.get("HF_API_TOKEN"):
            environment.setdefault("HF_TOKEN", environment["HF_API_TOKEN"])
        launcher = self.settings.launcher
        if launcher.huggingface_hub_cache is not None:
            cache = str(launcher.huggingface_hub_cache)
            environment |= {"HUGGINGFACE_HUB_CACHE": cache, "HF_HUB_CACHE": cache}
        if launcher.weights_cache_override is not None:
            environment["WEIGHTS_CACHE_OVERRIDE"] = str(launcher.weights_cache_override)
        return environment


def options(config: BaseSettings, *, leave_out: frozenset[str] | set[str]) -> list[str]:
    """The flags of a configuration: every field that differs from its default."""
    fields = {
        name: field for name, field in type(config).model_fields.items() if name not in leave_out
    }
    return list(as_options(fields, {name: getattr(config, name) for name in fields}))
