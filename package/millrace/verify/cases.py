"""The cases that compare servers of this program, and their launcher flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from millrace.verify.answers import ExactAnswer
from millrace.verify.client import (
    ACCEPTED,
    DRAFTED,
    LOST,
    PREEMPTIONS,
    PROMPT_STEPS,
    REPLAYED,
    STEPS,
    Client,
    counting,
)
from millrace.verify.comparison import (
    REFERENCE_TOLERANCE,
    Comparison,
    close,
    compare,
    merged,
    same_tokens,
)
from millrace.verify.questions import Question
from millrace.verify.reference import Reference, until_tie
from millrace.verify.report import Row, judged
from millrace.verify.suite import (
    ServerInfo,
    Suite,
    ask_alone,
    ask_in_traffic,
    ask_together,
    plain_greedy,
)

ALONE = ("--prefix-caching=off", "--speculate=0")
"""The first server answers each request alone and computes every prompt in one step."""
CACHED = ("--prefix-caching=on", "--speculate=0")
KILL_AFTER = 0.3
"""Share of all tokens before a shard is killed."""
DEMAND = 4
"""Blocks that growing requests need together, in multiples of the blocks of the server that preempts."""
MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A server whose answers a case compares, and whose shards it may kill."""

    client: Client
    kill_shard: Callable[[], object]


def chunked_flags(suite: Suite) -> tuple[str, ...]:
    """Flags for prompt chunks that end inside blocks."""
    return (*ALONE, f"--max-batch-prefill-tokens={chunk_tokens(suite.info)}")


def preempted_flags(suite: Suite) -> tuple[str, ...]:
    """Flags for a KV cache with one block more than the largest request needs."""
    blocks = max(suite.info.num_blocks(question.num_tokens) for question in suite.questions) + 1
    return (
        *ALONE,
        "--kv-reservation=grow",
        f"--max-batch-total-tokens={blocks * suite.info.block_size}",
    )


