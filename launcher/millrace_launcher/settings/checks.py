"""Checks for contradictory and unsupported settings, and for settings without effect."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.settings.arguments import Settings
from millrace_launcher.settings.flags import WIRING
from millrace_launcher.settings.foreign_flags import OLLAMA_VARIABLES
from millrace_proto.flags import option_name
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

UNSUPPORTED = {"quantize": ("exl2",)}
"""Values of flags that are refused."""
WITHOUT_EFFECT = {
    "usage_stats": "no usage statistics are ever sent",
    "prometheus_port": "metrics are served on --port",
    "ngrok_authtoken": "it is used with --ngrok only",
    "ngrok_edge": "it is used with --ngrok only",
    "max_image_fetch_size": "--max-image-bytes limits images, whether they are fetched or sent",
    "max_cpu_loras": "--adapter-cache-size bounds the copies of adapters that are kept",
    "trust_remote_code": "code from a model repository is never run; a model that needs it is refused",
    "waiting_served_ratio": "prompts are computed in chunks, so running answers never wait for them",
    "max_waiting_tokens": "prompts are computed in chunks, so they never wait for running answers",
    "prefill_chunking": "prompts are always computed in chunks alongside running answers",
}
WITHOUT_EFFECT_ON_CPU = {
    "cuda_graphs": "the model runs on CPU; there is nothing to capture",
    "disable_operators": "the model runs on CPU, which takes none of them",
    "cuda_memory_fraction": "the model runs on CPU; --kv-memory bounds the KV cache",
    "one_shot_all_reduce": "the model runs on CPU; there is no memory of GPUs to share",
}
WITHOUT_EFFECT_ELSEWHERE = dict.fromkeys(
    ShardConfig.model_fields.keys()
    - RouterConfig.model_fields.keys()
    - WIRING["shard"]
    - {"allow_insecure_tcp", "allow_unlisted_model", "enable_lora"},
    "the shards run elsewhere; give it to `millrace-launcher shards` there",
)
_KERNELS = "the kernels of the device are chosen at the start"
_NO_EXLLAMA = "the kernels for GPTQ weights are our own"
_NO_AMD = "there are no kernels for AMD GPUs"
_SAGEMAKER = "only the image for SageMaker reads it"
VARIABLES_WITHOUT_EFFECT = {
    "ATTENTION": _KERNELS,
    "USE_FLASH_ATTENTION": f"{_KERNELS}; DISABLE_CUSTOM_KERNELS leaves plain torch",
    "FLASH_INFER": _KERNELS,
    "FLASH_DECODING": _KERNELS,
    "USE_PREFIX_CACHING": "PREFIX_CACHING is read",
    "TGI_WIGGLE_ROOM": "KV_MEMORY and CUDA_MEMORY_FRACTION bound the KV cache",
    "XPU_MEMORY_FRACTION": "there are no kernels for Intel GPUs",
    "REQUEST_LOGPROBS": "ENABLE_PREFILL_LOGPROBS is read",
    "EXLLAMA_VERSION": _NO_EXLLAMA,
    "DISABLE_EXLLAMA": _NO_EXLLAMA,
    "ROCM_USE_FLASH_ATTN_V2_TRITON": _NO_AMD,
    "ROCM_USE_CUSTOM_PAGED_ATTN": _NO_AMD,
    "ROCM_USE_SKINNY_GEMM": _NO_AMD,
    "PYTORCH_TUNABLEOP_ENABLED": _NO_AMD,
    "PYTORCH_TUNABLEOP_TUNING": _NO_AMD,
    "PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP": _NO_AMD,
    "PYTORCH_TUNABLEOP_SEQLENS": _NO_AMD,
    "DEBUG": "shards always form a real process group",
    "HF_HUB_ENABLE_HF_TRANSFER": "the hub's client downloads with hf_xet",
    "HF_HUB_USER_AGENT_ORIGIN": "no usage statistics are ever sent; only the hub's client names it in downloads",
    "HF_MODEL_ID": f"{_SAGEMAKER}; MODEL_ID names the model",
    "HF_MODEL_REVISION": f"{_SAGEMAKER}; REVISION is read",
    "HF_MODEL_QUANTIZE": f"{_SAGEMAKER}; QUANTIZE is read",
    "HF_MODEL_TRUST_REMOTE_CODE": "code from a model repository is never run",
    "SM_NUM_GPUS": f"{_SAGEMAKER}; NUM_SHARD is read",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "the routes that load and unload adapters need ADMIN_KEY",
}
"""Variables of TGI, of its image for SageMaker, or of vLLM, that are not flags."""


def check(settings: Settings) -> None:
    """Raise ArgumentValidation for the first setting that cannot be served."""
    _refuse_unsupported(settings)
    router, launcher = settings.router, settings.launcher
    if launcher.max_input_length is not None and router.max_input_tokens is not None:
        raise ArgumentValidation(
            f"both `max_input_tokens`({router.max_input_tokens}) and `max_input_length`({launcher.max_input_length})"
            " are set; `max_input_length` is the old name, keep `max_input_tokens`"
        )
    longest_input = router.max_input_tokens or launcher.max_input_length
    total = router.max_total_tokens
    if longest_input is not None and total is not None and longest_input >= total:
        raise ArgumentValidation(
            f"`max_input_tokens`({longest_input}) must be < `max_total_tokens`({total})"
        )
    if router.validation_workers < 1:
        raise ArgumentValidation("`validation_workers` must be > 0")
    if router.max_batch_size is not None and router.max_batch_size < 1:
        raise ArgumentValidation("`max_batch_size` must be > 0")
    prefill = router.max_batch_prefill_tokens
    capacity = router.max_batch_total_tokens
    if capacity is not None:
        if total is not None and total > capacity:
            raise ArgumentValidation(
                f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {capacity}"
            )
        if prefill is not None and prefill > capacity:
            raise ArgumentValidation(
                "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`."
                f" Given: {prefill} and {capacity}"
            )
    if router.port == 0:
        raise ArgumentValidation("`port` must be > 0")
    check_elsewhere(settings)
    _check_files(settings)


FILES = (*("tokenizer_config_path", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),)
FOLDERS = ("adapter_root", "weights_cache_override")


def _check_files(settings: Settings) -> None:
    """Raise ArgumentValidation for a file or folder that is missing: the router would notice after the weights."""
    for name in (*FILES, *FOLDERS):
        path: Path | None = getattr(settings.router, name, None) or getattr(
            settings.launcher, name, None
        )
        if path is None:
            continue
        path, kind = path.expanduser(), "file" if name in FILES else "folder"
        if not path.exists():
            raise ArgumentValidation(f"`{name}`: there is no {kind} {path}")
        if path.is_dir() != (kind == "folder"):
            raise ArgumentValidation(f"`{name}`: {path} is not a {kind}")
        if not os.access(path, os.R_OK):
            raise ArgumentValidation(f"`{name}`: {path} cannot be read")
    for adapter in settings.router.registered_adapters:
        if adapter.path.startswith(("/", "./", "../", "~")):
            folder = Path(adapter.path).expanduser()
            if not folder.is_dir():
                raise ArgumentValidation(f"adapter {adapter.name}: {folder} is not a folder")


def notices(
    settings: Settings, *, on_cpu: bool, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A line for each flag, and for each variable of another server in `os.environ`, that is set but has no effect."""
    environ = os.environ if environ is None else environ
    reasons = (
        WITHOUT_EFFECT
        | (WITHOUT_EFFECT_ON_CPU if on_cpu else {})
        | (WITHOUT_EFFECT_ELSEWHERE if settings.launcher.remote_shards else {})
    )
    for name in sorted(settings.chosen & reasons.keys()):
        yield f"{option_name(name)} has no effect: {reasons[name]}"
    for variable, reason in (VARIABLES_WITHOUT_EFFECT | OLLAMA_VARIABLES).items():
        if environ.get(variable):
            yield f"{variable} has no effect: {reason}"


