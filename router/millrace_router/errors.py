"""The errors of a request, as one tree; each class has its HTTP status and its `error_type`.

`api/platforms/common.py` has the errors of the platform routes.

RouterError
├── InternalError             500  internal
├── ValidationError           422  validation
│   ├── SizeError             422  validation         (well-formed, but too long)
│   ├── AdapterInvalid        422  validation         (its files cannot be used with this model)
│   ├── ImageInvalid          422  validation         (a picture cannot be used; the message names its part)
│   └── BodyError             400  validation         (the body is not JSON)
│       ├── BodyShapeError    422  validation         (JSON of another shape)
│       ├── MediaTypeError    415  validation
│       ├── EncodingError     415  validation
│       ├── BodySizeError     413  validation
│       ├── BodyTimeout       408  validation         (the body did not arrive in time)
│       ├── HeadError         400  validation         (the request line or a header is not HTTP)
│       └── HeadSizeError     431  validation         (they are too long)
├── UnknownPath               404  not_found
│   └── ForeignPath           404  not_found          (another server's, with a tip)
├── UnknownModel              404  not_found          (no model and no adapter has this name)
├── NotStored                 404  not_found          (`/v1/responses/{id}`)
├── AdapterNotFound           404  adapter_not_found  (or no right to know that it exists)
│   └── AdapterRemoved        404  adapter_not_found  (the operator has unloaded it)
├── AdapterRefused            400  InvalidUserInput   (`/v1/load_lora_adapter`, and `/v1/unload_lora_adapter`)
├── AdapterNotLoaded          404  NotFoundError      (the same routes)
├── AdapterForbidden          403  adapter_forbidden  (the token does not grant access)
├── AdapterTooLarge           413  validation         (larger than a download, or all memory, may be)
├── AdapterUnavailable        503  unavailable        (the hub or the disk failed)
├── WrongMethod               405  method_not_allowed
├── WrongTask                 400  validation         (not a task of `--task`)
├── BatchSizeExceeded         422  batch size exceeded
├── SuffixNotSupported        422  suffix not supported
├── TemplateError             422  template_error
├── ToolError                 422  tool_error
├── GenerationError           424  generation
│   ├── NonFiniteOutput       424  generation         (caused only by this request)
│   ├── ImageFailed           424  generation         (the shards cannot encode its picture)
│   ├── Quarantined           424  generation         (its steps fail, even alone in a batch)
│   └── DoesNotFit            424  generation         (the shards lack memory to run it even alone)
├── Overloaded                429  overloaded
│   ├── QueueFull             429  overloaded         (`--max-queue-size`)
│   ├── QueueTooLong          429  overloaded         (the predicted wait is too long)
│   └── QueueExpired          429  overloaded         (the wait was too long)
├── NotResumable              410  not_resumable      (the stream of `Last-Event-ID` is gone)
├── IncompleteGeneration      500  incomplete_generation
│   └── IncompleteGenerationStream     incomplete_generation_stream (after the status was sent)
├── Unhealthy                 503  healthcheck        (with the reason)
├── ShardsGone                503  unavailable        (the shards do not come back)
├── ImagesUnavailable         503  unavailable        (the process that decodes images does not start)
└── ShuttingDown              503  unavailable
"""

from __future__ import annotations

import math
from typing import ClassVar

LONGEST_QUOTATION = 200


def quoted(name: str) -> str:
    """Quote a client's string for a message: on one line, without control characters, and short."""
    return repr(name if len(name) <= LONGEST_QUOTATION else f"{name[:LONGEST_QUOTATION]}…")


def is_failure(error: BaseException) -> bool:
    """Whether it is an `Exception`, or a panic of a library in Rust, which is none; a cancel is neither."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Panic(Exception):
    """A panic of a library in Rust, whose own exception is no `Exception`."""


def as_failure(error: BaseException) -> Exception:
    """Return a failure as an `Exception`; raises what `is_failure` excludes."""
    if not is_failure(error):
        raise error
    if isinstance(error, Exception):
        return error
    panic = Panic(str(error))
    panic.__cause__ = error
    return panic


class RouterError(Exception):
    """A failure that the client gets as an answer; `str(error)` is the whole message."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    failure_label: ClassVar[str | None] = None
    """Value of `err` in `tgi_request_failure`; None is not counted there."""
    openai_code: ClassVar[str | None] = None
    """`error.code` on OpenAI's routes."""
    is_counted: bool = False
    """Whether the failed request needs no further count in the metrics."""

    @property
    def client_text(self) -> str:
        """The message on routes that are not TGI's."""
        return str(self)

    retry_after_seconds: int | None = None
    """The header `Retry-After`; None: no header."""


