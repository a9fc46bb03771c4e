"""Keyed answers over the death of a router: cut anywhere and continued, they have the bytes of an undisturbed one."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace_router.errors import AdapterUnavailable, Overloaded, RouterError, ShardsGone
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server.idempotent_route import KEPT, RUNS, continue_runs
from millrace_router.server.run_log import RunLog
from millrace_testing.router.edge import Edge, limits_with, serving
from millrace_testing.router.idempotent import until
from millrace_testing.text.texts import Generations
from millrace_testing.text.thoughts import tagged

BYTES = tagged()
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for turn in messages %}{{ turn.role }} {% if turn.reasoning_content %}"
    "<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }} {% endfor %}bot "
)
LIMITS = limits_with(
    max_input_tokens=1000, max_total_tokens=2000, vocab_size=500, max_concurrent_requests=8
)
LOG_BYTES = 1 << 16
PRINT = bytes(32)
KEY = {"idempotency-key": "k"}
THOUGHT = "<think>\nWörld or not?\n</think>\n\nWell. 好 "
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}}
TURN = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "clock", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
STREAM = {"stream": True}


@dataclass(frozen=True)
class Case:
    """A request, and the texts of its choices."""

    path: str
    body: Mapping[str, Any]
    texts: tuple[str, ...] = (THOUGHT + CALL,)
    cached_tokens: int = 3


CHAT = "/v1/chat/completions"
CASES = {
    "tgi": Case("/generate_stream", {"inputs": "a", "parameters": {"details": True}}),
    "tgi, one path": Case("/", {"inputs": "a", **STREAM}),
    "tgi, stop": Case("/generate_stream", {"inputs": "a", "parameters": {"stop": ["not?"]}}),
    "tgi, whole": Case("/generate", {"inputs": "a", "parameters": {"details": True}}),
    "tgi, candidates": Case(
        "/generate_stream", {"inputs": "a", "parameters": {"top_n_tokens": 2, "details": True}}
    ),
    "completions": Case(
        "/v1/completions",
        {"prompt": ["a", "b"], "n": 2, **STREAM, "stream_options": USAGE},
        ("one", "two or three", "four", "five and six"),
    ),
    "chat": Case(CHAT, {"messages": TURN, **STREAM, "stream_options": USAGE}),
    "chat, tools": Case(CHAT, {"messages": TURN, "tools": TOOLS, "seed": 3, **STREAM}),
    "chat, whole": Case(CHAT, {"messages": TURN, "tools": TOOLS}),
    "chat, stop": Case(CHAT, {"messages": TURN, "stop": ["Well"], **STREAM}),
    "chat, two": Case(
        CHAT, {"messages": TURN, "tools": TOOLS, "n": 2, **STREAM}, (THOUGHT + CALL, "Just text.")
    ),
    "chat, logprobs": Case(CHAT, {"messages": TURN, "logprobs": True, **STREAM}),
    "chat, candidates": Case(
        CHAT, {"messages": TURN, "logprobs": True, "top_logprobs": 2, **STREAM}
    ),
    "responses": Case(
        "/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION}], **STREAM}
    ),
    "messages": Case(
        "/v1/messages",
        {
            "messages": TURN,
            "max_tokens": 500,
            "tools": [{"name": "clock", "input_schema": SCHEMA}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            **STREAM,
        },
    ),
    "sagemaker": Case("/invocations", {"messages": TURN, "tools": TOOLS, **STREAM}),
}


STALLED = RouterError()
"""In place of a failure: neither a token comes nor an end."""


class Script:
    """Plays the plans through real entries, after failures."""

    def __init__(
        self,
        plans: Sequence[Sequence[int]],
        cached_tokens: int,
        failures: Iterable[RouterError | None],
    ) -> None:
        self._plans, self._cached_tokens, self._failures = plans, cached_tokens, iter(failures)
        self._start()

    def _start(self) -> None:
        self._play = Generations(*self._plans, tokenizer=BYTES)
        self._play.candidates = [(5, -0.25), (6, -0.5)]
        self._play.cached_tokens = self._cached_tokens

    def __call__(self, request: ValidRequest, stream: TokenStream) -> None:
        failure = next(self._failures, None)
        if failure is None:
            self._play(request, stream)
            return
        self._start()
        if failure is STALLED:
            return
        if isinstance(failure, ShardsGone):
            stream.fail(failure)
        else:
            raise failure


class Life:
    """One router after another, with the memory that outlives them."""

    def __init__(self, memory: bytes = bytes(LOG_BYTES)) -> None:
        self.memory = bytearray(memory)

    @asynccontextmanager
    async def router(
        self,
        case: Case,
        num_wrong: int = 0,
        failures: Iterable[RouterError | None] = (),
        **options: Any,
    ) -> AsyncIterator[Edge]:
        """Serve with the log, which is left as at a kill; the first `num_wrong` tokens would be others.

        `failures` are of the first generations, before a token; after each, the plans begin anew.
        """
        plans = [[*BYTES.encode(text), 0] for text in case.texts]
        plans = [[5] * num_wrong + ids[num_wrong:] for ids in plans]
        script = Script(plans, case.cached_tokens, failures)
        usual = {"limits": LIMITS, "template": TEMPLATE, "tokenizer": BYTES, "resume_grace": 60.0}
        async with serving(script, **usual | options) as edge:
            self.count = await continue_runs(edge.runner.app, RunLog(self.memory, PRINT))
            try:
                yield edge
            finally:
                edge.runner.app[RUNS].forgets = False


async def ask(edge: Edge, case: Case, last: int = 0, **headers: str) -> tuple[int, str]:
    """Send the request with its key; status and body."""
    sent = KEY | headers | ({"last-event-id": str(last)} if last else {})
    status, answer, _ = await edge.post(case.path, case.body, headers=sent)
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return status, text


async def undisturbed(case: Case) -> tuple[str, bytes]:
    """The body of an answer, and the log behind it."""
    life = Life()
    async with life.router(case) as edge:
        status, text = await ask(edge, case)
        assert status == 200, text
        return text, bytes(life.memory)


def frames_of(body: str) -> list[str]:
    return [f"{frame}\n\n" for frame in body.removesuffix("\n\n").split("\n\n")]


def records_end(memory: bytes) -> tuple[int, int]:
    """The places behind the first run's start and behind the last record."""
    ends = list(places(memory))
    return ends[1], ends[-1]


