"""Conflicts, refusals and notices, by TGI's texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.checks import VARIABLES_WITHOUT_EFFECT, check, notices
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.flags import all_flags
from millrace_launcher.settings.prepare import model_name
from millrace_launcher.settings.rank_arguments import prepare_ranks, read_rank_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in all_flags():
        monkeypatch.delenv(flag.variable, raising=False)
    for variable in VARIABLES_WITHOUT_EFFECT:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--max-input-tokens=5 --max-input-length=5",
            "both `max_input_tokens`(5) and `max_input_length`(5)",
        ),
        (
            "--max-input-tokens=9 --max-total-tokens=9",
            "`max_input_tokens`(9) must be < `max_total_tokens`(9)",
        ),
        (
            "--max-input-length=10 --max-total-tokens=9",
            "`max_input_tokens`(10) must be < `max_total_tokens`(9)",
        ),
        ("--validation-workers=0", "`validation_workers` must be > 0"),
        ("--max-batch-size=0", "`max_batch_size` must be > 0"),
        (
            "--max-total-tokens=20 --max-batch-total-tokens=10",
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 20 and 10",
        ),
        (
            "--max-batch-prefill-tokens=20 --max-batch-total-tokens=10",
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 20 and 10",
        ),
        ("--ngrok", "`ngrok-authtoken` must be set when using ngrok tunneling"),
        ("--ngrok --ngrok-authtoken=a", "`ngrok-edge` must be set when using ngrok tunneling"),
        ("--ngrok --ngrok-authtoken=a --ngrok-edge=b", "--ngrok is not supported"),
        ("--quantize=exl2", "--quantize exl2 is not supported yet"),
        ("--port=0", "`port` must be > 0"),
    ],
)
def test_wrong_calls_are_refused(argv: str, message: str) -> None:
    with pytest.raises(ArgumentValidation, match=re.escape(message)) as error:
        check(read_settings(argv.split()))
    assert error.value.variant == "ArgumentValidation"


FILES = "tokenizer-config-path api-key-file ssl-certfile ssl-keyfile ssl-ca-certs"


@pytest.mark.parametrize("flag", FILES.split())
def test_a_file_that_is_missing_is_refused_before_anything_starts(
    flag: str, tmp_path: Path
) -> None:
    name = flag.replace("-", "_")
    for path, message in (
        (tmp_path / "no", f"`{name}`: there is no file {tmp_path}/no"),
        (tmp_path, f"`{name}`: {tmp_path} is not a file"),
    ):
        with pytest.raises(ArgumentValidation, match=re.escape(message)):
            check(read_settings([f"--{flag}={path}"]))


def test_a_folder_of_adapters_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValidation, match="`adapter_root`: there is no folder"):
        check(read_settings([f"--adapter-root={tmp_path}/no"]))
    for flag in ("lora-adapters", "lora-modules", "lora-paths"):
        with pytest.raises(ArgumentValidation, match=r"adapter a: .*/no is not a folder"):
            check(read_settings([f"--{flag}=a={tmp_path}/no"]))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de", "Qwen/Qwen3-0.6B"),
    ],
)
def test_clients_learn_the_name_of_a_folder_and_not_its_path(
    place: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert [model_name(text) for text in (str(folder), f"{folder}/", ".")] == [name] * 3
    assert model_name(str(folder), whole=True) == str(folder)
    assert model_name(str(folder / "q4.gguf")) == "q4"
    assert model_name("q4-00002-of-00003.gguf") == "q4"
    assert model_name("org/model:Q4_K_M") == "org/model:Q4_K_M"
    assert model_name("org/model") == "org/model"
    assert model_name(None) == "millrace/demo"


def test_the_name_of_the_demo_model_stands_for_it() -> None:
    assert read_settings(["--model-id=millrace/demo"]).launcher.model_id is None


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--speculate=0",
        "--speculate=2 --draft-model=a/b",
        "--max-input-tokens=8 --max-total-tokens=9",
        "--max-total-tokens=10 --max-batch-total-tokens=10",
        "--ngrok-edge=b",
        "--rope-scaling=linear --rope-factor=2",
        "--quantize=int8",
        "--quantize=gptq",
        "--kv-cache-dtype=auto",
        "--kv-cache-dtype=fp8_e5m2",
        "--kv-cache-dtype=int8",
        "--max-batch-prefill-tokens=7 --max-input-tokens=8",
        "--prefill-chunking=off --max-batch-prefill-tokens=7 --max-input-tokens=8",
    ],
)
def test_valid_settings_are_accepted(argv: str) -> None:
    check(read_settings(argv.split()))


# Each with a value; "" marks a switch.
WITHOUT_EFFECT_ON_CPU = {
    "--cuda-graphs": "1,2",
    "--cuda-memory-fraction": "0.5",
    "--one-shot-all-reduce": "on",
}
WITHOUT_EFFECT = {
    "--max-image-fetch-size": "10",
    "--max-waiting-tokens": "3",
    "--ngrok-authtoken": "t",
    "--ngrok-edge": "e",
    "--prefill-chunking": "off",
    "--prometheus-port": "9001",
    "--trust-remote-code": "",
    "--usage-stats": "off",
    "--waiting-served-ratio": "1.5",
}
EVERY_ONE = [
    f"{flag}={value}" if value else flag
    for flag, value in (WITHOUT_EFFECT | WITHOUT_EFFECT_ON_CPU).items()
]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_every_flag_without_effect_is_reported_once(on_cpu: bool) -> None:
    settings = read_settings(EVERY_ONE)
    told = [line.split(" has no effect: ")[0] for line in notices(settings, on_cpu=on_cpu)]
    assert told == sorted([*WITHOUT_EFFECT, *(WITHOUT_EFFECT_ON_CPU if on_cpu else [])])


def test_flags_without_effect_are_reported_only_when_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(notices(read_settings([]), on_cpu=True)) == []
    monkeypatch.setenv("USAGE_STATS", "off")
    (found,) = notices(read_settings([]), on_cpu=True)
    assert found == "--usage-stats has no effect: no usage statistics are ever sent"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATTENTION", "paged"),
        ("USE_FLASH_ATTENTION", "false"),
        ("TGI_WIGGLE_ROOM", "0.8"),
        ("REQUEST_LOGPROBS", "1"),
        ("DISABLE_EXLLAMA", "True"),
        ("HF_MODEL_ID", "a/b"),
        ("SM_NUM_GPUS", "2"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"),
        ("OLLAMA_HOST", "0.0.0.0:11434"),
        ("OLLAMA_KEEP_ALIVE", "-1"),
    ],
)
def test_variables_of_others_without_effect_are_reported(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    told = [line.split(" has no effect: ")[0] for line in notices(read_settings([]), on_cpu=True)]
    assert told == [variable]


def test_an_empty_variable_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION", "")
    assert list(notices(read_settings([]), on_cpu=True)) == []


def test_variables_without_effect_are_not_flags_but_their_replacements_are() -> None:
    flags = {flag.variable for flag in all_flags()}
    assert not flags & VARIABLES_WITHOUT_EFFECT.keys()
    named = set(re.findall(r"[A-Z]+_[A-Z_]+", " ".join(VARIABLES_WITHOUT_EFFECT.values())))
    assert named <= flags


@pytest.mark.parametrize("option", sorted(WITHOUT_EFFECT))
def test_the_help_marks_flags_that_never_have_an_effect(option: str) -> None:
    (flag,) = [flag for flag in all_flags() if flag.option == option]
    assert str(flag.field.description).startswith("No effect")


TLS = "--shard-tls-cert=a", "--shard-tls-key=b", "--shard-tls-ca=c"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--remote-shards=a:1,b:2", "--num-shard=3", *TLS], "is 3, and `remote_shards` has 2"),
        (["--remote-shards=a:1,b", *TLS], "b lacks a port"),
        (["--remote-shards=a:1,:2", *TLS], ":2 lacks a port"),
        (["--remote-shards=a:70000", *TLS], "a:70000: a port is 1 to 65535"),
        (["--remote-shards=a:0", *TLS], "a:0: a port is 1 to 65535"),
        (["--remote-shards=a:1,a:1", *TLS], "a:1 twice"),
        (["--remote-shards=127.0.0.1:1,gpu7:2"], "would go to gpu7 in clear text"),
        (["--remote-shards=a:1", "--cluster=ray", *TLS], "leave out --remote-shards"),
        (["--shard-tls-cert=a"], "`shard_tls_cert` is for --remote-shards"),
        (["--shards-per-node=2"], "`shards_per_node` is for --cluster"),
        (["--cluster=ray", "--num-shard=3", "--shards-per-node=2"], r"multiple of .*\(2\)"),
    ],
)
def test_contradictory_flags_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ArgumentValidation, match=words):
        check(read_settings(flags, {}))


def test_no_address_starts_no_shard_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--remote-shards=,"], {})
    assert "--remote-shards" in capsys.readouterr().err


def test_flags_of_ranks_are_reported_without_effect_with_remote_shards() -> None:
    given = ["--dtype=float32", "--kv-memory=1G", "--enable-lora", "--adapter-cache=/a"]
    told = notices(
        read_settings([*given, "--remote-shards=127.0.0.1:1"], {}), on_cpu=False, environ={}
    )
    assert [line.split(" has no effect: ")[0] for line in told] == ["--dtype", "--kv-memory"]
    assert list(notices(read_settings(given, {}), on_cpu=False, environ={})) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--remote-shards=localhost:1,127.0.0.1:2,[::1]:3"],
        ["--remote-shards=a:1", "--remote-shards=b:1", *TLS],
        ["--remote-shards=a:1,b:1", "--allow-insecure-tcp"],
        ["--cluster=ray", "--num-shard=4", "--shards-per-node=2"],
    ],
)
def test_valid_settings_of_remote_ranks_are_accepted(flags: list[str]) -> None:
    check(read_settings(flags, {}))


def ranks_of(*flags: str) -> Commands:
    """The commands of `millrace-launcher shards`."""
    settings, rank = read_rank_settings(["--device=cpu", "--model-id=m", *flags], {})
    return prepare_ranks(settings, rank, Programs())


def test_ranks_of_a_host_have_the_ports_that_follow() -> None:
    commands = ranks_of(
        *("--world-size=4", "--first-rank=2", "--num-shard=2"),
        *("--master-addr=one", "--address=0.0.0.0:9000", "--tls-cert=c"),
    )
    last = commands.shard(3, commands.settings.shard.model_folder).argv
    assert {"--rank=3", "--world-size=4", "--address=0.0.0.0:9001", "--master-addr=one"} < {*last}
    assert "--tls-cert=c" in last
    assert commands.socket_paths() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "`address` must be given"),
        (("--address=:9000",), "lacks a port"),
        (("--address=localhost:65535", "--num-shard=2", "--world-size=2"), "leaves no ports for 2"),
        (("--address=localhost:9000", "--first-rank=1"), "ranks 1 to 1 are outside a group of 1"),
        (("--address=10.1.1.1:9000",), "can be reached from other hosts"),
        (
            ("--address=10.1.1.1:9000", "--world-size=2", "--allow-insecure-tcp"),
            "`master_addr` must be the host of rank 0",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ArgumentValidation, match=words):
        ranks_of(*flags)


@pytest.mark.parametrize("flag", ["--port", "--cluster", "--shards-per-node", "--remote-shards"])
def test_flags_of_the_router_are_unknown_to_ranks(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ranks_of(f"{flag}=80")
    assert ended.value.code == 2
    assert f"unexpected argument '{flag}'" in capsys.readouterr().err
