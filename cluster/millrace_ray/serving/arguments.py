"""The arguments of the application: its own, and every flag of the launcher."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millrace_ray.serving.errors import ServingError

GRACE_FLAG = "graceful_termination_timeout"
GRACE_SECONDS = 90
"""The launcher's default."""
DELAY_FLAG = "drain_delay"
LAUNCHER_MARGIN_SECONDS = 10
"""The launcher gives its router that much longer to end."""
DRAIN_SECONDS = 15
"""The longest time until the proxies know of a replica that leaves."""
REFUSED = {
    "remote_shards": "replicas cannot share ranks",
    "ssl_certfile": "HAProxy reaches the replicas in clear text",
    "ssl_keyfile": "HAProxy reaches the replicas in clear text",
    "ssl_ca_certs": "HAProxy reaches the replicas in clear text",
}
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


class Own(BaseModel):
    """Arguments that are not the launcher's, or that mean something else here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int = Field(default=3000, ge=1, le=65535)
    """Where HAProxy listens on every node."""
    hostname: str = "0.0.0.0"  # noqa: S104
    """The address that HAProxy listens at."""
    num_replicas: int | None = Field(default=None, ge=1)
    min_replicas: int | None = Field(default=None, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    target_wait_seconds: float = Field(default=1.0, gt=0)
    """Replicas are added while the predicted wait of a mean request is longer."""
    upscale_delay_seconds: float = Field(default=15.0, ge=0)
    downscale_delay_seconds: float = Field(default=300.0, ge=0)
    metrics_interval_seconds: float = Field(default=10.0, gt=0, lt=30)
    """How often Ray Serve gets the figures of a replica; it looks back for 30 seconds."""
    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)


@dataclass(frozen=True)
class Arguments:
    """Checked arguments."""

    own: Own
    flags: Mapping[str, str] = field(default_factory=dict)
    """The launcher's, as the text of their environment variables."""

    @property
    def num_shard(self) -> int:
        """Ranks of a replica, as far as the arguments say."""
        return max(1, int(self.flags.get("num_shard", "1")))

    @property
    def is_on_cluster(self) -> bool:
        """Whether the launcher of a replica places its ranks in the cluster itself."""
        return "cluster" in self.flags

    @property
    def grace_seconds(self) -> float:
        """The longest time in which a launcher ends, in seconds."""
        flags = self.flags
        seconds = float(flags.get(DELAY_FLAG, "0")) + float(flags.get(GRACE_FLAG, GRACE_SECONDS))
        return seconds + LAUNCHER_MARGIN_SECONDS

    @property
    def num_cpus(self) -> float:
        """CPUs that a replica reserves: one for each rank on CPU by default."""
        if self.own.num_cpus is not None:
            return self.own.num_cpus
        if self.is_on_cluster:
            return 0.0
        return 1.0 if self.own.num_gpus else float(self.num_shard)

    @property
    def launcher_flags(self) -> Mapping[str, str]:
        """The flags, with the CPUs of a replica divided among its ranks."""
        if self.is_on_cluster or self.own.num_gpus or "cpu_threads" in self.flags:
            return self.flags
        return {**self.flags, "cpu_threads": str(max(1, int(self.num_cpus) // self.num_shard))}


def read(arguments: Mapping[str, object]) -> Arguments:
    """Check the arguments; raises ServingError, which names the wrong one."""
    own_names = set(Own.model_fields)
    own = _own({name: value for name, value in arguments.items() if name in own_names})
    flags = {name: value for name, value in arguments.items() if name not in own_names}
    known = flag_names() - own_names
    for name in flags:
        if name in REFUSED:
            raise ServingError(f"the argument {name} is not for Ray Serve: {REFUSED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known | own_names), n=1)
            tip = f"; did you mean {near[0]}?" if near else ""
            raise ServingError(f"unknown argument {name}{tip}")
    texts = {name: _text(value) for name, value in flags.items() if value is not None}
    for name in ("num_shard", GRACE_FLAG, DELAY_FLAG):
        if not texts.get(name, "1").isdecimal():
            raise ServingError(f"the argument {name} has to be a whole number, not {texts[name]}")
    return Arguments(own, texts)


def _own(given: Mapping[str, Any]) -> Own:
    try:
        own = Own(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        raise ServingError(f"the argument {name} is {first['input']}: {first['msg']}") from None
    if own.num_replicas is not None and own.max_replicas is not None:
        raise ServingError("num_replicas is a fixed number; leave out max_replicas")
    if own.min_replicas is not None and own.max_replicas is None:
        raise ServingError("min_replicas needs max_replicas")
    if own.max_replicas is not None and (own.min_replicas or 1) > own.max_replicas:
        raise ServingError(
            f"min_replicas ({own.min_replicas}) is more than max_replicas ({own.max_replicas})"
        )
    return own


def flag_names() -> set[str]:
    """The fields of all flags that the launcher here has, by its help."""
    program = [sys.executable, "-m", "millrace_launcher", "--help"]
    shown = subprocess.run(program, capture_output=True, text=True, check=True)  # noqa: S603
    return {name.replace("-", "_") for name in OPTION.findall(shown.stdout)} - {"help", "version"}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)
