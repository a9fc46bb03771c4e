"""Every flag and variable of TGI is accepted, and errors point to the help."""

from __future__ import annotations

import socket

import pytest
from pydantic_settings import BaseSettings

from millrace_launcher.settings.arguments import Settings, read_settings
from millrace_launcher.settings.flags import LAST, NAMES, OTHERS, all_flags, grouped
from millrace_launcher.settings.foreign_flags import OURS as FOREIGN
from millrace_launcher.settings.foreign_flags import WORDS

# (flag, a value, owner, what it becomes), by TGI's list; "" marks a switch.
TGI_FLAGS = [
    ("--model-id", "a/b", "launcher", "a/b"),
    ("--revision", "v1", "launcher", "v1"),
    ("--validation-workers", "4", "router", 4),
    ("--sharded", "true", "launcher", True),
    ("--num-shard", "2", "launcher", 2),
    ("--quantize", "bitsandbytes-nf4", "shard", "bitsandbytes-nf4"),
    ("--speculate", "3", "shard", 3),
    ("--dtype", "bfloat16", "shard", "bfloat16"),
    ("--kv-cache-dtype", "fp8_e5m2", "shard", "fp8_e5m2"),
    ("--trust-remote-code", "", "router", True),
    ("--trust-remote-code", "", "shard", True),
    ("--max-concurrent-requests", "7", "router", 7),
    ("--max-best-of", "3", "router", 3),
    ("--max-stop-sequences", "5", "router", 5),
    ("--max-top-n-tokens", "6", "router", 6),
    ("--max-input-tokens", "100", "router", 100),
    ("--max-input-length", "100", "launcher", 100),
    ("--max-total-tokens", "200", "router", 200),
    ("--waiting-served-ratio", "1.2", "router", 1.2),
    ("--max-batch-prefill-tokens", "2048", "router", 2048),
    ("--max-batch-total-tokens", "9000", "router", 9000),
    ("--max-waiting-tokens", "10", "router", 10),
    ("--max-batch-size", "16", "router", 16),
    ("--cuda-graphs", "0,1,8", "shard", (1, 8)),
    ("--cuda-graphs", "0", "shard", ()),
    ("--hostname", "127.0.0.2", "router", "127.0.0.2"),
    ("--hostname", "localhost", "router", "localhost"),
    ("--port", "8080", "router", 8080),
    ("--prometheus-port", "9001", "router", 9001),
    ("--shard-uds-path", "/tmp/x", "launcher", "/tmp/x"),
    ("--master-addr", "host", "shard", "host"),
    ("--master-port", "1234", "shard", 1234),
    ("--disable-custom-kernels", "", "shard", True),
    ("--cuda-memory-fraction", "0.5", "shard", 0.5),
    ("--rope-scaling", "dynamic", "shard", "dynamic"),
    ("--rope-factor", "2.0", "shard", 2.0),
    ("--json-output", "", "launcher", True),
    ("--otlp-endpoint", "http://x", "router", "http://x"),
    ("--otlp-service-name", "name", "router", "name"),
    ("--cors-allow-origin", "http://x", "router", ("http://x",)),
    ("--api-key", "null", "router", "null"),
    ("--watermark-gamma", "0.5", "shard", 0.5),
    ("--watermark-delta", "2.0", "shard", 2.0),
    ("--ngrok", "", "router", True),
    ("--ngrok-authtoken", "t", "router", "t"),
    ("--ngrok-edge", "e", "router", "e"),
    ("--disable-grammar-support", "", "router", True),
    ("--max-client-batch-size", "9", "router", 9),
    ("--lora-adapters", "a,b=c@d", "router", ("a", "b=c@d")),
    ("--usage-stats", "no-stack", "router", "no-stack"),
    ("--payload-limit", "1000", "router", 1000),
    ("--enable-prefill-logprobs", "", "shard", True),
    ("--graceful-termination-timeout", "5", "router", 5),
    ("--drain-delay", "2.5", "router", 2.5),
    ("--max-image-fetch-size", "10", "router", 10),
]
PATH_FLAGS = [
    ("--shard-tls-cert", "router"),
    ("--shard-tls-key", "router"),
    ("--shard-tls-ca", "router"),
    ("--huggingface-hub-cache", "launcher"),
    ("--weights-cache-override", "launcher"),
    ("--tokenizer-config-path", "router"),
    ("--api-key-file", "router"),
    ("--ssl-certfile", "router"),
    ("--ssl-keyfile", "router"),
    ("--ssl-ca-certs", "router"),
    ("--journal", "router"),
    ("--log-requests", "router"),
    ("--adapter-root", "router"),
    ("--adapter-cache", "router"),
    ("--adapter-cache", "shard"),
]
OURS = [
    ("--remote-shards", "a:1,b:2", "launcher", ("a:1", "b:2")),
    ("--cluster", "ray", "launcher", "ray"),
    ("--shards-per-node", "2", "launcher", 2),
    ("--allow-insecure-tcp", "", "shard", True),
    ("--max-image-bytes", "1MiB", "router", 1 << 20),
    ("--max-image-pixels", "1000", "router", 1000),
    ("--max-images-per-request", "3", "router", 3),
    ("--max-image-memory", "1GiB", "router", 1 << 30),
    ("--image-timeout", "2.5", "router", 2.5),
    ("--image-url-hosts", "a.example,b.example", "router", ("a.example", "b.example")),
    ("--allow-unlisted-model", "", "shard", True),
    ("--quantize-activations", "int8", "shard", "int8"),
    ("--hf-overrides", '{"rope_theta": 1e6}', "shard", '{"rope_theta": 1e6}'),
    ("--packed-weights-size", "8GiB", "shard", 8 * 1024**3),
    ("--tokenizer-name", "org/tokenizer", "launcher", "org/tokenizer"),
    ("--mmproj", "off", "launcher", "off"),
    ("--draft-model", "org/draft", "shard", "org/draft"),
    ("--speculator", "org/head", "shard", "org/head"),
    ("--device", "cpu", "shard", "cpu"),
    ("--dtype", "float32", "shard", "float32"),
    ("--cpu-threads", "3", "shard", 3),
    ("--kv-memory", "2G", "shard", 2_000_000_000),
    ("--kv-memory", "512MiB", "shard", 512 * 1024**2),
    ("--kv-groups", "off", "shard", "off"),
    ("--deterministic", "off", "shard", "off"),
    ("--deterministic", "TRUE", "shard", "on"),
    ("--steps-in-flight", "1", "router", 1),
    ("--max-n", "3", "router", 3),
    ("--task", "embed", "router", ("embed",)),
    ("--default-max-new-tokens", "256", "router", 256),
    ("--max-new-tokens-limit", "512", "router", 512),
    ("--one-shot-all-reduce", "off", "shard", "off"),
    ("--disable-operators", "grouped_mm,cublas", "shard", ("grouped_mm", "cublas")),
    ("--one-shot-all-reduce", "TRUE", "shard", "on"),
    ("--grammar-timeout", "2.5", "shard", 2.5),
    ("--max-grammar-bytes", "64KiB", "shard", 65536),
    ("--prefill-chunking", "off", "router", "off"),
    ("--prefill-chunking", "TRUE", "router", "on"),
    ("--prefix-caching", "0", "router", "off"),
    ("--kv-reservation", "full", "router", "full"),
    ("--late-planning", "off", "router", "off"),
    ("--prefill-order", "arrival", "router", "arrival"),
    ("--target-inter-token-latency", "12.5", "router", 12.5),
    ("--fairness", "tenant", "router", "tenant"),
    ("--fairness", "adapter", "router", "adapter"),
    ("--priority-ageing", "2.5", "router", 2.5),
    ("--max-queue-size", "40", "router", 40),
    ("--max-queue-wait", "1.5", "router", 1.5),
    ("--aip-predict-route", "/predict", "router", "/predict"),
    ("--aip-health-route", "/alive", "router", "/alive"),
    ("--tool-call-parser", "hermes", "router", "hermes"),
    ("--reasoning-parser", "qwen3", "router", "qwen3"),
    ("--strict-tgi", "", "router", True),
    ("--strict-fields", "", "router", True),
    ("--strict-max-tokens", "", "router", True),
    ("--allow-special-tokens-in-content", "", "router", True),
    ("--generation-config", "off", "router", "off"),
    ("--max-restarts", "0", "launcher", 0),
    ("--fork-server", "off", "launcher", "off"),
    ("--verify-kv", "", "shard", True),
    ("--step-timeout", "1.5", "router", 1.5),
    ("--kv-events", "tcp://127.0.0.1:5557", "router", "tcp://127.0.0.1:5557"),
    ("--kv-events-replay", "ipc:///tmp/replay", "router", "ipc:///tmp/replay"),
    ("--kv-events-topic", "kv@a@b", "router", "kv@a@b"),
    ("--kv-events-any-host", "", "router", True),
    ("--recovery-grace", "60", "router", 60.0),
    ("--responses-store", "64", "router", 64),
    ("--responses-store-seconds", "60", "router", 60.0),
    ("--resume-grace", "5", "router", 5.0),
    ("--journal-tokens", "", "router", True),
    ("--journal-max-bytes", "70000", "router", 70_000),
    ("--log-requests-max-bytes", "0", "router", 0),
    ("--enable-lora", "", "shard", True),
    ("--adapter-memory", "512MiB", "shard", 512 << 20),
    ("--adapter-memory-fraction", "0.2", "shard", 0.2),
    ("--lora-modules", "a=/b,c=/d", "router", ("a=/b", "c=/d")),
    ("--lora-modules", '{"name":"a","path":"/b"}', "router", ('{"name":"a","path":"/b"}',)),
    ("--lora-paths", "a=/b,/c", "router", ("a=/b", "/c")),
    ("--max-loras-per-batch", "7", "router", 7),
    ("--adapter-id", "org/voice", "router", "org/voice"),
    ("--adapter-source", "local", "router", "local"),
    ("--preloaded-adapter-ids", "a,b", "router", ("a", "b")),
    ("--adapter-allow", "hub:org/*", "router", ("hub:org/*",)),
    ("--adapter-cache-size", "2G", "router", 2_000_000_000),
    ("--max-loras", "4", "router", 4),
    ("--max-active-adapters", "5", "router", 5),
    ("--max-cpu-loras", "6", "router", 6),
    ("--max-lora-rank", "128", "router", 128),
    ("--adapter-cycle-time-s", "1.5", "router", 1.5),
    ("--unknown-model", "refuse", "router", "refuse"),
    ("--admin-key", "k", "router", "k"),
    ("--served-model-name", "a/b,c", "router", ("a/b", "c")),
    ("--root-path", "/llm", "router", "/llm"),
    ("--otlp-protocol", "grpc", "router", "grpc"),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in all_flags():
        monkeypatch.delenv(flag.variable, raising=False)


def value_of(settings: Settings, owner: str, flag: str) -> object:
    config: BaseSettings = getattr(settings, owner)
    return getattr(config, flag.removeprefix("--").replace("-", "_"))


@pytest.mark.parametrize(("flag", "value", "owner", "expected"), TGI_FLAGS + OURS)
def test_flag_reaches_its_owner(flag: str, value: str, owner: str, expected: object) -> None:
    joined = [f"{flag}={value}"] if value else [flag]
    assert value_of(read_settings(joined), owner, flag) == expected
    apart = [flag, value] if value else [flag]
    assert value_of(read_settings(apart), owner, flag) == expected


@pytest.mark.parametrize(("flag", "value", "owner", "expected"), TGI_FLAGS + OURS)
def test_environment_variable_reaches_its_owner(
    flag: str, value: str, owner: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = flag.removeprefix("--").replace("-", "_").upper()
    monkeypatch.setenv(name, value or "true")
    settings = read_settings([])
    assert value_of(settings, owner, flag) == expected
    assert flag.removeprefix("--").replace("-", "_") in settings.from_environment


@pytest.mark.parametrize(("flag", "owner"), PATH_FLAGS)
def test_a_path_reaches_the_owner_of_its_flag(flag: str, owner: str) -> None:
    assert str(value_of(read_settings([flag, "/some/where"]), owner, flag)) == "/some/where"


def test_defaults_are_tgis() -> None:
    settings = read_settings([])
    router, shard, launcher = settings.router, settings.shard, settings.launcher
    assert (router.validation_workers, router.max_concurrent_requests, router.max_best_of) == (
        2,
        128,
        2,
    )
    assert (router.max_stop_sequences, router.max_top_n_tokens, router.max_client_batch_size) == (
        4,
        5,
        4,
    )
    assert (router.waiting_served_ratio, router.max_waiting_tokens) == (0.3, 20)
    assert (router.hostname, router.port, router.prometheus_port) == ("0.0.0.0", 3000, 9000)
    assert (router.payload_limit, router.graceful_termination_timeout) == (2_000_000, 90)
    assert (router.usage_stats, router.otlp_service_name) == (
        "on",
        "text-generation-inference.router",
    )
    assert (shard.master_addr, shard.master_port, shard.cuda_memory_fraction) == (
        "localhost",
        29500,
        1.0,
    )
    assert shard.cuda_graphs is None
    assert launcher.shard_uds_path == "/tmp/text-generation-server"
    assert launcher.num_shard is None


def test_command_line_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1111")
    settings = read_settings(["-p", "2222", "-g", "3"])
    assert settings.router.port == 2222
    assert settings.router.graceful_termination_timeout == 3
    origins = {name: (value, origin) for name, value, origin in settings.configured()}
    assert origins["port"] == ("2222", "flag")
    assert origins["hostname"] == ("0.0.0.0", "default")


@pytest.mark.parametrize("origin", ["flag", "environment", "default"])
def test_the_hostname_is_shown_unchanged_with_its_source(
    origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if origin == "environment":
        monkeypatch.setenv("HOSTNAME", "4f2a9c")
    settings = read_settings(["--hostname=127.0.0.2"] if origin == "flag" else [])
    names = {"default": "0.0.0.0", "environment": "4f2a9c", "flag": "127.0.0.2"}
    shown = {name: (value, source) for name, value, source in settings.configured()}["hostname"]
    assert shown == (names[origin], origin)


def test_a_name_to_listen_on_is_resolved_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"box": "10.0.0.7"}

    def gethostbyname(name: str) -> str:
        if name not in known:
            raise socket.gaierror(name)
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    assert read_settings(["--hostname=box"]).router.hostname == "10.0.0.7"
    with pytest.raises(SystemExit) as refused:
        read_settings(["--hostname=4f2a9c"])
    assert refused.value.code == 2
    assert "invalid value '4f2a9c' for '--hostname'" in capsys.readouterr().err


def test_origins_are_repeatable_and_comma_separated() -> None:
    settings = read_settings(["--cors-allow-origin=a", "--cors-allow-origin", "b,c"])
    assert settings.router.cors_allow_origin == ("a", "b", "c")


def test_adapters_may_follow_one_flag() -> None:
    settings = read_settings(["--lora-modules", "a=/x", "b=/y", "--lora-modules=c=/z"])
    assert settings.router.lora_modules == ("a=/x", "b=/y", "c=/z")
    of_sglang = '{"lora_name": "c", "lora_path": "/z", "pinned": true}'
    settings = read_settings(["--lora-paths", "/x", "b=org/y", of_sglang])
    assert settings.router.lora_paths == ("/x", "b=org/y", of_sglang)


@pytest.mark.parametrize(
    "flag",
    [
        "--enable-lora",
        "--lora-adapters=a",
        "--lora-modules=a=b",
        "--lora-paths=a",
        "--max-loras-per-batch=2",
        "--adapter-id=a",
        "--preloaded-adapter-ids=a",
        "--adapter-root=/a",
        "--adapter-allow=hub:a/*",
        "--max-loras=2",
        "--max-lora-rank=8",
    ],
)
def test_flags_about_adapters_turn_adapters_on(flag: str) -> None:
    assert read_settings([flag]).has_adapters


@pytest.mark.parametrize("flag", ["--unknown-model=base", "--admin-key=a", "--port=1"])
def test_other_flags_do_not_turn_adapters_on(flag: str) -> None:
    assert not read_settings([flag]).has_adapters


@pytest.mark.parametrize("text", ["a=b=c", "a@b@c", "=a", "a@", '{"name":"a"}'])
def test_adapters_of_a_wrong_form_are_refused_in_tgis_words(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings([f"--lora-adapters=good,{text}"])
    assert ended.value.code == 2
    assert f"Invalid LoRA adapter format: {text}" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["true", "TRUE", "1", "on", "On"])
def test_true_words_turn_a_switch_on(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSON_OUTPUT", word)
    assert read_settings([]).launcher.json_output is True


@pytest.mark.parametrize("word", ["false", "False", "0", "off", ""])
def test_false_words_turn_a_switch_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSON_OUTPUT", word)
    assert read_settings([]).launcher.json_output is False


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--modl-id", "x"], "similar argument exists: '--model-id'"),
        (["--max-input-tokenz=3"], "similar argument exists: '--max-input-tokens'"),
        (["--max-total"], "unexpected argument '--max-total'"),
        (["stray"], "unexpected argument 'stray' found"),
        (["--port=abc"], "invalid value 'abc' for '--port'"),
        (["--port=70000"], "'--port'"),
        (["--port"], "expected one argument"),
        (["--quantize=zip"], "invalid value 'zip' for '--quantize'"),
        (["--fairness=all"], "invalid value 'all' for '--fairness'"),
        (["--kv-reservation=half"], "invalid value 'half' for '--kv-reservation'"),
        (
            ["--prefill-order=longest"],
            "invalid value 'longest' for '--prefill-order'",
        ),
        (["--prefix-caching=maybe"], "invalid value 'maybe' for '--prefix-caching'"),
        (["--max-queue-size=0"], "'--max-queue-size'"),
        (["--max-queue-wait=inf"], "'--max-queue-wait'"),
        (["--target-inter-token-latency=0"], "'--target-inter-token-latency'"),
        (["--priority-ageing=-1"], "'--priority-ageing'"),
        (["--num-shard=-1"], "'--num-shard'"),
        (["--trust-remote-code=true"], "--trust-remote-code"),
        (["--cuda-graphs=a"], "'--cuda-graphs'"),
        (["--kv-memory=lots"], "'--kv-memory'"),
        (["--api-key="], "invalid value '***' for '--api-key': Value error, is empty"),
        (["--api-key", ""], "invalid value '***' for '--api-key': Value error, is empty"),
    ],
)
def test_usage_errors_exit_with_2_and_a_reason(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        read_settings(argv)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("TRUST_REMOTE_CODE", "maybe"), ("PORT", "x"), ("SHARDED", "2")]
)
def test_wrong_variable_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as error:
        read_settings([])
    assert error.value.code == 2
    assert f"(from the environment variable {name})" in capsys.readouterr().err


