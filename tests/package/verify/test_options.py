"""The command line of millrace-verify."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millrace.verify.options import CASES, read_options


def test_defaults() -> None:
    options = read_options([], environ={})
    assert options.target is None
    assert options.cases == tuple(CASES)
    assert not options.chosen
    assert not options.is_url
    assert options.flags == ()


def test_flags_after_the_dashes_are_the_launchers() -> None:
    options = read_options(["m", "--requests", "3", "--", "--dtype", "float32"], environ={})
    assert (options.target, options.num_requests) == ("m", 3)
    assert options.flags == ("--dtype", "float32")


def test_cases_are_chosen_by_name() -> None:
    options = read_options(["--cases", "cached,batched"], environ={})
    assert options.cases == ("cached", "batched")
    assert options.chosen


@pytest.mark.parametrize("key", [["--api-key", "k"], []], ids=["flag", "environment"])
def test_the_key_comes_from_flag_or_environment(key: list[str]) -> None:
    environ = {} if key else {"API_KEY": "k"}
    assert read_options(["http://host:1", *key], environ=environ).api_key == "k"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cases", "nonsense"], "unknown case nonsense"),
        (["--cases", ""], "no case is named"),
        (["--requests", "0"], "at least 1"),
        (["--num-shard", "1"], "at least 2"),
        (["--max-new-tokens", "x"], "at least 1"),
        (["http://host:1", "--", "--dtype", "float32"], "not for a URL"),
        (["http://host:1", "--replay", "j"], "--replay needs the model"),
        (["--epoch", "1"], "--epoch is for --replay"),
        (["--nonsense"], "unrecognized"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_lines(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(argv, environ={})
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_help_names_every_case() -> None:
    command = [sys.executable, "-m", "millrace.verify", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, text in CASES.items():
        assert f"{name} " in shown
        assert text in shown


def test_an_epoch_is_that_of_a_journal() -> None:
    assert read_options(["--replay", "j", "--epoch", "2"], environ={}).epoch == 2