def places(memory: bytes) -> list[int]:
    """The ends of the log's records, beginning with its head's."""
    run_log = RunLog.__new__(RunLog)
    run_log._view, run_log._half_bytes = memoryview(memory), len(memory) // 2
    generation, _ = max(map(run_log._head_of, (0, 1)))
    begin, made = (generation & 1) * run_log._half_bytes, []
    for _, payload in run_log._records(generation):
        begin += 9 + len(payload)
        made.append(begin)
    return made


def cut(memory: bytes, place: int) -> bytes:
    """The log of a router that was killed when it had written up to `place`."""
    half = len(memory) // 2
    end = half if place <= half else len(memory)
    return memory[:place] + bytes(end - place) + memory[end:]


def without_end(body: str) -> str:
    """A body without the clock's time of its end."""
    return re.sub('"completed_at":[0-9]+', "", body)


MADE: dict[str, tuple[str, bytes]] = {}


async def made(name: str) -> tuple[str, bytes]:
    """The undisturbed answer of a case, made once."""
    if name not in MADE:
        MADE[name] = await undisturbed(CASES[name])
    return MADE[name]


def choices_of(body: str) -> dict[int, list[str]]:
    """The data of the events of each choice."""
    made: dict[int, list[str]] = {}
    for data in re.findall("data: (.*)", body):
        for choice in json.loads(data)["choices"] if data.startswith("{") else ():
            made.setdefault(choice["index"], []).append(data)
    return made


SINGLE = [name for name, case in CASES.items() if len(case.texts) == 1]
SEVERAL = [name for name in CASES if name not in SINGLE]


@pytest.mark.parametrize("name", SINGLE)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(share=st.floats(0, 1), seen=st.floats(0, 1))
def test_an_answer_that_is_cut_anywhere_is_continued_with_the_same_bytes(
    name: str, share: float, seen: float
) -> None:
    case = CASES[name]

    async def check() -> None:
        body, memory = await made(name)
        first, end = records_end(memory)
        place = first + round(share * (end - first))
        frames = frames_of(body)
        num_events = sum(frame.startswith("id: ") for frame in frames)
        last = round(seen * num_events)
        life = Life(cut(memory, place))
        async with life.router(case) as edge:
            assert life.count == 1
            status, rest = await ask(edge, case, last)
        assert status == 200, rest
        assert without_end("".join(frames[:last]) + rest) == without_end(body)

    asyncio.run(check())


