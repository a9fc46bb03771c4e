"""The router's settings: flags, each with its environment variable, default and meaning, and variables without a flag.

The launcher imports this module, so it may import nothing heavier than pydantic.
"""

from __future__ import annotations

import io
import ipaddress
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

ANY_ADDRESS = "0.0.0.0"  # noqa: S104
LogLevel = Literal["trace", "debug", "info", "warning", "error"]
SWITCH_WORDS = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}
"""Words for on and off in TGI's environment variables."""
COMMANDS = """
other commands:
  millrace-router replay JOURNAL
                        Have shards compute the steps of a journal again.
  millrace-router print-schema
                        Print the description of the API, as /openapi.json has
                        it.
"""


def _switch(value: object) -> object:
    word = str(value).strip().lower()
    return SWITCH_WORDS.get(word, word)


OnOff = Annotated[Literal["on", "off"], BeforeValidator(_switch)]


@contextmanager
def _printable_help() -> Iterator[None]:
    """Show the other commands, and no default where it is None: the stand-in for None cannot be printed."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            yield
    finally:
        if text := shown.getvalue():
            sys.stdout.write(re.sub(r"\s*\(default:\s*\0\)", "", text) + COMMANDS)


class RouterConfig(BaseSettings):
    """Settings of the router; a field's environment variable is its name in capitals, and the command line beats it."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        cli_prog_name="millrace-router",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        # A stand-in for None that no user can type.
        cli_parse_none_str="\0",
        cli_shortcuts={"port": "p"},
    )

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
        description="Path of /vertex, besides; Vertex AI sets it. A path that is served already stays what it is.",
    )
    aip_health_route: str | None = Field(
        default=None,
        pattern="^/[^{}]*$",
        description="Path of /health, besides; Vertex AI sets it.",
    )
    ssl_certfile: Path | None = Field(
        default=None, description="PEM file with the certificate for HTTPS, and its chain."
    )
    ssl_keyfile: Path | None = Field(
        default=None, description="PEM file with the certificate's key, which has no password."
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
        default=2_000_000, ge=1, description="Largest request body in bytes."
    )

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
        description="Most new tokens of a request that names no limit; what the context leaves when absent.",
    )
    max_new_tokens_limit: int | None = Field(
        default=None,
        ge=1,
        description="Most new tokens that a request may ask for, and get without asking; no limit of its own when"
        " absent.",
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
    waiting_served_ratio: float = Field(
        default=0.3,
        ge=0,
        description="With --prefill-chunking off: prompts interrupt decodes once they are this many "
        "for each running request.",
    )
    max_waiting_tokens: int = Field(
        default=20,
        ge=0,
        description="With --prefill-chunking off: prompts interrupt decodes after this many steps "
        "at the latest.",
    )
    prefill_chunking: OnOff = Field(
        default="on",
        description="Compute prompts in pieces beside decodes (on), or whole while decodes pause (off).",
    )
    prefill_order: Literal["shortest", "arrival"] = Field(
        default="shortest",
        description="With --prefill-chunking on: compute short prompts before older long ones, "
        "which keep half of each step (shortest), or prompts one after the other (arrival).",
    )
    batching_policy: Literal["continuous", "static", "static-naive", "none"] = Field(
        default="continuous",
        description="For experiments: admit requests at every step (continuous), or only when all of "
        "the last batch have ended (static; static-naive also decodes ended ones until then), or "
        "one at a time (none).",
    )
    prefix_caching: OnOff = Field(
        default="on", description="Keep computed KV blocks for requests that begin alike."
    )
    kv_reservation: Literal["grow", "full"] = Field(
        default="grow",
        description="Give a request KV blocks as it grows, preempting when they run out (grow), or "
        "admit it with blocks for all of max_new_tokens (full).",
    )
    target_inter_token_latency: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Milliseconds that a step with running requests should not exceed for the sake "
        "of prompts.",
    )
    fairness: Literal["none", "tenant", "adapter"] = Field(
        default="none",
        description="Share tokens equally between API keys, or values of x-tenant (tenant), between LoRA adapters and"
        " the base model (adapter), or not.",
    )
    priority_ageing: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds of waiting that are worth one step of priority.",
    )
    max_queue_size: int | None = Field(
        default=None, ge=1, description="Requests that may wait; more are answered 429."
    )
    max_queue_wait: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a request may wait; one that would, or has, is answered 429.",
    )
    steps_in_flight: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Steps sent before the first is answered; 1 turns it off.",
    )
    late_planning: OnOff = Field(
        default="on",
        description="Plan the second step in flight when the first is nearly done, so that requests "
        "which arrive meanwhile are in it.",
    )

    step_timeout: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a step always gets; one that takes longer, and far longer than "
        "predicted, means that the shards hang: they are restarted.",
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
        description="Record token ids, log probabilities and grammars as well: all that is asked and "
        "answered can be read from them.",
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

    validation_workers: int = Field(default=2, description="Threads that tokenize prompts.")
    tokenizer_config_path: Path | None = Field(
        default=None, description="tokenizer_config.json to take the chat template from."
    )
    tool_call_parser: Literal[
        "auto",
        "cohere_command3",
        "cohere_command4",
        "command_r7b",
        "deepseek_v3",
        "deepseek_v31",
        "functiongemma",
        "gemma4",
        "glm45",
        "glm47",
        "gpt_oss",
        "granite",
        "granite-20b-fc",
        "granite4",
        "harmony",
        "hermes",
        "json",
        "kimi_k2",
        "lfm2",
        "llama",
        "llama3_json",
        "llama4_json",
        "llama4_pythonic",
        "mimo",
        "minimax",
        "minimax_m2",
        "mistral",
        "nemotron_json",
        "olmo3",
        "openai",
        "phi4_mini_json",
        "pythonic",
        "qwen3_coder",
        "qwen3_json",
        "qwen3_xml",
        "seed_oss",
        "step3p5",
    ] = Field(
        default="auto",
        description="How the model writes tool calls, by the names of docs/tool-calling.md and of other servers; told"
        " from its chat template when auto.",
    )
    reasoning_parser: Literal[
        "auto",
        "none",
        "think",
        "mistral",
        "gpt_oss",
        "cohere",
        "gemma4",
        "granite",
        "granite_phrases",
        "seed_oss",
        "deepseek_r1",
        "deepseek_v3",
        "glm45",
        "hunyuan_a13b",
        "kimi_k2",
        "magistral",
        "minimax_m2",
        "minimax_m3",
        "nemotron",
        "openai_gptoss",
        "qwen3",
        "smollm3",
        "step3",
    ] = Field(
        default="auto",
        description="How the model writes thoughts, which answers to chats give beside their text; told from its chat "
        "template when auto. With none, thoughts stay in the text.",
    )
    strict_tgi: bool = Field(
        default=False,
        description="Answer as TGI does even where OpenAI's contract or its own clients want otherwise.",
    )
    generation_config: Literal["auto", "off"] = Field(
        default="auto",
        description="Whether the model's generation_config.json gives defaults for what requests to OpenAI's and"
        " Anthropic's routes leave out: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens.",
    )
    task: Annotated[tuple[Literal["auto", "generate", "embed", "score"], ...], NoDecode] = Field(
        default=("auto",),
        description="What the server does with the model: generate text, embed texts, score (rerank) pairs of texts, or"
        " several of these, separated by commas; told from the model's files when auto.",
    )
    strict_fields: bool = Field(
        default=False,
        description="Refuse requests with unknown fields, which are otherwise named in a header of the answer.",
    )
    disable_grammar_support: bool = Field(
        default=False, description="Refuse requests with a grammar, or with tools that need one."
    )
    trust_remote_code: bool = Field(
        default=False, description="No effect: code from a model repository is never run."
    )
    max_image_fetch_size: int = Field(
        default=1_073_741_824,
        ge=0,
        description="No effect: no images are fetched; requests with one are refused.",
    )

    lora_adapters: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapters that requests may name: ID, ID@REVISION, NAME=PATH or NAME=PATH@REVISION, or a JSON"
        " object with `name`, `path` and `revision`; separated by commas. A path is a folder or an id on the hub.",
    )
    lora_modules: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapters in vLLM's form: NAME=PATH, or a JSON object with `name`, `path` and"
        " `base_model_name`; repeatable.",
    )
    lora_paths: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapters in SGLang's form: PATH, NAME=PATH, or a JSON object with `lora_name`, `lora_path`"
        " and `pinned`, which has no effect; repeatable.",
    )
    adapter_id: str | None = Field(
        default=None,
        description="LoRA adapter of requests that name no model; it is fetched at the start.",
    )
    adapter_source: Literal["hub", "local"] = Field(
        default="hub",
        description="Where an id of an adapter is looked up when nothing else says it: on the hub, or below"
        " --adapter-root.",
    )
    preloaded_adapter_ids: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="LoRA adapter to fetch at the start; repeatable. Others are fetched at their first use.",
    )
    adapter_root: Path | None = Field(
        default=None,
        description="Folder below which clients may name folders of adapters, with `adapter_source` local.",
    )
    adapter_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Pattern of ids on the hub that clients may name, such as hub:org/*; repeatable. Without any,"
        " clients may name registered adapters alone.",
    )
    adapter_cache: Path | None = Field(
        default=None,
        description="Folder for checked copies of adapters, which router and shards share; adapters in MILLRACE_CACHE"
        " or the user's cache folder when absent.",
    )
    adapter_cache_size: ByteSize = Field(
        default=ByteSize(20 << 30),
        description="Bytes that those copies may take, such as 20GiB; copies that nothing uses are removed.",
    )
    max_loras: int | None = Field(
        default=None,
        ge=1,
        description="Most LoRA adapters in the shards at a time, if their memory has room;"
        " --max-loras-per-batch or --max-active-adapters when absent.",
    )
    max_loras_per_batch: int | None = Field(
        default=None, ge=1, description="SGLang's name of --max-loras, which beats it."
    )
    max_active_adapters: int = Field(
        default=1024, ge=1, description="LoRAX's name of --max-loras, which beats it."
    )
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="No effect: --adapter-cache-size bounds what is kept."
    )
    max_lora_rank: int = Field(
        default=64, ge=1, description="Highest rank of a LoRA adapter; higher ones are refused."
    )
    adapter_cycle_time_s: float = Field(
        default=2.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a LoRA adapter is served before it makes room for waiting ones, when all are busy.",
    )
    unknown_model: Literal["base", "refuse"] | None = Field(
        default=None,
        description="Answer requests for a `model` that is not served with the base model (base) or with 404 (refuse);"
        " refuse with --enable-lora, else base.",
    )

    graceful_termination_timeout: int = Field(
        default=90, ge=0, description="Seconds that running requests get after SIGTERM."
    )
    json_output: bool = Field(default=False, description="Logs as JSON, one object a line.")
    log_level: LogLevel = Field(default="info", description="Least severity that is logged.")
    log_requests: Path | None = Field(
        default=None,
        description="File for the log's line of each request, as JSON; it is created for this user alone.",
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
        default="text-generation-inference.router",
        description="Name of this service in traces; OTEL_SERVICE_NAME beats the default.",
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        default="on", description="No effect: no usage statistics are ever sent."
    )
    ngrok: bool = Field(default=False, description="Refused: tunnels are not supported.")
    ngrok_authtoken: str | None = Field(default=None, description="No effect without --ngrok.")
    ngrok_edge: str | None = Field(default=None, description="No effect without --ngrok.")

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
        # Empty values count as absent everywhere else.
        values: dict[str, Any] = {
            name: ""
            for name, flag in (("api_key", "--api-key"), ("admin_key", "--admin-key"))
            if f"{flag}=" in argv or (flag, "") in pairwise(argv)
        }
        try:
            with _printable_help():
                return cls(_cli_parse_args=list(argv), **values)  # type: ignore[call-arg]
        except ValidationError as error:
            for problem in error.errors():
                flag = "--" + "-".join(map(str, problem["loc"])).replace("_", "-")
                sys.stderr.write(f"error: {flag}: {problem['msg']}\n")
            raise SystemExit(2) from None

    @property
    def trace_target(self) -> TraceTarget | None:
        """Where traces go, by the flags and by OpenTelemetry's variables; None for nowhere."""
        return trace_target(
            self.otlp_endpoint, self.otlp_protocol, self.otlp_service_name, os.environ
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model, the first of which is the usual one."""
        return self.served_model_name or (self.model_id,)

    def names_the_model(self, name: str | None) -> bool:
        """Whether `name` is one of the model, and no adapter's."""
        return name in self.all_names

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the model with that of --model-id, which is always understood."""
        return (*self.served_model_name, self.model_id)

    @property
    def compute_type(self) -> str:
        """Value of the `x-compute-type` header, from COMPUTE_TYPE; the launcher sets it where it knows the device."""
        return os.environ.get("COMPUTE_TYPE", "gpu+optimized")

    @property
    def docker_label(self) -> str | None:
        """Name of the image, from DOCKER_LABEL."""
        return os.environ.get("DOCKER_LABEL") or None

    @property
    def profile_path(self) -> str | None:
        """File for a profile of the main thread, from MILLRACE_PROFILE; for developers."""
        return os.environ.get("MILLRACE_PROFILE")

    @property
    def registered_adapters(self) -> tuple[AdapterSpec, ...]:
        """The adapters of --lora-adapters, --lora-modules and --lora-paths."""
        return (
            *(tgi_adapter(text) for text in self.lora_adapters),
            *(vllm_adapter(text) for text in self.lora_modules),
            *(sglang_adapter(text) for text in self.lora_paths),
        )

    @property
    def adapter_cache_folder(self) -> Path:
        """The folder of --adapter-cache, or its default."""
        if self.adapter_cache is not None:
            return self.adapter_cache
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.environ.get("MILLRACE_CACHE") or f"{home}/millrace"
        return Path(folder).expanduser() / "adapters"

    @property
    def max_adapters(self) -> int:
        """The most adapters in the shards at a time."""
        return self.max_loras or self.max_loras_per_batch or self.max_active_adapters

    @property
    def hub_cache(self) -> Path:
        """The hub's local cache, by the variables that its client and TGI read."""
        given = {name: value for name, value in os.environ.items() if value}
        home = given.get("HF_HOME") or f"{given.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
        cache = given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
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
        for key in ("api_key", "admin_key"):
            if filled.get(key) is None and os.environ.get(key.upper()) == "":
                filled[key] = ""
        return filled

    @field_validator(
        "shard_addresses",
        "served_model_name",
        "cors_allow_origin",
        "preloaded_adapter_ids",
        "adapter_allow",
        "task",
        mode="before",
    )
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return split_commas(value)

    @field_validator("lora_adapters", "lora_modules", "lora_paths", mode="before")
    @classmethod
    def _split_adapters(cls, value: object) -> object:
        return split_adapters(value)

    @field_validator("lora_adapters", "lora_modules", "lora_paths")
    @classmethod
    def _check_adapters(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in value:
            _READERS[str(info.field_name)](text)
        return value

    @field_validator("adapter_allow")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if re.fullmatch(r"hub:[^/:]+/[^/:]+", pattern) is None:
                raise ValueError(f"must be patterns such as hub:org/*. Given: {pattern}")
        return value

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

    @field_validator("log_level", mode="before")
    @classmethod
    def _narrow_log_level(cls, value: object) -> object:
        return log_level(value)


def split_commas(value: object) -> object:
    """Break each comma-separated string; other values are left to pydantic."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(part for item in value for part in str(item).split(",") if part)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """An adapter as the operator names it; `path` is a folder or an id on the hub."""

    name: str
    path: str
    revision: str | None = None


_TGI_ADAPTER = re.compile(r"([^=@]+)(?:=([^=@]+))?(?:@([^=@]+))?")


def tgi_adapter(text: str) -> AdapterSpec:
    """Read ID, ID@REVISION, NAME=PATH, NAME=PATH@REVISION or a JSON object; raises ValueError with TGI's text."""
    if text.startswith("{"):
        return _json_adapter(text)
    match = _TGI_ADAPTER.fullmatch(text)
    if match is None:
        raise ValueError(f"Invalid LoRA adapter format: {text}")
    name, path, revision = match.groups()
    return AdapterSpec(name=name, path=path or name, revision=revision)


def vllm_adapter(text: str) -> AdapterSpec:
    """Read NAME=PATH or a JSON object; raises ValueError."""
    if text.startswith("{"):
        return _json_adapter(text)
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"Invalid LoRA adapter format: {text}")
    return AdapterSpec(name=name, path=path)


def sglang_adapter(text: str) -> AdapterSpec:
    """Read PATH, which is the name too, NAME=PATH or a JSON object; raises ValueError."""
    if text.startswith("{"):
        return _json_adapter(text, prefix="lora_")
    return vllm_adapter(text if "=" in text else f"{text}={text}")


_READERS = {
    "lora_adapters": tgi_adapter,
    "lora_modules": vllm_adapter,
    "lora_paths": sglang_adapter,
}
"""The form of an adapter in each flag."""


def _json_adapter(text: str, *, prefix: str = "") -> AdapterSpec:
    """Read an object with `name`, `path` and perhaps `revision`, all after `prefix`; others are ignored.

    Raises:
        ValueError: it is none.

    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError:
        given = {}
    name, path, revision = (given.get(prefix + key) for key in ("name", "path", "revision"))
    texts = all(isinstance(value, str) and value for value in (name, path))
    if not texts or not isinstance(revision, str | None):
        raise ValueError(f"Invalid LoRA adapter format: {text}")
    return AdapterSpec(name=name, path=path, revision=revision or None)


_ITEM = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\{(?:"(?:[^"\\]|\\.)*"|[^"{}])*\}|[^",{}])+')
"""A part of a list without a comma outside of objects and texts."""


def split_adapters(value: object) -> object:
    """Break strings at their commas, except for commas in JSON objects; other values are left to pydantic."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    parts: list[str] = []
    for item in map(str, value):
        text = item.strip()
        listed = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        found = [part.strip() for part in _ITEM.findall(listed)]
        # A text that does not split without a rest is no list: its own check refuses it.
        whole = _ITEM.sub("", listed).strip(", ") == ""
        parts.extend(part for part in (found if whole else [text]) if part)
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTarget:
    """The collector of traces."""

    endpoint: str
    """With the path of traces, if the protocol is http/protobuf."""
    protocol: str
    """grpc or http/protobuf."""
    service_name: str


def trace_target(
    endpoint: str | None, protocol: str | None, service_name: str, environ: Mapping[str, str]
) -> TraceTarget | None:
    """Return where traces go, by the values of the flags and, where they are absent, by OpenTelemetry's variables."""

    def variable(name: str) -> str:
        """The variable of traces, or that of all signals."""
        kinds = ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_")
        return next((value for kind in kinds if (value := environ.get(kind + name))), "")

    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None and environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        is_off = True
    address = endpoint or variable("ENDPOINT")
    if is_off or not address:
        return None
    parts = urlsplit(address if "://" in address else f"//{address}")
    usual = "http/protobuf" if parts.netloc.endswith(":4318") else "grpc"
    protocol = protocol or variable("PROTOCOL") or usual
    is_whole = endpoint is None and "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in environ
    if protocol != "grpc" and not is_whole and not parts.path.endswith("/v1/traces"):
        address = f"{address.rstrip('/')}/v1/traces"
    is_usual = service_name == RouterConfig.model_fields["otlp_service_name"].default
    name = environ.get("OTEL_SERVICE_NAME") if is_usual else None
    return TraceTarget(endpoint=address, protocol=protocol, service_name=name or service_name)


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


def log_level(value: object) -> object:
    """Map TGI's names of levels, and filter directives that name no level, to ours."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    word = {"warn": "warning", "critical": "error"}.get(word, word)
    return word if word in ("trace", "debug", "info", "warning", "error") else "info"
