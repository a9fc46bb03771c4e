"""The flags of KV-cache events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace_router.config import RouterConfig
from millrace_router.start import traces
from millrace_router.start.shards import StartupError
from millrace_router.start.traces import check_kv_events, open_kv_events


def config(**flags: Any) -> RouterConfig:
    return RouterConfig(model_folder=Path("model"), **flags)


def refusal(**flags: Any) -> str:
    with pytest.raises(StartupError) as refused:
        check_kv_events(config(**flags))
    return str(refused.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda _: object())


def test_without_the_flag_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_other_hosts_only_if_asked(flag: str, address: str) -> None:
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


async def test_what_a_turn_of_the_loop_records_is_one_batch() -> None:
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
