"""Byte-level tokenizers in GGUF files, against tokenizers made by hand and transformers' reading of the same files."""

from __future__ import annotations

import json
import logging
import shutil
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ecosystem.prepare import TOKENIZERS
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_SPLIT
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_SPLIT

from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.tokenizer import PRE_TOKENIZERS, TokenKind, Vocabulary
from millrace_shard.weights.published import PUBLISHED_MODELS
from millrace_testing.models.gguf_files import (
    CONTROL,
    NORMAL,
    SIZES,
    USER_DEFINED,
    TinyGguf,
    read_config,
)
from millrace_testing.text.texts import CORPUS

TEXTS: list[str] = [*json.loads((TOKENIZERS / "texts.json").read_text()), *CORPUS[:6]]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""The first tokens; they are padding, bos and eos."""
OWN = "<think>"
"""A token of the user's, the last one."""
PATTERNS = {
    **{name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in ("llama-bpe", "llama3", "llama-v3")},
    **{name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in ("falcon3", "smaug-bpe")},
    **{name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in ("tekken", "gpt-4o")},
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_SPLIT),
    "qwen35": QWEN35_SPLIT,
}
"""The patterns that transformers knows, by the names in `tokenizer.ggml.pre`."""
AS_LLAMA_CPP = {
    **dict.fromkeys(("phi-2", "olmo", "exaone4"), "gpt-2"),
    **dict.fromkeys(("dbrx", "chatglm-bpe", "glm4"), "smaug-bpe"),
    "command-r": "smollm",
    "hunyuan": "qwen2",
}
"""Names that transformers does not know, and those with the same expressions in llama.cpp's llama-vocab.cpp."""
NORMALIZED = ("qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "command-r")
"""Tokenizers of Qwen 2 and Command R bring text into normal form C, as the tokenizer.json of the models says."""
DIGITS = ("smollm", "starcoder", "refact")
PIECES = {
    "default": "Don|'|t| stop|,| naïve|:| x|+=|123|45| |$|7|!!| \n|\n|end",
    "deepseek-coder": "Don|'|t| stop|,| naïve|:| x|+=|1|2|3|4|5| $|7|!!| |\n|\n|end",
    "seed-coder": "Don|'t| stop|,| naïve|:| x|+=|1|2|3|4|5| $|7|!!| \n\n|end",
    "hunyuan-dense": "Don|'t| stop|,| naïve|:| x|+=|123|45| $|7|!!| \n\n|end",
    "deepseek-v3": "Don|'t| stop|,| naïve|:| x|+=|123|45| $|7|!!| \n\n|end",
}
"""The words of a text, parted by bars, for patterns that neither library has."""


def split_of(pre: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of `pre`, of parts of the library."""
    pre = AS_LLAMA_CPP.get(pre, pre)
    if pre in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, to_bytes])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    assert pre == "gpt-2"
    return gpt2


def by_hand(pre: str) -> Tokenizer:
    """A tokenizer trained on a small corpus, without bos and eos."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = split_of(pre)
    if pre in NORMALIZED:
        rust.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_tokens([OWN])
    return rust


def metadata_of(rust: Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata that a converter writes for `rust`."""
    model = json.loads(rust.to_str())["model"]
    vocab = rust.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = dict.fromkeys(SPECIAL, CONTROL) | {OWN: USER_DEFINED}
    return {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


def write(folder: Path, metadata: dict[str, Any]) -> tuple[Path, Path]:
    """A GGUF file with that tokenizer, and its prepared folder."""
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    path = TinyGguf("llama", metadata=metadata, vocab_size=vocab_size).write(folder / "m.gguf")
    return path, prepare_gguf(path, folder / "cache", tokenizer=None)


def ours(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_file(str(write(folder, metadata)[1] / "tokenizer.json"))


def theirs(folder: Path) -> PreTrainedTokenizerBase:
    """The reading of transformers of the file that `ours` wrote."""
    result: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")
    return result


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - PIECES))
def test_ids_match_a_tokenizer_by_hand(pre: str, tmp_path: Path) -> None:
    expected = by_hand(pre)
    result = ours(tmp_path, metadata_of(expected, pre))
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert result.encode(text).ids == ids, text
        normal = unicodedata.normalize("NFC", text) if pre in NORMALIZED else text
        assert result.decode(ids, skip_special_tokens=False) == normal


@pytest.mark.parametrize("pre", PIECES)
def test_words_are_split_as_each_pattern_requires(pre: str, tmp_path: Path) -> None:
    result = ours(tmp_path, metadata_of(by_hand("gpt-2"), pre))
    expected = PIECES[pre].split("|")
    assert result.pre_tokenizer is not None
    text = "".join(expected)
    words = result.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in words] == expected


@pytest.mark.parametrize("pre", ["gpt-2", *PATTERNS])
def test_ids_match_transformers(pre: str, tmp_path: Path) -> None:
    """transformers' reading leaves out the normal form, so that it gets the text in this form."""
    result = ours(tmp_path, metadata_of(by_hand(pre), pre))
    expected = theirs(tmp_path)
    for text in TEXTS:
        normal = unicodedata.normalize("NFC", text) if pre in NORMALIZED else text
        ids = expected.encode(normal, add_special_tokens=False)
        assert result.encode(text).ids == ids, text
        for skip in (False, True):
            decoded = expected.decode(ids, skip_special_tokens=skip)
            assert result.decode(ids, skip_special_tokens=skip) == decoded


def test_text_is_normalised_unlike_in_transformers(tmp_path: Path) -> None:
    result = ours(tmp_path, metadata_of(by_hand("qwen2"), "qwen2"))
    composed, parts = "caf\u00e9", "cafe\u0301"
    assert result.encode(parts).ids == result.encode(composed).ids
    assert theirs(tmp_path).encode(parts) != theirs(tmp_path).encode(composed)


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "smaug-bpe", "qwen2"])
def test_words_that_no_merges_build_are_single_tokens(pre: str, tmp_path: Path) -> None:
    """The models' tokenizer.json has `ignore_merges` for Llama 3 and Tekken; transformers' reading leaves it out."""
    expected = by_hand(pre)
    metadata = metadata_of(expected, pre)
    whole = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [*whole[:-1], "jxq", OWN]
    metadata["tokenizer.ggml.token_type"].insert(-1, NORMAL)
    result = ours(tmp_path, metadata).encode("jxq")
    is_whole = pre in ("llama-bpe", "tekken")
    assert result.tokens == (["jxq"] if is_whole else ["j", "x", "q"])
    assert len(theirs(tmp_path).encode("jxq", add_special_tokens=False)) == 3


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("llama-bpe", {"add_bos_token": None}, (1, None)),
        ("qwen2", {"add_bos_token": None}, (None, None)),
        ("qwen2", {"add_bos_token": True}, (1, None)),
        ("llama-bpe", {"add_bos_token": False, "add_eos_token": True}, (None, 2)),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (1, 2)),
    ],
)
def test_a_prompt_gets_the_ends_that_the_file_requests(
    pre: str, flags: dict[str, bool | None], around: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """Where the file says nothing, the pre-tokenizer decides, as in llama.cpp; transformers adds nothing then."""
    metadata = metadata_of(by_hand(pre), pre)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    result = ours(tmp_path, metadata)
    plain = result.encode("hello", add_special_tokens=False).ids
    begin, end = ([] if each is None else [each] for each in around)
    assert result.encode("hello").ids == [*begin, *plain, *end]
    assert result.encode("hello", "hello").ids == [*begin, *plain, *end] * 2
    if None not in flags.values():
        assert theirs(tmp_path).encode("hello") == result.encode("hello").ids


def test_special_tokens_and_templates_are_kept(tmp_path: Path) -> None:
    metadata = metadata_of(by_hand("gpt-2"), "gpt-2")
    metadata |= {
        "tokenizer.chat_template": "default {{ messages }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools {{ tools }}",
    }
    path, folder = write(tmp_path, metadata)
    result: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    expected: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name
    )
    for name in ("bos_token", "eos_token", "pad_token"):
        assert getattr(result, name) == getattr(expected, name)
    assert result.chat_template == {
        "default": "default {{ messages }}",
        "tool_use": "tools {{ tools }}",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "has 'ab', which is not a pair"),
        ({"merges": ["zzz yyy"]}, "tokenizer is damaged"),
        ({"add_bos_token": True, "bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_unusable_tokenizers_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    metadata = metadata_of(by_hand("gpt-2"), "gpt-2")
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ModelError, match=message):
        write(tmp_path, metadata)


Words = dict[str, int]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyGguf("llama", num_hidden_layers=1).write(tmp_path_factory.mktemp("file") / "m.gguf")


def source(file: Path, folder: Path, change: Callable[[Words], Words] = dict) -> Path:
    """A folder with the tokenizer of `file`, its vocabulary changed."""
    made = prepare_gguf(file, folder / "own", tokenizer=None)
    target = folder / "source"
    target.mkdir()
    content = json.loads((made / "tokenizer.json").read_text())
    model = content["model"]
    special = {each["content"]: each["id"] for each in content["added_tokens"]}
    model["vocab"] = change(model["vocab"])
    model["merges"] = []
    content["added_tokens"] = [
        each | {"id": model["vocab"][text]}
        for each, text in zip(content["added_tokens"], special, strict=True)
    ]
    content["post_processor"] = None
    (target / "tokenizer.json").write_text(json.dumps(content))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return target


def rotated(words: Words) -> Words:
    """Every token has the id of the next one."""
    return {word: (id_ + 1) % len(words) for word, id_ in words.items()}


def with_two_swapped(words: Words) -> Words:
    return words | {"hell": words["or"], "or": words["hell"]}


def enlarged(words: Words) -> Words:
    return words | {f"more{id_}": id_ for id_ in range(len(words), SIZES["vocab_size"] + 1)}


def prepare(file: Path, folder: Path, change: Callable[[Words], Words] = dict) -> Path:
    return prepare_gguf(file, folder / "cache", tokenizer=source(file, folder, change))


def test_the_tokenizer_and_its_end_match_the_folder(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = prepare(file, tmp_path)
    assert not caplog.records
    assert read_config(made)["eos_token_id"] == 0
    theirs = Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json"))
    assert Tokenizer.from_file(str(made / "tokenizer.json")).to_str() == theirs.to_str()


def test_another_vocabulary_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as refusal:
        prepare(file, tmp_path, rotated)
    assert str(refusal.value) == (
        f"the tokenizer in {tmp_path / 'source'} has other ids for 266 of the 266 tokens in the file: "
        "id 0 is '<think>', and '<|endoftext|>' in the file; name the model that the file was made from"
    )
    assert not list((tmp_path / "cache").glob("*"))


def test_some_other_tokens_are_reported(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prepare(file, tmp_path, with_two_swapped)
    (record,) = caplog.records
    assert "has other ids for 2 of the 266 tokens" in record.message


def test_more_tokens_than_embeddings_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="ids up to 288, and the model embeddings for 288"):
        prepare(file, tmp_path, enlarged)


def test_a_file_without_a_vocabulary_takes_any(tmp_path: Path) -> None:
    whole = TinyGguf("llama", num_hidden_layers=1)
    folder = source(whole.write(tmp_path / "whole.gguf"), tmp_path)
    metadata: dict[str, Any] = dict.fromkeys(
        key for key in whole.metadata if key.startswith("tokenizer.")
    )
    bare = TinyGguf("llama", num_hidden_layers=1, metadata=metadata)
    made = prepare_gguf(bare.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=folder)
    assert (made / "tokenizer.json").is_file()


def read(*, vocab_size: int = 8, **values: Any) -> Vocabulary:
    result = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return Vocabulary.read(Metadata(result, "m.gguf"), vocab_size=vocab_size)


def test_tokens_are_looked_up_by_id_kind_and_name() -> None:
    kinds = np.array([TokenKind.CONTROL, TokenKind.NORMAL, TokenKind.NORMAL], np.int32)
    result = read(tokens=["<s>", "a", "b"], token_type=kinds, bos_token_id=0)
    assert result.ids == {"<s>": 0, "a": 1, "b": 2}
    assert result.of_kind(TokenKind.NORMAL) == [1, 2]
    assert result.text("bos") == "<s>"
    assert result.text("eos") is None


def test_without_kinds_all_are_normal() -> None:
    assert read(tokens=["a", "b"]).of_kind(TokenKind.NORMAL) == [0, 1]


def test_empty_tokens_get_names() -> None:
    assert read(tokens=["a", "", ""]).tokens == ["a", "[EMPTY_1]", "[EMPTY_2]"]


def test_tokens_that_end_an_answer_are_recognised() -> None:
    """Those that the file names come first; a word with the text of one is a word."""
    tokens = ["<s>", "<|im_end|>", "<|eot_id|>", "</s>", "stop"]
    kinds = np.array([TokenKind.CONTROL] * 3 + [TokenKind.NORMAL] * 2, np.int32)
    result = read(tokens=tokens, token_type=kinds, eos_token_id=2, eot_token_id=4)
    assert result.end_ids() == [2, 4, 1]


def test_the_end_of_a_message_of_gpt_oss_does_not_end_the_answer() -> None:
    tokens = ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"]
    kinds = np.array([TokenKind.CONTROL] * 4, np.int32)
    assert read(tokens=tokens, token_type=kinds, eos_token_id=0).end_ids() == [0, 1, 3]
    others = ["<|return|>", "<|user|>", *tokens[2:]]
    assert read(tokens=others, token_type=kinds, eos_token_id=3).end_ids() == [3, 0, 2]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, UnsupportedModel, "no tokenizer.ggml.tokens.*--tokenizer-name"),
        ({"tokens": list("abcdefghi")}, WeightsError, "9 tokens, and the model embeddings for 8"),
        ({"tokens": ["a", "b", "a"]}, WeightsError, "token 'a' twice"),
        ({"tokens": ["a", "b"], "token_type": np.array([1])}, WeightsError, "1 kinds for 2 tokens"),
        ({"tokens": ["a"], "eos_token_id": 1}, WeightsError, "eos_token_id=1, .* has 1 tokens"),
    ],
)
def test_unusable_vocabularies_are_refused(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(**values)


def test_the_sampling_of_a_model_card_is_the_folders_default(file: Path, tmp_path: Path) -> None:
    card = PUBLISHED_MODELS["smollm2"].sampling
    assert card == {"temperature": 0.2, "top_p": 0.9}
    with_card = partial(prepare_gguf, file, tmp_path / "cache", sampling=card)
    plain = prepare_gguf(file, tmp_path / "cache", tokenizer=None)
    bare, own = source(file, tmp_path), tmp_path / "own_sampling"
    shutil.copytree(bare, own)
    (own / "generation_config.json").write_text('{"temperature": 0.7}')
    folders = [plain, *(with_card(tokenizer=one) for one in (None, bare, own))]
    made = [json.loads((one / "generation_config.json").read_text()) for one in folders]
    sampled = [(one.get("temperature"), one.get("top_p")) for one in made]
    assert sampled == [(None, None), (0.2, 0.9), (0.2, 0.9), (0.7, 0.9)]