def chunk_tokens(info: ServerInfo) -> int:
    """Prompt tokens in a step, not a multiple of a block."""
    return max(24, info.block_size // 2 + 5)


def batched(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Send all requests at once, then with other traffic, and compare with the answers one at a time."""
    client, promise = server.client, suite.info.promise
    with counting(client) as counted:
        answers = ask_together(client, suite.questions, suite.num_workers)
    comparison = compare(suite.questions, suite.expected, answers)
    num_tokens, steps = sum(len(answer.ids) for answer in answers), counted.of(STEPS)
    yield judged(
        "batched",
        "solo / batched",
        promise,
        comparison,
        exercised=steps < num_tokens,
        note=f"{num_tokens} tokens in {steps} steps",
    )
    with counting(client) as counted:
        answers = ask_in_traffic(client, suite)
    num_tokens, steps = sum(len(answer.ids) for answer in answers), counted.of(STEPS)
    yield judged(
        "batched",
        "solo / unrelated traffic",
        promise,
        compare(suite.questions, suite.expected, answers),
        exercised=steps < num_tokens,
    )


def chunked(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Compute prompts in small chunks together with decodes."""
    chunk = chunk_tokens(suite.info)
    longest = max(len(question.input_ids) for question in suite.questions)
    with counting(server.client) as counted:
        answers = ask_together(server.client, suite.questions, suite.num_workers)
    steps = counted.of(PROMPT_STEPS)
    yield judged(
        "chunked",
        "prompts whole / in chunks",
        suite.info.promise,
        compare(suite.questions, suite.expected, answers),
        exercised=longest > chunk and steps >= -(-longest // chunk),
        note=f"chunks of {chunk} tokens or less, the longest prompt has {longest}",
    )


def cached(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Ask with an empty prefix cache, then with the prompts in it."""
    client, promise = server.client, suite.info.promise
    cold = ask_alone(client, suite.questions)
    yield judged(
        "cached", "no cache / cold cache", promise, compare(suite.questions, suite.expected, cold)
    )
    warm = ask_together(client, suite.questions, suite.num_workers)
    before, after = (sum(answer.cached_tokens for answer in round_) for round_ in (cold, warm))
    yield judged(
        "cached",
        "no cache / warm cache",
        promise,
        compare(suite.questions, suite.expected, warm),
        exercised=after > before,
        note=f"{after} prompt tokens found cached, {before} when it was cold",
    )


def preempted(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Ask with too few KV blocks for all, so that the server preempts requests; repeat until it did."""
    info = ServerInfo.of(server.client)
    order = crowd(suite, server_tokens=info.max_batch_total_tokens)
    questions = [suite.questions[number] for number in order]
    expected = [suite.expected[number] for number in order]
    comparisons: list[Comparison] = []
    preemptions = 0
    while not preemptions and len(comparisons) < MOST_ROUNDS:
        with counting(server.client) as counted:
            answers = ask_together(server.client, questions, suite.num_workers)
        preemptions += counted.of(PREEMPTIONS)
        comparisons.append(compare(questions, expected, answers))
    yield judged(
        "preempted",
        "undisturbed / preempted",
        suite.info.promise,
        merged(comparisons),
        exercised=preemptions > 0,
        note=f"{preemptions} preemptions",
    )


def restarted(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Kill a shard during streams."""
    name = "undisturbed / shard killed"
    yield shard_killed("restarted", name, server, suite, suite.questions, suite.expected)


def shard_killed(
    case: str,
    name: str,
    server: ServerUnderTest,
    suite: Suite,
    questions: Sequence[Question],
    expected: Sequence[ExactAnswer],
) -> Row:
    """Kill a shard while it answers `questions`; repeat if the streams ended first."""
    total = sum(len(answer.ids) for answer in expected)
    comparisons: list[Comparison] = []
    lost = replayed = 0
    while not (lost and replayed) and len(comparisons) < MOST_ROUNDS:
        kill = After(max(1, int(total * KILL_AFTER)), server.kill_shard)
        with counting(server.client) as counted:
            answers = ask_together(server.client, questions, suite.num_workers, kill.on_token)
        lost += counted.of(LOST)
        replayed += counted.of(REPLAYED)
        comparisons.append(compare(questions, expected, answers))
    return judged(
        case,
        name,
        suite.info.promise,
        merged(comparisons),
        exercised=lost > 0 and replayed > 0,
        note=f"{lost} restart(s), {replayed} requests replayed",
    )


def speculated(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Ask with speculative decoding, alone and together; repeat until draft tokens were accepted and rejected."""
    client, questions = server.client, suite.questions
    rounds: Mapping[str, Callable[[], Sequence[ExactAnswer]]] = {
        "speculation": lambda: ask_alone(client, questions),
        "speculation, batched": lambda: ask_together(client, questions, suite.num_workers),
    }
    for title, ask in rounds.items():
        comparisons: list[Comparison] = []
        drafted = accepted = 0
        while not 0 < accepted < drafted and len(comparisons) < MOST_ROUNDS:
            with counting(client) as counted:
                comparisons.append(compare(questions, suite.expected, ask()))
            drafted += counted.of(DRAFTED)
            accepted += counted.of(ACCEPTED)
        yield judged(
            "speculated",
            f"no speculation / {title}",
            suite.info.promise,
            merged(comparisons),
            exercised=0 < accepted < drafted,
            note=f"{drafted} draft tokens, {accepted} accepted",
        )


def tensor_parallel(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Compare several ranks with one, where a tolerance is promised, and with themselves, where equality is."""
    info = ServerInfo.of(server.client)
    alone = ask_alone(server.client, suite.questions)
    yield judged(
        "tensor-parallel",
        f"{suite.info.num_shard} / {info.num_shard} shards",
        close(info.dtype),
        compare(suite.questions, suite.expected, alone),
        exercised=info.num_shard != suite.info.num_shard,
        note="sums over ranks are in another order",
    )
    with counting(server.client) as counted:
        together = ask_together(server.client, suite.questions, suite.num_workers)
    yield judged(
        "tensor-parallel",
        f"{info.num_shard} shards, solo / batched",
        info.promise,
        compare(suite.questions, alone, together),
        exercised=counted.of(STEPS) < sum(len(answer.ids) for answer in together),
    )


def transformers(server: ServerUnderTest, suite: Suite, reference: Reference) -> Iterator[Row]:
    """Compare greedy answers of a float32 server with plain `transformers`, up to the first tie."""
    greedy = plain_greedy(suite.questions, reference.max_new_tokens)
    answers = ask_together(server.client, greedy, suite.num_workers)
    promise = same_tokens(REFERENCE_TOLERANCE)
    pairs = [
        until_tie(one, answer, REFERENCE_TOLERANCE)
        for one, answer in zip(reference.ask(greedy), answers, strict=True)
    ]
    ties = sum(is_tie for _, _, is_tie in pairs)
    yield judged(
        "transformers",
        "transformers / float32",
        promise,
        compare(greedy, [one for one, _, _ in pairs], [other for _, other, _ in pairs]),
        note=f"{ties} compared up to a tie" if ties else "",
    )


class After:
    """Calls a function once, after a number of tokens, on the thread that received the last of them."""

    def __init__(self, num_tokens: int, act: Callable[[], object]) -> None:
        self._left = num_tokens
        self._act = act
        self._lock = Lock()

    def on_token(self) -> None:
        with self._lock:
            self._left -= 1
            is_time = self._left == 0
        if is_time:
            self._act()


def crowd(suite: Suite, *, server_tokens: int) -> list[int]:
    """Indexes of questions: those that grow most, repeated until they need DEMAND times the room, then the rest.

    So the server always has one to admit while other sequences have yet to grow.
    """
    info, questions = suite.info, suite.questions
    growth = [info.num_blocks(q.num_tokens) - info.num_blocks(len(q.input_ids)) for q in questions]
    growing = [place for place, blocks in enumerate(growth) if blocks == max(growth)]
    others = [place for place in range(len(questions)) if place not in growing]
    demand = sum(info.num_blocks(questions[place].num_tokens) for place in growing)
    copies = -(-DEMAND * info.num_blocks(server_tokens) // demand)
    return growing * max(1, copies) + others
