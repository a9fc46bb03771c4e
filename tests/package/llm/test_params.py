"""Sampling parameters as a body, and keyword arguments as flags."""

from __future__ import annotations

import pytest

from millrace import SamplingParams, StartError
from millrace.llm.deployment import arguments_of, settings_of
from millrace_router.api.openai.request import CompletionRequest


def test_only_what_is_set_is_in_the_body() -> None:
    assert SamplingParams().body() == {"n": 1}
    params = SamplingParams(temperature=0, stop=("a", "b"), extra={"logit_bias": {"5": 1.0}})
    assert params.body() == {
        "n": 1,
        "temperature": 0,
        "stop": ["a", "b"],
        "logit_bias": {"5": 1.0},
    }


def test_the_server_knows_every_parameter() -> None:
    names = set(SamplingParams.__dataclass_fields__) - {"extra"}
    assert names <= set(CompletionRequest.model_fields)


def test_keywords_are_flags() -> None:
    given = {"max_total_tokens": 64, "enable_lora": True, "revision": None, "deterministic": "on"}
    assert arguments_of("m", {**given, "lora_adapters": ["a=b", "c=d"], "strict_tgi": False}) == [
        *("--model-id=m", "--max-total-tokens=64", "--enable-lora", "--deterministic=on"),
        *("--lora-adapters=a=b", "--lora-adapters=c=d"),
    ]
    settings = settings_of("m", {"max_total_tokens": 64})
    assert settings.router.max_total_tokens == 64


@pytest.mark.parametrize(
    ("flags", "reason"),
    [({"max_totl_tokens": 1}, "--max-total-tokens"), ({"port": "x"}, "invalid value 'x'")],
)
def test_a_wrong_flag_is_an_error(
    flags: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartError, match=reason):
        settings_of(None, flags)
    assert capsys.readouterr().err == ""
