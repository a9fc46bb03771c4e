"""Environment variables of the shard's programs that are not flags: each is declared here once."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_ENDPOINT = "https://huggingface.co"
TRUE_WORDS = frozenset({"1", "true", "on", "yes"})


class Variables(BaseSettings):
    """The variables by their names in lower case; an empty one counts as absent."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_ignore_empty=True)

    revision: str | None = Field(default=None, description="Default of --revision.")
    millrace_cache: Path | None = Field(default=None, description="Folder for compiled kernels.")
    triton_cache_dir: Path | None = Field(
        default=None,
        description="Folder for what Triton compiles; triton in MILLRACE_CACHE when absent.",
    )
    cxx: str | None = Field(
        default=None, description="C++ compiler with arguments; g++ when absent."
    )
    cc: str | None = Field(
        default=None, description="Triton's C compiler; gcc or clang when absent."
    )
    xdg_cache_home: Path | None = Field(default=None, description="The user's folder for caches.")
    hf_home: Path | None = Field(default=None, description="Folder of the hub's client.")
    hf_hub_cache: Path | None = Field(default=None, description="Folder of downloaded models.")
    huggingface_hub_cache: Path | None = Field(
        default=None, description="TGI's name of HF_HUB_CACHE."
    )
    hf_token: str | None = Field(default=None, description="The user's token for the hub.")
    hugging_face_hub_token: str | None = Field(default=None, description="Old name of HF_TOKEN.")
    hf_api_token: str | None = Field(default=None, description="TGI's name of HF_TOKEN.")
    hf_endpoint: str = Field(default=DEFAULT_ENDPOINT, description="Address of the hub.")
    hf_hub_offline: str = Field(default="", description="A word for yes forbids downloads.")
    weights_cache_override: Path | None = Field(
        default=None, description="Folder to take the model from in place of the cache."
    )

    @property
    def hub_home(self) -> Path:
        """Folder of the hub's client."""
        home = self.hf_home or (self.xdg_cache_home or Path("~/.cache")) / "huggingface"
        return home.expanduser()

    @property
    def hub_cache(self) -> Path:
        cache = self.hf_hub_cache or self.huggingface_hub_cache or self.hub_home / "hub"
        return cache.expanduser()

    @property
    def hub_token(self) -> str | None:
        """The user's token for the hub."""
        return self.hf_token or self.hugging_face_hub_token or self.hf_api_token

    @property
    def is_offline(self) -> bool:
        return self.hf_hub_offline.lower() in TRUE_WORDS


class GpuVariables(BaseSettings):
    """NVIDIA's variables, of which an empty one is not absent."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    cuda_visible_devices: str | None = Field(default=None, description="GPUs, separated by commas.")

    @property
    def hides_gpus(self) -> bool:
        """Whether no GPU is visible because the operator wants none."""
        return self.cuda_visible_devices is not None and self.cuda_visible_devices.strip() in (
            "",
            "-1",
        )
