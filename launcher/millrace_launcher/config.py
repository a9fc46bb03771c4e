"""The launcher's own flags. The flags of router and shards are declared in their packages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from millrace_proto.flags import log_level

DEMO_NAME = "millrace/demo"
"""The demo model's name, which clients see and --model-id accepts."""


class LauncherConfig(BaseSettings):
    """Settings of processes. The environment variable is the field's name in capitals; the flag takes precedence."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, protected_namespaces=()
    )

    model_id: str | None = Field(
        default=None,
        description="Name on the Hugging Face hub, as `org/repo:Q4_K_M` for a GGUF file of that block type, a folder, a"
        " GGUF file or `smollm2`; the demo model when absent.",
    )
    tokenizer_name: str | None = Field(
        default=None,
        description="With a GGUF file, the model whose tokenizer and chat template are used: a local folder or a"
        " name on the hub; those in the file when absent.",
    )
    mmproj: str | None = Field(
        default=None,
        description="With a GGUF file, the mmproj file that reads images, or `off`; when absent, one next to"
        " it, if there is one.",
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of the model on the hub."
    )
    sharded: bool | None = Field(default=None, description="Whether to use more than one shard.")
    num_shard: int | None = Field(
        default=None,
        ge=0,
        description="Shards; when absent as many as the GPUs that CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES"
        " or ZE_AFFINITY_MASK names, else 1.",
    )
    max_input_length: int | None = Field(
        default=None, ge=1, description="Old name of --max-input-tokens."
    )
    shard_uds_path: str = Field(
        default="/tmp/text-generation-server",  # noqa: S108
        description="Unix sockets of the shards, without the rank that is appended; when absent, in the folder that"
        " systemd makes for the service or for a lingering user, if there is one.",
    )
    huggingface_hub_cache: Path | None = Field(
        default=None, description="Folder that models are downloaded to."
    )
    weights_cache_override: Path | None = Field(
        default=None, description="Folder to take the model from instead of the hub's cache."
    )
    remote_shards: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Addresses of all ranks, HOST:PORT separated by commas, which `millrace-launcher shards` or others"
        " run on other hosts; no shard is started here.",
    )
    cluster: Literal["ray"] | None = Field(
        default=None,
        description="Run the shards on the hosts of this cluster, which RAY_ADDRESS names; needs the extra `ray`.",
    )
    shards_per_node: int = Field(default=1, ge=1, description="Shards on each host of the cluster.")
    fork_server: Literal["auto", "weights", "off"] = Field(
        default="auto",
        description="auto: on a CPU under Linux a process for each rank loads the model once and forks the shards, so"
        " that one that died is back at once, and after a kill from outside with its KV; weights: without the KV; off:"
        " each start of a shard loads the model, which debuggers may need. Unless off, a second router waits to serve"
        " if the first one dies.",
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Restarts of the shards, or of the router, without progress before all is ended.",
    )
    json_output: bool = Field(default=False, description="Logs as JSON, one object a line.")
    log_level: Literal["trace", "debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )
    log_colorize: bool | None = Field(
        default=None, description="Colours in logs; only on a terminal when absent."
    )

    @field_validator("model_id")
    @classmethod
    def _know_demo(cls, value: str | None) -> str | None:
        return None if value == DEMO_NAME else value

    @property
    def has_shards_elsewhere(self) -> bool:
        """Whether no shard is started on this host."""
        return bool(self.remote_shards) or self.cluster is not None

    @field_validator("remote_shards", mode="before")
    @classmethod
    def _split_addresses(cls, value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            return parts
        words = [word.strip() for part in parts for word in str(part).split(",")]
        if parts and not any(words):
            raise ValueError("it must have at least one address")
        return tuple(word for word in words if word)

    @field_validator("log_level", mode="before")
    @classmethod
    def _narrow_log_level(cls, value: object) -> object:
        return log_level(value)


class RankConfig(BaseSettings):
    """The flags that only `millrace-launcher shards` has."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_ignore_empty=True)

    first_rank: int = Field(
        default=0, ge=0, description="Rank of the first shard here; the others follow it."
    )


class HostVariables(BaseSettings):
    """Environment variables that are not flags; container runtimes and images set them. An empty one is not absent."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    cuda_visible_devices: str | None = Field(default=None, description="GPUs, separated by commas.")
    nvidia_visible_devices: str | None = Field(
        default=None, description="GPUs, or `all`, or `void`."
    )
    ze_affinity_mask: str | None = Field(
        default=None, description="Intel's GPUs, separated by commas."
    )
    vergen_git_sha: str | None = Field(
        default=None, description="Commit that an image was built from."
    )
    runtime_directory: str | None = Field(
        default=None, description="systemd's folders for the files of a service while it runs."
    )
    xdg_runtime_dir: str | None = Field(
        default=None, description="systemd's folder for a user's sockets."
    )
    docker_label: str | None = Field(default=None, description="Label of the image.")
