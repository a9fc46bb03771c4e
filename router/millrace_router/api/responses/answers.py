"""Builds OpenAI's responses from their requests and their tokens."""

from __future__ import annotations

import time
from typing import Any

from millrace_router.api.responses.items import new_id
from millrace_router.api.responses.protocol import (
    ResponseErrorJson,
    ResponseItemJson,
    ResponseJson,
    ResponseReasoningJson,
    ResponseUsageJson,
)
from millrace_router.api.responses.request import ResponsesReasoning, ResponsesRequest
from millrace_router.api.responses.tools import LeftOutTool
from millrace_router.engine.generation import Usage
from millrace_router.errors import Overloaded, RouterError
from millrace_router.request.float32 import shortest
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults


class ResponseHead:
    """The parts of a response that are known before its first token: its id, and the request with its defaults."""

    def __init__(
        self,
        body: ResponsesRequest,
        *,
        model: str,
        defaults: SamplingDefaults = NO_DEFAULTS,
        is_stored: bool = False,
    ) -> None:
        """`model` is the name to answer with, and `defaults` are the model's."""
        self.called_as = {tool.name: tool.called_as for tool in body.offered}
        """How tools are named in the answer, by the names that the model knows."""
        self._json: ResponseJson = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _reasoning(body),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": is_stored,
            "temperature": _number(body.temperature, defaults.temperature),
            "text": {"format": _format(body)},
            "tool_choice": _choice(body),
            "tools": [
                tool.repeated() for tool in body.tools or () if not isinstance(tool, LeftOutTool)
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _number(body.top_p, defaults.top_p),
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def begun(self) -> ResponseJson:
        """Render the response while it is generated."""
        return self._json

    def ended(
        self, output: list[ResponseItemJson], usage: Usage, finish_reason: str
    ) -> ResponseJson:
        """Render the whole response, which is incomplete if it was cut off."""
        incomplete = is_cut(finish_reason)
        return {
            **self._json,
            "status": "incomplete" if incomplete else "completed",
            "completed_at": None if incomplete else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": output,
            "usage": usage_json(usage),
        }

    def failed(self, output: list[ResponseItemJson], error: RouterError) -> ResponseJson:
        """Render a response that failed, with its items so far."""
        return {**self._json, "status": "failed", "output": output, "error": _error(error)}


def is_cut(finish_reason: str) -> bool:
    """Whether a limit of tokens ended the answer."""
    return finish_reason == "length"


def usage_json(usage: Usage) -> ResponseUsageJson:
    """Render token counts; writes to the prefix cache are not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: RouterError) -> ResponseErrorJson:
    is_load = isinstance(error, Overloaded)
    return {
        "code": "rate_limit_exceeded" if is_load else "server_error",
        "message": str(error),
    }


def _number(given: float | None, default: float | None) -> float:
    """Render a number as the client wrote it, or the default; 1 restricts nothing."""
    given = default if given is None else given
    return 1.0 if given is None else shortest(given) or 0.0


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True)


def _reasoning(body: ResponsesRequest) -> ResponseReasoningJson:
    asked = body.reasoning or ResponsesReasoning()
    return {"effort": asked.effort, "summary": asked.summary}


def _choice(body: ResponsesRequest) -> str | dict[str, Any]:
    if body.tool_choice is None:
        return "auto"
    given = body.tool_choice
    return given if isinstance(given, str) else given.model_dump(exclude_none=True)
