"""The launcher's request to a cluster, and the answer with the addresses of the shards, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KEY = "cluster"
"""Marks the lines for the launcher among the ranks' output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The ranks of one model."""

    num_shard: int
    shards_per_node: int
    on_gpus: bool
    cpus_per_shard: int
    """Cores that are reserved for a shard on CPU."""
    argv: tuple[str, ...]
    """Flags of `millrace-launcher shards` that are the same on all hosts."""
    folder: str
    """Where the router's certificate is written to."""
    timeout_seconds: float
    """Time for the cluster to place all ranks at first."""

    @classmethod
    def from_json(cls, text: str) -> Spec:
        fields = json.loads(text)
        return cls(**{**fields, "argv": tuple(fields["argv"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def num_nodes(self) -> int:
        """Hosts; each has the same number of ranks."""
        return self.num_shard // self.shards_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """The CPUs or GPUs that the ranks of one host reserve."""
        if self.on_gpus:
            return {"GPU": self.shards_per_node}
        return {"CPU": self.shards_per_node * self.cpus_per_shard}


@dataclass(frozen=True, slots=True)
class Files:
    """PEM files of the router: its certificate, the key, and the authority of the ranks' certificates."""

    cert: Path
    key: Path
    ca: Path


def placed_line(addresses: Sequence[str], files: Files) -> str:
    """Say where all ranks are."""
    placement = {"addresses": list(addresses), **{k: str(v) for k, v in asdict(files).items()}}
    return json.dumps({KEY: placement})
