"""Flags of other servers, with what they are called here."""

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
    "--source": "--adapter-source",
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
WORDS: dict[str, str] = {
    "--enable-prefix-caching": f"prefix caching {ON}",
    "--enable-chunked-prefill": f"chunked prefill {ON}",
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
}
"""What to know where there is no flag."""


def tip_for(flag: str) -> str | None:
    """Return what to do in place of another server's flag; None for an unknown one."""
    if flag in OURS:
        return f"the flag is '{OURS[flag]}' here"
    return WORDS.get(flag)