def test_secrets_are_shown_neither_in_settings_nor_in_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NGROK_AUTHTOKEN", "hidden")
    rows = read_settings(["--api-key=hidden"]).configured()
    assert "hidden" not in str(rows)
    assert ("api_key", "***", "flag") in rows


def test_rank_of_another_launcher_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert read_settings([]).shard.rank == 0


def test_the_help_shows_flags_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        read_settings(["--help"])
    assert error.value.code == 0
    words = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    for flag in all_flags():
        assert flag.option in words
        assert flag.help
    assert "HTTP port. [3000]" in words
    assert "--task TASK [TASK ...]" in words
    positions = [
        words.index(f"{group}:") for group in ("examples", "Model", *list(NAMES)[1:], LAST)
    ]
    assert positions == sorted(positions)
    last = words[positions[-1] :]
    assert "--trust-remote-code" in last
    assert "--port" not in last.replace("--port-", "").replace("served on --port", "")


def test_every_flag_has_one_group() -> None:
    groups = dict(grouped(list(all_flags())))
    assert OTHERS not in groups
    named = [name for names in NAMES.values() for name in names.split()]
    assert len(named) == len(set(named))
    assert sum(map(len, groups.values())) == len(list(all_flags()))


@pytest.mark.parametrize("flag", sorted(FOREIGN))
def test_a_flag_of_another_server_has_a_tip(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {option.option for option in all_flags()}
    assert flag not in ours
    assert FOREIGN[flag].split()[0] in ours
    with pytest.raises(SystemExit):
        read_settings([flag, "1"])
    assert f"tip: the flag is '{FOREIGN[flag]}' here" in capsys.readouterr().err


@pytest.mark.parametrize("word", sorted(WORDS))
def test_a_flag_or_command_without_an_equal_has_a_tip(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word not in {option.option for option in all_flags()} | FOREIGN.keys()
    with pytest.raises(SystemExit):
        read_settings([word])
    assert f"tip: {WORDS[word]}\n" in capsys.readouterr().err


LORAX_ALONE = (
    "source default-adapter-source preloaded-adapter-source predibase-api-token embedding-model compile"
    " compile-batch-size compile-max-batch-size compile-max-rank speculative-tokens speculation-max-batch-size"
    " eager-prefill chunked-prefill merge-adapter-weights backend disable-sgmv memory-wiggle-room cors-allow-header"
    " cors-expose-header cors-allow-method cors-allow-credentials download-only"
)
"""Flags of LoRAX's launcher that neither TGI's nor this one has."""


def test_every_flag_of_lorax_has_a_tip() -> None:
    flags = {f"--{name}" for name in LORAX_ALONE.split()}
    assert len(flags) == 22
    assert flags <= FOREIGN.keys() | WORDS.keys()


COMMANDS = (
    "-m a.gguf -c 8192 -ngl 99 -fa on -t 8 -tb 16 -np 4 -cb --no-mmap --jinja --metrics --slots"
    " --no-webui -cram 0 --props",
    "-hf a/b:Q4_K_M -hfd a/c -ngld 99 --draft-max 16 --draft-min 5 -ctk q8_0 -ncmoe 20 --no-context-shift"
    " -to 600 --fit on",
    "--model a --tensor-parallel-size 2 --gpu-memory-utilization 0.9 --max-model-len 8192"
    " --pipeline_parallel_size 2 --enforce-eager --max_num_seqs 64 --distributed_executor_backend ray"
    " --swap_space 4 --limit_mm_per_prompt image=1",
    "--model a --speculative-config {} --compilation-config {} --kv-transfer-config {}"
    " --safetensors-load-strategy lazy --async-scheduling --mm-processor-cache-gb 0"
    " --enable-prompt-tokens-details --default-chat-template-kwargs {} -O 3",
    "--model-path a --tp 2 --mem-fraction-static 0.8 --context-length 8192 --chunked-prefill-size 4096"
    " --cuda-graph-bs 1 --attention-backend fa3 --disable-radix-cache --enable-mixed-chunk"
    " --moe-runner-backend x --skip-server-warmup --speculative-num-steps 3 --hicache-ratio 2"
    " --stream-interval 1 --dist-timeout 60 --nccl-port 1 --base-gpu-id 1",
)
"""Commands of llama-server, vLLM and SGLang."""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_of_a_command_of_another_server_has_a_tip_of_its_own(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {option.option for option in all_flags()}
    flags = [word for word in command.split() if word.startswith("-") and word not in ours]
    with pytest.raises(SystemExit):
        read_settings(command.split())
    problems = capsys.readouterr().err.split("error: ")[1:]
    assert [problem.split("'")[1] for problem in problems] == list(dict.fromkeys(flags))
    untipped = [problem for problem in problems if "tip: " not in problem or "a similar" in problem]
    assert untipped == []


@pytest.mark.parametrize(
    ("flag", "similar"),
    [
        ("--prot", "--port"),
        ("--modl-id", "--model-id"),
        ("--max_total_tokens", "--max-total-tokens"),
        ("--max-batch-prefil-token", "--max-batch-prefill-tokens"),
        ("--Port", "--port"),
        ("--foo-all-reduce", None),
        ("--tamp", None),
        ("--max-total", None),
        ("--enable-lora-bias", None),
        ("--x", None),
    ],
)
def test_only_a_misspelling_is_a_similar_flag(
    flag: str, similar: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings([flag, "1"])
    tip = f"tip: a similar argument exists: '{similar}'" if similar else "tip:"
    assert (tip in capsys.readouterr().err) == (similar is not None)


def test_all_unknown_flags_are_named_in_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tensor_parallel_size", "2", "-hf", "a/b", "-ngl", "-1", "--temp=0.7", "--port", "80"]
    with pytest.raises(SystemExit) as error:
        read_settings([*argv, "stray", "--no-such"])
    assert error.value.code == 2
    problems = capsys.readouterr().err.split("error: ")[1:]
    assert [problem.split("'")[1] for problem in problems] == [
        *("--tensor_parallel_size", "-hf", "-ngl", "--temp", "stray", "--no-such")
    ]
    for problem, words in zip(problems, ("--num-shard", "--model-id", "--device"), strict=False):
        assert words in problem
    assert "--help" not in problems[3]
    assert "tip" not in problems[5]


def test_no_short_flag_of_another_server_is_read_as_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_settings(["-hxy", "-evx", "-px"])
    errors = capsys.readouterr().err
    assert all(f"unexpected argument '{flag}'" in errors for flag in ("-hxy", "-evx", "-px"))


def test_the_word_of_a_short_flag_of_ours_may_follow_it_directly() -> None:
    assert read_settings(["-p8080"]).router.port == 8080


def test_a_model_without_a_flag_has_a_tip(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["Qwen/Qwen3-0.6B"])
    assert "'--model-id Qwen/Qwen3-0.6B'" in capsys.readouterr().err


def test_every_tgi_flag_is_in_the_table() -> None:
    covered = {flag for flag, *_ in TGI_FLAGS + OURS} | {flag for flag, _ in PATH_FLAGS}
    assert {flag.option for flag in all_flags()} - covered == {"--log-level", "--log-colorize"}
