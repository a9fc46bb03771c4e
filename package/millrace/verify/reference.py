"""Answers of plain `transformers` in float32, from `millrace-shard reference`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.verify.answers import ExactAnswer, TokenId, as_float32
from millrace.verify.questions import Question
from millrace_launcher.settings.commands import Programs

TAIL_LINES = 5


class NoReference(Exception):  # noqa: N818
    """`transformers` failed; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """An answer of `transformers`, with the second-best token of each position: (id, log probability)."""

    answer: ExactAnswer
    runners_up: tuple[tuple[int, float], ...]

    def is_tie(self, position: int, other: TokenId, tolerance: float) -> bool:
        """Whether `other` is as likely as the token at `position`, within `tolerance`."""
        runner_up, logprob = self.runners_up[position]
        return runner_up == other and self.answer.logprobs[position] - logprob <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """How to run `transformers`."""

    model: str
    """A folder or a name on the hub."""
    max_new_tokens: int
    revision: str | None = None
    program: Sequence[str] = Programs().shard

    def ask(self, questions: Sequence[Question]) -> tuple[Greedy, ...]:
        """Run `millrace-shard reference` on greedy questions, for minutes with a large model. Raises NoReference."""
        lines = (
            json.dumps({"input_ids": q.input_ids, "max_new_tokens": q.max_new_tokens})
            for q in questions
        )
        chosen = [] if self.revision is None else ["--revision", self.revision]
        done = subprocess.run(  # noqa: S603
            [*self.program, "reference", self.model, *chosen],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
            # Idle threads of libgomp would spin, which takes ten times as long on busy cores.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
        answers = done.stdout.splitlines()
        if done.returncode != 0 or len(answers) != len(questions):
            tail = " ".join(done.stderr.splitlines()[-TAIL_LINES:])
            raise NoReference(tail or f"{len(answers)} answers to {len(questions)} questions")
        return tuple(map(_greedy, answers))


def until_tie(
    one: Greedy, found: ExactAnswer, tolerance: float
) -> tuple[ExactAnswer, ExactAnswer, bool]:
    """Both answers up to the first tie, and whether there is one.

    At a tie two tokens are equally likely within the tolerance, so either is right and the texts after it differ.
    """
    expected = one.answer
    found = replace(found, text=None, finish_reason=None)
    for position, (id_, other) in enumerate(zip(expected.ids, found.ids, strict=False)):
        if id_ != other:
            if not one.is_tie(position, other, tolerance):
                break
            return _cut(expected, position), _cut(found, position), True
    return expected, found, False


def _cut(answer: ExactAnswer, length: int) -> ExactAnswer:
    return replace(answer, ids=answer.ids[:length], logprobs=answer.logprobs[:length])


def _greedy(line: str) -> Greedy:
    found = json.loads(line)
    logprobs = tuple(as_float32(value) for value in found["logprobs"])
    return Greedy(
        ExactAnswer(ids=tuple(found["ids"]), logprobs=logprobs),
        tuple((id_, as_float32(value)) for id_, value in found["runners_up"]),
    )
