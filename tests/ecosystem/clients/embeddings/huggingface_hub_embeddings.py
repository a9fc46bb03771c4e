"""`huggingface_hub`'s feature extraction and sentence similarity's texts, at the root of the server as with TEI."""

from __future__ import annotations

import asyncio
import math

from cases import run
from embedding_cases import DOCUMENTS, QUERY, check
from huggingface_hub import AsyncInferenceClient, InferenceClient


def a_text_is_embedded(base_url: str) -> None:
    (found,) = InferenceClient(base_url).feature_extraction(QUERY)
    check(found, QUERY)


def the_prompt_of_the_model_is_used(base_url: str) -> None:
    (found,) = InferenceClient(base_url).feature_extraction(QUERY, prompt_name="query")
    check(found, f"query: {QUERY}")


def a_state_may_stay_as_long_as_it_is(base_url: str) -> None:
    (found,) = InferenceClient(base_url).feature_extraction(QUERY, normalize=False)
    length = math.hypot(*found)
    assert length > 1.5
    check([value / length for value in found], QUERY)


def long_texts_are_cut(base_url: str) -> None:
    for side in ("Left", "Right"):
        (found,) = InferenceClient(base_url).feature_extraction(
            DOCUMENTS[2] * 200, truncate=True, truncation_direction=side
        )
        assert math.isclose(math.hypot(*found), 1, abs_tol=1e-6)


def texts_are_embedded_without_blocking(base_url: str) -> None:
    client = AsyncInferenceClient(base_url)

    async def all_of_them() -> None:
        found = await asyncio.gather(*(client.feature_extraction(text) for text in DOCUMENTS))
        for one, text in zip(found, DOCUMENTS, strict=True):
            check(one[0], text)

    asyncio.run(all_of_them())


run(globals())