@pytest.mark.parametrize("name", SEVERAL)
@settings(max_examples=8, deadline=None)
@given(share=st.floats(0, 1))
def test_choices_that_are_cut_anywhere_go_on_in_the_order_that_they_had(
    name: str, share: float
) -> None:
    case = CASES[name]

    async def check() -> None:
        body, memory = await made(name)
        first, end = records_end(memory)
        life = Life(cut(memory, first + round(share * (end - first))))
        ((_, run),) = RunLog(bytearray(life.memory), PRINT).restored()
        async with life.router(case) as edge:
            status, again = await ask(edge, case)
        assert status == 200, again
        assert choices_of(again) == choices_of(body)
        if name == "completions":
            # Each token is one event.
            known = len(run.tokens)
            assert frames_of(again)[:known] == frames_of(body)[:known]

    asyncio.run(check())


async def test_a_kept_answer_is_rendered_again_without_a_new_generation() -> None:
    case = CASES["chat, tools"]
    body, memory = await made("chat, tools")
    life = Life(memory)
    async with life.router(case, num_wrong=1000) as edge:
        assert edge.batcher.requests == [], "it waits for its client"
        assert await ask(edge, case) == (200, body)
        (request,) = edge.batcher.requests
        assert request.choice is not None
        assert len(request.choice.known) == len(BYTES.encode(case.texts[0])) + 1
    life = Life(bytes(life.memory))
    async with life.router(case) as edge:
        assert await ask(edge, case) == (200, body), "and by the router after that, too"


async def test_known_tokens_are_not_computed_again() -> None:
    case = CASES["chat, tools"]
    body, memory = await made("chat, tools")
    cut_memory = cut(memory, [end for end in places(memory) if end][20])
    ((_, run),) = RunLog(bytearray(cut_memory), PRINT).restored()
    known = len(run.tokens)
    assert known > 10
    async with Life(cut_memory).router(case, num_wrong=known) as edge:
        assert await ask(edge, case) == (200, body)


async def test_tokens_with_candidates_are_computed_again_and_compared() -> None:
    case = CASES["tgi, candidates"]
    _, memory = await made("tgi, candidates")
    cut_memory = cut(memory, [end for end in places(memory) if end][20])
    async with Life(cut_memory).router(case, num_wrong=10) as edge:
        status, text = await ask(edge, case, 3)
        assert (status, json.loads(text)["error_type"]) == (410, "not_resumable")


async def test_another_caller_path_or_body_does_not_get_it() -> None:
    case = CASES["tgi"]
    body, memory = await made("tgi")
    life = Life(memory)
    async with life.router(case) as edge:
        status, text = await ask(edge, case, 3, **{"x-tenant": "another"})
        assert (status, json.loads(text)["error_type"]) == (410, "not_resumable")
        status, text = await ask(edge, Case(case.path, {"inputs": "b"}), 3)
        assert (status, json.loads(text)["error_type"]) == (422, "validation")
        assert await ask(edge, case) == (200, body)


async def test_a_request_that_had_a_credential_waits_for_its_client() -> None:
    case = CASES["tgi"]
    body, memory = await made("tgi")
    ((_, run),) = RunLog(bytearray(memory), PRINT).restored()
    life = Life()
    recorder = RunLog(life.memory, PRINT).begin(replace(run.start, needs_client=True))
    assert recorder is not None
    recorder.begin(0, run.beginnings[0])
    for token in run.tokens[:9]:
        recorder.writer(token.choice)(token.id, token.logprob, token.closed)
    recorder.flush()
    kept = bytes(life.memory)
    async with life.router(case) as edge:
        assert edge.batcher.requests == []
        assert await ask(edge, case, 5) == (200, "".join(frames_of(body)[5:]))
    async with Life(kept).router(case) as edge:
        assert (await ask(edge, CASES["tgi, stop"]))[0] == 422, "the key came with another body"
        assert await ask(edge, case) == (200, body)


async def test_the_log_has_no_credentials() -> None:
    case, life = CASES["chat"], Life()
    async with life.router(case, api_key="s3cr3t") as edge:
        status, body = await ask(edge, case, authorization="Bearer s3cr3t", cookie="a=c00kie")
        assert status == 200
    assert b"s3cr3t" not in life.memory
    assert b"c00kie" not in life.memory
    life = Life(bytes(life.memory))
    async with life.router(case, api_key="s3cr3t") as edge:
        assert (await ask(edge, case))[0] == 401
        assert await ask(edge, case, authorization="Bearer s3cr3t") == (200, body)


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_a_body_that_may_have_a_credential_is_not_in_the_log(encoding: str) -> None:
    case, life = CASES["chat"], Life()
    body = json.dumps({**case.body, "user": "api_token"}).encode()
    sent = gzip.compress(body, mtime=0) if encoding == "gzip" else body
    headers = KEY | {"content-encoding": encoding, "content-type": "application/json"}
    async with life.router(case) as edge:
        _, text, _ = await edge.post(case.path, data=sent, headers=headers)
    assert b"messages" not in life.memory
    assert sent not in life.memory
    async with Life(bytes(life.memory)).router(case) as edge:
        assert edge.batcher.requests == []
        status, rest, _ = await edge.post(
            case.path, data=sent, headers=headers | {"last-event-id": "4"}
        )
        assert (status, rest) == (200, "".join(frames_of(text)[4:]))


