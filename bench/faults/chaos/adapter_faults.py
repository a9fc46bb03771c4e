"""Faults of adapters: loads, replacements, corrupt files, and kills while an adapter is fetched or loaded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from signal import SIGKILL, SIGSTOP

import orjson

from bench.faults.adapters import (
    ADMIN_KEY,
    LATE,
    REPLACED,
    STEADY,
)
from bench.faults.chaos.allowed_errors import AllowedError
from bench.faults.chaos.campaign import Fault
from bench.faults.chaos.malformed import JSON, RawRequest
from bench.faults.chaos.population import Request, named
from bench.faults.chaos.scene import Scene, hit_by, send, until

FETCHING_SECONDS = 10.0
LOADING_SECONDS = 1.5
"""Less than the server's step timeout, so that the shard ends by the kill."""
POLL_SECONDS = 0.005
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def load_and_unload(scene: Scene, fault: Fault) -> None:
    """Load an adapter by another name, and unload it while streams use it; afterwards the name is unknown."""
    drawing = random.Random(fault.seed)
    twin, name = drawing.choice(list(STEADY)), f"guest-{fault.seed}"
    requests = [_renamed(request, name) for request in scene.adapted[twin]]
    since = time.monotonic()
    folder = scene.adapters.steady(twin)
    await _operate(scene, LOAD, lora_name=name, lora_path=str(folder), load_inplace=True)
    unload = partial(_operate, scene, UNLOAD, 404, lora_name=name)
    await _while_streaming(scene, requests, unload, since=since)
    body = orjson.dumps(requests[0].body)
    await scene.client.post_raw(
        RawRequest(name="an unloaded adapter", content=body, statuses=frozenset({404})),
        requests[0].path,
    )


async def change(scene: Scene, _: Fault, *, name: str) -> None:
    """Change an adapter while streams use it; then a request gets the new version."""
    async with scene.changes:
        version = 1 - scene.versions[name]
        requests, since = scene.adapted[name], time.monotonic()
        await _while_streaming(scene, requests, partial(set_version, scene, name, version))
        await scene.client.ask(requests[0], version=version, since=since)


async def set_version(scene: Scene, name: str, version: int) -> None:
    """Load a version of an adapter in place, or overwrite the files."""
    if name == REPLACED:
        folder = scene.adapters.version(name, version)
        await _operate(scene, LOAD, lora_name=name, lora_path=str(folder), load_inplace=True)
    else:
        await asyncio.to_thread(scene.adapters.overwrite, version)
    scene.versions[name] = version


async def corrupt(scene: Scene, fault: Fault) -> None:
    """Ask for a corrupt adapter, and load it in place of another, which stays."""
    drawing, name = random.Random(fault.seed), f"corrupt-{fault.seed}"
    wrong = await asyncio.to_thread(scene.adapters.corrupt, name, drawing)
    content = orjson.dumps({"inputs": "x", "parameters": named(name)})
    bad = RawRequest(name=f"adapter with {wrong}", content=content, statuses=frozenset({422}))
    async with scene.changes:
        for path in bad.paths:
            await scene.client.post_raw(bad, path)
        path = str(scene.adapters.root / name)
        await _operate(scene, LOAD, only=400, lora_name=REPLACED, lora_path=path, load_inplace=True)


async def kill_fetching(scene: Scene, fault: Fault) -> None:
    """Kill the process that fetches an adapter; its requests get 503, and are sent again."""
    drawing = random.Random(fault.seed)
    twin, name = drawing.choice(list(STEADY)), f"fetched-{fault.seed}"
    await asyncio.to_thread(scene.adapters.shelve, name, twin)
    request = _renamed(scene.adapted[twin][0], name)
    async with scene.changes:
        scene.client.allowed.begin(AllowedError.FETCHES, time.monotonic())
        try:
            asking = asyncio.create_task(scene.client.ask(request))
            killed = await _kill_fetchers(scene, asking)
            await asking
        finally:
            scene.client.allowed.end(AllowedError.FETCHES, time.monotonic())
    scene.client.ledger.count(
        "fetching process killed" if killed else "fetching process ended before it was killed"
    )


async def kill_loading(scene: Scene, fault: Fault) -> set[int]:
    """Kill a shard that is stopped when it should load an adapter."""
    drawing = random.Random(fault.seed)
    pids, name = hit_by(scene, fault), drawing.choice(LATE)
    send(pids, SIGSTOP)
    scene.others.add(asyncio.create_task(scene.client.ask(scene.adapted[name][0])))
    with suppress(TimeoutError):
        async with asyncio.timeout(LOADING_SECONDS):
            await until(lambda: _is_loading(scene, name), every=POLL_SECONDS)
            scene.client.ledger.count("shard killed while an adapter was due")
    send(pids, SIGKILL)
    return pids


def _is_loading(scene: Scene, name: str) -> bool:
    with suppress(OSError):
        series = next((one for one in scene.server.metrics() if one.startswith("vllm:lora")), "")
        return name in series.partition("waiting_lora_adapters=")[2]
    return False


async def _kill_fetchers(scene: Scene, asking: asyncio.Task[None]) -> bool:
    """Kill all fetching processes as soon as there is one; whether there was one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FETCHING_SECONDS):
            while not asking.done():
                pids = await asyncio.to_thread(lambda: set(scene.server.members().fetchers))
                if pids:
                    send(pids, SIGKILL)
                    return True
                await asyncio.sleep(POLL_SECONDS)
    return False


async def _while_streaming(
    scene: Scene,
    requests: Sequence[Request],
    act: Callable[[], Awaitable[None]],
    *,
    since: float | None = None,
) -> None:
    """Act once each request has its first event, and wait for the answers."""
    async with asyncio.TaskGroup() as tasks:
        begun = [asyncio.Event() for _ in requests]
        for request, event in zip(requests, begun, strict=True):
            tasks.create_task(scene.client.ask(request, began=event, since=since))
        await asyncio.gather(*(event.wait() for event in begun))
        await act()


async def _operate(scene: Scene, path: str, *also: int, only: int = 200, **fields: object) -> None:
    """Call a route of the operator; statuses of `also` are right if the router has forgotten the adapter."""
    await scene.client.post_raw(
        RawRequest(
            name=f"{path} {fields['lora_name']}",
            content=orjson.dumps(fields),
            statuses=frozenset({only, *also}),
            headers=JSON | {"authorization": f"Bearer {ADMIN_KEY}"},
        ),
        path,
    )


def _renamed(request: Request, adapter: str) -> Request:
    """The same request for an adapter with the same weights and another name."""
    parameters = request.body["parameters"] | named(adapter)
    return replace(request, body={**request.body, "parameters": parameters})
