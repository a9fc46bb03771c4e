"""The demo model's facts about text-generation serving and about Millrace's parts."""

from __future__ import annotations

from demo.topic import named

SERVING = [
    (
        "prefill | the prefill phase | What happens during prefill?",
        "Prefill is the first phase of a request: the model reads all prompt tokens at once, "
        "fills the KV cache and produces the first new token.",
    ),
    (
        "decode | the decode phase | decoding | What happens during decode?",
        "Decode is the phase after prefill: each step feeds the newest token to the model and "
        "produces one more token per sequence, reusing the KV cache.",
    ),
    (
        "a KV cache | the KV cache | KV cache | kv-cache | Why do we need a KV cache? | Why is "
        "the KV cache useful?",
        "The KV cache keeps the attention keys and values of all earlier tokens, so that each "
        "step computes only the newest token instead of the whole text.",
    ),
    (
        "continuous batching | in-flight batching | Why is continuous batching fast?",
        "Continuous batching lets requests join and leave the running batch at every step, so "
        "short answers never wait for long ones and the device stays busy.",
    ),
    (
        "static batching | What is the problem with static batching?",
        "Static batching runs a fixed group of requests until all of them are done, so finished "
        "sequences waste their places until the longest one ends.",
    ),
    (
        "a batch | batching | Why do servers batch requests?",
        "A batch is a set of sequences that run through the model together, which shares the cost "
        "of reading the weights among them.",
    ),
    (
        "chunked prefill | prefill chunking | Why are prompts cut into chunks?",
        "Chunked prefill cuts a long prompt into pieces and computes them next to running "
        "decodes, so that one long prompt does not stall the other streams.",
    ),
    (
        "paged attention | PagedAttention | paged KV memory",
        "Paged attention stores the KV cache in blocks of fixed size that need not be neighbours "
        "in memory, so little memory is lost to fragmentation.",
    ),
    (
        "a KV block | KV blocks | a block of the KV cache | How big is a KV block?",
        "A KV block is a fixed number of token places in the KV cache; a sequence owns a list of "
        "blocks and grows block by block.",
    ),
    (
        "a block table | the block table | block tables",
        "A block table lists, for each sequence, which KV blocks hold its tokens, so that "
        "attention can find keys and values anywhere in memory.",
    ),
    (
        "prefix caching | the prefix cache | a prefix cache | Why is prefix caching useful?",
        "Prefix caching keeps the KV blocks of finished prompts, so that a new prompt with the "
        "same beginning skips that part of its prefill.",
    ),
    (
        "preemption | What happens when KV blocks run out?",
        "Preemption frees the KV blocks of the youngest sequence when memory runs out; the "
        "sequence waits and later continues where it stopped.",
    ),
    (
        "replay | request replay | How does a request survive a shard restart?",
        "Replay admits a sequence again as a prompt of everything so far, so a request continues "
        "after preemption or a restart without losing a token.",
    ),
    (
        "TTFT | time to first token | the time to first token",
        "TTFT, the time to first token, is the time from a request's arrival to its first "
        "generated token; queueing and prefill decide it.",
    ),
    (
        "ITL | inter-token latency | time per output token",
        "ITL, the inter-token latency, is the time between two tokens of one stream; it shows how "
        "smoothly an answer flows.",
    ),
    (
        "throughput | token throughput | tokens per second",
        "Throughput is the number of tokens a server generates per second over all requests; "
        "larger batches raise it.",
    ),
    (
        "latency | request latency",
        "Latency is the time a client waits: for the first token, between tokens, or for the "
        "whole answer.",
    ),
    (
        "goodput | serving goodput",
        "Goodput is the throughput of requests that also meet their latency goals, so it counts "
        "only useful work.",
    ),
    (
        "tensor parallelism | TP | tensor parallel inference | How is a model split over several "
        "GPUs?",
        "Tensor parallelism splits each weight matrix over several shards, which compute their "
        "parts at the same time and combine them with an all-reduce.",
    ),
    (
        "pipeline parallelism | PP",
        "Pipeline parallelism gives each device some whole layers and passes activations from one "
        "to the next; Millrace uses tensor parallelism instead.",
    ),
    (
        "an all-reduce | all-reduce | allreduce",
        "An all-reduce adds up a tensor over all shards and gives the sum to each of them; tensor "
        "parallel layers end with one.",
    ),
    (
        "NCCL | the NCCL library",
        "NCCL is NVIDIA's library for exchanging tensors between GPUs; shards on CUDA use it for "
        "the all-reduce.",
    ),
    (
        "gloo | the gloo backend",
        "Gloo is the exchange library that torch uses on CPUs; shards without GPUs use it for the "
        "all-reduce.",
    ),
    (
        "greedy decoding | greedy search | What is argmax decoding?",
        "Greedy decoding always takes the most likely next token, so the same prompt gives the "
        "same answer every time.",
    ),
    (
        "sampling | random sampling | What does do_sample do?",
        "Sampling draws the next token at random according to the model's probabilities; set "
        "do_sample to true to turn it on.",
    ),
    (
        "temperature | the temperature parameter | sampling temperature",
        "Temperature divides the scores before sampling: below 1 the answer gets more "
        "predictable, above 1 it gets more varied.",
    ),
    (
        "top-k | top_k | top-k sampling | the top_k parameter",
        "Top-k keeps only the k most likely tokens before sampling, so rare tokens can never be "
        "chosen.",
    ),
    (
        "top-p | top_p | nucleus sampling | the top_p parameter",
        "Top-p keeps the smallest set of most likely tokens whose probabilities add up to p, and "
        "samples from that set.",
    ),
    (
        "typical-p | typical_p | typical sampling | the typical_p parameter",
        "Typical-p keeps the tokens whose surprise is closest to the average surprise, until "
        "their probabilities add up to p.",
    ),
    (
        "the repetition penalty | repetition_penalty | a repetition penalty",
        "The repetition penalty lowers the score of every token that is already in the prompt or "
        "the answer; 1.0 turns it off.",
    ),
    (
        "the frequency penalty | frequency_penalty | a frequency penalty",
        "The frequency penalty lowers a token's score more the more often it has appeared; 0 "
        "turns it off.",
    ),
    (
        "the presence penalty | presence_penalty | a presence penalty",
        "The presence penalty lowers the score of tokens that have appeared at least once, "
        "however often; 0 turns it off.",
    ),
    (
        "a seed | the seed | the seed parameter | How do I get the same sample twice?",
        "A seed fixes the random numbers of sampling, so the same request with the same seed "
        "gives the same answer.",
    ),
    (
        "a stop sequence | stop sequences | the stop parameter | How do I stop at a word?",
        "A stop sequence is a string that ends the generation as soon as the answer ends with it; "
        "requests list them in stop.",
    ),
    (
        "an EOS token | the EOS token | EOS | the end-of-sequence token | How does the model know "
        "when to stop?",
        "The EOS token is a special token with which the model says that its answer is finished; "
        "the server then ends the request.",
    ),
    (
        "the finish reason | finish_reason | a finish reason",
        "The finish reason shows why a generation ended: length, eos_token or stop_sequence.",
    ),
    (
        "max_new_tokens | the max_new_tokens parameter | How do I limit the length of the answer?",
        "The parameter max_new_tokens limits how many tokens are generated; without it the answer "
        "may fill the context.",
    ),
    (
        "max_tokens | the max_tokens field",
        "The field max_tokens limits the answer's length on the OpenAI routes; on the native "
        "routes it is called max_new_tokens.",
    ),
    (
        "best_of | the best_of parameter",
        "The parameter best_of generates several samples of one prompt and returns the one with "
        "the highest mean logprob.",
    ),
    (
        "return_full_text | the return_full_text parameter",
        "The parameter return_full_text puts the prompt in front of the generated text in the "
        "response.",
    ),
    (
        "truncate | the truncate parameter",
        "The parameter truncate keeps only the last n tokens of the prompt, so that a long prompt "
        "still fits.",
    ),
    (
        "the details parameter | details",
        "The parameter details adds the finish reason, the token count, the seed and every token "
        "with its logprob to the response.",
    ),
    (
        "decoder_input_details | the decoder_input_details parameter | prefill logprobs",
        "The parameter decoder_input_details adds the prompt's tokens with their logprobs to the "
        "details.",
    ),
    (
        "top_n_tokens | the top_n_tokens parameter",
        "The parameter top_n_tokens adds the n most likely tokens of each step to the details, "
        "with their logprobs.",
    ),
    (
        "watermarking | a watermark | the watermark parameter",
        "Watermarking favours a secret set of tokens at each step, so that generated text can "
        "later be recognised.",
    ),
    (
        "a logprob | logprobs | log probabilities",
        "A logprob is the natural logarithm of the probability that the model gave to a token; 0 "
        "means certain.",
    ),
    (
        "logits | a logit",
        "Logits are the raw scores that the model gives to every token of the vocabulary before "
        "softmax turns them into probabilities.",
    ),
    (
        "softmax | the softmax function",
        "Softmax turns scores into probabilities: it exponentiates each score and divides by the "
        "sum.",
    ),
    (
        "streaming | token streaming | How do I stream the answer?",
        "Streaming sends each token to the client as soon as it is generated; use "
        "/generate_stream, or stream set to true on the OpenAI routes.",
    ),
    (
        "SSE | server-sent events",
        "SSE, server-sent events, is a simple way to stream over HTTP: the server sends lines "
        "that start with data: and a blank line after each event.",
    ),
    (
        "a token | tokens",
        "A token is the unit a language model reads and writes: a word, a piece of a word or a "
        "single character.",
    ),
    (
        "a tokenizer | the tokenizer | tokenization",
        "A tokenizer turns text into token ids and token ids back into text; each model has its "
        "own.",
    ),
    (
        "a vocabulary | the vocabulary",
        "The vocabulary is the list of all tokens a model knows; its size is the number of scores "
        "per step.",
    ),
    (
        "BPE | byte pair encoding",
        "BPE, byte pair encoding, builds a vocabulary by joining the most frequent neighbouring "
        "pieces again and again.",
    ),
    (
        "detokenization | incremental detokenization",
        "Detokenization turns token ids back into text; done step by step it holds back bytes "
        "until a whole character is complete.",
    ),
    (
        "a chat template | chat templates | the chat template",
        "A chat template is a small Jinja program that turns a list of messages into the prompt "
        "format a model was trained on.",
    ),
    (
        "a system prompt | system message | the system message",
        "A system prompt is a first message that shows the model how to behave; the chat template "
        "puts it before the user's message.",
    ),
    (
        "a prompt | the prompt",
        "A prompt is the text that a client sends to the model; the model continues it.",
    ),
    (
        "the context window | context length | context size",
        "The context window is the largest number of tokens, prompt and answer together, that a "
        "model can attend to.",
    ),
    (
        "a language model | an LLM | a large language model | LLMs",
        "A language model is a neural network that predicts the next token of a text; repeated "
        "prediction writes whole answers.",
    ),
    (
        "deep learning | machine learning with deep networks",
        "Deep learning trains neural networks with many layers on examples; language models such "
        "as me are made that way.",
    ),
    (
        "machine learning | ML",
        "Machine learning lets a program learn rules from examples instead of having them written "
        "by hand.",
    ),
    (
        "a neural network | neural networks",
        "A neural network is a chain of matrix products and simple functions whose numbers are "
        "learned from examples.",
    ),
    (
        "a transformer | the transformer architecture | transformer models",
        "A transformer is a neural network of attention and feed-forward layers; nearly all "
        "language models are built this way.",
    ),
    (
        "attention | self-attention | the attention mechanism",
        "Attention lets each token look at earlier tokens: it compares its query with their keys "
        "and mixes their values.",
    ),
    (
        "GQA | grouped-query attention",
        "GQA, grouped-query attention, lets several query heads share one key and value head, "
        "which makes the KV cache smaller.",
    ),
    (
        "MQA | multi-query attention",
        "MQA, multi-query attention, lets all query heads share one single key and value head, "
        "which makes the KV cache very small.",
    ),
    (
        "RoPE | rotary position embedding | rotary embeddings",
        "RoPE, rotary position embedding, turns queries and keys by an angle that depends on the "
        "position, so attention sees relative distances.",
    ),
    (
        "sliding window attention | a sliding window | sliding windows",
        "A sliding window limits attention to the most recent tokens, so cost and KV memory stop "
        "growing with the length of the text.",
    ),
    (
        "RMSNorm | RMS normalization",
        "RMSNorm divides a vector by its root mean square and scales it with learned weights, "
        "which keeps activations stable.",
    ),
    (
        "SwiGLU | the gated feed-forward layer",
        "SwiGLU is a feed-forward layer with a gate: one projection goes through SiLU and "
        "multiplies another one.",
    ),
    (
        "tied embeddings | weight tying",
        "Tied embeddings use one matrix both to read tokens and to score them, which saves memory "
        "in small models.",
    ),
    (
        "bf16 | bfloat16 | the bfloat16 format",
        "bf16 is a 16-bit number format with the range of float32 but fewer digits; it halves "
        "memory and is fast on modern chips.",
    ),
    (
        "fp16 | float16 | half precision",
        "fp16 is a 16-bit number format with more digits than bf16 but a smaller range, so large "
        "values can overflow.",
    ),
    (
        "fp32 | float32 | single precision",
        "fp32 is the usual 32-bit number format: exact enough for everything, but twice the "
        "memory of bf16.",
    ),
    (
        "fp8 | float8 | 8-bit floats",
        "fp8 is an 8-bit number format for weights or KV caches; it halves memory against bf16 at "
        "a small loss of accuracy.",
    ),
    (
        "quantization | weight quantization | Why do people quantize models?",
        "Quantization stores weights with fewer bits, such as 8 or 4, to save memory and "
        "bandwidth at a small loss of accuracy.",
    ),
    (
        "safetensors | the safetensors format | a safetensors file",
        "Safetensors is a file format for weights that holds only tensors and no code, so it is "
        "safe and fast to load.",
    ),
    (
        "speculative decoding | speculation",
        "Speculative decoding guesses several tokens cheaply and lets the model check them in one "
        "step; right guesses save time.",
    ),
    (
        "a LoRA adapter | LoRA | LoRA adapters",
        "A LoRA adapter is a small pair of matrices added to a model's weights, which changes its "
        "behaviour without copying the model.",
    ),
    (
        "a CUDA graph | CUDA graphs",
        "A CUDA graph records a whole step's GPU work once and replays it with one call, which "
        "removes launch overhead in decode.",
    ),
    (
        "a kernel | GPU kernels | compute kernels",
        "A kernel is a small program that runs on the device for one operation, such as attention "
        "or a matrix product.",
    ),
    (
        "flash attention | FlashAttention",
        "Flash attention computes attention in tiles that fit in fast memory and never stores the "
        "whole score matrix.",
    ),
    (
        "AMX | Intel AMX",
        "AMX is a matrix unit in recent Intel processors; it multiplies bf16 tiles much faster "
        "than ordinary vector code.",
    ),
    (
        "a mixture of experts | MoE | mixture-of-experts models",
        "A mixture of experts has many feed-forward networks and sends each token to only a few "
        "of them, so it grows without costing more per token.",
    ),
    (
        "guided generation | constrained decoding | a grammar",
        "Guided generation allows at each step only the tokens that fit a grammar, such as a JSON "
        "schema or a regular expression.",
    ),
    (
        "tool calling | function calling | a tool call",
        "Tool calling lets a model answer with the name and arguments of a function, which the "
        "client then runs.",
    ),
    (
        "gRPC | the gRPC protocol",
        "gRPC is a fast protocol for calls between processes with typed messages; router and "
        "shards talk over it.",
    ),
    (
        "protobuf | protocol buffers",
        "Protobuf describes typed messages and packs them into few bytes; Millrace uses it for "
        "the messages between router and shards.",
    ),
    (
        "a Unix socket | unix domain sockets",
        "A Unix socket connects processes on one host through a file path; router and shards use "
        "one instead of a network port.",
    ),
    (
        "backpressure",
        "Backpressure makes a fast sender slow down when the receiver is busy, so that memory "
        "does not fill up.",
    ),
    (
        "a health check | health checks | a liveness probe",
        "A health check asks a server whether it works; for Millrace, send GET to /health and "
        "expect status 200.",
    ),
    (
        "graceful shutdown | a graceful shutdown | What happens on SIGTERM?",
        "A graceful shutdown lets running streams finish and refuses new requests; it starts when "
        "the launcher gets SIGTERM.",
    ),
    (
        "Prometheus | the Prometheus server",
        "Prometheus is a monitoring system that reads numbers from /metrics at intervals and "
        "keeps them for graphs and alerts.",
    ),
    (
        "Grafana | a Grafana dashboard",
        "Grafana draws dashboards from metrics; Millrace comes with a dashboard for latency, "
        "queue and batch sizes.",
    ),
    (
        "Docker | a Docker container | Can I run Millrace in Docker?",
        "Docker runs programs in isolated containers; Millrace has images for the router and the "
        "shards.",
    ),
    (
        "Docker Compose | docker compose | the compose file | How do I start the compose stack?",
        "Docker Compose starts several containers from one file; run docker compose up in the "
        "repository to start the router and its shards.",
    ),
    (
        "Kubernetes | k8s",
        "Kubernetes runs containers on many machines; Millrace's /health answers its liveness "
        "probe.",
    ),
    (
        "overload | status 429 | HTTP 429 | error 429 | Why do I get a 429 error? | What does "
        "Model is overloaded mean?",
        "Status 429 means that the server is overloaded: too many requests run at once, so wait "
        "as long as Retry-After says and try again.",
    ),
    (
        "status 422 | HTTP 422 | error 422 | a validation error | Why do I get a 422 error?",
        "Status 422 means that the request is not valid, for example too long or with a parameter "
        "out of range; the error text says which.",
    ),
    (
        "status 424 | HTTP 424 | error 424 | a generation error",
        "Status 424 means that the generation failed in the model; only this request is affected "
        "and the others go on.",
    ),
    (
        "status 401 | HTTP 401 | error 401",
        "Status 401 means that the API key is missing or wrong; send it in the Authorization "
        "header as a Bearer token.",
    ),
    (
        "status 413 | HTTP 413 | error 413",
        "Status 413 means that the request body is larger than --payload-limit allows.",
    ),
    (
        "status 503 | HTTP 503 | error 503",
        "Status 503 means that the server is not healthy or is shutting down; try again later.",
    ),
]

