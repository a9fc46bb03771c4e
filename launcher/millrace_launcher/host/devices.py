"""How many GPUs are visible, and how many shards that makes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace_launcher.config import HostVariables
from millrace_launcher.errors import ArgumentValidation, NotEnoughCUDADevices
from millrace_proto.gpus import query_gpus, shown_gpus

REPORT_SECONDS = 120
"""Time for a child to import torch from a cold disk, and to ask the driver."""


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """The GPUs of this host that a shard can use."""

    names: tuple[str, ...] = ()
    problem: str | None = None
    """Why a shard can use none of the GPUs that the host shows."""


def usable_gpus(shard: Sequence[str], *, plain: bool) -> UsableGpus:
    """What the program of a shard says of the GPUs that the host shows; `plain`: without custom kernels.

    Only a shard has torch, which knows the driver, parts of GPUs, and the GPUs that variables hide.
    """
    if not shown_gpus():
        return UsableGpus()
    command = [*shard, "gpus", *(["--disable-custom-kernels"] if plain else [])]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=REPORT_SECONDS, check=True
        )
        fields = json.loads(done.stdout.splitlines()[-1])
        return UsableGpus(tuple(fields["names"]), fields["problem"])
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        return UsableGpus(problem=f"a shard cannot look for GPUs: {last[0]}")
    except (subprocess.TimeoutExpired, OSError, ValueError, LookupError) as error:
        return UsableGpus(problem=f"a shard cannot look for GPUs: {error}")


def visible_devices(
    variables: HostVariables, query: Callable[[str], list[str]] = query_gpus
) -> int | None:
    """The number of GPUs that the environment names; None if it names none, as on a bare host."""
    if variables.cuda_visible_devices is not None:
        return _count(variables.cuda_visible_devices)
    nvidia = variables.nvidia_visible_devices
    if nvidia is not None:
        return len(query("uuid")) if nvidia.strip() in ("all", "void") else _count(nvidia)
    intel = variables.ze_affinity_mask
    return _count(intel) if intel is not None else None


def shard_count(
    *, sharded: bool | None, num_shard: int | None, visible: int | None, gpus: int | None = None
) -> int:
    """The number of shards by TGI's rules for `--sharded` and `--num-shard`, and at most one per GPU.

    `visible` is the number of GPUs that the environment names, `gpus` the number that can be used; None: unknown.
    Raises ArgumentValidation or NotEnoughCUDADevices if the flags cannot be met.
    """
    count = _asked_count(sharded=sharded, num_shard=num_shard, visible=visible)
    if gpus is not None and count > gpus:
        raise NotEnoughCUDADevices(
            f"{count} shards need as many CUDA devices, but only found {gpus}; `device`=cpu needs none"
        )
    return count


def _asked_count(*, sharded: bool | None, num_shard: int | None, visible: int | None) -> int:
    if sharded and num_shard is None:
        if visible is None or visible <= 1:
            raise NotEnoughCUDADevices(
                f"`sharded` is true but only found {visible or 0} CUDA devices"
            )
        return visible
    if sharded and num_shard is not None and num_shard <= 1:
        raise ArgumentValidation("`sharded` is true but `num_shard` <= 1")
    if num_shard is None:
        return 1 if sharded is False else max(visible or 1, 1)
    if num_shard < 1:
        raise ArgumentValidation("`num_shard` cannot be < 1")
    return num_shard


def _count(devices: str) -> int:
    """The number of entries of a comma-separated list; an empty list or -1 means none."""
    return len([device for device in devices.split(",") if device.strip() not in ("", "-1")])
