"""The case that mixes LoRA adapters with the base model, and its launcher flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from millrace.errors import StartError
from millrace.server import LocalServers
from millrace.verify.adapter_files import (
    TARGETS,
    NoAdapters,
    checkpoint_of,
    write_adapters,
)
from millrace.verify.answers import ExactAnswer
from millrace.verify.cases import CACHED, ServerUnderTest, shard_killed
from millrace.verify.client import STEPS, Client, counting
from millrace.verify.comparison import compare
from millrace.verify.questions import Question
from millrace.verify.report import Row, judged
from millrace.verify.suite import Suite, ask_alone, ask_together

NAMES = tuple(TARGETS)


def adapter_flags(servers: LocalServers, model: str) -> tuple[str, ...]:
    """Write two adapters next to the logs, and return flags that register them. Raises StartError."""
    folder = (servers.logs / "adapters").absolute()
    try:
        found = write_adapters(checkpoint_of(model, servers.revision), folder)
    except NoAdapters as error:
        raise StartError(str(error), str(error)) from error
    modules = (f"--lora-modules={name}={path}" for name, path in found.items())
    return (*CACHED, *modules, f"--adapter-cache={_made(folder / 'cache')}")


def adapters(server: ServerUnderTest, suite: Suite) -> Iterator[Row]:
    """Mix requests for two adapters and for the base, then kill a shard; the base's answers are a plain server's."""
    questions = mixed(suite.questions, NAMES)
    expected = expected_of(server.client, suite, questions)
    yield _in_company(server.client, suite, questions, expected)
    name = "adapters / shard killed"
    yield shard_killed("adapters", name, server, suite, questions, expected)


def adapters_outside(client: Client, suite: Suite, names: Sequence[str]) -> Row:
    """The mixed part of the case, on a running server with adapters of these names."""
    questions = mixed(suite.questions, names)
    return _in_company(client, suite, questions, expected_of(client, suite, questions))


def mixed(questions: Sequence[Question], names: Sequence[str]) -> tuple[Question, ...]:
    """The same questions, for the base and each adapter in turn."""
    turns = (None, *names)
    return tuple(
        replace(question, adapter=turns[number % len(turns)])
        for number, question in enumerate(questions)
    )


def expected_of(
    client: Client, suite: Suite, questions: Sequence[Question]
) -> tuple[ExactAnswer, ...]:
    """The suite's answers of the base, and answers of the adapters to each request alone."""
    return tuple(
        answer if question.adapter is None else ask_alone(client, [question])[0]
        for question, answer in zip(questions, suite.expected, strict=True)
    )


def _in_company(
    client: Client, suite: Suite, questions: Sequence[Question], expected: Sequence[ExactAnswer]
) -> Row:
    with counting(client) as counted:
        answers = ask_together(client, questions, suite.num_workers)
    changed = num_changed(questions, suite.expected, expected)
    num_tokens = sum(len(answer.ids) for answer in answers)
    return judged(
        "adapters",
        "adapters alone / mixed with the base",
        suite.info.promise,
        compare(questions, expected, answers),
        exercised=changed > 0 and counted.of(STEPS) < num_tokens,
        note=f"adapters changed {changed} answers of the base",
    )


def num_changed(
    questions: Sequence[Question], base: Sequence[ExactAnswer], adapted: Sequence[ExactAnswer]
) -> int:
    """Requests with an adapter whose answer is not the base's."""
    return sum(
        question.adapter is not None and (one.ids, one.logprobs) != (other.ids, other.logprobs)
        for question, one, other in zip(questions, base, adapted, strict=True)
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
