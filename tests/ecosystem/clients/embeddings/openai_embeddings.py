"""The `openai` package asks for embeddings: texts, token ids, base64, dimensions."""

from __future__ import annotations

import math

import openai
from cases import raised, run
from embedding_cases import DOCUMENTS, QUERY, check


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def texts_are_embedded(base_url: str) -> None:
    """The package asks for base64 by itself."""
    answer = client(base_url).embeddings.create(model="m", input=[QUERY, *DOCUMENTS])
    for one, text in zip(answer.data, [QUERY, *DOCUMENTS], strict=True):
        check(one.embedding, text)
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4


def numbers_and_base64_are_the_same(base_url: str) -> None:
    create = client(base_url).embeddings.create
    plain = create(model="m", input=QUERY, encoding_format="float").data[0].embedding
    check(plain, QUERY)
    packed = create(model="m", input=QUERY).data[0].embedding
    assert all(math.isclose(a, b, abs_tol=1e-7) for a, b in zip(plain, packed, strict=True))


def dimensions_are_cut(base_url: str) -> None:
    create = client(base_url).embeddings.create
    cut = create(model="m", input=QUERY, dimensions=16).data[0].embedding
    assert len(cut) == 16
    assert math.isclose(math.hypot(*cut), 1, abs_tol=1e-6)


def token_ids_are_embedded(base_url: str) -> None:
    create = client(base_url).embeddings.create
    alone = create(model="m", input=[5, 6, 7]).data[0].embedding
    both = create(model="m", input=[[5, 6, 7], [8]]).data
    assert both[0].embedding == alone


def mistakes_are_typed(base_url: str) -> None:
    create = client(base_url).embeddings.create
    error = raised(openai.UnprocessableEntityError, lambda: create(model="m", input=""))
    assert "`input` cannot be empty" in str(error)
    chat = client(base_url).chat.completions.create
    turn = {"role": "user", "content": QUERY}
    refusal = raised(openai.BadRequestError, lambda: chat(model="m", messages=[turn]))
    assert "does not generate text" in str(refusal)


run(globals())
