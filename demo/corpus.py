"""Makes the demo model's conversations from a seed: training conversations and held-back questions."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Literal

from demo import facts, talk, words
from demo.skills import SKILLS
from demo.topic import Topic

Style = Literal["chat", "raw"]

SHARES = {
    "topic": 0.5,
    "unknown": 0.05,
    "arithmetic": 0.17,
    "spelling": 0.13,
    "counting": 0.08,
    "json": 0.07,
}
HELD_BACK_PERCENT = 8
RAW_SHARE = 0.35
LOWER_SHARE = 0.25
CAPITALS_SHARE = 0.06
BARE_END_SHARE = 0.2
SYSTEM_SHARE = 0.12
HISTORY_SHARE = 0.15
LONG_HISTORY_SHARE = 0.006
HELD_BACK_EXERCISES = 100

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are Millrace's demo model.",
    "Answer briefly.",
    "You are a friendly and concise assistant.",
    "Be precise.",
    "You are an expert in serving language models.",
    "Answer the user's question in one sentence.",
)


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Turns in chat form, or a single one as a bare prompt that the answer continues."""

    category: str
    key: str
    style: Style
    turns: tuple[Turn, ...]
    system: str = ""


@dataclass(frozen=True)
class Corpus:
    """Training conversations and held-back questions."""

    train: tuple[Conversation, ...]
    held_back: tuple[Conversation, ...]


@dataclass(frozen=True)
class Ask:
    """One topic in one wording, before letter case and punctuation vary."""

    topic: Topic
    template: str
    text: str
    held_back: bool


def generate(seed: int, size: int = 160_000) -> Corpus:
    """Make `size` training conversations and every held-back question."""
    asks = wordings(seed)
    rng = random.Random(seed)
    open_asks = {
        topic.key: [ask for ask in asks if ask.topic is topic and not ask.held_back]
        for topic in facts.TOPICS
    }
    maker = _Maker(seed, rng, open_asks)
    train = tuple(maker.conversation() for _ in range(size))
    return Corpus(train, _held_back(seed, asks))


def normalize(question: str) -> str:
    """The form in which equal questions are equal."""
    return question.strip().rstrip("?.!").strip().lower()


def wordings(seed: int) -> list[Ask]:
    """Every wording of every topic; a held-back template of a topic is held back with all its names."""
    asks = []
    for topic in facts.TOPICS:
        for template, name in facts.templates_of(topic):
            held = template != "{x}" and _is_held_back(seed, topic.key, template)
            asks.append(Ask(topic, template, facts.fill(template, name), held))
        openers = facts.TALK_OPENERS if topic.kind == "talk" else facts.OPENERS
        for question in topic.questions:
            for opener in openers:
                held = opener != "" and _is_held_back(seed, question, opener)
                asks.append(Ask(topic, opener, opener + question, held))
    return asks


def _is_held_back(seed: int, *parts: object) -> bool:
    """A fixed share of all combinations, by hash, so that no list needs to be kept."""
    return zlib.crc32(repr((seed, parts)).encode()) % 100 < HELD_BACK_PERCENT


class _Maker:
    """Draws training conversations."""

    def __init__(self, seed: int, rng: random.Random, asks: dict[str, list[Ask]]) -> None:
        self.seed = seed
        self.rng = rng
        self.asks = asks

    def conversation(self) -> Conversation:
        rng = self.rng
        category, key, turn = self._turn()
        if rng.random() < RAW_SHARE:
            return Conversation(category, key, "raw", (turn,))
        turns = [self._turn()[2] for _ in range(self._history_length())] + [turn]
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else ""
        return Conversation(category, key, "chat", tuple(turns), system)

    def _history_length(self) -> int:
        draw = self.rng.random()
        if draw < LONG_HISTORY_SHARE:
            return self.rng.randint(8, 18)
        return self.rng.randint(1, 3) if draw < HISTORY_SHARE else 0

    def _turn(self) -> tuple[str, str, Turn]:
        (category,) = self.rng.choices(tuple(SHARES), tuple(SHARES.values()))
        if category == "topic":
            return self._topic_turn()
        if category == "unknown":
            return category, category, self._unknown_turn()
        return category, category, self._exercise_turn(category)

    def _topic_turn(self) -> tuple[str, str, Turn]:
        rng = self.rng
        topic = rng.choice(facts.TOPICS)
        ask = rng.choice(self.asks[topic.key])
        text = ask.text
        if topic.names and rng.random() < 0.05 and "{x}" in ask.template:
            text = rng.choice(facts.OPENERS) + text
        return topic.kind, topic.key, Turn(_vary(rng, text), topic.answer)

    def _unknown_turn(self) -> Turn:
        if self.rng.random() < 0.25:
            jumble = " ".join(self.rng.choices(words.COMMON, k=self.rng.randint(3, 12)))
            return Turn(jumble, talk.UNKNOWN)
        while True:
            frame = self.rng.choice(talk.UNKNOWN_FRAMES)
            thing = self.rng.choice(talk.UNKNOWN_THINGS)
            if frame == "{thing}" or not _is_held_back(self.seed, frame, thing):
                return Turn(_vary(self.rng, frame.format(thing=thing)), talk.UNKNOWN)

    def _exercise_turn(self, skill: str) -> Turn:
        while True:
            exercise = SKILLS[skill](self.rng)
            if not _is_held_back(self.seed, skill, exercise.held_back_by):
                break
        return Turn(exercise.question, exercise.answer)


def _vary(rng: random.Random, text: str) -> str:
    """Vary letter case, and leave out the final mark, as users do."""
    draw = rng.random()
    if draw < LOWER_SHARE:
        text = text.lower()
    elif draw < LOWER_SHARE + CAPITALS_SHARE:
        text = " ".join(
            word[:1].upper() + word[1:] if rng.random() < 0.7 else word for word in text.split(" ")
        )
    elif rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return text.rstrip("?.!") or text if rng.random() < BARE_END_SHARE else text


def _held_back(seed: int, asks: list[Ask]) -> tuple[Conversation, ...]:
    """All held-back wordings of topics, and a fixed number of held-back exercises of each skill."""
    rng = random.Random(seed + 1)
    found = [_alone(ask.topic.kind, ask.topic.key, Turn(ask.text, ask.topic.answer), rng)
             for ask in asks if ask.held_back]  # fmt: skip
    unknown = [
        frame.format(thing=thing)
        for frame in talk.UNKNOWN_FRAMES
        for thing in talk.UNKNOWN_THINGS
        if frame != "{thing}" and _is_held_back(seed, frame, thing)
    ]
    found += [_alone("unknown", "unknown", Turn(text, talk.UNKNOWN), rng) for text in unknown]
    for skill, draw in SKILLS.items():
        questions: dict[str, str] = {}
        while len(questions) < HELD_BACK_EXERCISES:
            exercise = draw(rng)
            if _is_held_back(seed, skill, exercise.held_back_by):
                questions[exercise.question] = exercise.answer
        found += [_alone(skill, skill, Turn(*pair), rng) for pair in questions.items()]
    return tuple(found)


def _alone(category: str, key: str, turn: Turn, rng: random.Random) -> Conversation:
    style: Style = "raw" if rng.random() < RAW_SHARE else "chat"
    return Conversation(category, key, style, (turn,))
