"""Flags, commands and variables of other servers, with what they are called here."""

from __future__ import annotations

ON = "is on without a flag"
OURS: dict[str, str] = {
    # vLLM, SGLang and LoRAX
    "--model": "--model-id",
    "--model-path": "--model-id",
    "--tensor-parallel-size": "--num-shard",
    "--tp-size": "--num-shard",
    "--tp": "--num-shard",
    "-tp": "--num-shard",
    "--max-model-len": "--max-total-tokens",
    "--context-length": "--max-total-tokens",
    "--gpu-memory-utilization": "--cuda-memory-fraction",
    "--mem-fraction-static": "--cuda-memory-fraction",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--max-num-seqs": "--max-batch-size",
    "--max-running-requests": "--max-batch-size",
    "--max-num-batched-tokens": "--max-batch-prefill-tokens",
    "--chunked-prefill-size": "--max-batch-prefill-tokens",
    "--max-queued-requests": "--max-queue-size",
    "--host": "--hostname",
    "--chat-template": "--tokenizer-config-path",
    "--download-dir": "--huggingface-hub-cache",
    "--disable-radix-cache": "--prefix-caching off",
    "--no-enable-prefix-caching": "--prefix-caching off",
    "--enforce-eager": "--cuda-graphs 0",
    "--disable-cuda-graph": "--cuda-graphs 0",
    "--allowed-origins": "--cors-allow-origin",
    "--speculative-model": "--draft-model",
    "--speculative-draft-model-path": "--draft-model",
    "--num-speculative-tokens": "--speculate",
    "--speculative-num-draft-tokens": "--speculate",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--uvicorn-log-level": "--log-level",
    "--enable-batch-invariance": "--deterministic on",
    "--enable-deterministic-inference": "--deterministic on",
    # LoRAX alone
    "--source": "--adapter-source",
    "--default-adapter-source": "--adapter-source",
    "--preloaded-adapter-source": "--adapter-source",
    "--embedding-model": "--task embed",
    "--speculative-tokens": "--speculate",
    "--compile-batch-size": "--cuda-graphs",
    "--compile-max-batch-size": "--cuda-graphs",
    "--memory-wiggle-room": "--cuda-memory-fraction",
    # llama.cpp
    "-m": "--model-id",
    "--hf-repo": "--model-id",
    "--ctx-size": "--max-total-tokens",
    "-c": "--max-total-tokens",
    "--n-predict": "--default-max-new-tokens",
    "-n": "--default-max-new-tokens",
    "--parallel": "--max-batch-size",
    "-np": "--max-batch-size",
    "--threads": "--cpu-threads",
    "-t": "--cpu-threads",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--model-draft": "--draft-model",
    "-md": "--draft-model",
    "--lora": "--lora-adapters",
    "--alias": "--served-model-name",
    "--verbose": "--log-level debug",
    "-v": "--log-level debug",
}
"""The flag that does the same here, or nearly the same."""
_KERNELS = "the kernels are chosen by the device; --disable-custom-kernels leaves plain PyTorch"
_CORS = (
    "GET and POST are allowed with any header; --cors-allow-origin names the sites that may call"
)
_LOADED = "the model stays loaded until the server ends"
_MODELFILE = "Modelfiles are not read: --model-id FILE.gguf, --lora-adapters, and requests have the parameters"
WORDS: dict[str, str] = {
    "--enable-prefix-caching": f"prefix caching {ON}",
    "--enable-chunked-prefill": f"chunked prefill {ON}",
    "--chunked-prefill": f"chunked prefill {ON}",
    "--enable-auto-tool-choice": f"tool calling {ON}",
    "--enable-metrics": "/metrics is served without a flag",
    "--jinja": "chat templates are used without a flag",
    "--cont-batching": f"continuous batching {ON}",
    "--flash-attn": "the attention kernels are chosen by the device",
    "--n-gpu-layers": "the whole model runs on one device: --device",
    "-ngl": "the whole model runs on one device: --device",
    "--data-parallel-size": "start one server for each replica",
    "--dp-size": "start one server for each replica",
    "--pipeline-parallel-size": "pipeline parallelism is not supported; --num-shard splits every layer",
    # LoRAX
    "--eager-prefill": "--prefill-order and --target-inter-token-latency weigh prompts against running answers",
    "--compile": "CUDA graphs are on without a flag; --cuda-graphs chooses their sizes",
    "--compile-max-rank": "--max-lora-rank bounds the ranks of adapters",
    "--speculation-max-batch-size": "the number of draft tokens follows the load; --speculate bounds it",
    "--merge-adapter-weights": "adapters are not merged into the weights; --adapter-id names the default adapter",
    "--predibase-api-token": "adapters come from the hub or from folders; HF_TOKEN opens private ones",
    "--backend": _KERNELS,
    "--disable-sgmv": _KERNELS,
    "--cors-allow-header": _CORS,
    "--cors-expose-header": _CORS,
    "--cors-allow-method": _CORS,
    "--cors-allow-credentials": "credentials are the API key; --cors-allow-origin names the sites that may call",
    "--download-only": "`millrace download MODEL` fetches a model and ends",
    # Ollama
    "--keepalive": _LOADED,
    "--modelfile": _MODELFILE,
    "--insecure": "HF_ENDPOINT names the hub to download from",
    "--hidethinking": "requests have include_reasoning: false",
    "--think": "requests have reasoning_effort",
    "--format": "requests have response_format",
    "serve": "the model is served without a command: --model-id MODEL",
    "run": "`millrace chat MODEL` chats in the terminal",
    "pull": "`millrace download MODEL` fetches a model",
    "create": _MODELFILE,
    "list": "GET /v1/models lists what is served",
    "ls": "GET /v1/models lists what is served",
    "ps": "GET /status shows how busy the server is",
    "show": "GET /info describes the model",
    "stop": "Ctrl-C or SIGTERM ends the server",
    "rm": "models are in the hub's cache; `hf cache` removes them",
    "cp": "--served-model-name gives the model further names",
    "push": "models are not uploaded",
}
"""Hints where no flag corresponds, or the word is a command of Ollama."""
OLLAMA_VARIABLES: dict[str, str] = {
    "OLLAMA_HOST": "HOSTNAME and PORT are read",
    "OLLAMA_ORIGINS": "CORS_ALLOW_ORIGIN is read",
    "OLLAMA_MODELS": "HUGGINGFACE_HUB_CACHE and HF_HOME are read",
    "OLLAMA_CONTEXT_LENGTH": "MAX_TOTAL_TOKENS is read",
    "OLLAMA_NUM_PARALLEL": "MAX_BATCH_SIZE is read",
    "OLLAMA_MAX_QUEUE": "MAX_QUEUE_SIZE is read",
    "OLLAMA_KV_CACHE_TYPE": "KV_CACHE_DTYPE is read",
    "OLLAMA_KEEP_ALIVE": _LOADED,
    "OLLAMA_MAX_LOADED_MODELS": "a server has one model",
    "OLLAMA_FLASH_ATTENTION": "the kernels of the device are chosen at the start",
    "OLLAMA_DEBUG": "LOG_LEVEL is read",
}
"""Variables of Ollama's server, which have no effect here, and what to set instead."""


def tip_for(flag: str) -> str | None:
    """Return what to do in place of another server's flag; None for an unknown one."""
    if flag in OURS:
        return f"the flag is '{OURS[flag]}' here"
    return WORDS.get(flag)
