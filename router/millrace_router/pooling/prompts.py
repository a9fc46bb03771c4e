"""Prompts of embeddings and scores: a query around a document, and tokens that are cut to a length."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.control_tokens import GuardedText
from millrace_router.text.tokenizer import Tokenizer

QWEN3_SOURCE = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first \
| default("Given a web search query, retrieve relevant passages that answer the query") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""
"""Qwen3-Reranker's template, which its checkpoint has only in its model card; Jinja drops the last line break."""
_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


@dataclass(frozen=True, slots=True)
class PairText:
    """The text around a document."""

    before: str
    after: str
    guarded: Callable[[str], str] | None = None
    """Returns the whole text for a document that may have control tokens; None if they count as such."""

    def whole(self, document: str) -> str:
        """Return the text with a document in it."""
        text = self.before + document + self.after
        whole = text if self.guarded is None else self.guarded(document)
        # A template that changes the document could not be cut to a length.
        return whole if whole == text else text


class ScoreTemplate:
    """A chat template with the roles `query` and `document`, and `system` for the instruction."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @classmethod
    def of(cls, template: ChatTemplate) -> ScoreTemplate:
        """Use the model's own template if it has these roles, else Qwen3-Reranker's."""
        source = template.source or ""
        if all(role.search(source) for role in _ROLES):
            return cls(template)
        own, control = template.special_tokens, template.control_tokens
        return cls(ChatTemplate(QWEN3_SOURCE, special_tokens=own, control_tokens=control))

    async def around_document(self, query: str, instruction: str | None) -> PairText:
        """Render the prompt of `query`; raises TemplateError."""
        mark = uuid.uuid4().hex
        others = [{"role": "query", "content": query}]
        if instruction is not None:
            others = [{"role": "system", "content": instruction}, *others]

        def turns(document: str) -> list[dict[str, str]]:
            return [*others, {"role": "document", "content": document}]

        template, control = self._template, self._template.control_tokens
        text = await template.render_async(turns(mark), add_generation_prompt=True)
        before, separator, after = text.partition(mark)
        if not separator:
            raise TemplateError("the template leaves out the document")
        if control is None:
            return PairText(before, after)
        needs_guard = isinstance(text, GuardedText)

        def guarded(document: str) -> str:
            if not needs_guard and not control.may_be_in(document):
                return before + document + after
            return template.render(turns(document), add_generation_prompt=True)

        return PairText(before, after, guarded)


Ids = tuple[int, ...]
Item = TypeVar("Item")


class Side(StrEnum):
    """Where tokens are cut off, in TEI's words."""

    LEFT = "Left"
    RIGHT = "Right"


@dataclass(frozen=True, slots=True)
class Truncation:
    """How prompts are cut."""

    length: int
    """Most tokens, special ones included."""
    side: Side = Side.RIGHT

    def cut(self, items: Sequence[Item], room: int) -> Sequence[Item]:
        """Return `items` without those that are too many for `room`, which is at least 0."""
        if len(items) <= room:
            return items
        return items[:room] if self.side is Side.RIGHT else items[len(items) - room :]


def tokens_of(
    tokenizer: Tokenizer, text: str, truncation: Truncation | None, *, specials: bool = True
) -> Ids:
    """Tokenize `text`, with the tokenizer's special tokens unless they are not wanted; raises TokenizerError."""
    ids = tokenizer.encode(text, add_special_tokens=specials)
    if truncation is None or len(ids) <= truncation.length:
        return ids
    own = tokenizer.encode(text, add_special_tokens=False)
    num_before = next(
        (index for index in range(len(ids)) if ids[index : index + len(own)] == own), 0
    )
    before, after = ids[:num_before], ids[num_before + len(own) :]
    room = max(truncation.length - len(before) - len(after), 1)
    return (*before, *truncation.cut(own, room), *after)


def pair_tokens(
    tokenizer: Tokenizer, around: PairText, document: str, truncation: Truncation | None
) -> Ids:
    """Tokenize a document within its prompt; only the document's tokens are cut. Raises TokenizerError."""
    text = around.whole(document)
    if truncation is None:
        return tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.encode_with_starts(text, add_special_tokens=False)
    first, end = len(around.before), len(around.before) + len(document)
    starts = [start for _, start in tokens]
    # A token with the blank before the document is one of it.
    own = [
        index
        for index, (start, following) in enumerate(
            zip(starts, [*starts[1:], len(text)], strict=True)
        )
        if start < end and (start >= first or following > first)
    ]
    room = max(truncation.length - (len(tokens) - len(own)), 1)
    dropped = set(own).difference(truncation.cut(own, room))
    return tuple(id_ for index, (id_, _) in enumerate(tokens) if index not in dropped)
