"""Prompts of rerankers: Qwen3-Reranker's is that of its model card, and a checkpoint's own template beats it."""

from __future__ import annotations

import pytest

from millrace_router.errors import TemplateError
from millrace_router.pooling.score_template import ScoreTemplate
from millrace_router.text.chat_template import ChatTemplate

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
async def test_qwen3s_prompt(source: str | None, instruction: str | None) -> None:
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
