"""`millrace-shard reference`: plain transformers, asked over pipes, against its forward pass called by hand."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from millrace_shard.__main__ import main
from millrace_shard.commands.reference import answers, load_reference
from millrace_shard.errors import ModelError
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.models import VOCAB, prompt_of, save_tiny

NUM_TOKENS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny")
    save_tiny(target, "llama")
    # Settings of a checkpoint that would change what is generated.
    settings = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 3.0}
    generation = target / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | settings))
    (target / "tokenizer.json").write_text("{}")
    return target


def question(ids: list[int], count: int = NUM_TOKENS) -> str:
    return json.dumps({"input_ids": ids, "max_new_tokens": count})


@torch.inference_mode()
def by_hand(model: PreTrainedModel, ids: list[int]) -> tuple[list[int], list[float], list[int]]:
    """Greedy tokens, their log probabilities, and the second-best: a whole forward pass for each."""
    sequence, logprobs, others = list(ids), [], []
    for _ in range(NUM_TOKENS):
        scores = model(torch.tensor([sequence])).logits[0, -1].double().log_softmax(-1)
        best, second = scores.topk(2).indices.tolist()
        sequence.append(best)
        logprobs.append(float(scores[best]))
        others.append(second)
    return sequence[len(ids) :], logprobs, others


def test_answers_match_whole_forward_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt_of(5), prompt_of(40, seed=1)]
    lines = "\n\n".join(question(ids) for ids in prompts)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["reference", str(folder)]) == 0
    result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = load_reference(folder)
    assert len(result) == len(prompts)
    for ids, answer in zip(prompts, result, strict=True):
        tokens, logprobs, others = by_hand(model, ids)
        assert answer["ids"] == tokens
        assert answer["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert [id_ for id_, _ in answer["runners_up"]] == others
        assert all(
            second <= first
            for first, (_, second) in zip(answer["logprobs"], answer["runners_up"], strict=True)
        )


def test_no_token_ends_an_answer(folder: Path) -> None:
    model = load_reference(folder)
    (first,) = answers(model, [question(prompt_of(5))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.config, "eos_token_id", first["ids"][2])
        (again,) = answers(model, [question(prompt_of(5))])
    assert again["ids"] == first["ids"]


def test_the_reference_runs_in_float32_without_our_attention(folder: Path) -> None:
    model = load_reference(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a question"),
        ("[1]", "not a question"),
        ('{"input_ids": [1]}', "not a question"),
        (question([]), "one or more token ids"),
        ('{"input_ids": [true], "max_new_tokens": 1}', "one or more token ids"),
        (question([VOCAB]), f"knows {VOCAB} tokens"),
        (question([1], 0), "positive whole number"),
    ],
    ids=["cut off", "list", "missing", "empty", "boolean", "beyond the vocabulary", "nothing"],
)
def test_bad_questions_are_refused(
    line: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    assert main(["reference", str(folder)]) == 1
    assert words in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert main(["reference", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("Error: ")
    with pytest.raises(ModelError):
        load_reference(tmp_path)


def test_a_gguf_file_is_read_by_transformers_too(tmp_path: Path) -> None:
    tiny = TinyGguf("llama", "Q4_1")
    folder = prepare_gguf(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "cache", tokenizer=None)
    ids = torch.tensor([[5, 9, 3, 20, 11]])
    with torch.inference_mode():
        torch.testing.assert_close(load_reference(folder)(ids).logits, tiny.model(ids).logits)


def test_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    """transformers would make up the tensors of the other parts."""
    TinyGguf("llama").write(tmp_path / "tiny.gguf", per_part=12)
    first = tmp_path / "tiny-00001-of-00002.gguf"
    folder = prepare_gguf(first, tmp_path / "cache", tokenizer=None)
    with pytest.raises(ModelError, match="no split GGUF files; merge the parts"):
        load_reference(folder)


def test_a_gguf_file_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyGguf("llama").write(tmp_path / "tiny.gguf")
    folder = prepare_gguf(tiny, tmp_path / "cache", tokenizer=None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="pip install gguf"):
        load_reference(folder)
