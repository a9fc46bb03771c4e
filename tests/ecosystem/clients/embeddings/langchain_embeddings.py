"""LangChain's embeddings of OpenAI; those of Hugging Face's endpoints take no URL."""

from __future__ import annotations

import asyncio

from cases import run
from embedding_cases import DOCUMENTS, QUERY, check
from langchain_openai import OpenAIEmbeddings


def openais_embed(base_url: str) -> None:
    """By texts: the package would take token ids from OpenAI's tokenizer, which is not the model's."""
    model = OpenAIEmbeddings(
        model="m", base_url=f"{base_url}/v1", api_key="-", check_embedding_ctx_length=False
    )
    check(model.embed_query(QUERY), QUERY)
    for found, text in zip(model.embed_documents(DOCUMENTS), DOCUMENTS, strict=True):
        check(found, text)
    check(asyncio.run(model.aembed_query(QUERY)), QUERY)


run(globals())
