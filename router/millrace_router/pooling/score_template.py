"""The prompt of a query and a document, after which a reranker says whether they fit."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate

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
"""Qwen3-Reranker's template, which its checkpoint has in its model card alone; Jinja drops the last line break."""
_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


@dataclass(frozen=True, slots=True)
class PairText:
    """The text around a document."""

    before: str
    after: str


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
        return cls(ChatTemplate(QWEN3_SOURCE, special_tokens=template.special_tokens))

    async def around_document(self, query: str, instruction: str | None) -> PairText:
        """Render the prompt of `query`; raises TemplateError."""
        mark = uuid.uuid4().hex
        messages: Sequence[dict[str, str]] = [
            {"role": "query", "content": query},
            {"role": "document", "content": mark},
        ]
        if instruction is not None:
            messages = [{"role": "system", "content": instruction}, *messages]
        text = await self._template.render_async(messages, add_generation_prompt=True)
        before, found, after = text.partition(mark)
        if not found:
            raise TemplateError("the template leaves out the document")
        return PairText(before, after)
