"""Vertex AI's bodies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from millrace_router.api.body.fields import NullIs, Place, RequestModel
from millrace_router.api.openai.chat_request import ChatCompletionRequest
from millrace_router.api.tgi.request import GenerateParameters, sampling_parameters


class GenerateVertexInstance(RequestModel):
    """A text to continue; absent parameters sample, as on all routes."""

    place = Place.GENERATE

    inputs: str
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )


def _key_of(instance: Any) -> str | None:  # noqa: ANN401
    """Return the key that determines the kind of an instance; the text has precedence, as in TGI."""
    if isinstance(instance, dict):
        return next((key for key in ("inputs", "messages") if key in instance), None)
    return None


VertexInstance = Annotated[
    Annotated[GenerateVertexInstance, Tag("inputs")]
    | Annotated[ChatCompletionRequest, Tag("messages")],
    Discriminator(
        _key_of,
        custom_error_type="no_instance",
        custom_error_message="one of `inputs` and `messages` is needed",
    ),
]


class VertexRequest(RequestModel):
    """Body of `/vertex`."""

    instances: Annotated[list[VertexInstance], Field(fail_fast=True)]


class VertexResponse(TypedDict):
    """Answer of `/vertex`: a text for each instance, in their order."""

    predictions: list[str]
