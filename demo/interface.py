"""The demo model's facts about the server's flags, routes and metrics."""

from __future__ import annotations

from demo.topic import named

FLAGS = [
    (
        "--model-id",
        "The flag --model-id names the model to serve: a hub name or a local folder; without it "
        "this demo model is served.",
    ),
    ("--revision", "The flag --revision picks a branch, tag or commit of the model on the hub."),
    (
        "--tokenizer-name",
        "The flag --tokenizer-name shows the router where the tokenizer is, if it is not with the "
        "model.",
    ),
    (
        "--tokenizer-config-path",
        "The flag --tokenizer-config-path gives another tokenizer_config.json to take the chat "
        "template from.",
    ),
    (
        "--validation-workers",
        "The flag --validation-workers sets how many workers tokenize and check prompts; the "
        "default is 2.",
    ),
    (
        "--num-shard",
        "The flag --num-shard sets how many shards the model is split over by tensor parallelism.",
    ),
    (
        "--sharded",
        "The flag --sharded says whether to split the model over all visible GPUs; it takes true "
        "or false.",
    ),
    (
        "--quantize",
        "The flag --quantize selects a quantization method for the weights: Millrace has int8 on "
        "CPU and refuses TGI's methods, such as awq, gptq or fp8.",
    ),
    (
        "--speculate",
        "The flag --speculate sets the largest number of draft tokens that speculative decoding "
        "proposes for one sequence in a step.",
    ),
    (
        "--dtype",
        "The flag --dtype sets the number format of the weights: float16, bfloat16 or float32.",
    ),
    (
        "--kv-cache-dtype",
        "The flag --kv-cache-dtype stores the KV cache in an fp8 format to save memory; early "
        "versions of Millrace refuse it.",
    ),
    (
        "--kv-memory",
        "The flag --kv-memory sets how many bytes of memory the KV cache of a shard may take, "
        "such as 2G.",
    ),
    (
        "--trust-remote-code",
        "The flag --trust-remote-code is accepted for compatibility with TGI; Millrace never runs "
        "code from a model repository.",
    ),
    (
        "--max-concurrent-requests",
        "The flag --max-concurrent-requests limits how many requests the server accepts at once; "
        "more are answered with 429; the default is 128.",
    ),
    (
        "--max-best-of",
        "The flag --max-best-of sets the largest best_of that a request may ask for; the default "
        "is 2.",
    ),
    (
        "--max-stop-sequences",
        "The flag --max-stop-sequences limits how many stop sequences one request may list; the "
        "default is 4.",
    ),
    (
        "--max-top-n-tokens",
        "The flag --max-top-n-tokens sets the largest top_n_tokens that a request may ask for; "
        "the default is 5.",
    ),
    (
        "--max-input-tokens",
        "The flag --max-input-tokens sets the longest prompt, in tokens, that a request may have.",
    ),
    (
        "--max-input-length",
        "The flag --max-input-length is the old name of --max-input-tokens; do not set both.",
    ),
    (
        "--max-total-tokens",
        "The flag --max-total-tokens limits prompt and answer of one request together, in tokens.",
    ),
    (
        "--waiting-served-ratio",
        "The flag --waiting-served-ratio sets how many requests must wait, relative to the "
        "running ones, before decode pauses for a prefill; chunking makes it unnecessary.",
    ),
    (
        "--max-batch-prefill-tokens",
        "The flag --max-batch-prefill-tokens limits how many prompt tokens one step may compute.",
    ),
    (
        "--max-batch-total-tokens",
        "The flag --max-batch-total-tokens limits the tokens of all running requests together, "
        "which is the size of the KV cache.",
    ),
    (
        "--max-waiting-tokens",
        "The flag --max-waiting-tokens sets after how many decode steps waiting requests are let "
        "in at the latest; the default is 20; chunking makes it unnecessary.",
    ),
    (
        "--max-batch-size",
        "The flag --max-batch-size limits how many sequences run together in one batch.",
    ),
    (
        "--max-client-batch-size",
        "The flag --max-client-batch-size limits how many prompts one call to /v1/completions may "
        "carry; the default is 4.",
    ),
    (
        "--steps-in-flight",
        "The flag --steps-in-flight sets how many steps are sent before the first is answered: 2 "
        "by default, 1 to turn pipelining off.",
    ),
    (
        "--cuda-graphs",
        "The flag --cuda-graphs lists the batch sizes for which CUDA graphs are captured; 0 turns "
        "them off.",
    ),
    (
        "--cuda-memory-fraction",
        "The flag --cuda-memory-fraction sets which part of the GPU's memory may be used; the "
        "default is 1.0.",
    ),
    ("--cpu-threads", "The flag --cpu-threads sets how many threads a forward pass uses on a CPU."),
    ("--device", "The flag --device of the shard chooses where the model runs: auto, cpu or cuda."),
    (
        "--deterministic",
        "The flag --deterministic makes a request's output independent of the other requests in "
        "its batch: on, off or auto.",
    ),
    (
        "--hostname",
        "The flag --hostname sets the IP address to listen on; the default 0.0.0.0 means all of "
        "them.",
    ),
    ("--port", "The flag --port sets the HTTP port of the server; the default is 3000."),
    (
        "--prometheus-port",
        "The flag --prometheus-port is accepted for compatibility with TGI; metrics are served on "
        "the main port.",
    ),
    (
        "--shard-uds-path",
        "The flag --shard-uds-path sets the path of the Unix sockets between router and shards; "
        "the rank is appended.",
    ),
    (
        "--master-shard-uds-path",
        "The flag --master-shard-uds-path gives the router the Unix socket of the first shard.",
    ),
    (
        "--master-addr",
        "The flag --master-addr sets the host where the shards of a tensor-parallel group meet.",
    ),
    (
        "--master-port",
        "The flag --master-port sets the port where the shards of a tensor-parallel group meet; "
        "the default is 29500.",
    ),
    (
        "--huggingface-hub-cache",
        "The flag --huggingface-hub-cache sets the folder where downloaded models are kept.",
    ),
    (
        "--weights-cache-override",
        "The flag --weights-cache-override names a local folder to load the weights from instead "
        "of the hub cache.",
    ),
    (
        "--disable-custom-kernels",
        "The flag --disable-custom-kernels runs the model on plain PyTorch operators only.",
    ),
    (
        "--rope-scaling",
        "The flag --rope-scaling stretches rotary positions for longer contexts: linear or "
        "dynamic.",
    ),
    (
        "--rope-factor",
        "The flag --rope-factor sets by how much --rope-scaling stretches the positions.",
    ),
    ("--json-output", "The flag --json-output writes logs as JSON, one object per line."),
    (
        "--log-level",
        "The flag --log-level sets the least severity that is logged, such as info or debug.",
    ),
    (
        "--otlp-endpoint",
        "The flag --otlp-endpoint sets the collector that OpenTelemetry traces are sent to.",
    ),
    (
        "--otlp-service-name",
        "The flag --otlp-service-name sets the service name that traces carry.",
    ),
    (
        "--cors-allow-origin",
        "The flag --cors-allow-origin lists the web origins whose pages may call the server; none "
        "given means any.",
    ),
    (
        "--api-key",
        "The flag --api-key sets the key that clients must send as a Bearer token in the "
        "Authorization header.",
    ),
    (
        "--watermark-gamma",
        "The flag --watermark-gamma sets which share of the vocabulary a watermark favours.",
    ),
    (
        "--watermark-delta",
        "The flag --watermark-delta sets how much a watermark raises the scores of favoured "
        "tokens.",
    ),
    (
        "--ngrok",
        "The flag --ngrok opened a public tunnel in early TGI; it no longer works there and "
        "Millrace refuses it.",
    ),
    (
        "--disable-grammar-support",
        "The flag --disable-grammar-support makes the server refuse requests with a grammar or "
        "tools.",
    ),
    (
        "--env",
        "The flag --env prints facts about the machine and the build at the start, for bug "
        "reports.",
    ),
    (
        "--lora-adapters",
        "The flag --lora-adapters lists the LoRA adapters to load, separated by commas; early "
        "versions of Millrace refuse it.",
    ),
    (
        "--usage-stats",
        "The flag --usage-stats controls usage statistics in TGI; Millrace accepts it and never "
        "sends any.",
    ),
    (
        "--payload-limit",
        "The flag --payload-limit sets the largest request body in bytes; the default is 2000000.",
    ),
    (
        "--enable-prefill-logprobs",
        "The flag --enable-prefill-logprobs lets requests ask for the logprobs of their prompt.",
    ),
    (
        "--graceful-termination-timeout",
        "The flag --graceful-termination-timeout sets how many seconds running requests get to "
        "finish after SIGTERM; the default is 90.",
    ),
    (
        "--max-image-fetch-size",
        "The flag --max-image-fetch-size sets the largest image, in bytes, that is fetched for a "
        "request.",
    ),
]

