"""Checks between flags and capacity, and the errors of a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace_router.config import RouterConfig
from millrace_router.startup import StartupError, check_arguments, check_capacity, start
from millrace_router.wire import Capacity


def config_with(**values: Any) -> RouterConfig:
    return RouterConfig(**{"model_folder": Path("/nowhere"), **values})


def capacity_with(**values: int) -> Capacity:
    defaults = {
        "num_blocks": 11,
        "max_batch_total_tokens": 5000,
        "max_input_tokens": 100,
        "max_total_tokens": 200,
        "kv_bytes_per_token": 1,
    }
    return Capacity(**{**defaults, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"validation_workers": 0}, "`validation_workers` must be > 0"),
        ({"max_batch_size": 0}, "`max_batch_size` must be > 0"),
        ({"ngrok": True}, "`ngrok` is not supported"),
        (
            {"max_input_tokens": 10, "max_total_tokens": 10},
            "`max_input_tokens` must be < `max_total_tokens`",
        ),
    ],
)
def test_arguments(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        check_arguments(config_with(**values))
    assert str(caught.value) == f"Argument validation error: {message}"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"max_input_tokens": 200}, "`max_input_tokens` must be < `max_total_tokens`"),
        (
            {"max_batch_total_tokens": 4095},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 4096 and 4095",
        ),
        (
            {"max_total_tokens": 5001},
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 5001 and 5000",
        ),
    ],
)
def test_capacity(found: dict[str, int], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        check_capacity(config_with(), capacity_with(**found))
    assert str(caught.value) == f"Argument validation error: {message}"


def test_fitting_values_pass() -> None:
    check_arguments(config_with(max_input_tokens=9, max_total_tokens=10))
    check_capacity(config_with(), capacity_with(max_batch_total_tokens=4096))


async def test_a_folder_without_a_tokenizer() -> None:
    with pytest.raises(StartupError, match=r"/nowhere/tokenizer.json does not exist"):
        await start(config_with())
