"""The router's HTTP edge on a real socket, over a batcher with the test's generations."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import aiohttp
import structlog
from aiohttp import web
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.access.keys import ApiKeys
from millrace_router.adapters.resolver import Resolver
from millrace_router.app import create_runner
from millrace_router.config import RouterConfig
from millrace_router.engine.batcher import Batcher
from millrace_router.errors import GenerationError
from millrace_router.images.prompts import NO_IMAGES, ImagePrompts
from millrace_router.pooling.model import (
    GENERATES,
    LogitScore,
    PoolingModel,
    SentenceTransformersFiles,
)
from millrace_router.pooling.prompts import ScoreTemplate
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Estimate
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.limits import Limits, dialect_of
from millrace_router.request.request import FinishReason, Grammar, Task, ValidRequest
from millrace_router.request.token_stream import (
    Finished,
    PromptLogprobs,
    Token,
    TokenEvent,
    TokenStream,
    end_without_token,
)
from millrace_router.server.services import Services
from millrace_router.server.traces import RequestTraces, SpanSink
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.wire import Capacity, ShardInfo
from millrace_router.start.engine import Engine
from millrace_router.start.running import metrics_of, services_of
from millrace_router.start.shards import RouterDeployment
from millrace_router.telemetry import logs
from millrace_router.telemetry.metrics import Metrics
from millrace_router.telemetry.request_log import RequestLog
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.validation.grammar_admission import GrammarAdmission
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults

WORDS = ("hello", "world", "wörld", "日本", "a", "b")
GRACE_SECONDS = 300.0
HIDDEN_SIZE = 3
PROBE_SECONDS = 30.0
"""Long enough for the token or the failure of a probe on a slow machine."""
LIMITS = Limits(
    max_input_tokens=8,
    max_total_tokens=16,
    vocab_size=8,
    max_concurrent_requests=4,
    max_best_of=2,
    max_n=3,
    max_stop_sequences=4,
    max_top_n_tokens=5,
    grammars=True,
)

UNKNOWN = Estimate(prediction=None, num_cached=0, num_waiting=0, num_running=0)
"""An idle server that has measured nothing."""

PAIRS = """\
{% for message in messages if message.role in ["query", "document"] %}{{ message.content }} {% endfor %}"""


def pooling_of(*tasks: Task, **files: Any) -> PoolingModel:
    """A model with these tasks, which scores `query document ` by the logits of the ids 2 and 3."""
    return PoolingModel(
        tasks=frozenset(tasks),
        files=SentenceTransformersFiles(**files),
        score=LogitScore(true_token_id=2, false_token_id=3),
        template=ScoreTemplate.of(ChatTemplate(PAIRS, special_tokens={})),
    )


def word_tokenizer() -> Tokenizer:
    """One token per word between spaces."""
    vocab = {word: id_ for id_, word in enumerate(("[UNK]", "</s>", *WORDS))}
    rust = RustTokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(rust)


def token_event(
    index: int,
    text: str,
    *,
    logprob: float = -0.5,
    finished: Finished | None = None,
    **top: float,
) -> TokenEvent:
    """A generated token, the candidates beside it, and the end if it is the last."""
    candidates = tuple(Token(9, name, value, special=False) for name, value in top.items())
    return TokenEvent(index, Token(index, text, logprob, text == "</s>"), candidates, finished)


def finished(text: str, count: int, **other: Any) -> Finished:
    """A normal end."""
    return Finished(other.pop("reason", FinishReason.LENGTH), text, count, other.pop("seed", None))


def play(stream: TokenStream, *texts: str, logprob: float = -0.5, seed: int | None = None) -> None:
    """Send a whole generation: these tokens, then the end."""
    stream.batched_at = stream.queued_at
    end = finished("".join(texts), len(texts), seed=seed)
    for index, text in enumerate(texts, start=1):
        last = index == len(texts)
        stream.token(token_event(index, text, logprob=logprob, finished=end if last else None))


@dataclass
class FakeCompiler:
    """Takes every grammar that `refusal` has no reason against, and remembers which it was asked for.

    Answers when `gate` is open.
    """

    refusal: Callable[[Grammar], str | None] = lambda _: None
    gate: asyncio.Event | None = None
    asked: list[Grammar] = field(default_factory=list)

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        self.asked.append(grammar)
        if self.gate is not None:
            await self.gate.wait()
        return self.refusal(grammar)


def grammars_of(compiler: FakeCompiler | None = None) -> GrammarAdmission:
    """Ask `compiler`, which always serves."""
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    return GrammarAdmission(compiler or FakeCompiler(), ShardStatus(GRACE_SECONDS), metrics)


@dataclass
class FakeBatcher:
    """Keeps what is submitted; `script` says what happens to it, if anything.

    Its shards serve until `status` says otherwise. Answers every estimate with `estimated_as`, and keeps the
    requests in `estimated`.
    """

    script: Callable[[ValidRequest, TokenStream], None] | None = None
    estimated_as: Estimate = UNKNOWN
    drains_in: float = 0.0
    status: ShardStatus = field(default_factory=lambda: ShardStatus(GRACE_SECONDS))
    quarantine: Quarantine = field(default_factory=Quarantine)
    compiler: FakeCompiler = field(default_factory=FakeCompiler)
    estimated: list[ValidRequest] = field(default_factory=list)
    requests: list[ValidRequest] = field(default_factory=list)
    streams: list[TokenStream] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: ValidRequest) -> TokenStream:
        stream = TokenStream()
        stream.when_closed(self.closed.set)
        self.requests.append(request)
        self.streams.append(stream)
        self.arrived.set()
        if self.script is not None:
            self.script(request, stream)
        return stream

    def estimate(self, request: ValidRequest) -> Estimate:
        self.estimated.append(request)
        return self.estimated_as

    def drain_seconds(self) -> float:
        return self.drains_in


def echo(request: ValidRequest, stream: TokenStream) -> None:
    """Generate as many ` x` as asked for, at most three, or yield numbers for a request that is pooled."""
    if request.pooling is not None:
        stream.batched_at = stream.queued_at
        stream.pooled = [float(len(request.input_ids)), 2.0, *request.input_ids][:HIDDEN_SIZE]
        stream.token(end_without_token())
        return
    if request.prefill_logprobs:
        rest = (-1.0,) * (len(request.input_ids) - 1)
        stream.prompt_logprobs = PromptLogprobs(request.input_ids, (float("nan"), *rest))
    seed = request.sampling.seed if request.sampling.samples else None
    play(stream, *[" x"] * min(request.max_new_tokens, 3), seed=seed)


def fail(_: ValidRequest, stream: TokenStream) -> None:
    """Fail before the first token."""
    stream.fail(GenerationError("out of luck"))


def break_off(request: ValidRequest, stream: TokenStream) -> None:
    """Fail after the first token."""
    stream.batched_at = stream.queued_at
    stream.token(token_event(1, " x"))
    fail(request, stream)


def plays(*texts: str) -> Callable[[ValidRequest, TokenStream], None]:
    """A script that generates these tokens."""
    return lambda _, stream: play(stream, *texts)


@dataclass
class Edge:
    """A running server and the fakes beneath it."""

    url: str
    batcher: FakeBatcher
    services: Services
    client: aiohttp.ClientSession
    runner: web.AppRunner

    async def post(
        self, path: str, body: object = None, **other: Any
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Post JSON; status, parsed answer, response."""
        options: dict[str, Any] = {"json": body} if body is not None else {}
        async with self.client.post(self.url + path, **options, **other) as response:
            text = await response.text()
            parsed = await response.json() if response.content_type == "application/json" else text
            return response.status, parsed, response

    async def answer(self, path: str, body: object, **headers: str) -> Any:
        """Post JSON; the parsed answer, whose status is 200."""
        status, answer, _ = await self.post(path, body, headers=headers)
        assert status == 200, answer
        return answer

    async def stream(self, path: str, body: Mapping[str, Any], **headers: str) -> str:
        """Post JSON; the text of the stream that answers it with status 200."""
        status, text, response = await self.post(path, {**body, "stream": True}, headers=headers)
        assert status == 200, text
        assert response.content_type == "text/event-stream"
        return str(text)

    async def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The data of each event of a stream, `[DONE]` among them."""
        return events_in(await self.stream(path, body))

    async def chunks(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that ends as OpenAI's do."""
        *chunks, done = await self.events(path, body)
        assert done == "[DONE]"
        return chunks

    async def get(self, path: str, **other: Any) -> tuple[int, bytes, aiohttp.ClientResponse]:
        """Get; status, body, response."""
        async with self.client.get(self.url + path, **other) as response:
            return response.status, await response.read(), response

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send bytes on a new connection."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        return reader, writer

    async def open(
        self, path: str, body: object, *, version: str = "1.1", **headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Post JSON on a new connection and wait for the batcher to get the request."""
        data = json.dumps(body).encode()
        headers |= {"host": "x", "content-type": "application/json"}
        headers |= {"content-length": str(len(data))}
        lines = [f"POST {path} HTTP/{version}", *(": ".join(pair) for pair in headers.items())]
        connection = await self.send("\r\n".join([*lines, "", ""]).encode() + data)
        await self.batcher.arrived.wait()
        return connection

    async def exposition(self) -> list[str]:
        """Lines of /metrics."""
        return (await self.get("/metrics"))[1].decode().splitlines()


def events_in(text: str) -> list[Any]:
    """The data of each event of a stream without names and ids: parsed if it is JSON."""
    assert text.endswith("\n\n"), text
    events: list[Any] = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: "), event
        assert "\n" not in event, event
        data = event.removeprefix("data: ")
        events.append(json.loads(data) if data.startswith("{") else data)
    return events


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDeployment(RouterDeployment):
    """Flags and shards that do not decide the limits of a request."""

    request_limits: Limits

    def limits(self, tasks: frozenset[Task] = frozenset({Task.GENERATE})) -> Limits:
        return replace(
            self.request_limits,
            dialect=dialect_of(
                strict_tgi=self.config.strict_tgi,
                reads_images=self.request_limits.image_token_id is not None,
                lacks_encoder=self.request_limits.dialect.lacks_encoder,
            ),
            strict_max_tokens=self.config.strict_max_tokens,
            tasks=tasks,
        )


def services_over(
    batcher: FakeBatcher,
    *,
    limits: Limits = LIMITS,
    template: str | None = None,
    keep_alive_seconds: float = 60.0,
    cost: CostModel | None = None,
    request_log: RequestLog | None = None,
    sink: SpanSink | None = None,
    tokenizer: Tokenizer | None = None,
    adapters: Resolver | None = None,
    defaults: SamplingDefaults = NO_DEFAULTS,
    pooling: PoolingModel = GENERATES,
    images: ImagePrompts = NO_IMAGES,
    **config: Any,
) -> Services:
    """Everything an application is made of, over fakes."""
    settings = _config(**config)
    deployment = FakeDeployment(
        config=settings,
        info=_shard_info(limits),
        capacity=_capacity(limits),
        request_limits=limits,
    )
    used = tokenizer or word_tokenizer()
    control = None if settings.allow_special_tokens_in_content else used.control_tokens
    services = services_of(
        deployment,
        _engine(batcher, cost or CostModel()),
        cast("ShardGroup", batcher.compiler),
        metrics_of(deployment),
        tokenizer=used,
        template=ChatTemplate(template, special_tokens={}, control_tokens=control),
        keys=ApiKeys.of(settings),
        defaults=defaults,
        pooling=pooling,
        images=images,
        adapters=adapters,
    )
    services.health._probe_seconds = PROBE_SECONDS
    traces = None
    if sink is not None:
        traces = RequestTraces(sink, batcher.status, model=settings.served_names[0])
    return replace(
        services,
        request_log=request_log,
        traces=traces,
        cost=cost,
        keep_alive_seconds=keep_alive_seconds,
    )


def _engine(batcher: FakeBatcher, cost: CostModel) -> Engine:
    late = LatePlanning(cost, most=0.0)
    one = cast("Batcher", batcher)
    return Engine(one, batcher.status, batcher.quarantine, cost, late, adapters=None)


def _config(**given: Any) -> RouterConfig:
    usual: dict[str, Any] = {"model_folder": Path("model"), "model_id": "org/tiny"}
    return RouterConfig(**usual | {"revision": "abc"} | given)


def _shard_info(limits: Limits) -> ShardInfo:
    return ShardInfo(
        model_type="llama",
        dtype="float32",
        device_type="cpu",
        vocab_size=8,
        hidden_size=HIDDEN_SIZE,
        max_position_embeddings=32,
        eos_token_ids=frozenset({1}),
        block_size=4,
        world_size=1,
        attention="plain",
        deterministic=True,
        prefill_logprobs=limits.prefill_logprobs,
        window_size=None,
        quantization=None,
        max_draft_tokens=2,
        grammars=limits.grammars,
    )


def _capacity(limits: Limits) -> Capacity:
    return Capacity(
        num_blocks=9,
        max_batch_total_tokens=32,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        kv_bytes_per_token=1,
    )


@asynccontextmanager
async def serving(
    script: Callable[[ValidRequest, TokenStream], None] | None = echo, **options: Any
) -> AsyncIterator[Edge]:
    """Serve on a free port for the length of the block."""
    batcher = FakeBatcher(script)
    services = services_over(batcher, **options)
    runner = create_runner(services)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as client:
            yield Edge(f"http://{host}:{port}", batcher, services, client, runner)
    finally:
        await runner.cleanup()
        if "tokenizer" not in options:
            services.tokenizer.close()


@contextmanager
def logging_to(
    output: BinaryIO, *, level: str = "debug", json_output: bool = True
) -> Iterator[None]:
    """Log to `output` for the length of the block."""
    root = logging.getLogger()
    handlers, threshold = root.handlers, root.level
    logs.configure(level, json_output=json_output, file=output)
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers = handlers
        root.setLevel(threshold)


def limits_with(**changes: Any) -> Limits:
    """The usual limits but for these."""
    return replace(LIMITS, **changes)


@dataclass(eq=False)
class FakeTimer:
    """A call that is due."""

    due: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeTimers:
    """Stands in for the event loop's `call_later`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[FakeTimer] = []

    def __call__(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        self._timers.append(FakeTimer(self.now + seconds, callback))
        return self._timers[-1]

    @property
    def pending(self) -> int:
        """The number of calls that are not cancelled."""
        return sum(not timer.cancelled for timer in self._timers)

    def turn(self, seconds: float) -> None:
        """Let time go by, and call what is due, in order."""
        self.now += seconds
        while due := [t for t in self._timers if t.due <= self.now or t.cancelled]:
            timer = min(due, key=lambda timer: timer.due)
            self._timers.remove(timer)
            if not timer.cancelled:
                timer.callback()