ROUTES = [
    (
        "/generate",
        "POST /generate takes inputs and parameters as JSON and returns the whole generated text "
        "at once.",
    ),
    (
        "/generate_stream",
        "POST /generate_stream takes the same JSON as /generate and streams the tokens as "
        "server-sent events.",
    ),
    ("/tokenize", "POST /tokenize returns the tokens of a text with their ids and positions."),
    (
        "/chat_tokenize",
        "POST /chat_tokenize applies the chat template to messages and returns the text and its "
        "tokens.",
    ),
    ("/health", "GET /health answers 200 when the server works and 503 when it does not."),
    ("/ping", "GET /ping is another name for /health, used by SageMaker."),
    ("/info", "GET /info returns the model's name and the limits of the server as JSON."),
    ("/metrics", "GET /metrics returns counters, gauges and histograms in Prometheus text format."),
    (
        "/v1/chat/completions | chat completions | the chat completions API",
        "POST /v1/chat/completions is the OpenAI chat route: it takes messages and returns the "
        "assistant's reply, streamed if you ask.",
    ),
    (
        "/v1/completions | the completions API",
        "POST /v1/completions is the OpenAI completion route: it continues one or several prompts "
        "without a chat template.",
    ),
    ("/v1/models", "GET /v1/models lists the served model in OpenAI's format."),
    (
        "/invocations",
        "POST /invocations is the route that SageMaker calls; its body may be of any generation "
        "route.",
    ),
    (
        "/vertex",
        "POST /vertex is the route for Google's Vertex AI; its body holds a list of instances.",
    ),
    ("/docs", "GET /docs shows the API description as a web page."),
    (
        "POST / | the root route",
        "POST / works like /generate, or streams if the body says stream: true; it is kept for "
        "older clients.",
    ),
]

