"""Chooses the reasoning format of a model by its chat template or by --reasoning-parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace_router.config import RouterConfig
from millrace_router.reasoning.channels import CONSTRAIN, MARKERS, ChannelReasoning
from millrace_router.reasoning.reasoning_format import ReasoningFormat
from millrace_router.reasoning.tags import TaggedReasoning, Tags
from millrace_router.text.tokenizer import Tokenizer

THINK = Tags(openers=("<think>",), closers=("</think>",))
CHANNELS = "gpt_oss"
TAGS = {
    "cohere": Tags(
        openers=("<|START_THINKING|>",),
        closers=("<|END_THINKING|>",),
        answer_opener="<|START_RESPONSE|>",
        answer_closer="<|END_RESPONSE|>",
    ),
    "mistral": Tags(openers=("[THINK]",), closers=("[/THINK]",)),
    "seed_oss": Tags(openers=("<seed:think>",), closers=("</seed:think>",)),
    "minimax_m3": Tags(openers=("<mm:think>",), closers=("</mm:think>",)),
    "gemma4": Tags(openers=("<|channel>thought\n",), closers=("<channel|>",)),
    "granite_phrases": Tags(
        openers=("Here is my thought process:", "Here's my thought process:"),
        closers=("Here is my response:", "Here's my response:"),
        trimmed=" \n",
    ),
    "granite": Tags(
        openers=("<think>",),
        closers=("</think>",),
        answer_opener="<response>",
        answer_closer="</response>",
    ),
    "think": THINK,
}
"""Tags by the name of their format."""
_SIGNS = {
    CHANNELS: ("<|channel|>analysis",),
    "cohere": ("<|START_THINKING|>",),
    "mistral": ("[THINK]",),
    "seed_oss": ("<seed:think>",),
    "minimax_m3": ("<mm:think>",),
    "gemma4": ("<|channel>thought",),
    "granite_phrases": ("Here is my thought process:",),
    "granite": ("<response></response>",),
    "think": ("<think>", "</think>"),
}
"""Texts in chat templates by format, of which one suffices; the first match counts."""
_ALIASES = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "hunyuan_a13b": "think",
    "kimi_k2": "think",
    "magistral": "mistral",
    "minimax_m2": "think",
    "nemotron": "think",
    "openai_gptoss": CHANNELS,
    "qwen3": "think",
    "smollm3": "think",
    "step3": "think",
}
"""Names that other servers have for a format, or for a family with it."""
NAMES = (CHANNELS, *TAGS, *_ALIASES)


def reasoning_of_model(
    config: RouterConfig, template: str | None, tokenizer: Tokenizer
) -> ReasoningFormat | None:
    """Choose for a server with `config`; under --strict-tgi thoughts stay in the text, unless a format is named."""
    name = config.reasoning_parser
    if config.strict_tgi and name == "auto":
        return None
    return reasoning_of(template, name, tokenizer=tokenizer)


def reasoning_of(
    template: str | None, parser: str = "auto", *, tokenizer: Tokenizer | None = None
) -> ReasoningFormat | None:
    """Choose by `template`, the source of the chat template, unless `parser` names a format; None for no thoughts.

    Without `tokenizer` no tag is a token.
    """
    name = _detected(template or "") if parser == "auto" else _ALIASES.get(parser, parser)
    if name == CHANNELS:
        return ChannelReasoning(name=name, **_tokens(MARKERS, tokenizer, others=(CONSTRAIN,)))
    tags = TAGS.get(name)
    if tags is None:
        return None
    return TaggedReasoning(name=name, tags=tags, **_tokens(tags.texts, tokenizer))


def _detected(source: str) -> str:
    return next(
        (name for name, signs in _SIGNS.items() if any(sign in source for sign in signs)), "none"
    )


def _tokens(
    texts: Sequence[str], tokenizer: Tokenizer | None, *, others: Sequence[str] = ()
) -> dict[str, Any]:
    """Find the tokens in `texts`, the tags of a format, and `others`, which only grammars need."""
    if tokenizer is None:
        return {}
    special = {
        token: id_
        for token, id_ in tokenizer.special_ids.items()
        if any(token in text for text in texts)
    }
    ids = {text: id_ for text in (*texts, *others) if (id_ := tokenizer.id_of(text)) is not None}
    return {"ids": {**special, **ids}, "special": frozenset(special)}
