"""What a model's files and `--task` make of a server: its tasks, its pooling, its prompts, its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace_router.pooling.model import LogitScore, PoolingModel, pooling_of
from millrace_router.request.request import Task
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_testing.router.edge import word_tokenizer
from millrace_testing.text.texts import tokenizer

TRANSFORMER = {
    "idx": 0,
    "name": "0",
    "path": "",
    "type": "sentence_transformers.models.Transformer",
}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
NEW_POOLING = POOLING | {"type": "sentence_transformers.sentence_transformer.modules.Pooling"}
LOGIT_SCORE = {
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
CAUSAL = "Qwen3ForCausalLM"


def write(folder: Path, name: str, value: object) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def found(folder: Path, *asked: str, architecture: str = CAUSAL, words: Any = None) -> PoolingModel:
    write(folder, "config.json", {"architectures": [architecture]})
    return pooling_of(
        asked or ("auto",),
        folder,
        ModelFiles.load(folder),
        words or word_tokenizer(),
        ChatTemplate(None, special_tokens={}),
    )


def test_a_causal_model_generates(tmp_path: Path) -> None:
    assert found(tmp_path).tasks == {Task.GENERATE}
    assert found(tmp_path, architecture="GPT2LMHeadModel").tasks == {Task.GENERATE}


def test_a_class_without_a_head_embeds(tmp_path: Path) -> None:
    model = found(tmp_path, architecture="Qwen3Model")
    assert model.tasks == {Task.EMBED}
    assert model.files.normalizes


@pytest.mark.parametrize("pooling", [POOLING, NEW_POOLING], ids=["old", "new"])
@pytest.mark.parametrize("settings", [LAST, {"pooling_mode": "lasttoken"}], ids=["old", "new"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_sentence_transformers_files_select_embedding(
    pooling: dict[str, Any], settings: dict[str, Any], normalizes: bool, tmp_path: Path
) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, pooling, *([NORMALIZE] if normalizes else [])])
    write(tmp_path, "1_Pooling/config.json", settings)
    prompts = {"query": "Instruct: x\nQuery:", "document": ""}
    write(tmp_path, "config_sentence_transformers.json", {"prompts": prompts})
    model = found(tmp_path)
    assert model.tasks == {Task.EMBED}
    assert model.files.normalizes is normalizes
    assert model.files.prompts == prompts
    assert model.files.default_prompt == ""
    assert found(tmp_path, "generate").tasks == {Task.GENERATE}
    assert found(tmp_path, "generate", "embed").tasks == {Task.GENERATE, Task.EMBED}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, r"lasttoken\+mean"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({}, "mean"),
    ],
)
def test_other_poolings_are_refused_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING, NORMALIZE])
    write(tmp_path, "1_Pooling/config.json", settings)
    for asked in ("auto", "embed"):
        with pytest.raises(ModelFilesError, match=f"pooled by {named}, which is not supported"):
            found(tmp_path, asked)
    assert found(tmp_path, "generate").tasks == {Task.GENERATE}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("modules.json", {}, "list of modules"),
        ("modules.json", [1], "list of modules"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "a module Dense"),
        ("modules.json", [POOLING | {"path": "../x"}], "outside the model"),
        ("modules.json", [POOLING | {"path": "/etc"}], "outside the model"),
        ("modules.json", [POOLING | {"path": 1}], "outside the model"),
        ("modules.json", [LOGIT_SCORE], "ids of its tokens"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "texts by name"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "no prompt 'a'"),
        ("config_sentence_transformers.json", [], "JSON object"),
    ],
)
def test_malformed_files_are_refused(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    write(tmp_path, name, value)
    with pytest.raises(ModelFilesError, match=message):
        found(tmp_path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ModelFilesError, match=r"modules\.json cannot be read"):
        found(tmp_path)


def test_classifiers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="Qwen3ForSequenceClassification is not supported"):
        found(tmp_path, architecture="Qwen3ForSequenceClassification")


@pytest.mark.parametrize("false_id", [2, None])
def test_a_reranker_names_its_tokens(false_id: int | None, tmp_path: Path) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, LOGIT_SCORE])
    ids = {"true_token_id": 5, "false_token_id": false_id}
    write(tmp_path, "1_LogitScore/config.json", ids)
    model = found(tmp_path)
    assert model.tasks == {Task.SCORE}
    assert model.score_pooling.logit_ids == ((5,) if false_id is None else (5, 2))


def test_a_causal_model_scores_by_yes_and_no(tmp_path: Path) -> None:
    words = tokenizer("byte_level")
    with pytest.raises(ModelFilesError, match="'yes' and 'no'"):
        found(tmp_path, "score", words=words)
    words._rust.add_tokens(["yes", "no"])
    model = found(tmp_path, "score", words=words)
    yes, no = words.id_of("yes"), words.id_of("no")
    assert yes is not None
    assert model.score == LogitScore(true_token_id=yes, false_token_id=no)
    assert model.tasks == {Task.SCORE}
