"""The router as a process: parses the flags, starts, serves until a signal, and drains."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import structlog
from aiohttp import web

from millrace_proto.listening import bound, inherited, refuse_waiting
from millrace_router.access.keys import ApiKeys, KeyFileError
from millrace_router.access.tls import ListenerTlsError, listener_tls
from millrace_router.api.body.fields import request_models
from millrace_router.app import create_runner
from millrace_router.config import ANY_ADDRESS, RouterConfig, listen_address
from millrace_router.engine.infer import Infer
from millrace_router.hand_over import HandOver
from millrace_router.process import (
    die_with_parent,
    raise_file_limit,
    return_freed_memory,
    show_name,
)
from millrace_router.server.bodies import complete
from millrace_router.server.continuing import fingerprint
from millrace_router.server.idempotent_route import RUNS, continue_runs
from millrace_router.server.run_log import RunLog
from millrace_router.start.files import warn_without_tools
from millrace_router.start.running import Running, start
from millrace_router.start.shards import StartupError
from millrace_router.telemetry import logs

EVENT_LOOP_MODULE = "uvloop" if find_spec("uvloop") else "asyncio"
BACKLOG = 2048
"""Connections that wait to be accepted. The kernel may allow fewer, and resets further ones."""
RESTART_SECONDS = 0.5
"""By then a router whose shards serve already is ready."""
SWITCH_SECONDS = 0.0001
"""Longest time that a thread which parses or tokenizes keeps the interpreter from the event loop; Python's is 5 ms."""
GC_THRESHOLD = 20_000
"""Net allocations of objects between collections of the youngest generation."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger("millrace_router")


def run(arguments: Sequence[str]) -> int:
    """Serve as the flags say; return the exit status."""
    config = RouterConfig.from_args(arguments)
    logs.configure(config.log_level, json_output=config.json_output)
    die_with_parent()
    raise_file_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    new_event_loop = import_module(EVENT_LOOP_MODULE).new_event_loop
    try:
        with (
            _profiled(config.profile_path),
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):
            runner.run(serve(config))
    except StartupError as error:
        log.error(str(error))  # noqa: TRY400
        return 1
    return 0


@contextmanager
def _profiled(path: str | None) -> Iterator[None]:
    """Write a cProfile of the block to `path`, for `pstats`; the router then takes about 1.5 times as long."""
    if path is None:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(path)


class Listener(NamedTuple):
    """The bound port, and the TLS that clients speak there."""

    reserved: socket.socket
    tls: ssl.SSLContext | None


async def serve(config: RouterConfig) -> None:
    """Start, serve, and return after an orderly end; raises StartupError."""
    stop = asyncio.Event()
    # The start takes long, and a signal should end it too.
    keys, tls = _open_keys(config), _open_tls(config)
    _listen_to_signals(stop, keys)
    with _reserve_port(config) as reserved:
        # After a restart clients wait on an inherited socket.
        impatience = asyncio.get_running_loop().call_later(
            config.recovery_grace, refuse_waiting, reserved
        )
        if config.is_successor:
            # Another router serves them there.
            impatience.cancel()
        completing = asyncio.create_task(_complete_models())
        running = await _start_unless(stop, config, keys)
        impatience.cancel()
        if running is None:
            return
        show_name()
        if config.is_successor and keys.can_change:
            # The signal after a change of the file may have reached only the other router.
            keys.reload()
        warn_without_tools(running.services.template)
        _freeze_objects()
        try:
            await _serve_http(config, running, Listener(reserved, tls), stop)
        finally:
            completing.cancel()
            await running.close()


async def _complete_models() -> None:
    """Complete the models of bodies, each in its own turn of the loop: during a first start, or after a restart.

    Then return freed memory, for a router that may wait for days until another one dies.
    """
    await asyncio.sleep(RESTART_SECONDS)
    for model in request_models():
        complete(model)
        await asyncio.sleep(0)
    return_freed_memory()


def _freeze_objects() -> None:
    """Exempt all objects after the start from collection, and collect rarely from then on.

    Searching 100 000 objects for the start's few thousand in cycles would take a tenth of a restart. A stream makes no
    reference cycles; the cycles of a few hundred requests may pile up before they are collected.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    return_freed_memory()


def _open_keys(config: RouterConfig) -> ApiKeys:
    try:
        return ApiKeys.of(config)
    except KeyFileError as error:
        raise StartupError(f"--api-key-file: {error}") from error