class InternalError(RouterError):
    """A defect of the server, which the log describes."""

    failure_label: ClassVar[str] = "internal"

    def __init__(self) -> None:
        super().__init__("Internal server error")


class ValidationError(RouterError):
    """The request has an invalid or unsupported value."""

    status = 422
    error_type = "validation"
    failure_label = "validation"

    def __init__(self, message: str) -> None:
        super().__init__(f"Input validation error: {message}")


class SizeError(ValidationError):
    """The prompt, or prompt and answer together, are longer than this server allows."""

    openai_code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        num_prompt_tokens: int,
        max_new_tokens: int,
        max_total_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`max_total_tokens` is the limit of both together, if it is exceeded; `max_prompt_tokens` is the prompt's."""
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.max_total_tokens = max_total_tokens
        self.max_prompt_tokens = max_prompt_tokens


class AdapterInvalid(ValidationError):
    """The files of an adapter cannot be used; the message names the field or the tensor."""

    def __init__(self, name: str, reason: str, *, source_digest: str | None = None) -> None:
        super().__init__(f"the adapter {quoted(name)} cannot be used: {reason}")
        self.reason = reason
        self.source_digest = source_digest


class ImageInvalid(ValidationError):
    """A picture of the request cannot be used."""

    openai_code = "invalid_image"

    def __init__(self, part: str, reason: str) -> None:
        """`part` is where it is in the body, such as `messages.3.content.1`; `reason` completes "the image"."""
        super().__init__(f"`{part}`: the image {reason}")


class BodyError(ValidationError):
    """The body cannot be read as a request; the message is not prefixed."""

    status = 400

    def __init__(self, message: str) -> None:
        RouterError.__init__(self, message)


class BodyShapeError(BodyError):
    """The body is JSON, but a field has the wrong type or is missing."""

    status = 422

    def __init__(self, sentence: str, *, field: str = "") -> None:
        """`field` is the path of the field; empty for the body as a whole."""
        where = f"{field}: " if field else ""
        super().__init__(
            f"Failed to deserialize the JSON body into the target type: {where}{sentence}"
        )
        self._client_text = f"`{field}` {sentence}" if field else f"The body {sentence}"

    @property
    def client_text(self) -> str:
        """The message without TGI's beginning."""
        return self._client_text


class MediaTypeError(BodyError):
    """The content type of the body is not JSON."""

    status = 415

    def __init__(self) -> None:
        super().__init__("Expected request with `Content-Type: application/json`")


class EncodingError(BodyError):
    """The compression of the body is not supported."""

    status = 415

    def __init__(self, encoding: str) -> None:
        super().__init__(f"`Content-Encoding: {encoding}` is not supported")


class BodySizeError(BodyError):
    """The body is longer than `--payload-limit`."""

    status = 413

    def __init__(self) -> None:
        super().__init__("Failed to buffer the request body: length limit exceeded")


class BodyTimeout(BodyError):
    """The body did not end in time."""

    status = 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"Failed to buffer the request body: it took more than {seconds:.0f} s")


class HeadError(BodyError):
    """The request line or a header cannot be read."""

    def __init__(self) -> None:
        super().__init__("Failed to read the request's headers: they are not HTTP")


class HeadSizeError(BodyError):
    """The request line or the headers are too long."""

    status = 431

    def __init__(self, field_limit: int, limit: int) -> None:
        super().__init__(
            f"Failed to read the request's headers: each may have {field_limit} bytes, and all {limit},"
            " and there may be 128"
        )


class UnknownPath(RouterError):
    """The route does not exist."""

    status = 404
    error_type = "not_found"

    def __init__(self, path: str) -> None:
        super().__init__(f"Unknown path: {path}")


class ForeignPath(UnknownPath):
    """The route is another server's; the message names the route to use instead."""

    def __init__(self, path: str, tip: str) -> None:
        super().__init__(f"{path}. This is Millrace, a text-generation server: {tip}")


class UnknownModel(RouterError):
    """The server has no model of this name."""

    status = 404
    error_type = "not_found"
    failure_label = "validation"
    openai_code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"The model '{name}' does not exist")