async def test_a_conversation_outlives_the_store_of_its_responses() -> None:
    case = replace(CASES["responses"], texts=("One.", "Two.", "Three."))
    life = Life()
    options: dict[str, Any] = {"responses_store": 1}
    async with life.router(case, **options) as edge:
        earlier = await edge.answer(case.path, {"input": "hello"})
        asked = {**case.body, "previous_response_id": earlier["id"]}
        status, body = await ask(edge, replace(case, body=asked))
        prompt = edge.batcher.requests[-1].input_ids
    ends = [end for end in places(bytes(life.memory)) if end]
    for end in (ends[-3], ends[-1]):
        case = replace(CASES["responses"], body=asked, texts=("Two.", "Three."))
        async with Life(cut(bytes(life.memory), end)).router(case, **options) as edge:
            status, rest = await ask(edge, case, 2)
            assert (status, without_end("".join(frames_of(body)[:2]) + rest)) == (
                200,
                without_end(body),
            )
            assert edge.batcher.requests[0].input_ids == prompt
            (last,) = re.findall('"id":"(resp_[0-9a-f]+)"', rest)[-1:]
            assert await edge.answer(case.path, {"input": "a", "previous_response_id": last})


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_a_conversation_is_continued_though_its_body_is_not_in_the_log(encoding: str) -> None:
    case = replace(CASES["responses"], texts=("One.", "Two."))
    life = Life()
    options: dict[str, Any] = {"responses_store": 1}
    headers = KEY | {"content-encoding": encoding, "content-type": "application/json"}
    async with life.router(case, **options) as edge:
        earlier = await edge.answer(case.path, {"input": "hello"})
        body = {**case.body, "previous_response_id": earlier["id"], "user": "api_token"}
        data = json.dumps(body).encode()
        data = gzip.compress(data, mtime=0) if encoding == "gzip" else data
        status, text, _ = await edge.post(case.path, data=data, headers=headers)
        assert status == 200, text
        prompt = edge.batcher.requests[-1].input_ids
    assert b"hello" in life.memory
    assert b"api_token" not in life.memory
    ends = [end for end in places(bytes(life.memory)) if end]
    case = replace(case, texts=("Two.",))
    async with Life(cut(bytes(life.memory), ends[-3])).router(case, **options) as edge:
        headers["last-event-id"] = "2"
        status, rest, _ = await edge.post(case.path, data=data, headers=headers)
        assert status == 200, rest
        assert without_end("".join(frames_of(text)[:2]) + rest) == without_end(text)
        assert edge.batcher.requests[0].input_ids == prompt


async def test_tokens_of_another_prompt_are_not_continued() -> None:
    case = CASES["chat"]
    _, memory = await made("chat")
    life = Life(memory)
    async with life.router(case, template="another " + TEMPLATE) as edge:
        status, text = await ask(edge, case, 3)
        assert (status, json.loads(text)["error"]["type"]) == (410, "not_resumable")


async def test_a_request_with_which_routers_die_is_given_up() -> None:
    case = CASES["chat"]
    _, memory = await made("chat")
    place, _ = records_end(memory)
    life = Life(cut(memory, place))
    for count in (1, 1, 0):
        async with life.router(case) as edge:
            assert life.count == count
            before = bytes(life.memory)
        life = Life(before if count else bytes(LOG_BYTES))
        del edge


async def test_a_request_that_is_refused_leaves_the_log() -> None:
    life = Life()
    async with life.router(CASES["tgi"]) as edge:
        status, _, _ = await edge.post("/generate", {"inputs": ""}, headers=KEY)
        assert status == 422
    assert RunLog(life.memory, PRINT).restored() == []


async def test_a_client_that_has_read_more_than_was_logged_waits_for_it() -> None:
    case = CASES["tgi"]
    body, memory = await made("tgi")
    frames = frames_of(body)
    place, _ = records_end(memory)
    async with Life(cut(memory, place)).router(case) as edge:
        status, rest = await ask(edge, case, len(frames) - 1)
        assert (status, rest) == (200, frames[-1])


