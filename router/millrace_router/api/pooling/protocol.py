"""Bodies and answers of the routes for embeddings and scores."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import AliasChoices, ConfigDict, Field
from typing_extensions import TypedDict

from millrace_router.api.body.fields import FieldScope, Int32, Items, Prompt, RequestModel, Switch
from millrace_router.api.body.sampling import Salt
from millrace_router.errors import ValidationError
from millrace_router.pooling.prompts import Side, Truncation

MOST_PROMPTS = 2048
"""OpenAI's limit of inputs."""
Dimensions = Annotated[int, Field(ge=1)] | None
Side1 = str | Annotated[Items[str], Field(min_length=1, max_length=MOST_PROMPTS)]


class PoolingFields(RequestModel):
    """What all routes have."""

    priority: Int32 | None = None
    cache_salt: Salt | None = None
    """Prefixes of prompts are shared only among requests with the same salt."""
    truncate: Switch = False
    """TEI's, like the field below: whether to cut prompts at the server's limit."""
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    truncate_prompt_tokens: int | None = None
    """vLLM's, like the field below: most tokens of a prompt; -1: the server's limit."""
    truncation_side: Literal["left", "right"] | None = None

    def truncation(self, limit: int) -> Truncation | None:
        """Return how to cut prompts, of which `limit` is the most tokens; raises ValidationError."""
        length, side = (
            self.truncate_prompt_tokens,
            self.truncation_direction or self.truncation_side,
        )
        if length is not None and length != -1 and not 0 < length <= limit:
            raise ValidationError(
                f"`truncate_prompt_tokens` must be -1, or > 0 and <= {limit}. Given: {length}"
            )
        if length is None and not self.truncate:
            return None
        side_name = (side or Side.RIGHT).capitalize()
        return Truncation(limit if length in {None, -1} else int(length or limit), Side(side_name))


class EmbeddingFields(PoolingFields):
    """Fields that both routes for embeddings have."""

    dimensions: Dimensions = None
    normalize: bool | None = None
    prompt_name: str | None = None
    """The prompt of the model that is put before texts."""


class EmbeddingsRequest(EmbeddingFields):
    """Body of `/v1/embeddings`."""

    scope = FieldScope.EMBEDDINGS

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    """vLLM's."""


class EmbedParameters(RequestModel):
    """LoRAX's `parameters`."""

    scope = FieldScope.EMBED_PARAMETERS

    adapter_id: str | None = None
    adapter_source: str | None = None
    api_token: str | None = Field(default=None, repr=False)


class EmbedRequest(EmbeddingFields):
    """Body of `/embed`."""

    scope = FieldScope.EMBED

    inputs: Prompt
    parameters: EmbedParameters | None = None
    """LoRAX's: the answer has its form, and one embedding."""


class Document(RequestModel):
    """A document as an object."""

    text: str


Documents = Annotated[Items[str | Document], Field(min_length=1, max_length=MOST_PROMPTS)]


class RerankRequest(PoolingFields):
    """Body of `/rerank` and its aliases: TEI's with `texts`, or with `documents` as Cohere, Jina and vLLM have it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "query": "What is prefill?",
                    "documents": ["Prefill reads the prompt.", "Decode makes the next token."],
                }
            ]
        }
    )
    scope = FieldScope.RERANK

    query: Annotated[str, Field(min_length=1)]
    texts: Annotated[Items[str], Field(min_length=1, max_length=MOST_PROMPTS)] | None = None
    raw_scores: Switch = False
    return_text: Switch = False
    documents: Documents | None = None
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    """Describes which documents fit the query."""

    @property
    def all_texts(self) -> list[str]:
        """The texts of all documents; raises ValidationError."""
        if (self.texts is None) == (self.documents is None):
            raise ValidationError("either `documents` or `texts` must be given")
        documents = self.texts if self.texts is not None else self.documents
        return [one.text if isinstance(one, Document) else one for one in documents or []]


class ScoreRequest(PoolingFields):
    """Body of `/v1/score` and `/score`: one text or several on either side."""

    scope = FieldScope.SCORE

    text_1: Side1 = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Side1 = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    model: str | None = None
    instruction: str | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of texts: one with each, or the first with the first and so on. Raises ValidationError."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise ValidationError(
                f"`text_1` must have one text, or as many as `text_2`. Given: {len(first)} and {len(second)}"
            )
        return list(zip(first, second, strict=True))


class PoolingUsageJson(TypedDict):
    """Token counts, in OpenAI's form."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingJson(TypedDict):
    """One embedding."""

    object: str
    index: int
    embedding: list[float] | str
    """Numbers, or their float32 in base64."""


class EmbeddingsJson(TypedDict):
    """Answer of `/v1/embeddings`."""

    object: str
    data: list[EmbeddingJson]
    model: str
    usage: PoolingUsageJson


class LoraxEmbedJson(TypedDict):
    """Answer of `/embed` to LoRAX's clients."""

    embeddings: list[float]


class RankJson(TypedDict):
    """One document of TEI's `/rerank`, the best first."""

    index: int
    score: float
    text: NotRequired[str]


class RankedDocumentJson(TypedDict):
    """A document."""

    text: str


class RerankResultJson(TypedDict):
    """One document of a ranking, the best first."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocumentJson]


class RerankJson(TypedDict):
    """Answer of `/v1/rerank`."""

    id: str
    model: str
    results: list[RerankResultJson]
    usage: PoolingUsageJson


class ScoreItemJson(TypedDict):
    """The score of one pair."""

    index: int
    object: str
    score: float


class ScoreJson(TypedDict):
    """Answer of `/v1/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[ScoreItemJson]
    usage: PoolingUsageJson
