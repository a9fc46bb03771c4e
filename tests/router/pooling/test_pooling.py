"""Pooling models: what their files declare, and how prompts and documents are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.errors import TemplateError
from millrace_router.pooling.model import LogitScore, PoolingModel, pooling_of
from millrace_router.pooling.prompts import (
    PairText,
    ScoreTemplate,
    Side,
    Truncation,
    pair_tokens,
    tokens_of,
)
from millrace_router.request.request import Task
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.router.edge import word_tokenizer
from millrace_testing.text import texts
from millrace_testing.text.texts import tokenizer

END, USER = "<|end|>", "<|user|>"
TEMPLATES = {
    "none": None,
    "end": f"$A {END}",
    "both": f"{USER} $A {END}",
}
TEXTS = st.text(max_size=60) | st.sampled_from([f"the {END} cat {USER}", f"{END}{END}", "x" * 60])


def rust(template: str | None) -> RustTokenizer:
    made = RustTokenizer.from_str(texts.byte_level().to_str())
    if template is not None:
        special = [(name, made.token_to_id(name)) for name in (END, USER)]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return made


ORACLES = {name: rust(template) for name, template in TEMPLATES.items()}
OURS = {name: Tokenizer(rust(template)) for name, template in TEMPLATES.items()}


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(3, 20), st.sampled_from(Side), st.sampled_from(sorted(TEMPLATES)))
def test_a_text_is_cut_as_by_the_library(text: str, length: int, side: Side, name: str) -> None:
    oracle = ORACLES[name]
    oracle.enable_truncation(length, direction=side.lower())
    expected = tuple(oracle.encode(text).ids)
    assert tokens_of(OURS[name], text, Truncation(length, side)) == expected
    assert len(expected) <= length


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_may_be_left_out(name: str) -> None:
    ids = tokens_of(OURS[name], "the cat", None, specials=False)
    assert ids == OURS[name].encode("the cat", add_special_tokens=False)
    cut = tokens_of(OURS[name], "the cat sat on the mat", Truncation(3), specials=False)
    assert cut == OURS[name].encode("the cat sat on the mat", add_special_tokens=False)[:3]


@settings(deadline=None, max_examples=150)
@given(st.text(min_size=1, max_size=99), st.integers(35, 60), st.sampled_from(Side))
def test_only_tokens_of_the_document_are_cut(document: str, length: int, side: Side) -> None:
    around = PairText(f"{USER}Query: the cat\nDocument: ", f"{END}\nyes or no?")
    ours = OURS["none"]
    whole = pair_tokens(ours, around, document, None)
    assert whole == ours.encode(around.before + document + around.after, add_special_tokens=False)
    cut = pair_tokens(ours, around, document, Truncation(length, side))
    if len(whole) <= length:
        assert cut == whole
        return
    assert len(cut) == length
    after = ours.encode(around.after, add_special_tokens=False)
    assert cut[-len(after) :] == after
    num_first = next(place for place in range(length) if cut[place] != whole[place])
    if side is Side.RIGHT:
        # Everything before the gap, and the text after the document behind it.
        assert cut == whole[: length - len(after)] + after
    else:
        assert cut[num_first:] == whole[len(whole) - (length - num_first) :]
        before = ours.encode(around.before.rstrip(), add_special_tokens=False)
        assert cut[: len(before)] == before


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% endfor %}"
OWN = """\
{%- set query = messages | selectattr('role', 'eq', 'query') | first -%}
{%- set document = messages | selectattr('role', 'eq', 'document') | first -%}
Q {{ query.content }} D {{ document.content }} ?"""


def of_model_card(instruction: str, query: str, document: str) -> str:
    """The three pieces of the card's program, put together as it does."""
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return prefix + pair + suffix


@pytest.mark.parametrize("source", [None, CHAT])
@pytest.mark.parametrize("instruction", [None, "Find proverbs"])
async def test_score_prompt_equals_qwen3_rerankers_model_card(
    source: str | None, instruction: str | None
) -> None:
    template = ScoreTemplate.of(ChatTemplate(source, special_tokens={}))
    around = await template.around_document("{{ query }}\n<x>", instruction)
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    expected = of_model_card(instruction or usual, "{{ query }}\n<x>", "a document")
    assert around.before + "a document" + around.after == expected


@pytest.mark.parametrize("source", [None, CHAT])
async def test_control_tokens_of_a_scored_pair_are_text(source: str | None) -> None:
    made = RustTokenizer.from_str(OURS["none"]._rust.to_str())
    made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    own = Tokenizer(made)
    template = ScoreTemplate.of(
        ChatTemplate(source, special_tokens={}, control_tokens=own.control_tokens)
    )
    end = own.id_of("<|im_end|>")
    for query, document in (("a", "b<|im_end|>"), ("<|im_end|>a", "b"), ("a", "b")):
        around = await template.around_document(query, None)
        whole = pair_tokens(own, around, document, None)
        assert whole.count(end) == 2
        assert own.decode(whole, skip_special_tokens=False).count(document) >= 1
        cut = pair_tokens(own, around, document * 9, Truncation(len(whole)))
        assert (len(cut), cut.count(end)) == (len(whole), 2)


async def test_a_template_with_the_roles_of_a_pair_is_the_models_own() -> None:
    around = await ScoreTemplate.of(ChatTemplate(OWN, special_tokens={})).around_document("a", None)
    assert (around.before, around.after) == ("Q a D ", " ?")


async def test_a_template_that_drops_the_document_is_refused() -> None:
    source = """{{ "query" }}{{ "document" }}"""
    template = ScoreTemplate.of(ChatTemplate(source, special_tokens={}))
    with pytest.raises(TemplateError, match="leaves out the document"):
        await template.around_document("a", None)


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
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "lacks the prompt 'a'"),
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
