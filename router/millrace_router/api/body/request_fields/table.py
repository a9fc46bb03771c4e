"""The table of all request fields, by the objects that have them."""

from __future__ import annotations

from millrace_router.api.body.fields import Place
from millrace_router.api.body.request_fields.field import Fields
from millrace_router.api.body.request_fields.pooling import (
    EMBED,
    EMBED_PARAMETERS,
    EMBEDDINGS,
    RERANK,
    SCORE,
)
from millrace_router.api.body.request_fields.routes import (
    CHAT,
    COMPLETION,
    GENERATE,
    MESSAGE,
    PARAMETERS,
    RESPONSE,
    STRUCTURED_OUTPUTS,
)

TABLE: dict[Place, Fields] = {
    Place.GENERATE: GENERATE,
    Place.PARAMETERS: PARAMETERS,
    Place.CHAT: CHAT,
    Place.COMPLETION: COMPLETION,
    Place.RESPONSE: RESPONSE,
    Place.MESSAGE: MESSAGE,
    Place.EMBEDDINGS: EMBEDDINGS,
    Place.EMBED: EMBED,
    Place.EMBED_PARAMETERS: EMBED_PARAMETERS,
    Place.RERANK: RERANK,
    Place.SCORE: SCORE,
    Place.STRUCTURED_OUTPUTS: STRUCTURED_OUTPUTS,
}

NESTED = frozenset(
    (
        *("annotations", "cache_control", "caller", "citations", "data", "detail", "id", "index"),
        *("encrypted_content", "logprobs", "signature", "status", "summary", "thinking"),
        *("allowed_callers", "defer_loading", "eager_input_streaming"),
    )
)
"""Fields of messages, tools and their parts that do not change the prompt, or are in parts that it does not have."""
