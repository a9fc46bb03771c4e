"""Ways to ask the same requests: one at a time, all at once, or beside unrelated traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event

from millrace_launcher.verify.requests.question import Question
from millrace_launcher.verify.requests.suite import Suite
from millrace_launcher.verify.servers.answers import Answer
from millrace_launcher.verify.servers.client import Client


def ask_alone(client: Client, questions: Sequence[Question]) -> tuple[Answer, ...]:
    """Ask one request at a time."""
    return tuple(client.answer(question) for question in questions)


def ask_together(
    client: Client,
    questions: Sequence[Question],
    num_workers: int,
    on_token: Callable[[], None] = lambda: None,
) -> tuple[Answer, ...]:
    """Ask all at once, or `num_workers` at a time; `on_token` is called from worker threads."""
    with ThreadPoolExecutor(num_workers) as pool:
        return tuple(pool.map(lambda question: client.answer(question, on_token), questions))


def ask_in_traffic(client: Client, suite: Suite) -> tuple[Answer, ...]:
    """Ask all at once, beside unrelated requests that repeat until the last answer."""
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
