"""Types of fields in the bodies of requests, and the base of their models."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
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

    def _filled(self, given: object) -> object:
        return self._make() if given is None else given


Switch = Annotated[bool, NullIs(bool)]
"""A boolean; null is false."""


class Place(StrEnum):
    """The objects whose unused fields have reasons in `refused_fields`, by their routes."""

    GENERATE = "/generate"
    PARAMETERS = "/generate: parameters"
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSE = "/v1/responses"
    MESSAGE = "/v1/messages"
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
        # The docstrings of fields are their descriptions in the OpenAPI document.
        use_attribute_docstrings=True,
    )
    place: ClassVar[Place | None] = None
    is_open: ClassVar[bool] = False
    """Whether its fields are of no interest: what it stands for is left out of the prompt as a whole."""


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
    return "ids" if isinstance(first, int) else "texts"


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
