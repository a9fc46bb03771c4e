"""Which format a model's tool calls have: what its chat template shows, or what the flag says."""

from __future__ import annotations

from collections.abc import Mapping

from millrace_router.tool_calls.call_format import NO_IDS
from millrace_router.tool_calls.hermes import Hermes
from millrace_router.tool_calls.llama import JsonCalls, Llama
from millrace_router.tool_calls.mistral import Mistral
from millrace_router.tool_calls.tool_format import ToolFormat

_SIGNS = {
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>",),
    "llama": ("<|python_tag|>", "ipython"),
}
"""What templates contain; the first format that fits is taken."""


def format_of(
    template: str | None, asked: str = "auto", *, special_ids: Mapping[str, int] = NO_IDS
) -> ToolFormat:
    """Choose by the source of the template that tools are given to, unless `asked` names a format.

    `special_ids` are those of the model's special tokens, by text.
    """
    source = template or ""
    name = _told_by(source) if asked == "auto" else asked
    if name == "hermes":
        return Hermes(special_ids)
    if name == "llama":
        return Llama(special_ids)
    if name == "mistral":
        told = source if "[TOOL_CALLS]" in source else special_ids
        return Mistral(special_ids, has_names="[ARGS]" in told)
    return JsonCalls(special_ids)


def _told_by(source: str) -> str:
    return next(
        (name for name, signs in _SIGNS.items() if any(sign in source for sign in signs)), "json"
    )
