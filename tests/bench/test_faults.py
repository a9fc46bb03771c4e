"""Streams against a server whose every byte is known, and the comparison of two runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.faults.adapters import (
    CORRUPTIONS,
    OVERWRITTEN,
    Adapters,
)
from bench.faults.streams import Answer, Clients, differences
from bench.harness.paths import DEMO

from millrace.verify.adapter_files import linears
from millrace_router.request.adapter import RANKS_PER_SLICE, AdapterModule
from millrace_testing.adapters.fetch_jobs import fetch_folder
from millrace_testing.router.sse import FakeServer, event, served, whole_stream

BODY = {"inputs": "x", "parameters": {"max_new_tokens": 3}}


def answer(*events: bytes, error: str = "") -> Answer:
    return Answer(BODY, events=[one[len(b"data: ") : -2] for one in events], error=error)


def whole(count: int = 3) -> list[bytes]:
    return [event(index, last=index == count) for index in range(1, count + 1)]


async def test_every_event_is_kept_as_it_was_sent() -> None:
    async with served(FakeServer(whole_stream, hold=2)) as url, Clients(url) as clients:
        answers = await clients.send_all([BODY, BODY])
        assert clients.num_tokens == 6
    assert [one.events for one in answers] == [answer(*whole()).events] * 2
    for one in answers:
        assert one.is_whole
        assert one.error == ""
        assert one.arrivals == sorted(one.arrivals)
        assert one.sent <= one.arrivals[0] <= one.arrivals[-1] <= one.ended


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (whole()[:2], "ended after 2 tokens"),
        ([whole()[0], b'data: {"error":"gone","error_type":"unavailable"}\n\n'], "unavailable"),
        ([whole()[0][:-4]], "inside an event"),
        ([], "ended after 0 tokens"),
    ],
)
async def test_a_stream_without_its_end_is_a_failure(pieces: list[bytes], reason: str) -> None:
    async with served(FakeServer(lambda _: pieces)) as url, Clients(url) as clients:
        (one,) = await clients.send_all([BODY])
    assert reason in one.error


def test_cached_tokens_are_not_a_difference() -> None:
    last = json.loads(answer(*whole()).events[-1])
    last["details"]["cached_tokens"] = 16
    cached = answer(*whole()[:2], b"data: " + json.dumps(last).encode() + b"\n\n")
    assert differences([answer(*whole())], [cached]) == []


def test_a_token_a_length_an_end_and_an_error_are_differences() -> None:
    right = answer(*whole())
    changed = replace(right, events=[*right.events])
    changed.events[1] = changed.events[1].replace(b"-1.0", b"-1.1")
    ending = replace(right, events=[*right.events])
    ending.events[2] = ending.events[2].replace(b"length", b"eos_token")
    failed = answer(*whole()[:2], error="reset")
    found = differences([right] * 5, [right, changed, answer(*whole(2)), ending, failed])
    assert [line.split(":")[0] for line in found] == [f"stream {n}" for n in (1, 2, 3, 4)]
    assert "token 2 is" in found[0]
    assert "reset" in found[3]


def test_one_stream_may_be_excepted() -> None:
    right, failed = answer(*whole()), answer(error="424")
    assert differences([right, right], [right, failed], but=1) == []
    assert len(differences([right, right], [right, failed], but=0)) == 1


MODULES = [
    AdapterModule(
        name=name,
        inputs=inputs,
        outputs=outputs,
        bytes_per_slice=2 * RANKS_PER_SLICE * (inputs + outputs),
    )
    for name, (outputs, inputs) in linears(DEMO).items()
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def fetch(folder: Path) -> dict[str, Any]:
    return fetch_folder(folder, folder.parent / "cache", MODULES)


def test_an_overwritten_folder_has_the_version(adapters: Adapters) -> None:
    live = adapters.steady(OVERWRITTEN)
    for version in (1, 0):
        adapters.overwrite(version)
        assert fetch(live)["digest"] == fetch(adapters.version(OVERWRITTEN, version))["digest"]


def test_every_corrupt_adapter_is_refused(adapters: Adapters) -> None:
    drawing, seen = random.Random(0), set()
    for number in range(8 * len(CORRUPTIONS)):
        wrong = adapters.corrupt(f"corrupt-{number}", drawing)
        answer = fetch(adapters.root / f"corrupt-{number}")
        assert answer["error"] == "invalid", wrong
        seen.add(wrong)
    assert seen == set(CORRUPTIONS)
