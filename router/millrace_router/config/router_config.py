"""All flags of the router, and variables without a flag."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ByteSize, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from millrace_proto.flags import log_level, read_arguments, refuse
from millrace_router.config.adapters import AdapterFlags
from millrace_router.config.listening import ListeningFlags
from millrace_router.config.model import ModelFlags
from millrace_router.config.scheduling import SchedulingFlags
from millrace_router.config.text import TextFlags
from millrace_router.config.traces import SERVICE_NAME, TraceTarget, trace_target
from millrace_router.config.values import LogLevel, split_commas


class LimitFlags(BaseModel):
    """The limits of requests and of batches."""

    max_concurrent_requests: int = Field(
        default=128, ge=1, description="Requests accepted at once; more are answered 429."
    )
    max_best_of: int = Field(default=2, ge=1, description="Largest `best_of`.")
    max_n: int = Field(default=16, ge=1, description="Largest `n` on the OpenAI routes.")
    max_stop_sequences: int = Field(
        default=4, ge=0, description="Most stop sequences in one request."
    )
    max_top_n_tokens: int = Field(default=5, ge=0, description="Largest `top_n_tokens`.")
    max_client_batch_size: int = Field(
        default=4, ge=1, description="Most prompts in one completion call."
    )
    max_input_tokens: int | None = Field(
        default=None, ge=1, description="Longest prompt in tokens; inferred when absent."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and answer; inferred when absent."
    )
    default_max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most new tokens of a request that names no limit; when absent, the model's own limit, otherwise"
        " 2048 in chats and what the context leaves elsewhere.",
    )
    strict_max_tokens: bool = Field(
        default=False,
        description="Refuse chats with a `max_tokens` that does not fit, which otherwise is an upper bound, as requests"
        " to TGI's routes and text completions are refused.",
    )
    max_new_tokens_limit: int | None = Field(
        default=None,
        ge=1,
        description="Most new tokens that a request may have, and the default of requests; when absent, only the"
        " context limits them.",
    )
    max_batch_size: int | None = Field(
        default=None,
        description="Most sequences that run together; as many as --max-concurrent-requests when absent.",
    )
    max_batch_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens that one step computes; 4096, or what fits, when absent.",
    )
    max_batch_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Upper bound of the KV capacity in tokens; measured when absent.",
    )


class ImageFlags(BaseModel):
    """The limits of images, and where they may come from, for models that read them."""

    max_image_bytes: ByteSize = Field(
        default=ByteSize(20 << 20),
        ge=1,
        description="Largest file of an image in a request, such as 20MiB.",
    )
    max_image_pixels: int = Field(
        default=33_000_000,
        ge=1,
        description="Most pixels of an image; its header says how many it has, and it is not decoded beyond that.",
    )
    max_images_per_request: int = Field(
        default=100, ge=0, description="Most images in one request; 0 takes none."
    )
    max_image_memory: ByteSize = Field(
        default=ByteSize(2 << 30),
        ge=1,
        description="Bytes that images of all requests may take in the router while they wait or run, such as 2GiB;"
        " further ones wait, and then get 429.",
    )
    image_timeout: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that an image may take to decode; the process that decodes it is replaced then.",
    )
    image_url_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Hosts from which https: addresses of images are fetched, separated by commas; exact names, whose"
        " addresses have to be global. Without any, images have to be `data:` URLs.",
    )

    @field_validator("image_url_hosts", mode="before")
    @classmethod
    def _split_hosts(cls, value: object) -> object:
        return split_commas(value)

    @field_validator("image_url_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        hosts = tuple(host.lower() for host in hosts)
        for host in hosts:
            if _HOST.fullmatch(host) is None:
                raise ValueError(f"{host!r} is not the name of a host, without a port or a path")
        return hosts


class RecoveryFlags(BaseModel):
    """The times of recovery and of resumption, and what is kept."""

    step_timeout: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds in which shards may compute nothing of a step; a longer pause, also compared with "
        "the step's predicted duration, means that they hang: they are restarted.",
    )
    recovery_grace: float = Field(
        default=300.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that shards may take to come back; then /health fails and requests end.",
    )
    resume_grace: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a request with an Idempotency-Key outlives its connection, and can "
        "be resumed; 0 ends it with the connection.",
    )
    responses_store: int = Field(
        default=0,
        ge=0,
        description="MiB of memory for answers of /v1/responses, which `previous_response_id` refers "
        "to; the oldest are forgotten first, and 0 stores none.",
    )
    responses_store_seconds: float = Field(
        default=3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a stored response is forgotten.",
    )
    journal: Path | None = Field(
        default=None,
        description="Folder to record every step in, for replay; none is kept when absent.",
    )
    journal_tokens: bool = Field(
        default=False,
        description="Record token ids, log probabilities and grammars as well: requests and answers can be "
        "read from them.",
    )
    journal_max_bytes: int = Field(
        default=1 << 30,
        ge=1 << 16,
        description="Bytes that journal files may take together; the oldest make room for new ones.",
    )
    supervisor_fd: int | None = Field(
        default=None,
        ge=0,
        description="Socket to the launcher, inherited; for the launcher's use.",
    )
    listen_fd: int | None = Field(
        default=None,
        ge=0,
        description="Socket bound to the HTTP port, inherited; for the launcher's use. The router listens on it once it"
        " is ready.",
    )
    state_fd: int | None = Field(
        default=None,
        ge=0,
        description="File for what the next router should know, inherited; for the launcher's use.",
    )
    run_log_fd: int | None = Field(
        default=None,
        ge=0,
        description="File in memory for the log of requests with keys, inherited; for the launcher's use.",
    )
    is_successor: bool = Field(
        default=False,
        description="Another router serves until the shards are reported to be ready; for the launcher's use.",
    )


class LogFlags(BaseModel):
    """What is logged and traced, and TGI's flags without effect."""

    graceful_termination_timeout: int = Field(
        default=90, ge=0, description="Seconds that running requests get after SIGTERM."
    )
    drain_delay: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM in which new requests are still served while /readyz is 503, so that load"
        " balancers learn of it; then the server drains.",
    )
    json_output: bool = Field(default=False, description="Logs as JSON, one object a line.")
    log_level: LogLevel = Field(default="info", description="Least severity that is logged.")
    log_requests: Path | None = Field(
        default=None,
        description="File for the log's line of each request, as JSON; only this user can read a file that it creates.",
    )
    log_requests_max_bytes: int = Field(
        default=100 << 20,
        ge=0,
        description="Bytes after which that file is set aside as PATH.1 and so on; five are kept. 0: never.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="Collector to export traces to over OTLP, such as http://localhost:4317;"
        " OTEL_EXPORTER_OTLP_ENDPOINT when absent.",
    )
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = Field(
        default=None,
        description="Protocol of that collector; OTEL_EXPORTER_OTLP_PROTOCOL when absent, else http/protobuf on port"
        " 4318 and grpc on others.",
    )
    otlp_service_name: str = Field(
        default=SERVICE_NAME,
        description="Name of this service in traces; OTEL_SERVICE_NAME beats the default.",
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        default="on", description="No effect: no usage statistics are ever sent."
    )
    ngrok: bool = Field(default=False, description="Refused: tunnels are not supported.")
    ngrok_authtoken: str | None = Field(default=None, description="No effect without --ngrok.")
    ngrok_edge: str | None = Field(default=None, description="No effect without --ngrok.")

    @property
    def trace_target(self) -> TraceTarget | None:
        """Where traces go, by the flags and by OpenTelemetry's variables; None for nowhere."""
        return trace_target(
            self.otlp_endpoint, self.otlp_protocol, self.otlp_service_name, os.environ
        )

    @field_validator("log_level", mode="before")
    @classmethod
    def _narrow_log_level(cls, value: object) -> object:
        return log_level(value)


