"""What the clients of embeddings expect: the vectors of `EXPECTED`, a JSON file, by their texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

TOLERANCE = 1e-4
QUERY = "What is a shard?"
DOCUMENTS = ["A shard owns weights.", "The wind blows.", "The router owns requests and text. " * 9]


def expected() -> dict[str, list[float]]:
    """The embeddings of `QUERY` and `DOCUMENTS`, and as `query: …` that with the model's prompt."""
    found: dict[str, list[float]] = json.loads(Path(os.environ["EXPECTED"]).read_text())
    return found


def check(found: object, text: str) -> None:
    """That `found` is the embedding of `text`."""
    wanted, values = expected()[text], [float(value) for value in found]  # type: ignore[attr-defined]
    assert len(values) == len(wanted), (len(values), len(wanted))
    distance = max(abs(one - other) for one, other in zip(values, wanted, strict=True))
    assert distance < TOLERANCE, distance


def check_order(scores: dict[int, float]) -> None:
    """That a ranking of `DOCUMENTS` has the expected scores, the best first."""
    wanted = expected()["scores"]
    assert list(scores) == sorted(range(len(wanted)), key=lambda index: -wanted[index])
    for index, score in scores.items():
        assert abs(score - wanted[index]) < TOLERANCE, (index, score, wanted[index])
