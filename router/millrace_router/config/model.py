"""The model, and the shards that compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from millrace_router.config.values import split_commas


class ModelFlags(BaseModel):
    """Where the model and its shards are, and what they are called."""

    model_folder: Path = Field(
        description="Local folder with config.json, tokenizer.json and the chat template."
    )
    model_id: str = Field(default="", description="Name to report; the folder's name when absent.")
    served_model_name: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Names of the model on OpenAI's and Anthropic's routes, in place of --model-id; separated by"
        " commas. Answers to requests without a name have the first.",
    )
    tokenizer_name: str | None = Field(
        default=None,
        description="Local folder, or name of a model in the local cache of the Hugging Face hub, to take as"
        " --model-folder when that is absent.",
    )
    revision: str | None = Field(
        default=None, description="Commit of the model, reported as `model_sha` in /info."
    )
    shard_addresses: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="gRPC targets of the shards by rank, such as unix:/tmp/x-0; separated by commas.",
    )
    master_shard_uds_path: str = Field(
        default="/tmp/text-generation-server-0",  # noqa: S108
        description="Unix socket of the only shard when --shard-addresses is absent.",
    )
    shard_tls_cert: Path | None = Field(
        default=None,
        description="PEM file with the router's certificate, for shards at host:port.",
    )
    shard_tls_key: Path | None = Field(
        default=None, description="PEM file with the certificate's key."
    )
    shard_tls_ca: Path | None = Field(
        default=None, description="PEM file with the authority that signs shards' certificates."
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model, the first of which is the usual one."""
        return self.served_model_name or (self.model_id,)

    def names_the_model(self, name: str | None) -> bool:
        """Return whether `name` means the model and not an adapter."""
        return name in self.all_names or name == str(self.model_folder)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The served names and --model-id, which is always accepted."""
        return (*self.served_model_name, self.model_id)

    @model_validator(mode="before")
    @classmethod
    def _fill_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Derive folder, name and addresses from one another where they are missing."""
        filled = dict(values)
        if not filled.get("model_folder") and filled.get("tokenizer_name"):
            filled["model_folder"] = filled["tokenizer_name"]
        if not filled.get("model_id") and filled.get("model_folder"):
            filled["model_id"] = filled.get("tokenizer_name") or Path(filled["model_folder"]).name
        if not filled.get("shard_addresses"):
            default = cls.model_fields["master_shard_uds_path"].default
            filled["shard_addresses"] = f"unix:{filled.get('master_shard_uds_path') or default}"
        return filled

    @field_validator("shard_addresses", "served_model_name", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return split_commas(value)
