"""The start of the router: flags against capacity, adapters, the journal, KV-cache events, and errors."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from millrace_router.access.keys import ApiKeys
from millrace_router.config import RouterConfig
from millrace_router.engine import calibration
from millrace_router.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
)
from millrace_router.journal.reader import Answered, Epoch, Sent, read_epochs
from millrace_router.journal.rotation import JournalFolder, journal_files
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.request.adapter import (
    PAGE_BYTES,
    AdapterReference,
    AdapterSource,
    MergeRecipe,
    MergeStrategy,
)
from millrace_router.request.request import ValidRequest
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import Capacity
from millrace_router.start import traces
from millrace_router.start.adapters import OpenAdapters, open_adapters
from millrace_router.start.engine import new_engine
from millrace_router.start.files import sampling_defaults, tool_format, warn_without_tools
from millrace_router.start.learned import Learned
from millrace_router.start.running import measure_steps, metrics_of, services_of, start
from millrace_router.start.shards import (
    RouterDeployment,
    StartupError,
    check_arguments,
    check_capacity,
    prefill_tokens,
    warm_up,
)
from millrace_router.start.traces import (
    MODULES,
    PACKAGES,
    check_kv_events,
    check_traces,
    open_kv_events,
)
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from millrace_testing.adapters.fake_adapters import MODULE
from millrace_testing.adapters.hub_stub import HubStub, Repository, hub_stub
from millrace_testing.project import ROOT
from millrace_testing.router.edge import FakeBatcher, logging_to, services_over, word_tokenizer
from millrace_testing.router.fake_router import collect, tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard, continuation, serve_fake_shard

SECONDS = 30
INFO = services_over(FakeBatcher()).shard


def config_with(**values: Any) -> RouterConfig:
    return RouterConfig(**{"model_folder": Path("/nowhere"), **values})


def capacity_with(**values: Any) -> Capacity:
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
def test_prefill_tokens_follow_the_flag_or_the_capacity(
    given: dict[str, int], positions: int, measured: int, at_warmup: int, resolved: int
) -> None:
    config, info = config_with(**given), replace(INFO, max_position_embeddings=positions)
    capacity = capacity_with(max_batch_total_tokens=measured)
    assert prefill_tokens(config, info) == at_warmup
    assert prefill_tokens(config, info, capacity) == resolved


@pytest.mark.parametrize(
    ("source", "asked", "warning"),
    [
        ("{{ tools }}", "auto", "--tool-call-parser"),
        ("{{ tools }}", "hermes", None),
        ("{{ tools }}<tool_call>", "auto", None),
        ("nothing of it", "auto", "no place for tools"),
        ("nothing of it", "hermes", "no place for tools"),
        (None, "auto", None),
    ],
)
def test_a_template_of_which_calls_are_not_known_is_a_warning_at_the_start(
    source: str | None, asked: str, warning: str | None
) -> None:
    template = ChatTemplate(source, special_tokens={})
    with capture_logs() as logs:
        tool_format(config_with(tool_call_parser=asked), template, word_tokenizer())
        warn_without_tools(template)
    assert [str(warning) in line["event"] for line in logs] == [True] * (warning is not None)


async def test_resolved_settings_are_the_ones_in_use() -> None:
    config, capacity = config_with(), capacity_with(max_batch_total_tokens=250)
    info = replace(INFO, max_position_embeddings=100_000, vocab_size=77)
    check_capacity(config, capacity)
    channel, tokenizer = StepChannel(ShardGroup(["unix:/nowhere"])), word_tokenizer()
    deployment = RouterDeployment(config=config, info=info, capacity=capacity)
    cost, metrics = CostModel(), metrics_of(deployment)
    engine = new_engine(
        deployment,
        channel,
        tokenizer,
        metrics,
        learned=Learned(cost),
        launcher=LauncherChannel(None),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "/tokenizer.json does not exist"),
        (("--api-key-file=no-keys",), "no-keys"),
        (("--ssl-certfile=no-cert",), "HTTPS needs --ssl-keyfile too"),
        (("--max-batch-size=0",), "`max_batch_size` must be > 0"),
    ],
)
def test_what_flags_and_files_decide_is_refused_without_a_shard_and_before_anything_is_written(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    arguments = (f"--tokenizer-name={tmp_path}", f"--journal={journal}", *flags)
    command = (sys.executable, "-m", "millrace_router", *arguments)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert message in refused.stdout
    assert not journal.exists()


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


async def test_a_slow_machine_measures_as_many_steps_as_the_first_prediction_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SECONDS", -1.0)
    address, tokenizer, cost = f"unix:{tmp_path}/shard", tiny_tokenizer(), CostModel()
    channel = StepChannel(ShardGroup([address]))
    config = config_with(shard_addresses=(address,), max_batch_prefill_tokens=16)
    with serve_fake_shard(address, FakeShard()):
        deployment = await warm_up(config, channel.group)
        await measure_steps(
            deployment, channel, tokenizer, cost=cost, launcher=LauncherChannel(None)
        )
        await channel.close()
    tokenizer.close()
    assert cost.is_known


async def test_a_router_that_finds_no_socket_has_the_shards_restarted(tmp_path: Path) -> None:
    address, ranks = f"unix:{tmp_path}/shard", ExitStack()
    channel = StepChannel(ShardGroup([address]))
    config = config_with(shard_addresses=(address,), max_batch_prefill_tokens=16, step_timeout=0.05)
    reasons = []

    def restart(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 2:
            ranks.enter_context(serve_fake_shard(address, FakeShard()))

    with ranks:
        async with asyncio.timeout(SECONDS):
            deployment = await warm_up(config, channel.group, restart)
        await channel.close()
    assert deployment.capacity.num_blocks
    assert reasons[:2] == ["the shards cannot be reached at their sockets"] * 2


def test_defaults_of_a_model_are_read_unless_a_flag_forbids() -> None:
    model = ModelFiles(generation_config={"temperature": 0.5, "eos_token_id": 2})
    assert sampling_defaults(config_with(), model) == SamplingDefaults(temperature=0.5)
    for flags in ({"generation_config": "off"}, {"strict_tgi": True}):
        assert sampling_defaults(config_with(**flags), model) == NO_DEFAULTS
    wrong = ModelFiles(generation_config={"temperature": -1})
    assert sampling_defaults(config_with(generation_config="off"), wrong) == NO_DEFAULTS
    with pytest.raises(ModelFilesError, match=r"`temperature`.*--generation-config off"):
        sampling_defaults(config_with(), wrong)


def config_of(protocol: str | None = None, endpoint: str | None = "http://c") -> RouterConfig:
    return RouterConfig.model_validate(
        {"model_folder": Path("m"), "otlp_endpoint": endpoint, "otlp_protocol": protocol}
    )


@pytest.mark.parametrize("protocol", MODULES)
def test_the_installed_packages_are_enough_for_traces(protocol: str) -> None:
    check_traces(config_of(protocol))


@pytest.mark.parametrize("protocol", MODULES)
def test_missing_packages_are_named(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULES[protocol], raising=False)
    monkeypatch.setitem(sys.modules, MODULES[protocol].rpartition(".")[0], None)
    package = MODULES[protocol].removesuffix(".trace_exporter").replace(".", "-")
    assert PACKAGES[protocol] in (ROOT / "router" / "pyproject.toml").read_text(encoding="utf-8")
    with pytest.raises(StartupError, match=f"pip install opentelemetry-sdk {package},"):
        check_traces(config_of(protocol))
    check_traces(config_of(protocol, endpoint=None))


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(StartupError, match="http/json is not one of grpc, http/protobuf"):
        check_traces(config_of())


CAPACITY = Capacity(
    num_blocks=11,
    max_batch_total_tokens=5000,
    max_input_tokens=100,
    max_total_tokens=200,
    kv_bytes_per_token=1,
)


@pytest.mark.parametrize(
    ("device", "num_shard", "variable", "strict_tgi", "compute_type"),
    [
        ("cpu", 1, None, False, "1-cpu"),
        ("cuda", 2, None, False, "2-cuda"),
        ("cuda", 2, "2-nvidia-h100", False, "2-nvidia-h100"),
        ("cpu", 1, "", False, "1-cpu"),
        ("cpu", 1, None, True, "gpu+optimized"),
        ("cuda", 2, "2-nvidia-h100", True, "2-nvidia-h100"),
    ],
)
def test_answers_name_the_compute_type(
    device: str,
    num_shard: int,
    variable: str | None,
    compute_type: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    strict_tgi: bool,
) -> None:
    if variable is None:
        monkeypatch.delenv("COMPUTE_TYPE", raising=False)
    else:
        monkeypatch.setenv("COMPUTE_TYPE", variable)
    deployment = RouterDeployment(
        config=RouterConfig(model_folder=Path("/nowhere"), strict_tgi=strict_tgi),
        info=replace(INFO, device_type=device, world_size=num_shard),
        capacity=CAPACITY,
    )
    assert deployment.compute_type == compute_type


def config(**flags: Any) -> RouterConfig:
    return RouterConfig(model_folder=Path("model"), **flags)


def refusal(**flags: Any) -> str:
    with pytest.raises(StartupError) as refused:
        check_kv_events(config(**flags))
    return str(refused.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda _: object())


def test_kv_events_need_no_package_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda _: None)
    check_kv_events(config())
    assert open_kv_events(config(), block_size=16) is None


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda _: None)
    assert refusal(kv_events="tcp://127.0.0.1:5557") == (
        "--kv-events needs pyzmq and msgpack: pip install pyzmq msgpack, or start without it"
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5557", "tcp://127.9.9.9:1", "tcp://[::1]:5557", "ipc:///run/events"],
)
def test_loopback_and_sockets_of_this_host_are_allowed(address: str) -> None:
    check_kv_events(config(kv_events=address, kv_events_replay=address))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("flag", ["kv_events", "kv_events_replay"])
@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557"])
def test_events_are_published_to_other_hosts_only_with_a_flag(flag: str, address: str) -> None:
    flags = {"kv_events": "tcp://127.0.0.1:5557", flag: address}
    name = "--" + flag.replace("_", "-")
    assert refusal(**flags) == (
        f"{name} {address} is not a loopback address, and events contain prompts: add --kv-events-any-host to publish"
        " them there"
    )
    check_kv_events(config(**flags, kv_events_any_host=True))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "--kv-events is tcp://IP:PORT or ipc://PATH"),
        ({"kv_events": "tcp://127.0.0.1:99999"}, "--kv-events is tcp://IP:PORT or ipc://PATH"),
        ({"kv_events": "tcp://here:5557"}, "needs an IP address or \\*, not the name here"),
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "--kv-events-replay needs --kv-events"),
        (
            {"kv_events": "tcp://127.0.0.1:5557", "prefix_caching": "off"},
            "which --prefix-caching off disables",
        ),
    ],
)
def test_wrong_flags_of_events_end_the_start(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_kv_events(config(**flags))


async def test_an_address_in_use_ends_the_start() -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    pytest.importorskip("msgpack", reason="msgpack is not installed")
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(StartupError, match=f"cannot be published at tcp://127.0.0.1:{port}"):
            open_kv_events(config(kv_events=f"tcp://127.0.0.1:{port}"), block_size=16)


async def test_events_of_one_turn_of_the_loop_are_one_batch() -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    pytest.importorskip("msgpack", reason="msgpack is not installed")
    events = open_kv_events(
        config(kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0"), block_size=16
    )
    assert events is not None
    events.recorder.new_cache()
    events.recorder.new_cache()
    await asyncio.sleep(0)
    assert events.recorder.take() is None
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(events.publisher.replay_address)
        asking.send_multipart([b"", bytes(8)])
        numbers = []
        while (answer := asking.recv_multipart())[2]:
            numbers.append(answer[1])
        assert numbers == [bytes(8)]
    events.close()


SERVICES = services_over(FakeBatcher())


def write_peft(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write an adapter of the only layer of the fake model, as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed)
    prefix = f"base_model.model.{MODULE.name}"
    tensors = {
        f"{prefix}.lora_A.weight": numbers.normal(size=(4, 8)).astype(np.float32),
        f"{prefix}.lora_B.weight": numbers.normal(size=(8, 4)).astype(np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def deployment_of(
    tmp_path: Path, *, pages: int = 4, lora: bool = True, **flags: Any
) -> RouterDeployment:
    config = RouterConfig(
        model_folder=tmp_path,
        model_id="base",
        adapter_cache=tmp_path / "cache",
        **flags,
    )
    info = replace(SERVICES.shard, adapter_modules=(MODULE,) if lora else ())
    capacity = replace(SERVICES.capacity, adapter_pages=pages)
    return RouterDeployment(config=config, info=info, capacity=capacity)


@asynccontextmanager
async def opened(tmp_path: Path, **options: Any) -> AsyncIterator[OpenAdapters]:
    deployment = deployment_of(tmp_path, **options)
    adapters = await open_adapters(deployment, metrics_of(deployment))
    assert adapters is not None
    try:
        yield adapters
    finally:
        await adapters.fetcher.close()


async def test_adapters_of_all_flags_are_registered(tmp_path: Path) -> None:
    one, two = write_peft(tmp_path / "one"), write_peft(tmp_path / "two", seed=1)
    flags: dict[str, Any] = {
        "lora_adapters": f"a={one}",
        "lora_modules": f'{{"name": "b", "path": "{two}"}}',
        "adapter_id": "a",
        "preloaded_adapter_ids": str(two),
        "max_loras": 3,
    }
    async with opened(tmp_path, **flags) as adapters:
        resolver = adapters.resolver
        known = {one.name: one.current is not None for one in resolver.registry}
        assert known == {"a": True, "b": False, str(two): True}
        assert resolver.default == AdapterReference(name="a")
        first = await resolver.resolve(AdapterReference(name="a"), "me")
        other = await resolver.resolve(AdapterReference(name="b"), "me")
        assert first.num_slices == ((MODULE.name, 1),)
        assert first.digest != other.digest
        assert resolver.digests() == {first.digest, other.digest}
        assert (tmp_path / "cache" / first.digest / "adapter.safetensors").is_file()
        recipe = MergeRecipe(ids=("a", "b"), weights=(1.0, 0.5), strategy=MergeStrategy.CAT)
        merged = await resolver.resolve(AdapterReference(merged=recipe), "me")
        assert merged.digest not in resolver.digests()


@asynccontextmanager
async def hub_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HubStub]:
    """A hub with the files of `folder` as `org/a`."""
    async with hub_stub() as hub:
        hub.repositories["org/a"] = Repository.of_folder(folder)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


async def test_a_restart_while_the_hub_is_down_uses_the_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {"lora_modules": "a=org/a", "adapter_allow": "hub:org/*"}
    async with hub_of(write_peft(tmp_path / "one"), monkeypatch) as hub:
        async with opened(tmp_path, **flags, adapter_id="a") as adapters:
            first = await adapters.resolver.resolve(AdapterReference(name="a"), "me")
        hub.repositories["org/a"].status = 502
        output = io.BytesIO()
        with logging_to(output):
            async with opened(tmp_path, **flags, adapter_id="a") as adapters:
                assert await adapters.resolver.resolve(AdapterReference(name="a"), "me") == first
                registration = adapters.resolver.registry.get("a")
                assert registration is not None
                # The operator, who asks for new files, and clients, whose access the hub would check.
                with pytest.raises(AdapterUnavailable):
                    await adapters.resolver.reload(registration)
                with pytest.raises(AdapterUnavailable):
                    await adapters.resolver.resolve(AdapterReference(name="org/a"), "me")
        assert b"hub unreachable: serving the cached version" in output.getvalue()
        # A server with another limit has checked nothing.
        with pytest.raises(StartupError, match="502"):
            async with opened(tmp_path, **flags, adapter_id="a", max_lora_rank=8):
                pass
        del hub.repositories["org/a"]
        with pytest.raises(StartupError, match="does not exist"):
            async with opened(tmp_path, **flags, adapter_id="a"):
                pass


async def test_only_folders_below_the_root_can_be_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_peft(root / "mine")
    outside = write_peft(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    async with opened(tmp_path, adapter_root=root) as adapters:

        async def ask(name: str) -> str:
            reference = AdapterReference(name=name, source=AdapterSource.LOCAL)
            return (await adapters.resolver.resolve(reference, "me")).digest

        first = await ask("mine")
        for name in ("link", "../outside", str(outside), "none"):
            with pytest.raises((AdapterNotFound, AdapterInvalid)):
                await ask(name)
        write_peft(root / "mine", seed=2)
        assert await ask("mine") != first


async def test_versions_that_are_registered_or_in_use_stay_in_the_cache(tmp_path: Path) -> None:
    one = write_peft(tmp_path / "one")
    async with opened(tmp_path, lora_modules=f"a={one}", adapter_id="a") as adapters:
        adapters.in_use = lambda: {"used"}
        assert adapters.fetcher._needed() == {*adapters.resolver.digests(), "used"}
        assert len(adapters.resolver.digests()) == 1


async def test_an_adapter_larger_than_all_memory_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path / "one")
    flags = {"lora_modules": f"a={tmp_path / 'one'}"}
    async with opened(tmp_path, pages=0, **flags) as adapters:
        with pytest.raises(AdapterTooLarge, match=f"{PAGE_BYTES} bytes"):
            await adapters.resolver.resolve(AdapterReference(name="a"), "me")
    async with opened(tmp_path, max_lora_rank=3, **flags) as adapters:
        with pytest.raises(AdapterInvalid, match="4"):
            await adapters.resolver.resolve(AdapterReference(name="a"), "me")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_modules": "a=/x,a=/y"}, "two LoRA adapters have the name a"),
        ({"lora_modules": "base=/x"}, "the LoRA adapter base has the name of the model"),
        ({"lora_modules": "a=neither"}, "'neither' is neither a folder nor an id on the hub"),
        ({"lora_modules": "a=/x", "lora": False}, "start them with --enable-lora"),
        ({"adapter_allow": "hub:a/*", "lora": False}, "start them with --enable-lora"),
        ({"adapter_id": "/nowhere/a"}, "'/nowhere/a'"),
        ({"adapter_cache": "/proc/none"}, "cannot use --adapter-cache"),
    ],
)
async def test_failed_starts_name_the_cause(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    is_lora = flags.pop("lora", True)
    usual: dict[str, Any] = {"model_folder": tmp_path, "model_id": "base"}
    config = RouterConfig(**usual | {"adapter_cache": tmp_path} | flags)
    deployment = replace(deployment_of(tmp_path, lora=is_lora), config=config)
    with pytest.raises(StartupError, match=message):
        await open_adapters(deployment, metrics_of(deployment))


async def test_a_server_without_adapters_creates_no_cache(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, lora=False)
    assert await open_adapters(deployment, metrics_of(deployment)) is None
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer()._rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    return tmp_path


def journal_config(folder: Path, **values: Any) -> RouterConfig:
    return RouterConfig(
        model_folder=folder,
        model_id="my/model",
        revision="0123abc",
        shard_addresses=(f"unix:{folder}/shard",),
        max_batch_prefill_tokens=64,
        journal=folder / "journal",
        **values,
    )


ASKED = ValidRequest(input_ids=(5, 6, 7), max_new_tokens=6, ignore_eos=True)


async def serve(folder: Path, asked: ValidRequest = ASKED, **values: Any) -> tuple[str, list[int]]:
    """Serve one request by a complete router; returns /metrics and the tokens."""
    with serve_fake_shard(f"unix:{folder}/shard", FakeShard(num_blocks=600, max_batch_size=256)):
        running = await start(journal_config(folder, **values))
        try:
            stream = running.services.infer._batcher.submit(asked)
            ids = [e.token.id for e in await collect(stream)]
            counter = running.services.metrics.journal_dropped_records
            return f"{counter.touched} {counter.value}", ids
        finally:
            await running.stop_batcher()
            await running.close()


def told(folder: Path) -> tuple[Epoch, list[Any]]:
    ((epoch, events),) = [(epoch, list(epoch.events)) for epoch in read_epochs(folder / "journal")]
    return epoch, events


async def test_the_journal_records_served_requests_and_no_calibration(folder: Path) -> None:
    dropped, ids = await serve(folder, journal_tokens=True, max_batch_size=7, fairness="tenant")
    assert dropped == "True 0.0"
    assert ids == continuation([5, 6, 7], 6)
    epoch, events = told(folder)
    admitted = [
        list(sequence.input_ids)
        for event in events
        if isinstance(event, Sent)
        for sequence in event.message.prefill.change.admitted
    ]
    assert admitted == [[5, 6, 7]]
    answers = [event.answer for event in events if isinstance(event, Answered)]
    assert [id_ for answer in answers for id_ in answer.ids][:6] == ids
    head = epoch.header
    assert (head.model_id, head.model_sha, head.keeps_tokens) == ("my/model", "0123abc", True)
    assert (head.shard.model_type, head.capacity.num_blocks) == ("fake", 600)
    assert head.warmup["max_batch_prefill_tokens"] == 64
    assert head.warmup["max_batch_size"] > 7
    assert "num_blocks" not in head.warmup
    assert head.settings["fairness"] == "tenant"
    assert head.settings["max_batch_prefill_tokens"] == 64
    assert head.settings["prefix_caching"] == "on"


async def test_an_end_token_of_the_chosen_tokenizer_config_ends_answers(folder: Path) -> None:
    answer = continuation([5, 6, 7], 6)
    end = next(id_ for id_ in answer if id_ != answer[0])
    text = tiny_tokenizer()._rust.id_to_token(end)
    chosen = folder / "chosen.json"
    chosen.write_text(json.dumps({"eos_token": {"content": text}}))
    asked = replace(ASKED, ignore_eos=False, min_new_tokens=1, stop_token_ids=(3,))
    _, ids = await serve(folder, asked, tokenizer_config_path=chosen, journal_tokens=True)
    assert ids == answer[: answer.index(end) + 1]
    _, events = told(folder)
    (sent,) = [
        sequence
        for event in events
        if isinstance(event, Sent)
        for sequence in event.message.prefill.change.admitted
    ]
    assert list(sent.parameters.stop_ids) == [3, end]


async def test_token_ids_are_recorded_only_when_they_are_wanted(folder: Path) -> None:
    _, ids = await serve(folder)
    epoch, events = told(folder)
    assert not epoch.header.keeps_tokens
    answers = [event.answer for event in events if isinstance(event, Answered)]
    assert sum(count for answer in answers for count in answer.counts) >= len(ids) == 6
    assert not any(answer.ids for answer in answers)


async def test_each_life_of_the_router_begins_a_file(folder: Path) -> None:
    for _ in range(2):
        await serve(folder)
    assert len(journal_files(folder / "journal")) == 2
    lives = {epoch.header.life for epoch in read_epochs(folder / "journal")}
    assert len(lives) == 2


async def test_a_router_that_cannot_write_its_journal_does_not_start(folder: Path) -> None:
    (folder / "journal").write_text("a file")
    with pytest.raises(StartupError, match="cannot keep a journal"):
        await start(journal_config(folder))
    (folder / "journal").unlink()
    taken = JournalFolder(folder / "journal", max_bytes=1 << 20)
    with pytest.raises(StartupError, match="another router"):
        await asyncio.wait_for(start(journal_config(folder)), 30)
    taken.close()
