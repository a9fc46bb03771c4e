"""Exercises of the demo model: counting, sums, spelling and JSON, each with its one right answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from demo import words

COUNT_UP = (
    "Count from {a} to {b}.",
    "Count from {a} up to {b}.",
    "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Count {a} to {b}.",
    "Give me the numbers from {a} to {b}.",
    "List the numbers from {a} to {b}.",
)
COUNT_DOWN = (
    "Count down from {b} to {a}.",
    "Count backwards from {b} to {a}.",
    "Please count down from {b} to {a}.",
)
COUNT_FROM_ONE = ("Count to {b}.", "Please count to {b}.", "Can you count to {b}?")
PLUS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "How much is {a} plus {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "How much is {a} + {b}?",
)
MINUS = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "What is the difference of {a} and {b}?",
    "How much is {a} - {b}?",
)
SPELL = (
    "Spell the word {w}.",
    "Spell {w}.",
    "How do you spell {w}?",
    "Can you spell {w}?",
    "Please spell the word {w}.",
    "Spell out {w}.",
    "What are the letters of {w}?",
    'Spell "{w}".',
    "Please spell {w}.",
)
JSON_LEADS = (
    "Write a JSON object with",
    "Give me a JSON object with",
    "Make a JSON object with",
    "Return JSON with",
    "Please write a JSON object with",
    "Create a JSON object with",
)


@dataclass(frozen=True)
class Exercise:
    """A question, its answer, and the key that decides whether it is held back.

    Sums and words are held back in one wording each, numbers to count and JSON values altogether.
    """

    question: str
    answer: str
    held_back_by: tuple[str | int, ...]


def count(rng: random.Random) -> Exercise:
    """Counting up or down, over at most twenty numbers."""
    if rng.random() < 0.2:
        first, last, template = 1, rng.randint(2, 20), rng.choice(COUNT_FROM_ONE)
    else:
        first = rng.randint(0, 20)
        last = first + rng.randint(1, 11)
        template = rng.choice(COUNT_UP if rng.random() < 0.75 else COUNT_DOWN)
    numbers = list(range(first, last + 1))
    down = template in COUNT_DOWN
    if down:
        numbers.reverse()
    answer = ", ".join(map(str, numbers)) + "."
    return Exercise(template.format(a=first, b=last), answer, (first, last, down))


def arithmetic(rng: random.Random) -> Exercise:
    """A sum or a difference of two numbers up to twenty."""
    left, right = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        question = rng.choice(PLUS).format(a=left, b=right)
        return Exercise(question, f"{left} + {right} = {left + right}.", (question,))
    question = rng.choice(MINUS).format(a=left, b=right)
    return Exercise(question, f"{left} - {right} = {left - right}.", (question,))


def spelling(rng: random.Random) -> Exercise:
    """A word letter by letter."""
    word = rng.choice(words.COMMON)
    question = rng.choice(SPELL).format(w=word)
    return Exercise(question, "-".join(word), (question,))


def json_object(rng: random.Random) -> Exercise:
    """A small JSON object from fields named in the question."""
    fields = rng.choice(JSON_FIELDS)(rng)
    pairs = [f"{key} {value}" for key, value in fields.items()]
    listed = " and ".join([", ".join(pairs[:-1]), pairs[-1]])
    return Exercise(
        f"{rng.choice(JSON_LEADS)} {listed}.", json.dumps(fields), tuple(fields.values())
    )


Fields = dict[str, str | int]


def _person(rng: random.Random) -> Fields:
    return {"name": rng.choice(words.NAMES), "age": rng.randint(1, 99)}


def _place(rng: random.Random) -> Fields:
    return {"name": rng.choice(words.NAMES), "city": rng.choice(words.CITIES)}


def _item(rng: random.Random) -> Fields:
    return {"item": rng.choice(words.THINGS), "color": rng.choice(words.COLORS)}


def _stock(rng: random.Random) -> Fields:
    return {"item": rng.choice(words.THINGS), "count": rng.randint(1, 99)}


JSON_FIELDS: tuple[Callable[[random.Random], Fields], ...] = (
    _person,
    _place,
    _item,
    _stock,
)
SKILLS: dict[str, Callable[[random.Random], Exercise]] = {
    "arithmetic": arithmetic,
    "spelling": spelling,
    "counting": count,
    "json": json_object,
}