class NotStored(RouterError):
    """There is no stored response of this id, or the client has no right to know that it exists."""

    status = 404
    error_type = "not_found"

    def __init__(self, id_: str, *, are_stored: bool) -> None:
        reason = "" if are_stored else ": responses are not stored without `--responses-store`"
        super().__init__(f"Response with id {quoted(id_)} not found{reason}")


class StoreNeeded(ValidationError):
    """The request refers to a response that is not stored, or the server does not store responses."""

    status = 400
    openai_code = "previous_response_not_found"


class ThreadsUnsupported(ValidationError):
    """The request refers to a conversation on Anthropic's servers; the error's details make clients send all of it."""

    status = 400
    details: ClassVar[dict[str, object]] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }

    def __init__(self) -> None:
        super().__init__("`thread` is not supported: send everything as `messages`")


class AdapterNotFound(RouterError):
    """There is no adapter of this name, or the client has no right to know that it exists."""

    status = 404
    error_type = "adapter_not_found"
    failure_label = "validation"
    openai_code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"The adapter {quoted(name)} does not exist")


class AdapterRemoved(AdapterNotFound):
    """The operator has unloaded the adapter of this name."""

    def __init__(self, name: str) -> None:
        RouterError.__init__(self, f"The adapter {quoted(name)} has been unloaded")


class AdapterRefused(RouterError):
    """The operator's call to load or unload an adapter is wrong; status, type and texts are vLLM's."""

    status = 400
    error_type = "InvalidUserInput"


class AdapterNotLoaded(RouterError):
    """The operator's call names an adapter that is not there; status, type and texts are vLLM's."""

    status = 404
    error_type = "NotFoundError"


class AdapterForbidden(RouterError):
    """The client's token has no access to the adapter."""

    status = 403
    error_type = "adapter_forbidden"
    failure_label = "validation"

    def __init__(self, name: str) -> None:
        super().__init__(f"The token has no access to the adapter {quoted(name)}")


class AdapterTooLarge(RouterError):
    """The adapter is larger than a download or the memory for adapters may be."""

    status = 413
    error_type = "validation"
    failure_label = "validation"

    def __init__(self, name: str, *, num_bytes: int, limit: int) -> None:
        super().__init__(
            f"The adapter {quoted(name)} has {num_bytes} bytes, and at most {limit} are allowed"
        )
        self.num_bytes = num_bytes
        self.limit = limit


class AdapterUnavailable(RouterError):
    """The adapter cannot be fetched now, because the hub, the disk or the fetching process failed."""

    status = 503
    error_type = "unavailable"
    failure_label = "generation"

    def __init__(self, name: str, reason: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(f"The adapter {quoted(name)} cannot be fetched now: {reason}")
        self.reason = reason
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))


class WrongMethod(RouterError):
    """The route does not support the method."""

    status = 405
    error_type = "method_not_allowed"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Method not allowed: {method} {path}")


class BatchSizeExceeded(RouterError):
    """The request has more prompts than `--max-client-batch-size`."""

    status = 422
    error_type = "batch size exceeded"
    failure_label = "validation"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"Number of prompts exceeds the maximum allowed batch size of {limit}",
        )


class WrongTask(RouterError):
    """The server does not do this task with its model; the message gives the flag that starts it for the task."""

    status = 400
    error_type = "validation"
    failure_label = "validation"


class SuffixNotSupported(RouterError):
    """The completion has a `suffix`, which is not supported."""

    status = 422
    error_type = "suffix not supported"
    failure_label = "validation"

    def __init__(self) -> None:
        super().__init__(
            "Suffix is not supported and can be achieved by preprocessing the prompt.",
        )


class TemplateError(RouterError):
    """There is no chat template, or it refused the messages."""

    status = 422
    error_type = "template_error"
    failure_label = "template"

    def __init__(self, message: str) -> None:
        super().__init__(f"Template error: {message}")


class ToolError(RouterError):
    """The request names a tool that does not exist, or the model's call cannot be parsed."""

    status = 422
    error_type = "tool_error"
    failure_label = "validation"

    def __init__(self, message: str, tip: str = "") -> None:
        """Only clients of other APIs than TGI's get the tip, behind the message."""
        super().__init__(f"Tool error: {message}")
        self._tip = tip

    @property
    def client_text(self) -> str:
        return f"{self}{self._tip}"


