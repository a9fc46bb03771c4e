"""The flags of the shard, each declared once with its environment variable, default and meaning.

Each flag is a field of the group that it belongs to. The launcher imports this module too, so that it must import
nothing larger than pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from millrace_proto.flags import log_level, read_arguments, refuse

ROPE_NAMES = ("linear", "dynamic")
"""Values of --rope-scaling that are not objects."""


def json_object(text: str) -> dict[str, Any]:
    """The object that a flag holds. Raises ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not an object in JSON: {error}") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"it is not an object in JSON: {text}")


TorchOperator = Literal["flash_attn_3", "varlen_attn", "grouped_mm", "cublas", "scaled_mm"]
"""Operators that CUDA takes from libraries without --deterministic."""
LogLevel = Literal["trace", "debug", "info", "warning", "error"]


class LogFlags(BaseModel):
    """Flags of logs and traces."""

    otlp_endpoint: str | None = Field(
        default=None,
        description="Collector to export traces of calls to over OTLP, such as http://localhost:4317.",
    )
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = Field(
        default=None,
        description="Protocol of that collector; http/protobuf on port 4318 and grpc on others when absent.",
    )
    otlp_service_name: str | None = Field(
        default=None,
        description="Name of this service in traces; text-generation-inference.server when absent.",
    )
    json_output: bool = Field(default=False, description="Logs as JSON, one object a line.")
    log_level: LogLevel = Field(default="info", description="Least severity that is logged.")
    logger_level: LogLevel | None = Field(
        default=None, description="TGI's name of --log-level, which it beats."
    )

    @property
    def threshold(self) -> LogLevel:
        """The least severity that is logged, by either name."""
        return self.logger_level or self.log_level

    @field_validator("log_level", "logger_level", mode="before")
    @classmethod
    def _narrow_log_level(cls, value: object) -> object:
        return log_level(value)


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
        description="Permit connections of router and shards without TLS where other hosts may reach them: "
        "only in a network where everyone may use the model.",
    )
    launcher_fd: int | None = Field(
        default=None,
        description="Inherited socket on which the launcher requests forks; only for `fork-server`.",
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


class DeviceFlags(BaseModel):
    """The device, its numbers, its memory and its graphs."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto takes CUDA when there is any."
    )
    dtype: Literal["float16", "bfloat16", "float32"] | None = Field(
        default=None,
        description="Type of activations, and of weights and KV that are not quantized; the model's own, where the"
        " device has it.",
    )
    max_total_tokens: int | None = Field(
        None,
        ge=2,
        description="The longest sequence that requests may have; RoPE is laid out for it.",
    )
    deterministic: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="on: output never depends on batch mates; off: faster; auto: the device's default.",
    )
    disable_custom_kernels: bool = Field(
        default=False,
        description="Run on plain PyTorch operators only; on CUDA several times slower, and without CUDA graphs.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of a forward pass on CPU; chosen by cores when absent.",
    )
    kv_memory: ByteSize | None = Field(
        default=None,
        description="Bytes for the KV cache on this shard, such as 2G or 512MiB; when absent, on CPU a quarter of the"
        " memory that is free at the start and no more than all requests can use, on CUDA 96 % of what is left after"
        " the largest step was rehearsed.",
    )
    cuda_memory_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Part of the GPU's memory that may be used."
    )
    cuda_graphs: Annotated[tuple[int, ...] | None, NoDecode] = Field(
        default=None,
        description="Batch sizes whose decodes, and drafts by an EAGLE head or MTP layer, are captured as CUDA graphs,"
        " separated by commas; 0 for no graphs. When absent 1, 2, 4, 8, then every 8 to 64 and every 16 to 256, up to"
        " --max-batch-size. A batch between two sizes is padded. Graphs of other steps, up to 512 tokens, or 2048 with"
        " small models, have no attention in them. No effect on CPU.",
    )
    disable_operators: Annotated[tuple[TorchOperator, ...], NoDecode] = Field(
        default=(),
        description="Operators of libraries that CUDA does not take, separated by commas: flash_attn_3, varlen_attn,"
        " grouped_mm, and for codes in long prompts cublas and scaled_mm (which quantises activations to e4m3, too)."
        " Without --deterministic each is taken where it is there and agrees with plain PyTorch at the start; /info"
        " lists those.",
    )
    verify_kv: bool = Field(
        default=False,
        description="Keep a checksum of each full KV block that outlives a killed shard on CPU, and check it after the"
        " restart: slower, for tests.",
    )
    one_shot_all_reduce: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Sum tensors of up to 8 MiB between the GPUs of a host through memory they share in place of NCCL."
        " auto: where they can share it and a trial has the right sums; on: warn where they cannot.",
    )
    enable_prefill_logprobs: bool = Field(
        default=False,
        description="Let `decoder_input_details` tell the log probabilities of a prompt, as it does in TGI.",
    )

    @field_validator("cuda_graphs", "disable_operators", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Split at commas and drop zeros, which mean no graphs."""
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            parts = [part.strip() for item in value for part in str(item).split(",")]
            return tuple(part for part in parts if part not in ("", "0"))
        return value

    @field_validator("deterministic", "one_shot_all_reduce", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        """Accept boolean words for on and off too."""
        if not isinstance(value, str):
            return value
        word = value.strip().lower()
        return {"true": "on", "1": "on", "false": "off", "0": "off"}.get(word, word)


Quantization = Literal[
    "awq",
    "compressed-tensors",
    "eetq",
    "exl2",
    "gptq",
    "marlin",
    "bitsandbytes",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "fp8",
    "int4",
    "int8",
]


class WeightFlags(BaseModel):
    """Flags of a checkpoint: how it is read, quantised and extended."""

    allow_unlisted_model: bool = Field(
        default=False,
        description="Start classes of transformers that no test knows, after a check of their logits;"
        " the output of such a model may depend on its batch.",
    )
    trust_remote_code: bool = Field(
        default=False, description="No effect: code from a model repository is never run."
    )
    max_input_tokens: int | None = Field(
        default=None, ge=1, description="No effect: the router limits prompts."
    )

    quantize: Quantization | None = Field(
        default=None,
        description="How weights are quantized; config.json decides when absent. awq, compressed-tensors, gptq, marlin"
        " are for such checkpoints, and so are fp8 and bitsandbytes where the checkpoint has them. On other checkpoints"
        " fp8, int4, eetq (int8) and bitsandbytes (int8, nf4, fp4) quantize weights as they are loaded, and int8 does"
        " it to bfloat16 models on CPU. exl2 is refused.",
    )
    quantize_activations: Literal["auto", "exact", "int8"] = Field(
        default="auto",
        description="What quantized weights are multiplied with on CPU in bfloat16 models: int8 rounds activations to"
        " int8 with a scale for every 32 of a row, where the weights are integers, which is faster; exact keeps them."
        " auto is exact below a billion parameters, and where int8 is less than 1.2 times as fast with the model's"
        " shapes on this CPU, which is measured once and kept on disk; else int8. The log and /info state it."
        " exact leaves scaled_mm of CUDA out, too, see --disable-operators.",
    )
    packed_weights_size: ByteSize = Field(
        default=ByteSize(32 << 30),
        description="Bytes on disk for packed weights, which later starts on CPU read in place of packing quantized"
        " weights again, such as 8GiB; the least recently used go first, and 0 keeps none.",
    )
    speculate: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Most tokens guessed ahead for one sequence: by --draft-model, --speculator or Medusa heads, else"
        " by what followed the last tokens before. When absent as many as there are Medusa heads, 4 with a draft model"
        " or another head, else none.",
    )
    speculator: str | None = Field(
        default=None,
        description="EAGLE or EAGLE-3 head for the model that guesses ahead from its hidden states: a folder or a name"
        " on the Hugging Face hub; or mtp: the MTP layer of the checkpoint itself.",
    )
    draft_model: str | None = Field(
        default=None,
        description="Smaller model of the same tokens that guesses ahead, or Medusa heads for the model:"
        " a folder or a name on the Hugging Face hub.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3fn", "fp8_e5m2", "int8"] = Field(
        default="auto",
        description="Type of keys and values in the KV cache. int8 has a scale for each token and head, fp8 the"
        " checkpoint's scales, else 1. auto: the model's type, or fp8_e4m3fn if kv_cache_scheme in config.json requests"
        " it.",
    )
    kv_groups: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: layers with an attention window have their own KV blocks, and give each back when it is"
        " behind the window, if that saves memory; off: they keep all positions. The output is the same.",
    )
    rope_scaling: str | None = Field(
        default=None,
        description="Scaling of the position encoding, in place of config.json's: linear or dynamic, or an object"
        ' such as {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}.',
    )
    rope_factor: float | None = Field(
        default=None,
        gt=0,
        description="Factor of --rope-scaling linear or dynamic, 1.0 when absent; without --rope-scaling it implies"
        " linear.",
    )
    hf_overrides: str | None = Field(
        default=None,
        description="Fields in place of config.json's, as an object in JSON. A field that the model does not have is"
        " refused.",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_speculator(cls, values: object) -> object:
        """A speculator is what `draft_model` names, too: one thing drafts."""
        if not isinstance(values, dict) or not values.get("speculator"):
            return values
        if values.get("draft_model") not in {None, "", values["speculator"]}:
            raise ValueError(
                "--speculator and --draft-model both name what drafts: give one of them"
            )
        return {**values, "draft_model": values["speculator"]}

    @field_validator("rope_scaling", "hf_overrides")
    @classmethod
    def _check_object(cls, value: str | None, info: ValidationInfo) -> str | None:
        is_name = info.field_name == "rope_scaling" and value in ROPE_NAMES
        if value is not None and not is_name:
            json_object(value)
        return value

    @model_validator(mode="after")
    def _check_factor(self) -> Self:
        if self.rope_factor is not None and self.rope_parameters is not None:
            raise ValueError(
                "--rope-factor is for --rope-scaling linear and dynamic; an object has its own factor"
            )
        return self

    @property
    def rope_parameters(self) -> dict[str, Any] | None:
        """The object of --rope-scaling; None for a name."""
        text = self.rope_scaling
        return None if text is None or text in ROPE_NAMES else json_object(text)


class RequestFlags(BaseModel):
    """Flags of what requests may use in addition to plain sampling."""

    grammar_timeout: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="Seconds of CPU time a grammar may take to compile before it is refused.",
    )
    max_grammar_bytes: ByteSize = Field(
        default=ByteSize(1 << 17), description="Longest grammar or JSON schema, such as 64KiB."
    )
    enable_lora: bool = Field(
        default=False,
        description="Let requests have LoRA adapters; every other flag about adapters implies it.",
    )
    adapter_cache: Path | None = Field(
        default=None,
        description="Folder of the adapters that the router has checked, which both share.",
    )
    adapter_memory: ByteSize | None = Field(
        default=None, description="Bytes for adapters on this shard, such as 512MiB."
    )
    adapter_memory_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Part of the free memory of the device that adapters may fill, without --adapter-memory.",
    )
    watermark_gamma: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the vocabulary that the watermark of requests with `watermark` favours.",
    )
    watermark_delta: float = Field(
        default=2.0,
        ge=-1000,
        le=1000,
        description="What the watermark adds to the scores of the tokens it favours.",
    )


class ShardConfig(
    # The help shows the flags of the last class first.
    LogFlags,
    RequestFlags,
    WeightFlags,
    DeviceFlags,
    PlaceFlags,
    BaseSettings,
):
    """The settings of a shard. Environment variables have the field names in capitals; flags override them."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        # No warning about the name of `model_folder`.
        protected_namespaces=(),
    )

    @classmethod
    def from_args(
        cls, argv: Sequence[str], *, command: str = "serve", description: str | None = None
    ) -> Self:
        """Read the command line and the environment; exit 2 with a message when either is wrong."""
        values = read_arguments(
            cls.model_fields,
            argv,
            program=f"millrace-shard {command}",
            description=description or cls.__doc__,
            positional="model_folder",
        )
        try:
            # An empty value counts as absent.
            return cls(**{name: value for name, value in values.items() if value != ""})
        except ValidationError as error:
            refuse(error.errors())
