"""Checks between flags and capacity, and the errors of a start."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from millrace_router.access.keys import ApiKeys
from millrace_router.config import RouterConfig
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import Capacity
from millrace_router.start.engine import new_engine
from millrace_router.start.files import sampling_defaults, tool_format
from millrace_router.start.running import measure_steps, metrics_of, services_of, start
from millrace_router.start.shards import (
    RouterDeployment,
    StartupError,
    check_arguments,
    check_capacity,
    prefill_tokens,
    warm_up,
)
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from millrace_testing.router.edge import FakeBatcher, services_over, word_tokenizer
from millrace_testing.router.fake_router import tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard

SECONDS = 30
INFO = services_over(FakeBatcher()).shard


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
def test_wrong_flags_end_the_start(values: dict[str, Any], message: str) -> None:
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
def test_flags_beyond_the_capacity_end_the_start(found: dict[str, int], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        check_capacity(config_with(max_batch_prefill_tokens=4096), capacity_with(**found))
    assert str(caught.value) == f"Argument validation error: {message}"


def test_fitting_values_pass() -> None:
    check_arguments(config_with(max_input_tokens=9, max_total_tokens=10))
    fitting = capacity_with(max_batch_total_tokens=4096)
    check_capacity(config_with(max_batch_prefill_tokens=4096), fitting)


def test_a_step_may_be_shorter_than_the_longest_prompt() -> None:
    capacity = capacity_with(max_batch_total_tokens=5000, max_input_tokens=100)
    check_capacity(config_with(max_batch_prefill_tokens=99, prefill_chunking="off"), capacity)


@pytest.mark.parametrize(
    ("given", "positions", "measured", "at_warmup", "resolved"),
    [
        ({}, 100_000, 100_000, 4096, 4096),
        ({}, 300, 100_000, 300, 300),
        ({}, 100_000, 700, 4096, 700),
        ({"max_batch_total_tokens": 500}, 100_000, 400, 500, 400),
        ({"max_batch_prefill_tokens": 9000}, 300, 100_000, 9000, 9000),
    ],
)
def test_prefill_tokens_are_what_was_given_or_what_fits(
    given: dict[str, int], positions: int, measured: int, at_warmup: int, resolved: int
) -> None:
    config, info = config_with(**given), replace(INFO, max_position_embeddings=positions)
    capacity = capacity_with(max_batch_total_tokens=measured)
    assert prefill_tokens(config, info) == at_warmup
    assert prefill_tokens(config, info, capacity) == resolved


@pytest.mark.parametrize(
    ("source", "asked", "warns"),
    [
        ("{{ tools }}", "auto", True),
        ("{{ tools }}", "hermes", False),
        ("{{ tools }}<tool_call>", "auto", False),
        ("no tools", "auto", False),
    ],
)
def test_an_unknown_form_of_calls_is_a_warning_that_names_the_flag(
    source: str, asked: str, warns: bool
) -> None:
    template = ChatTemplate(source, special_tokens={})
    with capture_logs() as logs:
        tool_format(config_with(tool_call_parser=asked), template, word_tokenizer())
    assert ["--tool-call-parser" in line["event"] for line in logs] == [True] * warns


async def test_what_is_resolved_is_what_is_used() -> None:
    config, capacity = config_with(), capacity_with(max_batch_total_tokens=250)
    info = replace(INFO, max_position_embeddings=100_000, vocab_size=77)
    check_capacity(config, capacity)
    channel, tokenizer = StepChannel(ShardGroup(["unix:/nowhere"])), word_tokenizer()
    deployment = RouterDeployment(config=config, info=info, capacity=capacity)
    cost, metrics = CostModel(), metrics_of(deployment)
    engine = new_engine(
        deployment, channel, tokenizer, metrics, cost=cost, launcher=LauncherChannel(None)
    )
    services = services_of(
        deployment,
        engine,
        channel.group,
        metrics,
        tokenizer=tokenizer,
        template=ChatTemplate(None, special_tokens={}),
        keys=ApiKeys(None),
    )
    assert services.cost is cost
    assert engine.batcher._predictor.cost is cost
    assert services.max_batch_prefill_tokens == 250
    assert engine.batcher._planner.budgets.max_batch_prefill_tokens == 250
    assert services.limits.vocab_size == 77
    await channel.close()
    tokenizer.close()


async def test_a_folder_without_a_tokenizer_ends_the_start() -> None:
    with pytest.raises(StartupError, match=r"/nowhere/tokenizer.json does not exist"):
        await start(config_with())


async def test_shards_that_go_while_steps_are_measured_do_not_keep_the_port_closed(
    tmp_path: Path,
) -> None:
    address, tokenizer = f"unix:{tmp_path}/shard", tiny_tokenizer()
    channel = StepChannel(ShardGroup([address]))
    config = config_with(shard_addresses=(address,), max_batch_prefill_tokens=16)
    with serve_fake_shard(address, FakeShard()):
        deployment = await warm_up(config, channel.group)
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(SECONDS):
            await measure_steps(
                deployment, channel, tokenizer, cost=CostModel(), launcher=LauncherChannel(None)
            )
    assert "cannot measure steps" in logs[-1]["event"]
    await channel.close()
    tokenizer.close()


def test_defaults_of_a_model_are_read_unless_a_flag_forbids() -> None:
    model = ModelFiles(generation_config={"temperature": 0.5, "eos_token_id": 2})
    assert sampling_defaults(config_with(), model) == SamplingDefaults(temperature=0.5)
    for flags in ({"generation_config": "off"}, {"strict_tgi": True}):
        assert sampling_defaults(config_with(**flags), model) == NO_DEFAULTS
    wrong = ModelFiles(generation_config={"temperature": -1})
    assert sampling_defaults(config_with(generation_config="off"), wrong) == NO_DEFAULTS
    with pytest.raises(ModelFilesError, match=r"`temperature`.*--generation-config off"):
        sampling_defaults(config_with(), wrong)
