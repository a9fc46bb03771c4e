"""Conflicts, refusals and notices, by TGI's texts."""

from __future__ import annotations

import re

import pytest

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.checks import VARIABLES_WITHOUT_EFFECT, check, notices
from millrace_launcher.settings.flags import all_flags


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
def test_refused(argv: str, message: str) -> None:
    with pytest.raises(ArgumentValidation, match=re.escape(message)) as error:
        check(read_settings(argv.split()))
    assert error.value.variant == "ArgumentValidation"


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
def test_accepted(argv: str) -> None:
    check(read_settings(argv.split()))


# Each with a value; "" marks a switch.
WITHOUT_EFFECT_ON_CPU = {
    "--cuda-graphs": "1,2",
    "--cuda-memory-fraction": "0.5",
    "--one-shot-all-reduce": "",
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


def test_what_is_said_to_be_without_effect_is_no_flag_and_what_is_named_instead_is() -> None:
    flags = {flag.variable for flag in all_flags()}
    assert not flags & VARIABLES_WITHOUT_EFFECT.keys()
    named = set(re.findall(r"[A-Z]+_[A-Z_]+", " ".join(VARIABLES_WITHOUT_EFFECT.values())))
    assert named <= flags


@pytest.mark.parametrize("option", sorted(WITHOUT_EFFECT))
def test_help_says_what_never_has_an_effect(option: str) -> None:
    (flag,) = [flag for flag in all_flags() if flag.option == option]
    assert str(flag.field.description).startswith("No effect")
