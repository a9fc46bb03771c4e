"""Writes what sentence-transformers makes of the texts: the embeddings, or the scores of a reranker.

Arguments: `embed` or `score`, the model's folder, the file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from embedding_cases import DOCUMENTS, QUERY
from sentence_transformers import CrossEncoder, SentenceTransformer


def embeddings(folder: str) -> dict[str, list[float]]:
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    texts = [QUERY, *DOCUMENTS]
    # One by one: padding must not matter.
    found = {text: model.encode(text).tolist() for text in texts}
    found[f"query: {QUERY}"] = model.encode(QUERY, prompt_name="query").tolist()
    return found


def scores(folder: str) -> dict[str, list[float]]:
    model = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    raw = [
        model.predict([(QUERY, document)], activation_fn=torch.nn.Sigmoid()).item()
        for document in DOCUMENTS
    ]
    return {"scores": raw}


if __name__ == "__main__":
    kind, folder, target = sys.argv[1:]
    made = embeddings(folder) if kind == "embed" else scores(folder)
    Path(target).write_text(json.dumps(made))
