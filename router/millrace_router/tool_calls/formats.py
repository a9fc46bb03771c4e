"""Chooses the call format of a model by its chat template or by --tool-call-parser."""

from __future__ import annotations

from collections.abc import Mapping

from millrace_router.tool_calls.call_format import NO_IDS, CallFormat
from millrace_router.tool_calls.hermes import Hermes
from millrace_router.tool_calls.llama import JsonCalls, Llama
from millrace_router.tool_calls.mistral import Mistral

_SIGNS = {
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>",),
    "llama": ("<|python_tag|>", "ipython"),
}
"""Texts in chat templates by format; the first match counts."""


def format_of(
    template: str | None, asked: str = "auto", *, special_ids: Mapping[str, int] = NO_IDS
) -> CallFormat:
    """Choose by `template`, the source of the chat template for tools, unless `asked` names a format.

    `special_ids` are the ids of the model's special tokens, by text.
    """
    source = template or ""
    name = _detected(source) if asked == "auto" else asked
    if name == "hermes":
        return Hermes(special_ids)
    if name == "llama":
        return Llama(special_ids)
    if name == "mistral":
        known = source if "[TOOL_CALLS]" in source else special_ids
        return Mistral(special_ids, has_names="[ARGS]" in known)
    return JsonCalls(special_ids)


def _detected(source: str) -> str:
    return next(
        (name for name, signs in _SIGNS.items() if any(sign in source for sign in signs)), "json"
    )
