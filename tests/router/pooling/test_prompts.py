"""Prompts are cut as the tokenizer's own library cuts them, and documents leave the rest of their prompt whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors

from millrace_router.errors import TemplateError
from millrace_router.pooling.prompts import (
    PairText,
    ScoreTemplate,
    Side,
    Truncation,
    pair_tokens,
    tokens_of,
)
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.text import texts

END, USER = "<|end|>", "<|user|>"
TEMPLATES = {
    "none": None,
    "end": f"$A {END}",
    "both": f"{USER} $A {END}",
}
TEXTS = st.text(max_size=60) | st.sampled_from([f"the {END} cat {USER}", f"{END}{END}", "x" * 60])


def rust(template: str | None) -> RustTokenizer:
    made = RustTokenizer.from_str(texts.byte_level().to_str())
    if template is not None:
        special = [(name, made.token_to_id(name)) for name in (END, USER)]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return made


ORACLES = {name: rust(template) for name, template in TEMPLATES.items()}
OURS = {name: Tokenizer(rust(template)) for name, template in TEMPLATES.items()}


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(3, 20), st.sampled_from(Side), st.sampled_from(sorted(TEMPLATES)))
def test_a_text_is_cut_as_by_the_library(text: str, length: int, side: Side, name: str) -> None:
    oracle = ORACLES[name]
    oracle.enable_truncation(length, direction=side.lower())
    expected = tuple(oracle.encode(text).ids)
    assert tokens_of(OURS[name], text, Truncation(length, side)) == expected
    assert len(expected) <= length


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_may_be_left_out(name: str) -> None:
    ids = tokens_of(OURS[name], "the cat", None, specials=False)
    assert ids == OURS[name].encode("the cat", add_special_tokens=False)
    cut = tokens_of(OURS[name], "the cat sat on the mat", Truncation(3), specials=False)
    assert cut == OURS[name].encode("the cat sat on the mat", add_special_tokens=False)[:3]


@settings(deadline=None, max_examples=150)
@given(st.text(min_size=1, max_size=99), st.integers(35, 60), st.sampled_from(Side))
def test_only_tokens_of_the_document_are_cut(document: str, length: int, side: Side) -> None:
    around = PairText(f"{USER}Query: the cat\nDocument: ", f"{END}\nyes or no?")
    ours = OURS["none"]
    whole = pair_tokens(ours, around, document, None)
    assert whole == ours.encode(around.before + document + around.after, add_special_tokens=False)
    cut = pair_tokens(ours, around, document, Truncation(length, side))
    if len(whole) <= length:
        assert cut == whole
        return
    assert len(cut) == length
    after = ours.encode(around.after, add_special_tokens=False)
    assert cut[-len(after) :] == after
    num_first = next(place for place in range(length) if cut[place] != whole[place])
    if side is Side.RIGHT:
        # Everything before the gap, and the text after the document behind it.
        assert cut == whole[: length - len(after)] + after
    else:
        assert cut[num_first:] == whole[len(whole) - (length - num_first) :]
        before = ours.encode(around.before.rstrip(), add_special_tokens=False)
        assert cut[: len(before)] == before


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% endfor %}"
OWN = """\
{%- set query = messages | selectattr('role', 'eq', 'query') | first -%}
{%- set document = messages | selectattr('role', 'eq', 'document') | first -%}
Q {{ query.content }} D {{ document.content }} ?"""


def of_model_card(instruction: str, query: str, document: str) -> str:
    """The three pieces of the card's program, put together as it does."""
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return prefix + pair + suffix


@pytest.mark.parametrize("source", [None, CHAT])
@pytest.mark.parametrize("instruction", [None, "Find proverbs"])
async def test_score_prompt_equals_qwen3_rerankers_model_card(
    source: str | None, instruction: str | None
) -> None:
    template = ScoreTemplate.of(ChatTemplate(source, special_tokens={}))
    around = await template.around_document("{{ query }}\n<x>", instruction)
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    expected = of_model_card(instruction or usual, "{{ query }}\n<x>", "a document")
    assert around.before + "a document" + around.after == expected


async def test_a_template_with_the_roles_of_a_pair_is_the_models_own() -> None:
    around = await ScoreTemplate.of(ChatTemplate(OWN, special_tokens={})).around_document("a", None)
    assert (around.before, around.after) == ("Q a D ", " ?")


async def test_a_template_that_drops_the_document_is_refused() -> None:
    source = """{{ "query" }}{{ "document" }}"""
    template = ScoreTemplate.of(ChatTemplate(source, special_tokens={}))
    with pytest.raises(TemplateError, match="leaves out the document"):
        await template.around_document("a", None)