_HOST = re.compile(r"(?!-)[a-z0-9.-]*[a-z][a-z0-9.-]*", re.ASCII)
COMMANDS = """other commands:
  millrace-router replay JOURNAL
                        Have shards compute the steps of a journal again.
  millrace-router print-schema
                        Print the description of the API, as /openapi.json has
                        it.
"""
KEYS = frozenset({"api_key", "admin_key"})


class RouterConfig(
    # The help shows the flags of the last class first.
    LogFlags,
    AdapterFlags,
    ImageFlags,
    TextFlags,
    RecoveryFlags,
    SchedulingFlags,
    LimitFlags,
    ListeningFlags,
    ModelFlags,
    BaseSettings,
):
    """Settings of the router; a field's environment variable is its name in capitals, and the command line beats it."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let Vertex AI's AIP_HTTP_PORT beat PORT, which images set, but not the command line."""
        port = os.environ.get("AIP_HTTP_PORT")
        vertex = InitSettingsSource(settings_cls, {"port": port} if port else {})
        return init_settings, vertex, env_settings

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> Self:
        """Read the command line and the environment; exit 2 with a message when one of them is wrong."""
        values = read_arguments(
            cls.model_fields,
            argv,
            program="millrace-router",
            description=cls.__doc__,
            epilog=COMMANDS,
            shorts={"port": "-p"},
        )
        # An empty value counts as absent, but an empty key must be refused.
        chosen = {name: value for name, value in values.items() if value != "" or name in KEYS}
        try:
            return cls(**chosen)
        except ValidationError as error:
            refuse(error.errors())

    @property
    def compute_type(self) -> str | None:
        """Value of the `x-compute-type` header, from COMPUTE_TYPE; the launcher sets it where it knows the card."""
        return os.environ.get("COMPUTE_TYPE") or None

    @property
    def docker_label(self) -> str | None:
        """Name of the image, from DOCKER_LABEL."""
        return os.environ.get("DOCKER_LABEL") or None

    @property
    def profile_path(self) -> str | None:
        """File for a profile of the main thread, from MILLRACE_PROFILE; for developers."""
        return os.environ.get("MILLRACE_PROFILE")

    @property
    def hub_cache(self) -> Path:
        """The hub's local cache, by the variables that its client and TGI read."""
        variables = {name: value for name, value in os.environ.items() if value}
        home = (
            variables.get("HF_HOME") or f"{variables.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
        )
        cache = (
            variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
        )
        return Path(cache).expanduser()

    @property
    def hub_token(self) -> str | None:
        """The server's own token for the hub, by the variables that its client and TGI read."""
        names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")
        return next((value for name in names if (value := os.environ.get(name))), None)

    @property
    def hub_endpoint(self) -> str:
        """Address of the hub, from HF_ENDPOINT."""
        return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
