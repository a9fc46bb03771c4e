"""The router's core in this process, over shards that the launcher's own code starts and watches."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import structlog

from millrace.errors import StartError
from millrace_launcher.errors import LaunchError, ShardCrashLoop
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, cancel
from millrace_launcher.settings.arguments import Settings, read_settings
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.prepare import prepare
from millrace_launcher.supervision.control import Control
from millrace_launcher.supervision.download import resolve_model
from millrace_launcher.supervision.shards import Shards
from millrace_proto.flags import option_name
from millrace_router.config import RouterConfig
from millrace_router.server.services import Services
from millrace_router.start.running import Running, start
from millrace_router.start.shards import StartupError

PROGRAM = "LLM"


def arguments_of(model: str | None, flags: Mapping[str, object]) -> list[str]:
    """`max_total_tokens=512` as `--max-total-tokens=512`; True is a switch, None and False are left out."""
    words = [] if model is None else [f"--model-id={model}"]
    for name, value in flags.items():
        option = option_name(name)
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [f"{option}={each}" for each in value]
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words


def settings_of(model: str | None, flags: Mapping[str, object]) -> Settings:
    """The launcher's settings. Raises StartError where a flag is wrong."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read_settings(arguments_of(model, flags), program=PROGRAM)
    except SystemExit:
        words = said.getvalue().partition("\n\nFor more")[0]
        raise StartError(words.removeprefix("error: ")) from None


GRACE_SECONDS = 10.0


class LocalModel:
    """A model that is served in this process; nothing listens on a port.

    Shards are processes, as under the launcher: they are restarted when they die, and end with this process.
    """

    def __init__(self, commands: Commands, claims: ExitStack) -> None:
        self._commands = commands
        self._claims = claims
        self._children = Children()
        self._control = Control(self._on_event)
        self._shards = Shards(
            commands, self._children, self._control.restarting, self._control.shards_ready
        )
        self._watch: asyncio.Task[None] | None = None
        self._running: Running | None = None

    @classmethod
    async def start(cls, model: str | None, flags: Mapping[str, object]) -> LocalModel:
        """Load the model, and return when it can answer. Raises StartError; nothing is left then."""
        if not isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            raise StartError(
                "a model of this process needs an event loop of asyncio's own; LLM has one"
            )
        settings = settings_of(model, flags)
        _quiet_router()
        with ExitStack() as claims, _errors() as reasons:
            try:
                commands = prepare(settings, Programs(), claims)
                deployment = cls(commands, claims.pop_all())
                try:
                    await deployment._start()
                except BaseException:
                    await deployment.close()
                    raise
            except (LaunchError, StartupError, SystemExit) as error:
                raise StartError("; ".join(dict.fromkeys(reasons)) or str(error)) from error
        return deployment

    @property
    def services(self) -> Services:
        assert self._running is not None
        return self._running.services

    async def close(self) -> None:
        """End running requests, then the shards."""
        if self._running is not None:
            await self._running.stop_batcher()
            await self._running.close()
            self._running = None
        if self._watch is not None:
            await cancel([self._watch])
        await self._shards.terminate(GRACE_SECONDS)
        await self._children.dismiss_guard()
        self._control.close()
        self._claims.close()

    async def _start(self) -> None:
        """Raises LaunchError or StartupError."""
        commands, children = self._commands, self._children
        folders = await resolve_model(commands, children)
        await children.guard(commands.guard())
        self._watch = asyncio.create_task(self._shards.run(folders))
        ready = asyncio.create_task(self._shards.ready())
        await asyncio.wait({self._watch, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._watch.done():
            await cancel([ready])
            self._watch.result()
        self._watch.add_done_callback(self._on_end_of_shards)
        self._control.shards_ready()
        program = len(commands.programs.router)
        descriptor = {"supervisor_fd": self._control.theirs.detach()}
        argv: Sequence[str] = commands.router(folders.model, descriptor).argv
        self._running = await start(RouterConfig.from_args(argv[program:]))

    def _on_end_of_shards(self, watch: asyncio.Task[None]) -> None:
        """Tell the router that the shards do not come back, so that requests fail and do not wait."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            reason = error.reason if isinstance(error, ShardCrashLoop) else str(error)
            self._control.gave_up(reason)

    def _on_event(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the router, as the launcher does."""
        match event:
            case {"event": "progress"}:
                self._shards.breaker.progressed()
            case {"event": "restart", "reason": str(reason)}:
                self._shards.restart(reason)
            case {"event": "suspects", "count": int(count)}:
                self._shards.breaker.suspect(count)
            case _:
                log.debug("The router sent an unknown event: %s", event)


class _Reasons(logging.Handler):
    """Keeps the text of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _errors() -> Iterator[list[str]]:
    """The errors that launcher and shards log during the block, and which would go to stderr otherwise."""
    handler = _Reasons()
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)


def _quiet_router() -> None:
    """Log the router's warnings to the standard library's log, unless the program has configured structlog itself."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.stdlib.LoggerFactory(),
            processors=[structlog.stdlib.render_to_log_kwargs],
        )
