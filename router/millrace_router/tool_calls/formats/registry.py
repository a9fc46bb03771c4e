"""Chooses the call format of a model by its chat template or by --tool-call-parser."""

from __future__ import annotations

from collections.abc import Mapping

from millrace_router.tool_calls.formats.cohere import Cohere
from millrace_router.tool_calls.formats.deepseek import DeepSeekV3, DeepSeekV31
from millrace_router.tool_calls.formats.gemma import FunctionGemma, Gemma4
from millrace_router.tool_calls.formats.glm import Glm
from millrace_router.tool_calls.formats.gpt_oss import Harmony
from millrace_router.tool_calls.formats.granite import Granite
from millrace_router.tool_calls.formats.hermes import Hermes
from millrace_router.tool_calls.formats.json_calls import JsonCalls
from millrace_router.tool_calls.formats.kimi import KimiK2
from millrace_router.tool_calls.formats.lfm import Lfm2
from millrace_router.tool_calls.formats.llama import Llama, Pythonic
from millrace_router.tool_calls.formats.minimax import MiniMaxM1, MiniMaxM2
from millrace_router.tool_calls.formats.mistral import Mistral
from millrace_router.tool_calls.formats.nemotron import Nemotron
from millrace_router.tool_calls.formats.olmo import Olmo3
from millrace_router.tool_calls.formats.phi import Phi4Mini
from millrace_router.tool_calls.formats.qwen_coder import Qwen3Coder
from millrace_router.tool_calls.formats.seed_oss import SeedOss
from millrace_router.tool_calls.parsing.call_format import NO_IDS, CallFormat

FORMATS: dict[str, type[CallFormat]] = {
    made.name: made
    for made in (
        Harmony,
        DeepSeekV3,
        DeepSeekV31,
        KimiK2,
        Cohere,
        Mistral,
        Granite,
        Phi4Mini,
        Nemotron,
        MiniMaxM1,
        SeedOss,
        Qwen3Coder,
        Glm,
        MiniMaxM2,
        Pythonic,
        Olmo3,
        Lfm2,
        Gemma4,
        FunctionGemma,
        Hermes,
        Llama,
        JsonCalls,
    )
}
"""By the name of a format, which is the most common one among servers."""
ALIASES = {
    "cohere_command4": "cohere_command3",
    "command_r7b": "cohere_command3",
    "gpt_oss": "openai",
    "glm47": "glm45",
    "granite-20b-fc": "granite",
    "granite4": "hermes",
    "harmony": "openai",
    "llama3_json": "llama",
    "llama4_json": "llama",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
"""Names that other servers have for a format, or for a family with it."""
_GLM_COMPACT = "</arg_key><arg_value>"
NAMES = (*FORMATS, *ALIASES)
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>commentary",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools",)),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax", ("<tool_calls>", "<tool-name>")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("olmo3", ("<function_calls>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("pythonic", ("[func_name1(",)),
    ("hermes", ("<tool_call>",)),
    ("json", ('"tool_name": ', "Action:")),
    ("llama", ("<|python_tag|>",)),
    ("llama", ("ipython",)),
)
"""Formats and texts that are all in their chat templates; the first match counts."""
_UNKNOWN_SIGNS = ("]<]minimax[>[",)
"""Texts in the templates of formats that are not known, but have a sign of another: MiniMax M3."""


def format_of(
    template: str | None, parser: str = "auto", *, special_ids: Mapping[str, int] = NO_IDS
) -> CallFormat:
    """Choose by `template`, the source of the chat template for tools, unless `parser` names a format.

    `special_ids` are the ids of the model's special tokens, by text.
    """
    source = template or ""
    name = detected(source) or "json" if parser == "auto" else ALIASES.get(parser, parser)
    if name == Mistral.name:
        sources = source if "[TOOL_CALLS]" in source else special_ids
        return Mistral(special_ids, has_names="[ARGS]" in sources)
    if name == Glm.name:
        return Glm(special_ids, has_newlines=_GLM_COMPACT not in source)
    return FORMATS[name](special_ids)


def detected(template: str | None) -> str | None:
    """Return the name of the format that a template has a sign of, if there is one."""
    source = template or ""
    if any(sign in source for sign in _UNKNOWN_SIGNS):
        return None
    return next((name for name, signs in _SIGNS if all(sign in source for sign in signs)), None)
