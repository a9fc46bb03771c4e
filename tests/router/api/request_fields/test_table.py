"""The table of request fields against the models of bodies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace_router.api.anthropic.request import MessagesRequest
from millrace_router.api.completions.request import CompletionRequest
from millrace_router.api.fields import Place, RequestModel
from millrace_router.api.guided import StructuredOutputs
from millrace_router.api.openai.chat_request import ChatCompletionRequest
from millrace_router.api.pooling.requests import (
    EmbeddingsRequest,
    EmbedParameters,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from millrace_router.api.request_fields.field import Support
from millrace_router.api.request_fields.reading import names_of
from millrace_router.api.request_fields.table import TABLE
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.tgi.request import CompatGenerateRequest, GenerateParameters

MODELS: dict[Place, type[RequestModel]] = {
    Place.GENERATE: CompatGenerateRequest,
    Place.PARAMETERS: GenerateParameters,
    Place.CHAT: ChatCompletionRequest,
    Place.COMPLETION: CompletionRequest,
    Place.RESPONSE: ResponsesRequest,
    Place.MESSAGE: MessagesRequest,
    Place.EMBEDDINGS: EmbeddingsRequest,
    Place.EMBED: EmbedRequest,
    Place.EMBED_PARAMETERS: EmbedParameters,
    Place.RERANK: RerankRequest,
    Place.SCORE: ScoreRequest,
    Place.STRUCTURED_OUTPUTS: StructuredOutputs,
}


def subclasses(model: type[RequestModel]) -> Iterator[type[RequestModel]]:
    for subclass in model.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


@pytest.mark.parametrize("model", [*subclasses(RequestModel)], ids=lambda model: model.__name__)
def test_every_field_of_a_body_is_in_the_table(model: type[RequestModel]) -> None:
    if model.place is not None:
        assert names_of(model).keys() <= TABLE[model.place].keys()


@pytest.mark.parametrize("place", Place)
def test_what_works_is_read(place: Place) -> None:
    works = {name for name, field in TABLE[place].items() if field.support is Support.WORKS}
    assert works <= names_of(MODELS[place]).keys()