def _open_tls(config: RouterConfig) -> ssl.SSLContext | None:
    try:
        return listener_tls(config)
    except ListenerTlsError as error:
        raise StartupError(str(error)) from error


def _listen_to_signals(stop: asyncio.Event, keys: ApiKeys) -> None:
    loop = asyncio.get_running_loop()
    if keys.can_change:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)

    def on_signal() -> None:
        stop.set()
        # A second signal ends the process at once.
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)


def _reserve_port(config: RouterConfig) -> socket.socket:
    address = listen_address(config.hostname)
    if address == ANY_ADDRESS != config.hostname:
        log.warning("--hostname is no IP address: listening on all", hostname=config.hostname)
    if config.listen_fd is not None:
        try:
            return inherited(config.listen_fd)
        except OSError as error:
            raise StartupError(f"--listen-fd is not a socket: {error.strerror}.") from error
    try:
        return bound(address, config.port)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: RouterConfig, error: OSError) -> StartupError:
    where = f"{listen_address(config.hostname)}:{config.port}"
    return StartupError(f"Cannot listen on {where}: {error.strerror}. Choose another with --port.")


async def _start_unless(stop: asyncio.Event, config: RouterConfig, keys: ApiKeys) -> Running | None:
    """Start, or return None as soon as `stop` is set."""
    starting = asyncio.create_task(start(config, keys))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait({starting})
    return None


async def _serve_http(
    config: RouterConfig, running: Running, listener: Listener, stop: asyncio.Event
) -> None:
    runner = create_runner(running.services)
    await runner.setup()
    await _continue_runs(runner.app, running)
    hand_over = HandOver(running, runner, partial(_listen, runner, listener))
    try:
        try:
            await hand_over.begin()
        except OSError as error:
            raise _cannot_listen(config, error) from error
        host, port = listener.reserved.getsockname()[:2]
        scheme = "http" if listener.tls is None else "https"
        log.info("Connected", url=f"{scheme}://{host}:{port}")
        running.launcher.listening()
        await _ended(stop, hand_over.ended, running.batcher_task)
        if hand_over.ended.is_set():
            return
        if not running.batcher_task.done() and config.drain_delay:
            running.services.infer.leave()
            log.info("Leaving", seconds=config.drain_delay)
            await asyncio.wait({running.batcher_task}, timeout=config.drain_delay)
        if not running.batcher_task.done():
            runner.app[RUNS].drain()
            await drain(running.services.infer, config.graceful_termination_timeout)
    finally:
        runner.app[RUNS].forgets = False
        try:
            # Handlers that wait for tokens receive an error, which they send to their clients.
            await running.stop_batcher()
        finally:
            await hand_over.close()
            await runner.cleanup()


async def _listen(runner: web.AppRunner, listener: Listener) -> web.SockSite:
    """Accept clients. Raises OSError."""
    # Another process may have bound the same port; uvloop does not report it.
    listener.reserved.listen(BACKLOG)
    # A site closes its socket, and may have to begin again.
    ours = listener.reserved.dup()
    site = web.SockSite(runner, ours, backlog=BACKLOG, ssl_context=listener.tls)
    await site.start()
    return site


async def _ended(stop: asyncio.Event, left: asyncio.Event, batcher: asyncio.Task[None]) -> None:
    """Wait for a signal, for the end of a hand-over, or for the end of the batcher."""
    waiting = [asyncio.create_task(event.wait()) for event in (stop, left)]
    await asyncio.wait({*waiting, batcher}, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


async def _continue_runs(app: web.Application, running: Running) -> None:
    """Continue the requests with keys of the former router, if a launcher has kept their log."""
    services = running.services
    if services.config.run_log_fd is None:
        return
    try:
        run_log = RunLog.of_file(services.config.run_log_fd, fingerprint(services))
    except OSError as error:
        log.warning("--run-log-fd cannot be used", error=error.strerror)
        return
    count = await continue_runs(app, run_log)
    if count:
        log.info("Requests with keys go on", count=count)


async def drain(infer: Infer, seconds: float) -> None:
    """Refuse new requests and wait up to `seconds` for the running ones."""
    infer.drain()
    log.info("Draining", running=infer.permits.taken)
    try:
        async with asyncio.timeout(seconds):
            await infer.permits.all_free()
    except TimeoutError:
        log.warning("Requests are cut off", running=infer.permits.taken)