BUSY, GONE, AWAY = Overloaded(), ShardsGone("test"), AdapterUnavailable("a", "test")


@pytest.mark.parametrize("name", ["tgi", "chat, whole"])
async def test_a_run_that_cannot_be_continued_now_is_continued_later(name: str) -> None:
    case = CASES[name]
    body, memory = await made(name)
    cut_memory = cut(memory, [end for end in places(memory) if end][20])
    ((_, run),) = RunLog(bytearray(cut_memory), PRINT).restored()
    known = len(run.tokens)
    assert known > 10
    life = Life(cut_memory)
    async with life.router(case, known, failures=[BUSY, GONE, AWAY]) as edge:
        await settled(edge)
        for _ in (1, 2):
            status, _ = await ask(edge, case)
            assert status == 503
            await settled(edge)
        ((_, run),) = RunLog(bytearray(life.memory), PRINT).restored()
        assert len(run.tokens) == known
        assert run.num_tries == 1, "it is one router"
        last = 4 if body.startswith("id: ") else 0
        expected = "".join(frames_of(body)[last:]) if last else body
        assert await ask(edge, case, last) == (200, expected)


async def test_tokens_before_a_refusal_are_kept_once() -> None:
    case = CASES["completions"]
    body, memory = await made("completions")
    place, _ = records_end(memory)
    life = Life(cut(memory, place))
    async with life.router(case, failures=[None, None, BUSY, None, None, BUSY]) as edge:
        await settled(edge)
        assert (await ask(edge, case))[0] == 429
        await settled(edge)
        status, again = await ask(edge, case)
    assert status == 200, again
    assert choices_of(again) == choices_of(body)
    ((_, run),) = RunLog(life.memory, PRINT).restored()
    assert len(run.tokens) == sum(len(BYTES.encode(text)) + 1 for text in case.texts)


async def test_a_run_that_waits_for_its_client_again_can_be_ended() -> None:
    case = CASES["tgi"]
    _, memory = await made("tgi")
    place, _ = records_end(memory)
    life = Life(cut(memory, place))
    async with life.router(case, failures=[BUSY]) as edge:
        await settled(edge)
        async with edge.client.delete(f"{edge.url}/v1/requests/k") as response:
            assert response.status == 200
        assert RunLog(bytearray(life.memory), PRINT).restored() == []
        assert not edge.runner.app[KEPT].expected


ONE = {"limits": replace(LIMITS, max_concurrent_requests=1)}


async def test_a_full_server_ends_continued_runs_without_readers_last_and_continues_them_later() -> (
    None
):
    case = replace(CASES["tgi"], texts=CASES["tgi"].texts * 2)
    body, memory = await made("tgi")
    life = Life(cut(memory, [end for end in places(memory) if end][20]))
    options: dict[str, Any] = ONE
    async with life.router(case, failures=[STALLED], **options) as edge:
        await until(lambda: len(edge.batcher.requests) == 1)
        status, text, _ = await edge.post(case.path, case.body)
        assert (status, len(edge.batcher.requests)) == (200, 2), text
        assert await ask(edge, case, 5) == (200, "".join(frames_of(body)[5:]))


async def test_continued_runs_do_not_end_each_other() -> None:
    case = replace(CASES["chat"], texts=CASES["chat"].texts * 2)
    keys = [{"idempotency-key": key} for key in "kl"]
    life, options = Life(), dict[str, Any](ONE)
    async with life.router(case, failures=[STALLED, STALLED]) as edge:
        clients = [asyncio.create_task(ask(edge, case, 0, **key)) for key in keys]
        await until(lambda: len(edge.batcher.requests) == 2)
        memory = bytes(life.memory)
        for client in clients:
            client.cancel()
    _, (_, second) = RunLog(bytearray(memory), PRINT).restored()
    life = Life(memory)
    async with life.router(case, failures=[STALLED], **options) as edge:
        assert life.count == 2
        await until(lambda: len(edge.batcher.requests) == 1)
        await until(lambda: len(edge.runner.app[KEPT].expected) == 1)
        ((_, waiting),) = edge.runner.app[KEPT].expected.values()
        assert waiting.start.scope == second.start.scope, "the first is not ended for the second"
        for key in reversed(keys):
            status, text = await ask(edge, case, 0, **key)
            assert status == 200, text
        assert len(RunLog(bytearray(life.memory), PRINT).restored()) == 2


async def settled(edge: Edge) -> None:
    """Wait until no run is going on."""
    runs = edge.runner.app[RUNS]
    await asyncio.gather(*runs._tasks.values(), return_exceptions=True)
