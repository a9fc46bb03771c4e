"""Parts of all of OpenAI's answers, as plain dictionaries for the JSON writer, in TGI's key order."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping

import orjson

from millrace_router.api.openai.protocol import (
    HeadJson,
    OpenAIErrorResponseJson,
    StreamFailureJson,
    UsageJson,
)
from millrace_router.engine.generation import Usage
from millrace_router.errors import RouterError, ValidationError

FIELD = re.compile(r"`([A-Za-z_][\w.\[\]]*)`")
"""The name of a field in a message."""


def usage_json(usage: Usage) -> UsageJson:
    """Render token counts."""
    told: UsageJson = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return told


class AnswerHead:
    """The first keys of every answer and chunk of one request."""

    def __init__(
        self, kind: str, id_prefix: str, *, model: str, fingerprint: str, anonymous: bool = False
    ) -> None:
        """With `anonymous` the id is "", as TGI's is."""
        self._json: HeadJson = {
            "object": kind,
            "id": "" if anonymous else f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def json(self, kind: str | None = None) -> HeadJson:
        """Render; `kind` replaces the usual `object`."""
        return {**self._json, "object": kind or self._json["object"]}


class ChunkTemplate:
    """A chunk that is rendered once, with gaps for the text of each token."""

    def __init__(
        self,
        render: Callable[[str], Mapping[str, object]],
        *,
        frame: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """`frame` adds the framing around the rendered chunk."""
        mark = uuid.uuid4().hex
        framed = frame(orjson.dumps(render(mark)))
        self._parts = framed.split(orjson.dumps(mark))

    def fill(self, text: str) -> bytes:
        """Render the chunk with `text`."""
        return orjson.dumps(text).join(self._parts)


def error_answer(error: RouterError) -> OpenAIErrorResponseJson:
    """Render a failure before the first byte."""
    return {
        "error": {**error_detail(error), "param": _field_of(error), "code": error.openai_code},
        "error_type": error.error_type,
    }


def error_detail(error: RouterError) -> StreamFailureJson:
    """Render a failure in mid-stream."""
    return {
        "message": error.client_text,
        "type": error.error_type,
        "http_status_code": error.status,
    }


def _field_of(error: RouterError) -> str | None:
    """The field of the request that is wrong: the one that a message about the request names first."""
    if not isinstance(error, ValidationError):
        return None
    named = FIELD.search(error.client_text)
    return None if named is None else named[1]
