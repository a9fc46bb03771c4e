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
    "--no-cache-prompt": "--prefix-caching off",
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
    "--quantization": "--quantize",
    "--model-name": "--served-model-name",
    "--tokenizer": "--tokenizer-name",
    "--tokenizer-path": "--tokenizer-name",
    "-mm": "--mmproj",
    "--max-prefill-tokens": "--max-batch-prefill-tokens",
    "--is-embedding": "--task embed",
    "--cuda-graph-max-bs": "--cuda-graphs",
    "--cuda-graph-sizes": "--cuda-graphs",
    "--watchdog-timeout": "--step-timeout",
    "--scheduling-policy": "--prefill-order",
    "--schedule-policy": "--prefill-order",
    "--enable-log-requests": "--log-requests",
    "--enable-prefill-logprob": "--enable-prefill-logprobs",
    "--tokenizer-revision": "--revision",
    "--code-revision": "--revision",
    "--cuda-graph-bs": "--cuda-graphs",
    "--cudagraph-capture-sizes": "--cuda-graphs",
    "--max-cudagraph-capture-size": "--cuda-graphs",
    "--max-seq-len-to-capture": "--cuda-graphs",
    "--shutdown-timeout": "--graceful-termination-timeout",
    "--kv-events-config": "--kv-events",
    "--cpu-kvcache-space": "--kv-memory",
    "--max-loaded-loras": "--max-cpu-loras",
    "--admin-api-key": "--admin-key",
    "--oltp-traces-endpoint": "--otlp-endpoint",
    "--log-level-http": "--log-level",
    "--nccl-port": "--master-port",
    "--dist-timeout": "--step-timeout",
    "--runner": "--task",
    # LoRAX alone
    "--default-adapter-source": "--adapter-source",
    "--embedding-model": "--task embed",
    "--speculative-tokens": "--speculate",
    "--compile-batch-size": "--cuda-graphs",
    "--compile-max-batch-size": "--cuda-graphs",
    "--memory-wiggle-room": "--cuda-memory-fraction",
    # llama.cpp
    "-m": "--model-id",
    "-mu": "--model-id",
    "--model-url": "--model-id",
    "-hf": "--model-id",
    "-hfr": "--model-id",
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
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--model-draft": "--draft-model",
    "-md": "--draft-model",
    "--draft": "--speculate",
    "--draft-max": "--speculate",
    "--draft-n": "--speculate",
    "--batch-size": "--max-batch-prefill-tokens",
    "-b": "--max-batch-prefill-tokens",
    "--ubatch-size": "--max-batch-prefill-tokens",
    "-ub": "--max-batch-prefill-tokens",
    "--embedding": "--task embed",
    "--embeddings": "--task embed",
    "--chat-template-file": "--tokenizer-config-path",
    "--api-prefix": "--root-path",
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
    "--reasoning-format": "--reasoning-parser",
    "--rope-scale": "--rope-factor",
    "--json-model-override-args": "--hf-overrides",
    "--predict": "--default-max-new-tokens",
    "--threads-batch": "--cpu-threads",
    "-tb": "--cpu-threads",
    "--hf-repo-draft": "--draft-model",
    "-hfd": "--draft-model",
    "-hfrd": "--draft-model",
    "--embedding-only": "--task embed",
    "--rerank": "--task score",
    "--reranking": "--task score",
    "--log-colors": "--log-colorize",
    "--log-verbosity": "--log-level",
    "--verbosity": "--log-level",
    "-lv": "--log-level",
    "--lora": "--lora-adapters",
    "--lora-scaled": "--lora-adapters",
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--verbose": "--log-level debug",
    "-v": "--log-level debug",
}
"""The flag that does the same here, or nearly the same."""
_LOADED = "the model stays loaded until the server ends"
_MODELFILE = "Modelfiles are not read: --model-id FILE.gguf, --lora-adapters, and requests have the parameters"
WORDS: dict[str, str] = {
    "--enable-prefix-caching": f"prefix caching {ON}",
    "--enable-chunked-prefill": f"chunked prefill {ON}",
    "--chunked-prefill": f"chunked prefill {ON}",
    "--enable-auto-tool-choice": f"tool calling {ON}",
    "--enable-metrics": "/metrics is served without a flag",
    "--jinja": "chat templates are used without a flag",
    "--base-gpu-id": "CUDA_VISIBLE_DEVICES chooses the GPUs",
    "--cont-batching": f"continuous batching {ON}",
    "-cb": f"continuous batching {ON}",
    "--metrics": "/metrics is served without a flag",
    "--offline": "with HF_HUB_OFFLINE=1 nothing is asked of the hub",
    "--enable-priority-scheduling": "requests have `priority`",
    "--threads-http": "the router needs one thread",
    "--tags": "GET /v1/models lists the names of --served-model-name",
    "--timeout": "requests have no time limit; --max-queue-wait bounds their wait",
    "-to": "requests have no time limit; --max-queue-wait bounds their wait",
    "--pp-size": "pipeline parallelism is not supported; --num-shard splits every layer",
    "--pp": "pipeline parallelism is not supported; --num-shard splits every layer",
    "--pipeline-parallel-size": "pipeline parallelism is not supported; --num-shard splits every layer",
    # LoRAX
    "--eager-prefill": "--prefill-order and --target-inter-token-latency weigh prompts against running answers",
    "--compile": "CUDA graphs are on without a flag; --cuda-graphs chooses their sizes",
    "--compile-max-rank": "--max-lora-rank bounds the ranks of adapters",
    "--speculation-max-batch-size": "the number of draft tokens follows the load; --speculate bounds it",
    "--merge-adapter-weights": "adapters are not merged into the weights; --adapter-id names the default adapter",
    "--predibase-api-token": "adapters come from the hub or from folders; HF_TOKEN opens private ones",
    "--source": "--model-id names a folder, a GGUF file or a model on the hub",
    "--preloaded-adapter-source": "--preloaded-adapter-ids names adapters of the hub, and --lora-adapters folders",
    "--cors-allow-credentials": "credentials are the API key; --cors-allow-origin names the sites that may call",
    "--download-only": "`millrace download MODEL` fetches a model and ends",
    # Ollama
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
_BY_REASON: dict[str, str] = {
    "requests have their own sampling parameters; generation_config.json has the defaults": "--temp --temperature"
    " --top-k --top-p --min-p --typical --typical-p --repeat-penalty --repeat-last-n --presence-penalty"
    " --frequency-penalty --xtc-probability --xtc-threshold --dry-multiplier --dry-base --dry-allowed-length"
    " --samplers --logit-bias -l --ignore-eos --override-generation-config --preferred-sampling-params --sampler-seq"
    " --sampling-seq --dynatemp-range --dynatemp-exp --top-nsigma --top-n-sigma --dry-penalty-last-n"
    " --dry-sequence-breaker --adaptive-target --adaptive-decay --backend-sampling -bs --sampling-defaults"
    " --reverse-prompt -r --n-probs",
    "requests have `seed`": "--seed -s --random-seed",
    "Mirostat is not supported; requests have temperature, top_p, min_p and others": "--mirostat --mirostat-lr"
    " --mirostat-ent",
    "requests have response_format, or grammar on TGI's routes": "--grammar --grammar-file --json-schema -j"
    " --guided-decoding-backend --grammar-backend --structured-outputs-config --json-schema-file -jf"
    " --guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace"
    " --constrained-json-whitespace-pattern --constrained-json-disable-any-whitespace",
    "the kernels are chosen by the device": "--backend --disable-sgmv --attention-backend --sampling-backend"
    " --flash-attn -fa --use-v2-block-manager --cuda-graph-backend --decode-attention-backend"
    " --prefill-attention-backend --fp8-gemm-backend --moe-runner-backend --moe-a2a-backend --moe-backend"
    " --all2all-backend --attention-config --disable-cascade-attn --lora-backend --repack --no-repack -nr --op-offload"
    " --no-op-offload",
    "--one-shot-all-reduce off leaves sums between GPUs to NCCL": "--disable-custom-all-reduce"
    " --enable-custom-all-reduce",
    "the whole model runs on one device: --device": "--n-gpu-layers --gpu-layers -ngl --split-mode -sm --main-gpu -mg"
    " --cpu-offload-gb --swap-space --no-kv-offload -nkvo --cpu-moe -cmoe --override-tensor -ot --list-devices"
    " --kv-offload -kvo --n-cpu-moe -ncmoe --gpu-layers-draft --n-gpu-layers-draft -ngld --device-draft -devd"
    " --cpu-moe-draft -cmoed --override-tensor-draft -otd --offload-group-size",
    "start one server for each replica": "--data-parallel-size --dp-size -dp --dp --enable-dp-attention"
    " --api-server-count -asc --data-parallel-rank -dpn --data-parallel-size-local -dpl --data-parallel-address -dpa"
    " --data-parallel-rpc-port --data-parallel-backend --data-parallel-hybrid-lb --data-parallel-external-lb"
    " --headless --load-balance-method --uvicorn-workers --tokenizer-worker-num",
    "--num-shard splits every layer, experts included": "--enable-expert-parallel --ep-size --expert-parallel-size"
    " --tensor-split -ts --enable-eplb --eplb-config --num-redundant-experts --ep-num-redundant-experts"
    " --enable-ep-moe --enable-deepep-moe --deepep-mode --expert-placement-strategy --enable-dbo"
    " --decode-context-parallel-size -dcp",
    "ranks on several hosts are started by `millrace-launcher shards`": "--nnodes --node-rank"
    " --dist-init-addr --distributed-executor-backend",
    "weights are read from safetensors or a GGUF file, without a flag": "--load-format --config-format --model-impl"
    " --tokenizer-mode --skip-tokenizer-init --safetensors-load-strategy --ignore-patterns --use-tqdm-on-load"
    " --pt-load-map-location --model-loader-extra-config --max-parallel-loading-workers --check-tensors --override-kv"
    " --hf-config-path",
    "weights are mapped from the file, and stay in memory": "--mlock --no-mmap --enable-sleep-mode --mmap --direct-io"
    " -dio --enable-memory-saver --delete-ckpt-after-loading",
    "--draft-model names the draft model, --speculator a head or mtp, and --speculate the number of draft tokens": ""
    "--speculative-config"
    " --speculative-algorithm --draft-min --draft-n-min --draft-p-min --draft-p-split --spec-replace"
    " --lookup-cache-static -lcs --lookup-cache-dynamic -lcd --cache-type-k-draft -ctkd --cache-type-v-draft -ctvd"
    " --ctx-size-draft -cd --threads-draft -td --threads-batch-draft -tbd --speculative-num-steps"
    " --speculative-eagle-topk --speculative-token-map --num-lookahead-slots --ngram-prompt-lookup-max"
    " --ngram-prompt-lookup-min",
    "steps are pipelined without a flag; --steps-in-flight bounds them": "--async-scheduling --num-scheduler-steps"
    " --disable-overlap-schedule --enable-torch-compile --compilation-config --use-async-output-proc"
    " --disable-async-output-proc --num-continuous-decode-steps --enable-mixed-chunk --enable-two-batch-overlap"
    " --enable-single-batch-overlap --multi-step-stream-outputs -O --optimization-level -cc --torch-compile-max-bs",
    "requests are logged only with --log-requests": "--disable-log-requests --disable-log-stats --enable-log-outputs"
    " --log-requests-level --log-requests-format --max-log-len",
    "--mmproj FILE names the file that reads images, and --mmproj off none": "-mmu --mmproj-url --no-mmproj"
    " --no-mmproj-auto",
    "the mmproj file next to a GGUF file is read without a flag": "--mmproj-auto",
    "images are read where the model reads them; sound and video are refused": "--limit-mm-per-prompt"
    " --mm-processor-kwargs --enable-multimodal --mmproj-offload --no-mmproj-offload"
    " --image-min-tokens --image-max-tokens --mm-processor-cache-gb --disable-mm-preprocessor-cache"
    " --mm-encoder-tp-mode --interleave-mm-strings --skip-mm-profiling --media-io-kwargs --media-path"
    " --allowed-local-media-path --allowed-media-domains --mm-process-config --mm-attention-backend --enable-mm-embeds"
    " --video-pruning-rate",
    "--max-top-n-tokens bounds the log probabilities of a request": "--max-logprobs",
    "--kv-memory sets the size of the KV cache": "--num-gpu-blocks-override --block-size --page-size --num-gpu-blocks"
    " --kv-unified -kvu --no-kv-unified --swa-full --kv-offloading-size --kv-offloading-backend --cache-ram -cram"
    " --enable-hierarchical-cache --hicache-ratio --hicache-size",
    "HF_TOKEN is read": "--hf-token -hft",
    "--model-id ORG/REPO:TYPE names a GGUF file on the hub by its block type": "--hf-file -hff",
    "thoughts are separated by the model's format; --reasoning-parser chooses another": "--enable-reasoning",
    "requests have thinking_token_budget": "--reasoning-budget",
    "the content of a message is text or a list of parts, whatever the template": "--chat-template-content-format"
    " --response-role",
    "the model's own position encoding is read; --rope-scaling and --rope-factor replace it": "--rope-theta"
    " --rope-freq-base --rope-freq-scale --yarn-ext-factor --yarn-orig-ctx",
    "GET and POST are allowed with any header; --cors-allow-origin names the sites that may call": ""
    "--cors-allow-header --cors-expose-header --cors-allow-method --allowed-methods --allowed-headers"
    " --allow-credentials",
    "requests have chat_template_kwargs": "--chat-template-kwargs --default-chat-template-kwargs",
    "a prompt that does not fit is refused, and an answer ends where the context ends": "--context-shift"
    " --no-context-shift --keep --grp-attn-n -gan --grp-attn-w -gaw --defrag-thold -dt --allow-auto-truncate",
    "the server warms up before it is ready": "--warmup --no-warmup --skip-server-warmup --warmups",
    "prefix caching is on without a flag, for all requests": "--cache-prompt --cache-reuse --slot-prompt-similarity"
    " -sps --prefix-caching-hash-algo --radix-eviction-policy",
    "GET /status shows what runs": "--slots --no-slots --props --slots-endpoint-disable",
    "the state of a request is not kept: a prompt that comes again finds its prefix cached": "--slot-save-path"
    " --ctx-checkpoints --swa-checkpoints",
    "the pages are part of the server; a proxy can hide them (docs/operate.md)": "--webui --no-webui --webui-config"
    " --webui-config-file --path --disable-fastapi-docs",
    "threads follow the CPUs of the process, which taskset or numactl choose; --cpu-threads sets their number": ""
    "--cpu-mask -C --cpu-range -Cr --cpu-strict --prio --poll --numa --numa-node --cpu-mask-batch -Cb"
    " --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch",
    "the log goes to stdout; --log-level and --json-output choose what it has": "--log-disable --log-file --log-prefix"
    " --log-timestamps --log-config-file --log-format --disable-uvicorn-access-log --disable-access-log-for-endpoints",
    "control vectors are not supported; --lora-adapters names adapters": "--control-vector --control-vector-scaled"
    " --control-vector-layer-range",
    "prompts and answers are computed by the same shards": "--disaggregation-mode --disaggregation-transfer-backend"
    " --disaggregation-bootstrap-port --kv-transfer-config --ec-transfer-config --enable-lmcache",
    "code of plug-ins is not loaded": "--logits-processors --logits-processor-pattern --enable-custom-logit-processor"
    " --reasoning-parser-plugin --tool-parser-plugin --worker-cls --worker-extension-cls --scheduler-cls --middleware"
    " --io-processor-plugin --custom-weight-loader --forward-hooks",
    "adapters need no such flag: --lora-adapters, --max-lora-rank and --adapter-memory": "--lora-dtype"
    " --lora-extra-vocab-size --fully-sharded-loras --long-lora-scaling-factors --lora-init-without-apply"
    " --max-lora-chunk-size --lora-target-modules --lora-eviction-policy --qlora-adapter-name-or-path",
    "each token is sent at once": "--stream-interval --stream-output --incremental-streaming-output",
    "`usage` of an answer has the cached tokens": "--enable-prompt-tokens-details --enable-cache-report",
    "speech is not supported": "--model-vocoder -mv --hf-repo-v -hfv -hfrv --hf-file-v -hffv --tts-use-guide-tokens",
    "a server has one model": "--models-dir --models-preset --models-max --no-models-autoload",
    "weights and KV cache are sized by the free memory": "--fit -fit --fit-target -fitt --fit-ctx -fitc",
    _LOADED: "--keepalive --keep-alive --sleep-idle-seconds --sleep-on-idle",
    _MODELFILE: "--modelfile --file -f --system --template --parameters",
}
"""Hints by their text, with the flags of vLLM, SGLang, llama.cpp, LoRAX and Ollama that they are for."""
WORDS |= {flag: reason for reason, flags in _BY_REASON.items() for flag in flags.split()}
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
    """Return what to do in place of another server's flag or command, whose words `_` may join; None if unknown."""
    flag = flag.replace("_", "-")
    if flag in OURS:
        return f"the flag is '{OURS[flag]}' here"
    return WORDS.get(flag)
