"""The requests for every server, fitted to the first server's limits, and ways to ask them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Event

from millrace.verify.answers import ExactAnswer
from millrace.verify.client import Client, ServerError
from millrace.verify.comparison import BITS, Promise, close
from millrace.verify.questions import UNRELATED, Kind, Question, kinds_for

FIRST_SEED = 1001
LONG_EVERY = 4
LONG_BLOCKS = 2
"""KV blocks, and a few tokens, by which every LONG_EVERY-th answer grows, so that a small cache runs out of blocks."""
PROMPT_BLOCKS = 5
"""KV blocks, and a few tokens, to which built-in prompts are cut."""
UNRELATED_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The fields of `/info` that the cases need."""

    model_id: str
    dtype: str
    device: str
    version: str
    deterministic: bool
    num_shard: int
    block_size: int
    max_input_tokens: int
    max_total_tokens: int
    max_concurrent_requests: int
    max_batch_total_tokens: int
    """Tokens that the KV cache has room for."""
    caches_prefixes: bool
    max_top_n_tokens: int
    grammars: bool
    """Whether the server accepts grammars."""
    attention: str = ""
    """The name of its attention kernels, which determine the last bits."""
    activations: str = ""
    """The activations that quantised weights are multiplied with; another choice changes more than the last bits."""

    @classmethod
    def of(cls, client: Client) -> ServerInfo:
        """Read `/info`. Raises ServerError for a server that is not Millrace."""
        info = client.info()
        try:
            return cls(
                model_id=str(info["model_id"]),
                dtype=str(info["model_dtype"]).removeprefix("torch."),
                device=str(info["model_device_type"]),
                version=str(info["version"]),
                deterministic=bool(info["deterministic"]),
                num_shard=int(info["num_shard"]),
                block_size=int(info["block_size"]),
                max_input_tokens=int(info["max_input_tokens"]),
                max_total_tokens=int(info["max_total_tokens"]),
                max_concurrent_requests=int(info["max_concurrent_requests"]),
                max_batch_total_tokens=int(info["max_batch_total_tokens"]),
                caches_prefixes=info["prefix_caching"] == "on",
                max_top_n_tokens=int(info["max_top_n_tokens"]),
                grammars=bool(info["grammars"]),
                attention=str(info.get("attention", "")),
                activations=str(info.get("quantize_activations") or ""),
            )
        except KeyError as error:
            raise ServerError(f"{client.url}/info has no {error}; is it Millrace?") from error

    @property
    def promise(self) -> Promise:
        """The promise about two answers of such a server to one request."""
        return BITS if self.deterministic else close(self.dtype)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The requests, and the expected answers."""

    info: ServerInfo
    questions: tuple[Question, ...]
    unrelated: tuple[Question, ...]
    expected: tuple[ExactAnswer, ...]

    @property
    def num_workers(self) -> int:
        """Requests to ask at once, with room for unrelated ones."""
        return max(1, min(64, self.info.max_concurrent_requests - len(self.unrelated)))


def questions_for(
    client: Client,
    info: ServerInfo,
    prompts: Sequence[str],
    *,
    num_requests: int,
    max_new_tokens: int,
    cut: bool,
) -> tuple[Question, ...]:
    """Requests of all kinds over `prompts`, in turn; `cut` bounds prompts to a few blocks. Raises ServerError."""
    ids = {text: client.token_ids(text) for text in prompts}
    kinds = kinds_for(grammars=info.grammars)
    found = []
    for number in range(num_requests):
        text, kind = prompts[number % len(prompts)], kinds[number % len(kinds)]
        wanted = max_new_tokens - max_new_tokens * (number % 3) // 4
        if number % LONG_EVERY == 0:
            wanted = max(max_new_tokens, LONG_BLOCKS * info.block_size + 8)
        most = PROMPT_BLOCKS * info.block_size + 7 if cut else info.max_input_tokens
        question = _question(
            info, text, ids[text], kind, wanted=wanted, most=most, ignore_eos=number % 3 != 2
        )
        found.append(question if question.is_greedy else question.seeded(FIRST_SEED + number))
    return tuple(found)


def unrelated_questions(client: Client, info: ServerInfo) -> tuple[Question, ...]:
    """Requests whose answers are not compared. Raises ServerError."""
    kinds = kinds_for(grammars=info.grammars)
    return tuple(
        _question(
            info,
            text,
            client.token_ids(text),
            kinds[number % len(kinds)],
            wanted=UNRELATED_TOKENS + 5 * number,
            most=PROMPT_BLOCKS * info.block_size,
            ignore_eos=True,
        )
        for number, text in enumerate(UNRELATED)
    )


def plain_greedy(questions: Sequence[Question], max_new_tokens: int) -> tuple[Question, ...]:
    """Each prompt once, with plain greedy decoding."""
    by_prompt = {question.input_ids: question for question in questions}
    return tuple(
        Question(
            text=question.text,
            input_ids=ids,
            max_new_tokens=min(max_new_tokens, question.max_new_tokens),
            parameters={"ignore_eos": True},
        )
        for ids, question in by_prompt.items()
    )


def _question(
    info: ServerInfo,
    text: str,
    ids: tuple[int, ...],
    kind: Kind,
    *,
    wanted: int,
    most: int,
    ignore_eos: bool,
) -> Question:
    """Cut to the server's limits; at most half of the longest sequence is generated."""
    max_new_tokens = min(wanted, info.max_total_tokens // 2)
    room = min(most, info.max_input_tokens, info.max_total_tokens - max_new_tokens)
    input_ids = ids[-room:]
    return Question(
        text=text,
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        parameters=kind.parameters_for(
            input_ids, ignore_eos=ignore_eos, max_top_n_tokens=info.max_top_n_tokens
        ),
        route=kind.route,
    )


def ask_alone(client: Client, questions: Sequence[Question]) -> tuple[ExactAnswer, ...]:
    """Ask one request at a time."""
    return tuple(client.answer(question) for question in questions)


def ask_together(
    client: Client,
    questions: Sequence[Question],
    num_workers: int,
    on_token: Callable[[], None] = lambda: None,
) -> tuple[ExactAnswer, ...]:
    """Ask all at once, or `num_workers` at a time; `on_token` is called from worker threads."""
    with ThreadPoolExecutor(num_workers) as pool:
        return tuple(pool.map(lambda question: client.answer(question, on_token), questions))


def ask_in_traffic(client: Client, suite: Suite) -> tuple[ExactAnswer, ...]:
    """Send all at once, with unrelated requests that repeat until the last answer."""
    done, running = Event(), Event()
    rounds = count()

    def disturb(question: Question) -> None:
        failed = False
        while not done.is_set() and not failed:
            failed = client.answer(question.seeded(next(rounds)), running.set).error is not None
        running.set()

    with ThreadPoolExecutor(len(suite.unrelated)) as pool:
        traffic = [pool.submit(disturb, question) for question in suite.unrelated]
        try:
            running.wait()
            answers = ask_together(client, suite.questions, suite.num_workers)
        finally:
            done.set()
        for one in traffic:
            one.result()
    return answers
