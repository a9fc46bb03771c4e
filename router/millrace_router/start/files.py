"""Reads the model's files at the start: sampling defaults, the chat template, and the form of tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from millrace_router.config import RouterConfig
from millrace_router.journal.rotation import JournalFolder
from millrace_router.pooling.model import PoolingModel, pooling_of
from millrace_router.start.journal import journal_folder
from millrace_router.start.shards import StartupError
from millrace_router.telemetry.request_log import RequestFile
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError, find_snapshot
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.formats.registry import detected, format_of
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFiles:
    """The chat template, tokenizer, sampling defaults and kind of pooling of a model folder, and what is written."""

    template: ChatTemplate
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    pooling: PoolingModel
    journal: JournalFolder | None
    requests: RequestFile | None


def open_files(config: RouterConfig) -> StartFiles:
    """Read the files of the model, then open those to write.

    Raises ModelFilesError, TokenizerError, JournalError or StartupError.
    """
    folder = config.model_folder
    model = ModelFiles.load(folder, tokenizer_config_path=config.tokenizer_config_path)
    tokenizer = Tokenizer.load(folder, validation_workers=config.validation_workers)
    control = None if config.allow_special_tokens_in_content else tokenizer.control_tokens
    template = ChatTemplate.of(model, control_tokens=control)
    ends = map(tokenizer.id_of, model.end_tokens)
    tokenizer.end_ids = frozenset(id_ for id_ in ends if id_ is not None)
    return StartFiles(
        template=template,
        tokenizer=tokenizer,
        defaults=sampling_defaults(config, model),
        pooling=pooling_of(config.task, folder, model, tokenizer, template),
        journal=journal_folder(config),
        requests=_request_file(config),
    )


def _request_file(config: RouterConfig) -> RequestFile | None:
    """Open the file of --log-requests; raises StartupError."""
    if config.log_requests is None:
        return None
    try:
        return RequestFile(config.log_requests, max_bytes=config.log_requests_max_bytes)
    except OSError as error:
        raise StartupError(f"cannot write --log-requests: {error}") from error


def sampling_defaults(config: RouterConfig, model: ModelFiles) -> SamplingDefaults:
    """Return the model's own defaults, if requests get them; raises ModelFilesError."""
    if config.generation_config == "off" or config.strict_tgi:
        return NO_DEFAULTS
    try:
        defaults = SamplingDefaults.of(model.generation_config)
    except ValueError as error:
        raise ModelFilesError(f"{error}; --generation-config off ignores it") from None
    if given := defaults.given():
        log.info("Sampling defaults are from the model's generation_config.json", **given)
    return defaults


def tool_format(config: RouterConfig, template: ChatTemplate, tokenizer: Tokenizer) -> CallFormat:
    """Return how the model writes calls, by the flag or its template; warns if neither shows it."""
    parser = config.tool_call_parser
    if parser == "auto" and template.lists_tools and detected(template.tool_source) is None:
        log.warning(
            "The chat template has tools, but its form of calls is not known: answers are searched for JSON."
            " --tool-call-parser names the form",
        )
    return format_of(template.tool_source, parser, special_ids=tokenizer.special_ids)


def warn_without_tools(template: ChatTemplate) -> None:
    """Log that calls of tools are unlikely, if the template has no place for tools."""
    if template.source is not None and not template.lists_tools:
        log.warning(
            "The chat template has no place for tools: requests with tools get a list of them added to the"
            " conversation, and the model may not call them"
        )


def with_model_folder(config: RouterConfig) -> RouterConfig:
    """Look up in the hub's cache a --tokenizer-name that is not a folder. Raises ModelFilesError."""
    name = config.tokenizer_name
    if name is None or Path(name) != config.model_folder or config.model_folder.is_dir():
        return config
    folder = find_snapshot(name, revision=config.revision, cache=config.hub_cache)
    return config.model_copy(update={"model_folder": folder, "revision": folder.name})
