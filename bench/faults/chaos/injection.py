"""Injects faults, and waits for the recovery from each."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial

import orjson
import psutil

from bench.faults.adapters import OVERWRITTEN, REPLACED
from bench.faults.chaos import adapter_faults
from bench.faults.chaos.allowed_errors import AllowedError
from bench.faults.chaos.campaign import Fault, Kind
from bench.faults.chaos.client import body_bytes
from bench.faults.chaos.malformed import GARBAGE, MALFORMED, OVERSIZED, UNFINISHED, RawRequest
from bench.faults.chaos.pauses import Pause
from bench.faults.chaos.population import Request
from bench.faults.chaos.scene import Scene, hit_by, send, until
from bench.faults.deployment import Deployment

RECOVERY_SECONDS = 180.0
NUM_VANISHING = 6
NUM_SLOW = 3
NUM_CROWD = 400
MAX_CROWD_MIB = 450
"""The router's bound of 256 MiB for such requests, and what Python adds."""
GARBAGE_SECONDS = 0.2
SLOWED_SECONDS = 12.0
"""Longer than several step timeouts."""
SLOWED_PERIOD_SECONDS = 0.4
MARK = " 90909 wqxz wqxz"
"""The end of a poison prompt."""
NUM_MARK_TOKENS = 6
"""Tokens that only a poison prompt ends with."""


class NotRecoveredError(Exception):
    """The server did not recover in time; the message says what was missing."""


async def inject(scene: Scene, fault: Fault) -> Pause | None:
    """Inject a fault; returns what a fatal one cost the clients. Raises NotRecoveredError."""
    if not fault.kind.value.is_fatal:
        task = asyncio.create_task(CLIENT_FAULTS[fault.kind](scene, fault))
        scene.others.add(task)
        # Some faults continue during the next one, but those after which restarts are counted stay by themselves.
        alone = fault.kind in {Kind.POISON, Kind.SLOWED}
        await asyncio.wait([task], timeout=RECOVERY_SECONDS if alone else fault.delay)
        return None
    if fault.kind.value.is_idle:
        await _others_end(scene)
        await scene.load.pause()
    scene.client.arrivals.start(time.monotonic())
    try:
        async with asyncio.timeout(RECOVERY_SECONDS):
            old = await FATAL_FAULTS[fault.kind](scene, fault)
            await settled(scene, old)
    except TimeoutError:
        raise NotRecoveredError(f"{fault.kind.value.text}: {missing(scene.server)}") from None
    finally:
        scene.load.resume()
        for error in (AllowedError.RESETS, AllowedError.FORGETS):
            scene.client.allowed.end(error, time.monotonic())
    return scene.client.arrivals.pause()


async def settled(scene: Scene, old: set[int]) -> None:
    """Wait until no process of `old` is left, all new ones run, and every earlier request has ended."""
    await until(lambda: _has_recovered(scene.server, old))
    scene.client.arrivals.recovered(time.monotonic())
    scene.load.resume()
    # A request is a poison suspect until it ends: a second kill during its replay would put it into quarantine.
    await scene.load.ended(set(scene.client.open))
    tokens = scene.client.arrivals.num_tokens
    await until(lambda: scene.client.arrivals.num_tokens > tokens)


async def finish_others(scene: Scene) -> None:
    """Wait for client faults, raise their exceptions, and close the connections of slow readers."""
    await _others_end(scene)
    for connection in scene.held:
        connection.close()
    scene.held.clear()


async def _others_end(scene: Scene) -> None:
    others, scene.others = scene.others, set()
    await asyncio.gather(*others)


def _has_recovered(server: Deployment, old: set[int]) -> bool:
    members = server.members()
    return (
        members.is_complete(server.num_ranks)
        and not members.pids() & old
        and server.is_ready()
        and server.metrics().get("millrace_recovering", 0.0) == 0
    )


def missing(server: Deployment) -> str:
    """The reason why the server has not recovered."""
    if server.has_ended:
        return "the launcher ended"
    members = server.members()
    if not members.is_complete(server.num_ranks):
        return f"processes are {members}"
    if not server.is_ready():
        return "/readyz does not say 200"
    return "no token, or requests that do not end"


async def _signal_ranks(scene: Scene, fault: Fault, *, number: signal.Signals) -> set[int]:
    pids = hit_by(scene, fault)
    send(pids, number)
    return pids


