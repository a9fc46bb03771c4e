"""LlamaIndex's client of TEI."""

from __future__ import annotations

import asyncio

from cases import run
from embedding_cases import DOCUMENTS, QUERY, check
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference


def model(base_url: str) -> TextEmbeddingsInference:
    return TextEmbeddingsInference(
        model_name="m", base_url=base_url, query_instruction="", text_instruction=""
    )


def texts_are_embedded(base_url: str) -> None:
    check(model(base_url).get_query_embedding(QUERY), QUERY)
    found = model(base_url).get_text_embedding_batch(DOCUMENTS)
    # The package removes blanks at the end of a text.
    for one, text in zip(found[:2], DOCUMENTS[:2], strict=True):
        check(one, text)


def texts_are_embedded_without_blocking(base_url: str) -> None:
    check(asyncio.run(model(base_url).aget_query_embedding(QUERY)), QUERY)


run(globals())
