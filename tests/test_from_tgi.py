"""docs/from-tgi.md agrees with the programs on flags, variables and metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace_launcher.settings import checks
from millrace_launcher.settings.flags import all_flags
from millrace_proto.flags import option_name
from millrace_router.telemetry.instruments import Family
from millrace_router.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "from-tgi.md").read_text()
CODE = [*re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))]
NEVER_SET_IN_TGI = "tgi_batch_total_tokens"


def section(title: str) -> str:
    """A chapter's text."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def in_first_column(text: str) -> set[str]:
    """Names in code in the first column of a section's tables."""
    cells = re.findall(r"^\|([^|]*)\|", text, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_lists_the_flags_without_effect_of_the_launcher() -> None:
    flags = {
        option_name(name)
        for name in (
            *checks.WITHOUT_EFFECT,
            *checks.WITHOUT_EFFECT_ON_CPU,
        )
    }
    variables = set(checks.VARIABLES_WITHOUT_EFFECT)
    # These are not TGI's.
    flags -= {"--one-shot-all-reduce", "--disable-operators", "--max-cpu-loras"}
    variables -= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
    named = in_first_column(section("Accepted without effect"))
    assert named == flags | variables


def test_the_page_lists_the_flags_that_the_launcher_refuses() -> None:
    flags = {option_name(name) for name in checks.UNSUPPORTED} | {"--ngrok"}
    assert in_first_column(section("Refused")) == flags


@pytest.mark.parametrize(
    "option", sorted({word for word in CODE if re.fullmatch("--[a-z-]+", word)})
)
def test_every_flag_that_the_page_names_exists(option: str) -> None:
    assert option in {flag.option for flag in all_flags()}


def test_every_metric_that_the_page_names_exists() -> None:
    metrics = Metrics(max_input_tokens=10, max_total_tokens=20)
    known = {one.name for one in metrics.registry._collector_to_names if isinstance(one, Family)}
    named = set(re.findall(r"\b(?:tgi|millrace)_[a-z_]+[a-z]", section("Metrics")))
    assert len(named) > 10
    assert named - known == {NEVER_SET_IN_TGI, "tgi_batch"}