class GenerationError(RouterError):
    """The generation failed on the shards."""

    status = 424
    error_type = "generation"
    failure_label = "generation"

    def __init__(self, message: str) -> None:
        super().__init__(f"Request failed during generation: Server error: {message}")


NON_FINITE = "the model's output is not finite"


class NonFiniteOutput(GenerationError):
    """The model has no finite scores for this request; other requests continue."""

    def __init__(self) -> None:
        super().__init__(NON_FINITE)


class ImageFailed(GenerationError):
    """The shards refuse the pixels of a picture."""

    def __init__(self) -> None:
        super().__init__("an image of the request cannot be encoded")


class GrammarFailed(GenerationError):
    """The grammar of this request allows no further token; other requests continue."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the grammar cannot be followed any further: {reason}")


class Quarantined(GenerationError):
    """Steps with this request fail, even alone in a batch; other requests continue."""

    def __init__(self) -> None:
        super().__init__("the request breaks the model server and has been quarantined")


class DoesNotFit(GenerationError):
    """The shards run out of memory even with only this request; other requests continue."""

    def __init__(self) -> None:
        super().__init__("out of memory, even with this request alone")


class Overloaded(RouterError):
    """No permit of `--max-concurrent-requests` is free."""

    status = 429
    error_type = "overloaded"
    failure_label = "overloaded"

    def __init__(
        self, message: str = "Model is overloaded", *, retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))


class QueueFull(Overloaded):
    """The queue has `--max-queue-size` requests."""

    def __init__(self, max_size: int, *, retry_after_seconds: float) -> None:
        super().__init__(
            f"Model is overloaded: {max_size} requests wait already",
            retry_after_seconds=retry_after_seconds,
        )


class QueueTooLong(Overloaded):
    """The predicted wait of the request is longer than allowed."""

    def __init__(self, *, predicted_seconds: float, allowed_seconds: float) -> None:
        super().__init__(
            f"Model is overloaded: the request would wait for {round(predicted_seconds, 3):g} s, "
            f"and may wait for {round(allowed_seconds, 3):g} s",
            retry_after_seconds=predicted_seconds - allowed_seconds,
        )


class QueueExpired(Overloaded):
    """The request waited longer than allowed."""

    def __init__(self, *, retry_after_seconds: float) -> None:
        super().__init__(
            "Model is overloaded: the request has waited for as long as it may",
            retry_after_seconds=retry_after_seconds,
        )


class NotResumable(RouterError):
    """The stream that a client wants to resume is not kept.

    The status is 410, because clients do not retry it, and OpenAI's clients retry 409. A silent new start would repeat
    tokens; for a new start, a client sends the request without `Last-Event-ID`.
    """

    status = 410
    error_type = "not_resumable"
    failure_label = "validation"

    def __init__(self) -> None:
        super().__init__(
            "The stream cannot be resumed: it has ended, or its beginning is forgotten"
        )


class IncompleteGeneration(RouterError):
    """A stream ended without its terminal event: a defect of the server."""

    status = 500
    error_type = "incomplete_generation"
    failure_label = "incomplete"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class IncompleteGenerationStream(IncompleteGeneration):
    """A stream ended without its terminal event after events were sent."""

    error_type = "incomplete_generation_stream"

    def __init__(self) -> None:
        RouterError.__init__(self, "Incomplete generation stream")


class Unhealthy(RouterError):
    """The health check fails for `reason`."""

    status = 503
    error_type = "healthcheck"

    def __init__(self, reason: str | None = None) -> None:
        super().__init__("unhealthy")
        self.reason = reason


class ShardsGone(RouterError):
    """The shards are down, and do not come back in time."""

    status = 503
    error_type = "unavailable"
    failure_label = "generation"

    def __init__(self, reason: str) -> None:
        super().__init__(f"The model server is down: {reason}")


class ImagesUnavailable(RouterError):
    """The process that decodes images does not start."""

    status = 503
    error_type = "unavailable"
    failure_label = "generation"
    retry_after_seconds = 1

    def __init__(self) -> None:
        super().__init__("Images cannot be read now: the process that decodes them does not start")


class ShuttingDown(RouterError):
    """The server drains: running requests finish, and new requests are refused."""

    status = 503
    error_type = "unavailable"
    is_counted = True

    def __init__(self) -> None:
        super().__init__("Server is shutting down")
