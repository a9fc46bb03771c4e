"""Tiny random checkpoints for embeddings and scores, with the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoModelForCausalLM

from millrace_testing.models.tiny_models import save_with_tokenizer

MODULES = "sentence_transformers.models"
PROMPTS = {"query": "Instruct: Given a query, find passages\nQuery:", "document": ""}
TRUE_ID, FALSE_ID = 300, 301
PAIR = """\
{% for message in messages if message.role in ["query", "document"] -%}
{{ message.role }}: {{ message.content }}
{% endfor %}"""


def save_embedding(folder: Path) -> None:
    """Write what Qwen3-Embedding-8B's folder has: a class without a head, and a tokenizer that ends every text."""
    save_with_tokenizer(folder, "qwen3")
    model = AutoModel.from_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_modules(folder, "Transformer", "Pooling", "Normalize")
    _write(folder / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True, **_size(model)})
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def save_reranker(folder: Path) -> None:
    """Write a causal model whose score is the difference of two logits, with a template of pairs."""
    save_with_tokenizer(folder, "qwen3")
    _write(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
    )
    ids = {"true_token_id": TRUE_ID, "false_token_id": FALSE_ID}
    _write(folder / "1_LogitScore" / "config.json", ids)
    (folder / "chat_template.jinja").write_text(PAIR)
    _write(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    logits = {"method": "forward", "method_output_name": "logits"}
    _write(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
            "module_output_name": "causal_logits",
        },
    )


def embeddings(
    folder: Path, texts: Sequence[str], *, dimensions: int | None = None
) -> torch.Tensor:
    """The last states of `texts` by transformers, cut and of length 1: [texts, dimensions]."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        states = [
            model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, -1, :dimensions]
            for text in texts
        ]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1)


def scores(folder: Path, query: str, documents: Sequence[str]) -> list[float]:
    """The probabilities that `documents` fit, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for document in documents:
        prompt = f"query: {query}\ndocument: {document}\n"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        found.append(float(torch.sigmoid(logits[TRUE_ID] - logits[FALSE_ID])))
    return found


def _size(model: torch.nn.Module) -> dict[str, int]:
    return {"word_embedding_dimension": int(model.config.hidden_size)}  # type: ignore[union-attr,arg-type]


def _write_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"{MODULES}.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