async def _kill_again(scene: Scene, fault: Fault) -> set[int]:
    """Kill again before the new group serves, that is before the replay of requests."""
    first = await _signal_ranks(scene, fault, number=signal.SIGKILL)
    await until(lambda: bool(hit_by(scene, fault) - first))
    second = hit_by(scene, fault) - first
    await asyncio.sleep(fault.delay)
    if await asyncio.to_thread(scene.server.is_ready):
        return first
    send(second, signal.SIGKILL)
    return first | second


async def _idle(scene: Scene, fault: Fault, *, number: signal.Signals) -> set[int]:
    pids = await _signal_ranks(scene, fault, number=number)
    # The server has to detect the fault without any request.
    await until(lambda: not any(map(psutil.pid_exists, pids)))
    await asyncio.sleep(fault.delay)
    scene.load.resume()
    return pids


async def _router(scene: Scene, _: Fault) -> set[int]:
    scene.client.allowed.begin(AllowedError.RESETS, time.monotonic())
    (pid,) = scene.server.members().routers
    psutil.Process(pid).kill()
    return {pid}


async def _hand_over(scene: Scene, _: Fault) -> set[int]:
    """Replace the router; no request may fail, and the old one ends with its last connection."""
    scene.client.allowed.begin(AllowedError.FORGETS, time.monotonic())
    old = set(scene.server.members().routers)
    scene.server.launcher.send_signal(signal.SIGUSR2)
    # Clients that do not read would keep it for a minute.
    for connection in scene.held:
        connection.close()
    scene.held.clear()
    return old


async def _unlink(scene: Scene, fault: Fault) -> set[int]:
    """The next router finds shards that run and cannot be reached."""
    shards = {pid for pids in scene.server.members().ranks.values() for pid in pids}
    for path in scene.server.folder.iterdir():
        if path.is_socket():
            path.unlink()
    return shards | await _router(scene, fault)


async def _slowed(scene: Scene, fault: Fault) -> None:
    """Let the shards run for a twentieth of the time; no one may take that for a hang."""
    pids, before = hit_by(scene, fault), scene.server.num_shard_starts()
    try:
        async with asyncio.timeout(SLOWED_SECONDS):
            while True:
                send(pids, signal.SIGSTOP)
                await asyncio.sleep(0.95 * SLOWED_PERIOD_SECONDS)
                send(pids, signal.SIGCONT)
                await asyncio.sleep(0.05 * SLOWED_PERIOD_SECONDS)
    except TimeoutError:
        send(pids, signal.SIGCONT)
    if scene.server.num_shard_starts() > before:
        scene.client.ledger.wrong("a slow shard was restarted")


async def _roll(scene: Scene, _: Fault) -> set[int]:
    old = {pid for pids in scene.server.members().ranks.values() for pid in pids}
    scene.server.launcher.send_signal(signal.SIGHUP)
    return old


async def _vanish(scene: Scene, fault: Fault) -> None:
    drawing = random.Random(fault.seed)
    async with asyncio.TaskGroup() as tasks:
        for request in drawing.sample([*scene.requests, *scene.long], k=NUM_VANISHING):
            tasks.create_task(
                scene.client.leave(
                    request,
                    after_events=drawing.randint(1, 20),
                    after_seconds=drawing.uniform(0.01, 2.0),
                )
            )


async def _slow(scene: Scene, fault: Fault) -> None:
    drawing = random.Random(fault.seed)
    for request in drawing.choices(scene.unread, k=NUM_SLOW):
        await asyncio.to_thread(_stall, scene, request)


