"""Where a shard is: its model, its socket, its group."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator


class PlaceFlags(BaseModel):
    """The model, the address to serve on, and the tensor-parallel group."""

    model_folder: Path = Field(
        description="Local folder with config.json and weights, GGUF file, or name of a model on the Hugging Face hub."
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a model on the hub."
    )
    uds_path: str = Field(
        default="/tmp/text-generation-server",  # noqa: S108
        description="Unix socket to serve on, without the rank that is appended to it.",
    )
    address: str | None = Field(
        default=None,
        description="TCP address to serve on in place of the socket, such as 0.0.0.0:50051.",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="PEM file with this shard's certificate, for --address; the router must present one too.",
    )
    tls_key: Path | None = Field(default=None, description="PEM file with the certificate's key.")
    tls_ca: Path | None = Field(
        default=None, description="PEM file with the authority that signs routers' certificates."
    )
    allow_insecure_tcp: bool = Field(
        default=False,
        description="Serve without TLS at an --address that other hosts may reach: only in a network "
        "where everyone may use the model.",
    )
    rank: int = Field(
        default=0, ge=0, description="This shard's place in its tensor-parallel group."
    )
    world_size: int = Field(default=1, ge=1, description="Shards in the group.")
    sharded: bool = Field(
        default=False,
        description="Refuse to start unless rank, world size, and master's address and port are set.",
    )
    master_addr: str = Field(
        default="localhost", description="Where the group meets (torch.distributed)."
    )
    master_port: int = Field(
        default=29500, ge=0, le=65535, description="Port where the group meets (torch.distributed)."
    )

    @property
    def socket_path(self) -> Path:
        """The unix socket of this rank."""
        return Path(f"{self.uds_path}-{self.rank}")

    @property
    def listen_target(self) -> str:
        """The gRPC address: the TCP address if there is one, else the socket of this rank."""
        return self.address or f"unix:{self.socket_path}"

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        if self.sharded:
            for name in ("rank", "world_size", "master_addr", "master_port"):
                if name not in self.model_fields_set:
                    raise ValueError(f"{name.upper()} must be set when sharded is True")
        if self.rank >= self.world_size:
            msg = f"`rank`({self.rank}) must be < `world_size`({self.world_size})"
            raise ValueError(msg)
        return self
