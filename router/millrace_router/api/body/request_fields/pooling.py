"""Fields of the routes for embeddings and scores."""

from __future__ import annotations

from collections.abc import Iterator

from millrace_router.api.body.request_fields.field import RequestField, Support, by_name, rows

WORKS, NO_EFFECT, REFUSED = Support.WORKS, Support.NO_EFFECT, Support.REFUSED


def _common() -> Iterator[RequestField]:
    yield from rows(WORKS, "truncate", "E", "cuts prompts at the server's limit")
    yield from rows(WORKS, "truncation_direction", "E", "`Right` by default: the first tokens stay")
    yield from rows(
        WORKS, "truncate_prompt_tokens", "V", "the first tokens are kept; -1: as many as fit"
    )
    yield from rows(WORKS, "truncation_side", "V", "`right` by default")
    yield from rows(WORKS, "priority", "VS", "-10 to 10; higher is sooner")
    yield from rows(WORKS, "cache_salt", "V", "requests share prefixes only with the same salt")
    yield from rows(NO_EFFECT, "mm_processor_kwargs", "V", "images are refused")
    yield from rows(NO_EFFECT, "user request_id rid", "OVS")
    yield from rows(REFUSED, "embed_dtype endianness", "V", "numbers are float32, little-endian")


EMBEDDINGS = by_name(
    _common(),
    rows(WORKS, "input", "OVSE", "texts or token ids"),
    rows(WORKS, "model", "OVSE", "names the model, an alias of it or an adapter"),
    rows(WORKS, "encoding_format", "OVE", "`float` or `base64`"),
    rows(WORKS, "dimensions", "OVS", "the first ones, normalised again"),
    rows(WORKS, "add_special_tokens", "V"),
    rows(WORKS, "normalize prompt_name", "E"),
    rows(REFUSED, "messages", "V", "send the text as `input`"),
)
EMBED = by_name(
    _common(),
    rows(WORKS, "inputs", "LE", "texts or token ids"),
    rows(WORKS, "normalize prompt_name dimensions", "E"),
    rows(WORKS, "parameters", "L", "the answer has LoRAX's form"),
)
EMBED_PARAMETERS = by_name(rows(WORKS, "adapter_id adapter_source api_token", "L"))
RERANK = by_name(
    _common(),
    rows(WORKS, "query", "EHV"),
    rows(WORKS, "documents", "HV", "texts, or objects with `text`"),
    rows(WORKS, "texts raw_scores return_text", "E"),
    rows(WORKS, "top_n", "HV"),
    rows(WORKS, "return_documents", "H", "true by default"),
    rows(WORKS, "model", "HV", "names the model, an alias of it or an adapter"),
    rows(WORKS, "instruction", "V", "what a fitting document is"),
    rows(REFUSED, "rank_fields", "H", "send texts"),
    rows(REFUSED, "max_tokens_per_doc max_chunks_per_doc", "H", "use `truncate_prompt_tokens`"),
)
SCORE = by_name(
    _common(),
    rows(WORKS, "text_1 text_2", "V", "one text or several; also `queries` and `documents`"),
    rows(WORKS, "queries documents items data_1 data_2", "V", "names of `text_1` and `text_2`"),
    rows(WORKS, "model", "V", "names the model, an alias of it or an adapter"),
    rows(WORKS, "instruction", "V", "what a fitting document is"),
)
