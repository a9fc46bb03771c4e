"""The shipped demo model answers held-back questions exactly, stops by itself and fits its size."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import corpus, facts, measure, vocabulary
from demo.corpus import Conversation
from demo.measure import Reply
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ASKED = 240
LARGEST_FOLDER = 8_000_000
LONGEST_ANSWER_WORDS = 40

Answered = list[tuple[Conversation, Reply]]


@pytest.fixture(scope="module")
def held_back() -> tuple[Conversation, ...]:
    return corpus.generate(measure.SEED, size=0).held_back


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    return measure.load(measure.MODEL)


@pytest.fixture(scope="module")
def answered(
    held_back: tuple[Conversation, ...], loaded: tuple[PreTrainedModel, PreTrainedTokenizerFast]
) -> Answered:
    asked = measure.sample(held_back, ASKED)
    replies = measure.ask(*loaded, [vocabulary.prompt(item) for item in asked])
    return list(zip(asked, replies, strict=True))


def rate(answered: Answered) -> float:
    return sum(measure.is_exact(item, reply) for item, reply in answered) / len(answered)


def wrong(answered: Answered) -> str:
    """The wrong answers, for the failure report."""
    return "\n".join(
        f"{item.turns[-1].question!r}: {reply.text!r}"
        for item, reply in answered
        if not measure.is_exact(item, reply)
    )


def test_held_back_questions_get_the_exact_answer(answered: Answered) -> None:
    assert len(answered) >= 200
    assert rate(answered) >= 0.9, wrong(answered)


@pytest.mark.parametrize("style", ["chat", "raw"])
def test_both_prompt_styles_work(answered: Answered, style: str) -> None:
    chosen = [pair for pair in answered if pair[0].style == style]
    assert len(chosen) >= 50
    assert rate(chosen) >= 0.85, wrong(chosen)


def test_every_kind_of_question_is_covered_and_mostly_answered_right(answered: Answered) -> None:
    kinds = {item.category for item, _ in answered}
    assert kinds == {
        *(topic.kind for topic in facts.TOPICS),
        *(skill for skill in corpus.SHARES if skill != "topic"),
    }
    for kind in kinds:
        chosen = [pair for pair in answered if pair[0].category == kind]
        assert rate(chosen) >= 0.6, f"{kind}:\n{wrong(chosen)}"


def test_generation_ends_by_itself(answered: Answered) -> None:
    assert [item.turns[-1].question for item, reply in answered if not reply.ended] == []


def test_earlier_messages_and_system_prompt_do_not_confuse_it(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = loaded
    by_name = {topic.key: topic.answer for topic in facts.TOPICS}
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is prefill?"},
        {"role": "assistant", "content": by_name["prefill"]},
        {"role": "user", "content": "Explain top-k."},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert measure.ask(model, tokenizer, [prompt]) == [Reply(by_name["top-k"], ended=True)]


def test_the_chat_template_renders_the_training_format(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    _, tokenizer = loaded
    for item in corpus.generate(measure.SEED, size=300).train:
        if item.style == "raw":
            ids = tokenizer(item.turns[0].question)["input_ids"]
        else:
            messages = [{"role": "system", "content": item.system}] if item.system else []
            for turn in item.turns:
                messages.append({"role": "user", "content": turn.question})
                messages.append({"role": "assistant", "content": turn.answer})
            text = tokenizer.apply_chat_template(
                messages[:-1], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer(vocabulary.prompt(item), add_special_tokens=False)["input_ids"]


def test_digits_are_tokens_of_their_own(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    _, tokenizer = loaded
    assert tokenizer.tokenize("4096") == ["4", "0", "9", "6"]


def test_the_folder_is_small() -> None:
    sizes = {path.name: path.stat().st_size for path in Path(measure.MODEL).iterdir()}
    assert sum(sizes.values()) <= LARGEST_FOLDER, sizes


def test_topics_are_many_short_and_unambiguous(held_back: tuple[Conversation, ...]) -> None:
    assert len({topic.answer for topic in facts.TOPICS}) == len(facts.TOPICS) >= 130
    assert all(len(topic.answer.split()) <= LONGEST_ANSWER_WORDS for topic in facts.TOPICS)
    answers: dict[str, str] = {}
    for ask in corpus.wordings(measure.SEED):
        known = answers.setdefault(corpus.normalize(ask.text), ask.topic.answer)
        assert known == ask.topic.answer, ask.text
    kinds = {topic.kind for topic in facts.TOPICS}
    assert len({item.key for item in held_back if item.category in kinds}) >= 100


def test_held_back_questions_are_never_trained_on(held_back: tuple[Conversation, ...]) -> None:
    trained = {
        corpus.normalize(turn.question)
        for item in corpus.generate(measure.SEED).train
        for turn in item.turns
    }
    asked = {corpus.normalize(item.turns[-1].question) for item in held_back}
    assert asked & trained == set()


def test_the_corpus_depends_only_on_its_seed() -> None:
    first, again, other = (corpus.generate(seed, size=500) for seed in (7, 7, 8))
    assert first == again
    assert first.train != other.train
    assert first.held_back != other.held_back
