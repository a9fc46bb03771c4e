"""Cohere's package orders documents, by both versions of its API."""

from __future__ import annotations

import cohere
from cases import run
from embedding_cases import DOCUMENTS, QUERY, check_order


def documents_are_ordered(base_url: str) -> None:
    for client in (
        cohere.Client(api_key="-", base_url=base_url),
        cohere.ClientV2(api_key="-", base_url=base_url),
    ):
        answer = client.rerank(model="m", query=QUERY, documents=DOCUMENTS)
        check_order({one.index: one.relevance_score for one in answer.results})
        assert len(client.rerank(model="m", query=QUERY, documents=DOCUMENTS, top_n=1).results) == 1


run(globals())
