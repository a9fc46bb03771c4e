"""What the model's own files say about answers: sampling defaults, and the form of tool calls."""

from __future__ import annotations

import structlog

from millrace_router.config import RouterConfig
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.call_format import CallFormat
from millrace_router.tool_calls.formats import detected, format_of
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults

log = structlog.get_logger(__name__)


def sampling_defaults(config: RouterConfig, model: ModelFiles) -> SamplingDefaults:
    """Return the model's own defaults, if requests get them; raises ModelFilesError."""
    if config.generation_config == "off" or config.strict_tgi:
        return NO_DEFAULTS
    try:
        defaults = SamplingDefaults.of(model.generation_config)
    except ValueError as error:
        raise ModelFilesError(f"{error}; --generation-config off ignores it") from None
    if given := defaults.given():
        log.info("Sampling defaults are those of the model's generation_config.json", **given)
    return defaults


def tool_format(config: RouterConfig, template: ChatTemplate, tokenizer: Tokenizer) -> CallFormat:
    """Return how the model writes calls, by the flag or its template; warns if nobody knows."""
    asked = config.tool_call_parser
    if asked == "auto" and template.lists_tools and detected(template.tool_source) is None:
        log.warning(
            "The chat template has tools, but no known form of calls: answers are searched for JSON."
            " --tool-call-parser names the form",
        )
    return format_of(template.tool_source, asked, special_ids=tokenizer.special_ids)
