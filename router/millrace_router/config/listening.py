"""Flags of the HTTP server: where it listens, and who may call it."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode

from millrace_router.config.values import split_commas

ANY_ADDRESS = "0.0.0.0"  # noqa: S104


class ListeningFlags(BaseModel):
    """The address, keys, certificates and paths of the HTTP server."""

    hostname: str = Field(
        default=ANY_ADDRESS,
        description="Address or name to listen on; a name in the environment, as containers have, means any.",
    )
    port: int = Field(default=3000, ge=0, le=65535, description="HTTP port.")
    prometheus_port: int = Field(
        default=9000, ge=0, le=65535, description="No effect: metrics are served on --port."
    )
    api_key: str | None = Field(default=None, description="Bearer token that clients must present.")
    api_key_file: Path | None = Field(
        default=None,
        description="File of further keys, one NAME:KEY a line; SIGHUP has it read again. Names are logged, and are"
        " tenants.",
    )
    admin_key: str | None = Field(
        default=None,
        description="Bearer token of the routes that load, unload and list adapters; without it there are none.",
    )
    cors_allow_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Origin that browsers may call from; repeatable; none means any."
    )
    aip_predict_route: str | None = Field(
        default=None,
        pattern="^/[^{}]*$",
        description="Another path of /vertex, which Vertex AI sets. A path that is already served is not replaced.",
    )
    aip_health_route: str | None = Field(
        default=None,
        pattern="^/[^{}]*$",
        description="Another path of /health, which Vertex AI sets.",
    )
    ssl_certfile: Path | None = Field(
        default=None, description="PEM file with the certificate for HTTPS, and its chain."
    )
    ssl_keyfile: Path | None = Field(
        default=None, description="PEM file with the certificate's key, without a password."
    )
    ssl_ca_certs: Path | None = Field(
        default=None,
        description="PEM file with authorities: clients must present a certificate that one of them signed.",
    )
    root_path: str = Field(
        default="",
        pattern="^(/[A-Za-z0-9._~-]+)*/?$",
        description="Path under which a proxy serves this server, such as /llm; the proxy removes it.",
    )
    payload_limit: int = Field(
        default=2_000_000,
        ge=1,
        description="Largest request body in bytes; the default is 32000000 for a model that reads images.",
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_empty_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take a key from its variable even where that is empty, so that it is refused."""
        filled = dict(values)
        for key in ("api_key", "admin_key"):
            if filled.get(key) is None and os.environ.get(key.upper()) == "":
                filled[key] = ""
        return filled

    @field_validator("cors_allow_origin", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> object:
        return split_commas(value)

    @field_validator("api_key", "admin_key")
    @classmethod
    def _refuse_empty_key(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse an empty key, which must not open the server to everyone."""
        if value is not None and not value.strip():
            name = str(info.field_name).upper()
            raise ValueError(f"is empty; give a key, or unset {name} to serve without one")
        return value

    @field_validator("root_path")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/")


def listen_address(hostname: str) -> str:
    """Return the IP address to bind for the name or address that the user gave.

    Containers export their own name as HOSTNAME; such a name means any address, as in TGI.
    """
    if hostname == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(hostname))
    except ValueError:
        return ANY_ADDRESS