def _refuse_unsupported(settings: Settings) -> None:
    for name, values in UNSUPPORTED.items():
        value = getattr(settings.shard, name)
        if value in values:
            raise ArgumentValidation(
                f"{option_name(name)} {value} is not supported yet; start without it"
            )
    router = settings.router
    if router.ngrok:
        if router.ngrok_authtoken is None:
            raise ArgumentValidation("`ngrok-authtoken` must be set when using ngrok tunneling")
        if router.ngrok_edge is None:
            raise ArgumentValidation("`ngrok-edge` must be set when using ngrok tunneling")
        raise ArgumentValidation("--ngrok is not supported; run the ngrok agent next to the server")


LAST_PORT = 65535


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port; raises ArgumentValidation, which names the `flag`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ArgumentValidation(f"`{flag}` {address} lacks a port; it must be HOST:PORT")
    if not 0 < int(port) <= LAST_PORT:
        raise ArgumentValidation(f"`{flag}` {address}: a port is 1 to {LAST_PORT}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_elsewhere(settings: Settings) -> None:
    """Raise ArgumentValidation for flags about shards on other hosts that contradict each other or miss some."""
    launcher = settings.launcher
    if launcher.cluster is None:
        if "shards_per_node" in settings.chosen:
            raise ArgumentValidation("`shards_per_node` is for --cluster")
    elif launcher.remote_shards:
        raise ArgumentValidation("`cluster` places the shards itself; leave out --remote-shards")
    elif (launcher.num_shard or 1) % launcher.shards_per_node:
        raise ArgumentValidation(
            f"`num_shard`({launcher.num_shard or 1}) must be a multiple of"
            f" `shards_per_node`({launcher.shards_per_node})"
        )
    _check_addresses(settings)


def _check_addresses(settings: Settings) -> None:
    launcher, router, shard = settings.launcher, settings.router, settings.shard
    addresses = launcher.remote_shards
    files = {
        "shard_tls_cert": router.shard_tls_cert,
        "shard_tls_key": router.shard_tls_key,
        "shard_tls_ca": router.shard_tls_ca,
    }
    given = [name for name, path in files.items() if path is not None]
    if not addresses:
        if given:
            raise ArgumentValidation(f"`{given[0]}` is for --remote-shards")
        return
    hosts = [split_address(address, "remote_shards")[0] for address in addresses]
    doubled = sorted({address for address in addresses if addresses.count(address) > 1})
    if doubled:
        raise ArgumentValidation(f"`remote_shards` has {doubled[0]} twice; each rank has its own")
    if launcher.num_shard not in {None, len(addresses)}:
        raise ArgumentValidation(
            f"`num_shard` is {launcher.num_shard}, and `remote_shards` has {len(addresses)} addresses"
        )
    exposed = [host for host in hosts if not is_loopback(host)]
    if exposed and not given and not shard.allow_insecure_tcp:
        raise ArgumentValidation(
            f"prompts would go to {exposed[0]} in clear text: give --shard-tls-cert, --shard-tls-key and"
            " --shard-tls-ca, or --allow-insecure-tcp if no one else can read that network"
        )