MILLRACE = [
    (
        "Millrace | the Millrace server | What software is this? | What server am I talking to?",
        "Millrace is a text-generation server in Python: a launcher, one router and one or more "
        "shards, with the flags, routes and metrics of TGI.",
    ),
    (
        "the name Millrace | the meaning of the name Millrace | Why is it called Millrace? | "
        "Where does the name Millrace come from?",
        "A millrace is the stream that keeps a mill wheel turning: the router keeps the stream "
        "and the shards are the wheels.",
    ),
    (
        "TGI | Text Generation Inference | text-generation-inference",
        "TGI, Text Generation Inference, is Hugging Face's text-generation server; Millrace "
        "speaks its API, flags and metric names.",
    ),
    (
        "the router | a router | the Millrace router",
        "The router speaks HTTP, checks and tokenizes requests, queues them, plans every step, "
        "owns the KV blocks and streams the answers.",
    ),
    (
        "a shard | the shard | shards | What do the shards do?",
        "A shard holds the model's weights, or its part of them, and runs the forward passes that "
        "the router plans.",
    ),
    (
        "the launcher | a launcher | the Millrace launcher",
        "The launcher starts the shards and the router, watches them, restarts what dies and "
        "shuts everything down in order.",
    ),
    (
        "warmup | the warmup phase | Why does the server warm up?",
        "Warmup runs the model once at its limits before serving, to find out how much KV memory "
        "there is.",
    ),
    (
        "the queue | the waiting queue | the request queue",
        "The queue holds accepted requests, first come first served, until the batch has token "
        "budget and KV blocks for them.",
    ),
    (
        "the batcher | the batching loop",
        "The batcher is the router's loop: it plans a step, sends it to the shards, delivers the "
        "tokens and drops what has finished.",
    ),
    (
        "the planner | step planning",
        "The planner decides what each step computes: which requests join, how much of each "
        "prompt runs and which sequences leave.",
    ),
    (
        "a token budget | token budgets | the token budget",
        "A token budget limits how many tokens a batch may use: one budget for the prompts of a "
        "step and one for the whole KV cache.",
    ),
    (
        "a step | one step",
        "A step is one forward pass of the model over the whole batch; it may mix prompt chunks "
        "and decodes.",
    ),
    (
        "a sequence | sequences",
        "A sequence is one request's tokens inside a shard: its prompt and everything generated "
        "so far.",
    ),
    (
        "an entry | the router's entry",
        "An entry is a request inside the router, together with the stream that carries its "
        "answer to the client.",
    ),
    (
        "an epoch | epochs",
        "An epoch is one life of the router and its shard group; after a failure a new epoch "
        "begins with empty batches.",
    ),
    (
        "step pipelining | pipelined steps | steps in flight",
        "Step pipelining sends the next step before the last one is answered, so the device never "
        "waits for Python.",
    ),
    (
        "validation | request validation",
        "Validation checks a request's parameters and its length in tokens before it enters the "
        "queue, and answers 422 if something is wrong.",
    ),
    (
        "batch invariance | deterministic mode",
        "Batch invariance means that a request's tokens do not depend on which other requests run "
        "with it.",
    ),
    (
        "cancellation | request cancellation | How do I cancel a request? | What happens when the "
        "client disconnects?",
        "To cancel a request, close the connection: the router drops it and frees its KV blocks "
        "within a step.",
    ),
    (
        "the default port | the port of the server | Which port does Millrace use?",
        "Millrace listens on port 3000 by default; change it with --port.",
    ),
    (
        "the license of Millrace | the license | Which license does Millrace have? | Is Millrace "
        "open source?",
        "Millrace is open source under the Apache 2.0 license.",
    ),
    (
        "the language of Millrace | Which language is Millrace written in? | What is Millrace "
        "written in?",
        "Millrace is written in Python, with small C++ and Triton kernels where they are faster.",
    ),
    (
        "starting Millrace | How do I start Millrace? | How do I run Millrace? | How can I start "
        "the server?",
        "Run make serve in the repository, or millrace-launcher with --model-id and your model.",
    ),
    (
        "the models of Millrace | supported models | Which models can Millrace run? | Which "
        "models are supported?",
        "Millrace runs Llama, Mistral and Qwen models with its own decoder, and others through "
        "the transformers library.",
    ),
    (
        "the devices of Millrace | Does Millrace need a GPU? | Can Millrace run on a CPU?",
        "Millrace needs no GPU: it runs on CPUs with its own kernels and on CUDA GPUs with the "
        "same code.",
    ),
    (
        "using my own model | serving another model | How do I serve another model? | How do I "
        "use my own model?",
        "Start the launcher with --model-id and the name of a hub model or the path of a local "
        "folder.",
    ),
    (
        "the OpenAI client | Can I use the OpenAI client? | How do I use the OpenAI Python client?",
        "Point the OpenAI client at http://127.0.0.1:3000/v1 as base_url; chat completions and "
        "completions work.",
    ),
    (
        "the environment variables | environment variables | an environment variable | Can I use "
        "environment variables for flags?",
        "Every flag has an environment variable with its name in capitals and underscores, such "
        "as MAX_BATCH_SIZE; the command line wins.",
    ),
    (
        "Retry-After | the Retry-After header",
        "Retry-After is a response header that says how many seconds to wait before trying again; "
        "it comes with status 429.",
    ),
    (
        "the demo model | this demo model",
        "The demo model is me: a small Llama-style model that Millrace serves when no --model-id "
        "is given.",
    ),
    (
        "PyTorch | torch",
        "PyTorch is the library for tensors and neural networks in which the shards compute.",
    ),
    (
        "Python | the Python language",
        "Python is a programming language that is easy to read; Millrace is written in it.",
    ),
    (
        "Hugging Face | the Hugging Face hub | the hub",
        "Hugging Face runs the hub, a site where models are shared; --model-id may name a model "
        "there.",
    ),
    (
        "aiohttp | the aiohttp library",
        "aiohttp is the Python library for HTTP that the router is built on.",
    ),
    (
        "Llama | the Llama architecture",
        "Llama is a family of language models by Meta; many open models, and this one, have its "
        "architecture.",
    ),
    (
        "a GPU | GPUs | the GPU",
        "A GPU is a chip that does very many small calculations at once, which suits the matrix "
        "products of language models.",
    ),
    (
        "a CPU | the CPU",
        "A CPU is a computer's main processor; Millrace also runs on it, with kernels made for "
        "bf16.",
    ),
    (
        "an API | APIs",
        "An API is the agreed way in which programs talk to each other; Millrace offers TGI's and "
        "OpenAI's over HTTP.",
    ),
    (
        "JSON | the JSON format",
        "JSON is a simple text format for data made of objects, lists, strings and numbers; "
        "requests and answers use it.",
    ),
    (
        "HTTP | the HTTP protocol",
        "HTTP is the protocol of the web: a client sends a request with a method and a path, and "
        "gets a status and a body.",
    ),
    (
        "curl | the curl command | How do I use curl? | How do I send a request with curl?",
        "curl sends HTTP requests from the command line: POST your JSON to /generate with "
        "Content-Type application/json.",
    ),
    (
        "inference | model inference",
        "Inference is the use of a trained model to answer requests, as opposed to training it.",
    ),
    (
        "training | model training",
        "Training changes a model's weights step by step until its predictions fit the examples.",
    ),
    (
        "a forward pass | forward passes",
        "A forward pass runs tokens through all layers of the model once and gives the scores of "
        "the next tokens.",
    ),
    (
        "an embedding | embeddings",
        "An embedding is a vector of numbers that stands for a token inside the model.",
    ),
    (
        "weights | model weights | the weights | parameters of a model",
        "Weights are the learned numbers of a model; a shard loads them from safetensors files.",
    ),
    (
        "LoRAX",
        "LoRAX is a server derived from TGI that serves many LoRA adapters on one base model.",
    ),
    (
        "vLLM",
        "vLLM is another text-generation server, known for paged attention and high throughput.",
    ),
]

TOPICS = named("concept", SERVING) + named("concept", MILLRACE)
