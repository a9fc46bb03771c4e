"""The command `serve`: loads the model, listens, and ends in order."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from millrace_shard.commands.composition import build_engine, load, open_tracing
from millrace_shard.commands.device_settings import (
    choose_device,
    is_deterministic,
)
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import GroupError, RanksGone, RanksMissing
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.errors import EngineEnded, ModelError
from millrace_shard.logs import configure
from millrace_shard.process import START_AGAIN, Stages, die_with_parent, end_in, end_process
from millrace_shard.server.address import SocketFile, for_this_user_only, server_credentials
from millrace_shard.server.service import ShardService, new_server

STOP_SECONDS = 5.0
"""Time for running calls, a step among them, to finish after a signal."""
ENDED_SECONDS = 1.0
"""The same time when the engine has ended, and calls cannot be answered."""
END_SECONDS = 0.9
"""Time after the router ends this rank, whose answer needs some of it."""
ABORT_SECONDS = 1.0
"""Further time to stop before the process is killed."""
WAKE_SECONDS = 0.5
STDERR = 2

WITHOUT_EFFECT = {
    "trust_remote_code": "code from a model repository is never run",
    "max_input_tokens": "the router limits prompts",
}
"""Flags of TGI's `text-generation-server` that are accepted, and why they do nothing."""

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until SIGTERM or SIGINT; exit with 1 and a message after an error, or when the engine ends by itself."""
    run_command(argv, serve)


def run_command(
    argv: Sequence[str] | None, run: Callable[[ShardConfig, Stages], None], **words: str
) -> NoReturn:
    """Run with the flags of the command line, of whose help are `words`, and end the process as `end_after` does."""
    config = ShardConfig.from_args(sys.argv[1:] if argv is None else argv, **words)
    configure(config.threshold, json_output=config.json_output)
    die_with_parent()
    # During loading nothing needs an orderly stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_after(config, lambda: run(config, Stages().done("imports")))


def end_after(config: ShardConfig, run: Callable[[], None]) -> NoReturn:
    """Run, and end the process: with the message of an error and 1, or with START_AGAIN if only ranks are missing."""
    try:
        run()
    except (ModelError, GroupError, EngineEnded, RuntimeError) as error:
        logger.error("%s", error)  # noqa: TRY400
        sys.stderr.write(f"Error: {error}\n")
        # On one host the launcher restarts all ranks together, and hears of those that cannot load from themselves.
        missing = RanksGone if config.address is None else RanksMissing
        is_to_meet = isinstance(error, missing)
        end_process(START_AGAIN if is_to_meet else 1)
    end_process(0)


def serve(config: ShardConfig, stages: Stages | None = None) -> None:
    """Load the model, then listen, wait for a signal, and stop.

    Raises EngineEnded if the engine ends by itself, RanksGone if it ended because another rank is gone, and the
    errors of loading.
    """
    for notice in notices(config):
        logger.info("%s", notice)
    # Errors of the address come before the model is loaded.
    check_address(config)
    device = choose_device(config)
    serve_loaded(config, device, lambda: load(config, device, stages))


def check_address(config: ShardConfig) -> None:
    """Raises CredentialsError or SocketTaken."""
    server_credentials(config)
    if not config.address:
        SocketFile(config.socket_path).check_free()


def serve_loaded(
    config: ShardConfig,
    device: torch.device,
    load: Callable[[], LoadedModel],
    when_serving: Callable[[], None] = lambda: None,
) -> None:
    """Serve what `load` returns, which the engine's thread calls. Raises as `serve` does."""
    credentials, tracing = server_credentials(config), open_tracing(config)
    socket = None if config.address else SocketFile(config.socket_path)
    engine = build_engine(config, device)
    engine.start()
    engine.attach(engine.submit(load).result())
    service = ShardService(
        engine,
        deterministic=is_deterministic(config, device),
        prefill_logprobs=config.enable_prefill_logprobs,
        end=lambda: end_in(END_SECONDS, START_AGAIN),
    )
    stops: SimpleQueue[int | None] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stops.put(received))
    engine.when_ended(lambda: stops.put(None))
    target = f"unix:{socket.private}" if socket else config.listen_target
    with for_this_user_only():
        server = new_server(service, target, credentials, () if tracing is None else (tracing,))
    server.start()
    if socket is not None:
        socket.publish()
    shown = config.address or f"unix://{config.socket_path}"
    logger.info("Server started at %s", shown)
    when_serving()
    received = _first_of(stops)
    if received is not None:
        logger.info("Stopping after %s", signal.Signals(received).name)
    grace = ENDED_SECONDS if received is None else STOP_SECONDS
    # If stopping hangs, a C thread, which does not need the interpreter lock, prints all stacks and ends the process.
    faulthandler.dump_traceback_later(grace + ABORT_SECONDS, exit=True, file=STDERR)
    service.end_streams()
    server.stop(grace=grace).wait()
    faulthandler.cancel_dump_traceback_later()
    if tracing is not None:
        tracing.close()
    if socket is not None:
        socket.remove()
    if received is None:
        raise _end_of(engine)


def _end_of(engine: Engine) -> EngineEnded | RanksGone:
    if engine.group_is_lost:
        return RanksGone("the engine has ended: another rank is gone")
    return EngineEnded("the engine has ended")


def _first_of(stops: SimpleQueue[int | None]) -> int | None:
    while True:
        # The timeout lets this thread run signal handlers: a signal delivered to another thread does not end its wait.
        with suppress(Empty):
            return stops.get(timeout=WAKE_SECONDS)


def notices(config: ShardConfig) -> Iterator[str]:
    """A line for each flag that was set and has no effect."""
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(config, name):
            yield f"{_option(name)} has no effect: {reason}"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