METRICS = [
    ("tgi_request_count", "The metric tgi_request_count counts all generation requests."),
    (
        "tgi_request_success",
        "The metric tgi_request_success counts the requests that finished normally.",
    ),
    (
        "tgi_request_failure",
        "The metric tgi_request_failure counts failed requests, with the kind of failure in the "
        "label err.",
    ),
    (
        "tgi_request_duration",
        "The metric tgi_request_duration measures the time from a request's arrival to its end.",
    ),
    (
        "tgi_request_validation_duration",
        "The metric tgi_request_validation_duration measures the time from a request's arrival "
        "until it is queued.",
    ),
    (
        "tgi_request_queue_duration",
        "The metric tgi_request_queue_duration measures how long requests wait in the queue.",
    ),
    (
        "tgi_request_inference_duration",
        "The metric tgi_request_inference_duration measures the time from leaving the queue to "
        "the last token.",
    ),
    (
        "tgi_request_mean_time_per_token_duration",
        "The metric tgi_request_mean_time_per_token_duration measures the inference time divided "
        "by the number of generated tokens.",
    ),
    (
        "tgi_request_generated_tokens",
        "The metric tgi_request_generated_tokens is a histogram of how many tokens requests "
        "generate.",
    ),
    (
        "tgi_request_input_length",
        "The metric tgi_request_input_length is a histogram of prompt lengths in tokens.",
    ),
    (
        "tgi_request_max_new_tokens",
        "The metric tgi_request_max_new_tokens is a histogram of the max_new_tokens that requests "
        "ask for.",
    ),
    (
        "tgi_request_skipped_tokens",
        "The metric tgi_request_skipped_tokens counts the extra tokens that speculation gains per "
        "step.",
    ),
    (
        "tgi_queue_size",
        "The metric tgi_queue_size is the number of requests that wait in the queue now.",
    ),
    (
        "tgi_batch_next_size",
        "The metric tgi_batch_next_size is a histogram of how many requests join the batch at "
        "once.",
    ),
    (
        "tgi_batch_current_size",
        "The metric tgi_batch_current_size is the number of requests in the running batch; 0 "
        "means idle.",
    ),
    (
        "tgi_batch_current_max_tokens",
        "The metric tgi_batch_current_max_tokens is the number of tokens reserved by the running "
        "batch.",
    ),
    (
        "tgi_batch_concat",
        "The metric tgi_batch_concat counts how often new requests join a running batch, with the "
        "reason as label.",
    ),
    (
        "tgi_batch_inference_duration",
        "The metric tgi_batch_inference_duration measures the time of each prefill and decode "
        "call as the router sees it.",
    ),
    (
        "tgi_batch_inference_count",
        "The metric tgi_batch_inference_count counts the prefill and decode calls.",
    ),
    (
        "tgi_batch_forward_duration",
        "The metric tgi_batch_forward_duration measures the time of the model's forward pass in "
        "the shard.",
    ),
    (
        "tgi_batch_decode_duration",
        "The metric tgi_batch_decode_duration measures the time that choosing tokens takes after "
        "the forward pass.",
    ),
    (
        "tgi_batch_filter_duration",
        "The metric tgi_batch_filter_duration measures the time to deliver tokens and drop "
        "finished requests.",
    ),
]

TOPICS = named("flag", FLAGS) + named("route", ROUTES) + named("metric", METRICS)
