"""Types of fields in the bodies of requests, and the base of their models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeAliasType

from millrace_router.request.float32 import rounded

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

UInt32 = Annotated[int, Field(ge=0, le=UINT32_MAX)]
UInt64 = Annotated[int, Field(ge=0, le=UINT64_MAX)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation ends at the first mistake: a million mistakes would take seconds to collect."""
MAX_MESSAGES = 4096
"""Most turns of a conversation: each takes the time of kilobytes of text."""
Messages = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]
MAX_TOOLS = 1024
"""Most tools of a request; OpenAI takes 128."""
Tools = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_TOOLS)]
Float32 = Annotated[float, Field(allow_inf_nan=False), AfterValidator(rounded)]


class NullIs:
    """Annotates a field in which null stands for what `make` returns; the JSON schema allows null."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def __get_pydantic_core_schema__(
        self,
        source: Any,  # noqa: ANN401
        handler: GetCoreSchemaHandler,
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._filled, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}

    def _filled(self, value: object) -> object:
        return self._make() if value is None else value


Switch = Annotated[bool, NullIs(bool)]
"""A boolean; null is false."""


class FieldScope(StrEnum):
    """The objects in bodies whose unused fields `refused_fields` lists, by their routes."""

    GENERATE = "/generate"
    PARAMETERS = "/generate: parameters"
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSE = "/v1/responses"
    MESSAGE = "/v1/messages"
    VERTEX = "/vertex"
    EMBEDDINGS = "/v1/embeddings"
    EMBED = "/embed"
    EMBED_PARAMETERS = "/embed: parameters"
    RERANK = "/rerank"
    SCORE = "/v1/score"
    STRUCTURED_OUTPUTS = "structured_outputs"


class RequestModel(BaseModel):
    """A strict, frozen model; `reading` looks for fields that it does not have."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        protected_namespaces=(),
        # A start takes a sixth less time without the validators, which are made after it.
        defer_build=True,
    )
    scope: ClassVar[FieldScope | None] = None
    is_open: ClassVar[bool] = False
    """Whether all unknown fields are accepted: the whole object is left out of the prompt."""

    def left_out(self) -> Iterable[str]:
        """Yield names of the parts that are read but that the prompt does not have."""
        return ()


def request_models(base: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    """Yield all models that are derived from `base`."""
    for model in base.__subclasses__():
        yield model
        yield from request_models(model)


@cache
def names_of(model: type[RequestModel]) -> dict[str, str]:
    """Return the attributes of a model by the names that its fields have in JSON."""
    names: dict[str, str] = {}
    for attribute, info in model.model_fields.items():
        alias = info.validation_alias
        if isinstance(alias, AliasChoices):
            names |= {choice: attribute for choice in alias.choices if isinstance(choice, str)}
        else:
            names[alias if isinstance(alias, str) else info.alias or attribute] = attribute
    return names


class SamplingModel(RequestModel):
    """The sampling parameters that mean the same on TGI's and OpenAI's routes; null means absent."""

    temperature: Float32 | None = None
    """How random the answer is: lower values prefer likely tokens. Range: 0, which is greedy, to 2;
    above 0 on TGI's routes. Default: the model's own, otherwise 1; 1 on TGI's routes.
    """
    top_k: Int32 | None = None
    """Draws from this many of the likeliest tokens. Range: 1 or more; 0 and -1 are off on OpenAI's routes. Default: the
    model's own on OpenAI's routes, otherwise off.
    """
    top_p: Float32 | None = None
    """Draws from the likeliest tokens whose probabilities add up to this. Range: above 0 and below 1; 1 is off on
    OpenAI's routes. Default: the model's own on OpenAI's routes, otherwise off.
    """
    min_p: Float32 | None = None
    """Draws no token that is less likely than this share of the likeliest one. Range: 0 to 1; 0 is off. Default: the
    model's own on OpenAI's routes, otherwise 0.
    """
    repetition_penalty: Float32 | None = None
    """Divides the scores of tokens that are in the prompt or the answer. Range: above 0; 1 is off. Default: the model's
    own on OpenAI's routes, otherwise 1.
    """

    def shared_sampling(self) -> dict[str, Any]:
        """Return these parameters by name; `GenerationRequest` has the same names."""
        return {name: getattr(self, name) for name in SamplingModel.model_fields}


Ids = Annotated[list[UInt32], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, fail_fast=True)]


def _form_of(prompt: object) -> str:
    """Return the form of a prompt by its first item; the others must have the same form."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "id_lists"
    return "ids" if isinstance(first, int | float) else "texts"


Prompt = TypeAliasType(
    "Prompt",
    Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[IdLists, Tag("id_lists")],
        Discriminator(_form_of),
    ],
)
"""One text or several, or the token ids of one or several."""


def prompts_of(prompt: Any) -> list[str | tuple[int, ...]]:  # noqa: ANN401
    """Return the prompts of a checked `Prompt`, in order."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [one if isinstance(one, str) else tuple(one) for one in prompt]
