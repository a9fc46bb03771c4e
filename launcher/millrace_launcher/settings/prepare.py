"""From checked settings to the commands of one deployment: devices, number of shards, threads, sockets, port."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from millrace_launcher.config import DEMO_NAME, HostVariables, LauncherConfig
from millrace_launcher.demo import demo_folder
from millrace_launcher.errors import NotEnoughCUDADevices
from millrace_launcher.host.claims import claimed_port, claimed_sockets, socket_prefix
from millrace_launcher.host.devices import shard_count, usable_gpus, visible_devices
from millrace_launcher.host.runtime import millrace_version, runtime_info
from millrace_launcher.host.threads import ThreadPlan, find_intel_openmp, plan_threads
from millrace_launcher.logs import log
from millrace_launcher.settings.arguments import Settings
from millrace_launcher.settings.checks import check, notices
from millrace_launcher.settings.commands import Commands, Programs
from millrace_proto.cores import usable_cores

GGUF = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""Ends the names of the parts of a split GGUF file."""
HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")
"""A repository in the hub's cache."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Where the model runs."""

    gpus: tuple[str, ...]
    """Names of the GPUs that shards can use; none with --device cpu."""
    visible: int | None
    """GPUs that the environment names; None where it names none."""
    on_cpu: bool

    @property
    def num_usable(self) -> int | None:
        """GPUs that shards can use; None if their number is unknown, or if the model runs on CPU."""
        if self.on_cpu:
            return None
        return (len(self.gpus) or self.visible) or None


@dataclass(frozen=True, slots=True)
class Plan:
    """What computes on this host."""

    devices: Devices
    num_shard: int
    threads: ThreadPlan


def prepare(settings: Settings, programs: Programs, claims: ExitStack) -> Commands:
    """Log the settings, check them, and choose shards, sockets and threads. Raises LaunchError.

    `claims` releases the sockets and the port of this deployment.
    """
    launcher = settings.launcher
    plan = plan_for(settings, HostVariables(), programs, num_shard=_num_elsewhere(launcher))
    uds_path, master_port = launcher.shard_uds_path, settings.shard.master_port
    if not launcher.has_shards_elsewhere:
        uds_path, master_port = _claim(settings, plan.num_shard, claims)
    gpus = plan.devices.gpus
    return Commands(
        settings=settings,
        model_id=launcher.model_id or str(demo_folder()),
        model_name=model_name(launcher.model_id, whole=settings.router.strict_tgi),
        num_shard=plan.num_shard,
        shard_uds_path=uds_path,
        master_port=master_port,
        threads=plan.threads,
        environ=os.environ,
        programs=programs,
        compute_type=f"{plan.num_shard}-{gpus[0].lower().replace(' ', '-')}" if gpus else None,
    )


def _num_elsewhere(launcher: LauncherConfig) -> int | None:
    """The number of shards on other hosts; None where they run here."""
    if launcher.cluster is not None:
        return launcher.num_shard or 1
    return len(launcher.remote_shards) or None


def plan_for(
    settings: Settings, variables: HostVariables, programs: Programs, *, num_shard: int | None
) -> Plan:
    """Log the settings, check them, and choose devices and threads; `num_shard` None: by flags and devices.

    Raises LaunchError.
    """
    _log_settings(settings, variables)
    check(settings)
    launcher = settings.launcher
    devices = _find_devices(settings, variables, programs)
    for notice in notices(settings, on_cpu=devices.on_cpu):
        log.info("%s", notice)
    if num_shard is None:
        num_shard = shard_count(
            sharded=launcher.sharded,
            num_shard=launcher.num_shard,
            visible=devices.visible,
            gpus=devices.num_usable,
        )
    threads = plan_threads(
        cores=usable_cores(),
        shards=num_shard,
        requested=settings.shard.cpu_threads,
        intel_openmp=find_intel_openmp(),
        environ=os.environ,
    )
    if launcher.has_shards_elsewhere:
        log.info("%d shard(s) on other hosts", num_shard)
    else:
        gpus = list(devices.gpus) or "none"
        count = threads.threads
        log.info("%d shard(s), GPUs: %s, CPU threads per shard: %d", num_shard, gpus, count)
        if num_shard < len(devices.gpus):
            log.info("--num-shard %d would use all GPUs", len(devices.gpus))
    if launcher.model_id is None:
        log.info("No --model-id, so the demo model is served")
    return Plan(devices, num_shard, threads)


def model_name(model_id: str | None, *, whole: bool = False) -> str:
    """The name to report: of the demo model, on the hub, or of a folder or GGUF file.

    Clients learn no path of this machine, unless `whole` keeps the path of a folder, as TGI does.
    """
    if model_id is None:
        return DEMO_NAME
    path = Path(model_id).expanduser()
    if model_id.endswith(GGUF):
        return PART.sub("", path.stem)
    if whole or not path.is_dir():
        return model_id
    resolved = path.resolve()
    repository = (
        HUB_FOLDER.fullmatch(resolved.parents[1].name) if len(resolved.parents) > 1 else None
    )
    if resolved.parent.name == "snapshots" and repository is not None:
        return "/".join(repository.groups())
    return resolved.name or model_id


def _find_devices(settings: Settings, variables: HostVariables, programs: Programs) -> Devices:
    """Raises NotEnoughCUDADevices for --device cuda where the host shows GPUs and none can be used."""
    device = settings.shard.device
    if device == "cpu":
        return Devices((), visible=None, on_cpu=True)
    gpus = usable_gpus(programs.shard, plain=settings.shard.disable_custom_kernels)
    on_cpu = device == "auto" and not gpus.names
    visible = visible_devices(variables)
    if gpus.problem and visible != 0:
        if device == "cuda" and not settings.launcher.has_shards_elsewhere:
            raise NotEnoughCUDADevices(f"--device cuda, but no GPU can be used: {gpus.problem}")
        # GPUs that cannot be used do not count shards.
        visible = None
    return Devices(gpus.names, visible=visible, on_cpu=on_cpu)


def _claim(settings: Settings, num_shard: int, claims: ExitStack) -> tuple[str, int]:
    """The prefix of the shards' sockets, and the port where the shards meet."""
    prefix, may_move = settings.launcher.shard_uds_path, "shard_uds_path" not in settings.chosen
    if may_move:
        prefix = socket_prefix(HostVariables(), prefix)
    uds_path = claims.enter_context(claimed_sockets(prefix, num_shard=num_shard, may_move=may_move))
    master_port = claims.enter_context(
        claimed_port(
            settings.shard.master_port,
            may_move=num_shard > 1 and "master_port" not in settings.chosen,
        )
    )
    return uds_path, master_port


def _log_settings(settings: Settings, variables: HostVariables) -> None:
    log.info("Millrace %s", millrace_version())
    if settings.show_env:
        log.info("%s", runtime_info(variables))
    rows = settings.configured()
    chosen = [f"{name}={value} ({origin})" for name, value, origin in rows if origin != "default"]
    log.info("Set: %s", ", ".join(chosen) or "nothing")
    log.debug("Defaults: %s", ", ".join(f"{n}={v}" for n, v, origin in rows if origin == "default"))