def _stall(scene: Scene, request: Request) -> None:
    """Read a few bytes, then stop reading."""
    connection = socket.socket()
    scene.held.append(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(5)
    # Other clients check answers; this one ignores errors.
    with suppress(OSError):
        connection.connect(_address(scene.server))
        connection.sendall(body_bytes(request))
        connection.recv(200)


def _address(server: Deployment) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


async def _malformed(scene: Scene, fault: Fault) -> None:
    await _post_raw(scene, fault, MALFORMED)
    for garbage in GARBAGE:
        await _throw(scene.server, garbage)


async def _oversized(scene: Scene, fault: Fault) -> None:
    await _post_raw(scene, fault, OVERSIZED)


async def _crowd(scene: Scene, _: Fault) -> None:
    """Leave many requests unfinished: the router's memory stays bounded, and it answers."""
    (pid,) = scene.server.members().routers
    before = psutil.Process(pid).memory_info().rss
    crowd = await asyncio.to_thread(_unfinished, scene.server)
    try:
        grown = (psutil.Process(pid).memory_info().rss - before) >> 20
        scene.client.ledger.count("MiB of unfinished requests", grown)
        if grown > MAX_CROWD_MIB:
            scene.client.ledger.wrong(f"unfinished requests take {grown} MiB")
        if not await asyncio.to_thread(scene.server.is_ready):
            scene.client.ledger.wrong("/readyz does not answer beside unfinished requests")
    finally:
        for connection in crowd:
            connection.close()


def _unfinished(server: Deployment) -> list[socket.socket]:
    """Connect with unfinished bodies and headers; the server may close some."""
    crowd = []
    for number in range(NUM_CROWD):
        connection = socket.create_connection(_address(server), timeout=5)
        crowd.append(connection)
        with suppress(OSError):
            connection.sendall(UNFINISHED[number % len(UNFINISHED)])
    return crowd


async def _post_raw(scene: Scene, fault: Fault, bad: tuple[RawRequest, ...]) -> None:
    drawing = random.Random(fault.seed)
    for request in drawing.sample(bad, k=len(bad)):
        await scene.client.post_raw(request, drawing.choice(request.paths))


async def _throw(server: Deployment, garbage: bytes) -> None:
    """Send the bytes, read for a moment, disconnect."""
    with suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(*_address(server))
        try:
            writer.write(garbage)
            async with asyncio.timeout(GARBAGE_SECONDS):
                await reader.read()
        finally:
            writer.close()


async def _burst(scene: Scene, fault: Fault) -> None:
    drawing = random.Random(fault.seed)
    scene.client.allowed.begin(AllowedError.REFUSALS, time.monotonic())
    try:
        async with asyncio.TaskGroup() as tasks:
            for request in drawing.choices(scene.requests, k=3 * scene.max_concurrent):
                tasks.create_task(scene.client.ask(request, may_be_refused=True))
    finally:
        scene.client.allowed.end(AllowedError.REFUSALS, time.monotonic())


async def _exhaust(scene: Scene, _: Fault) -> None:
    async with asyncio.TaskGroup() as tasks:
        for request in scene.long:
            tasks.create_task(scene.client.ask(request))


async def _poison(scene: Scene, fault: Fault) -> None:
    """Send a request that breaks each step it is in; it must be found, and blamed alone, within few restarts."""
    prompt = f"{fault.seed}: What is a shard?{MARK}"
    content = orjson.dumps({"inputs": prompt, "parameters": {"max_new_tokens": 20}})
    before = scene.server.num_shard_starts()
    poison = RawRequest(name="a poison request", content=content, statuses=frozenset({424}))
    await scene.client.post_raw(poison, "/generate")
    restarts = (scene.server.num_shard_starts() - before) / scene.server.num_ranks
    scene.client.ledger.count("restarts of shards by poison", round(restarts))
    if restarts > most_restarts(scene.max_concurrent):
        scene.client.ledger.wrong(f"{restarts:g} restarts to find a poison request")


def most_restarts(num_requests: int) -> float:
    """The most failures that the search for one request among `num_requests` may take."""
    return 2 * math.log2(num_requests) + 2


FATAL_FAULTS: dict[Kind, Callable[[Scene, Fault], Awaitable[set[int]]]] = {
    Kind.KILL: partial(_signal_ranks, number=signal.SIGKILL),
    Kind.SEGV: partial(_signal_ranks, number=signal.SIGSEGV),
    Kind.HANG: partial(_signal_ranks, number=signal.SIGSTOP),
    Kind.KILL_AGAIN: _kill_again,
    Kind.KILL_IDLE: partial(_idle, number=signal.SIGKILL),
    Kind.HANG_IDLE: partial(_idle, number=signal.SIGSTOP),
    Kind.ROUTER: _router,
    Kind.HAND_OVER: _hand_over,
    Kind.UNLINK: _unlink,
    Kind.ROLL: _roll,
    Kind.KILL_LOADING: adapter_faults.kill_loading,
}
"""Each returns the process ids that must end."""
CLIENT_FAULTS: dict[Kind, Callable[[Scene, Fault], Coroutine[None, None, None]]] = {
    Kind.SLOWED: _slowed,
    Kind.VANISH: _vanish,
    Kind.SLOW: _slow,
    Kind.MALFORMED: _malformed,
    Kind.OVERSIZED: _oversized,
    Kind.CROWD: _crowd,
    Kind.BURST: _burst,
    Kind.EXHAUST: _exhaust,
    Kind.LOAD: adapter_faults.load_and_unload,
    Kind.REPLACE: partial(adapter_faults.change, name=REPLACED),
    Kind.OVERWRITE: partial(adapter_faults.change, name=OVERWRITTEN),
    Kind.CORRUPT: adapter_faults.corrupt,
    Kind.KILL_FETCHING: adapter_faults.kill_fetching,
    Kind.POISON: _poison,
}
