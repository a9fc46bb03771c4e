"""The tokenizer in the metadata of a GGUF file, as the tokenizer.json and tokenizer_config.json of a model folder."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.model_loader.gguf.metadata import Metadata
from millrace_shard.model_loader.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from millrace_shard.model_loader.gguf.sentencepiece import sentencepiece_model
from millrace_shard.model_loader.gguf.vocabulary import PREFIX, TokenKind, Vocabulary

TEMPLATE = "tokenizer.chat_template"
REMEDY = "name a model with the right tokenizer: --tokenizer-name"


def tokenizer_json(metadata: Metadata, vocabulary: Vocabulary) -> str:
    """The text of a tokenizer.json. Raises UnsupportedModel for other kinds, and WeightsError for damaged ones."""
    kind = metadata.text(f"{PREFIX}model")
    if kind == "gpt2":
        starts, parts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        starts, parts = True, sentencepiece_model(metadata, vocabulary)
    else:
        raise UnsupportedModel(
            f"{PREFIX}model={kind!r} is not supported, gpt2 and llama are; {REMEDY}"
        )
    text = json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(vocabulary),
            **parts,
            "post_processor": _ends(metadata, vocabulary, starts=starts),
        },
        ensure_ascii=False,
    )
    try:
        Tokenizer.from_str(text)
    except Exception as error:
        # The library raises plain exceptions.
        raise WeightsError(f"the file's tokenizer is damaged: {error}; {REMEDY}") from error
    return text


def tokenizer_config(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The object of a tokenizer_config.json: special tokens and chat templates."""
    texts = {f"{name}_token": vocabulary.text(name) for name in ("bos", "eos", "unk", "pad")}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in texts.items() if text is not None},
    }
    templates = {"default": metadata.text(TEMPLATE)}
    for name in metadata.texts("tokenizer.chat_templates") or ():
        templates[name] = metadata.text(f"{TEMPLATE}.{name}")
    found = [{"name": name, "template": text} for name, text in templates.items() if text]
    if found:
        single = len(found) == 1 and found[0]["name"] == "default"
        config["chat_template"] = found[0]["template"] if single else found
    return config


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> tuple[bool, dict[str, Any]]:
    """Whether prompts begin with bos, and the parts of a byte-level tokenizer.json."""
    pre = _pre_tokenizer(metadata)
    merges = metadata.texts(f"{PREFIX}merges")
    if merges is None:
        raise WeightsError(f"the file has no {PREFIX}merges; {REMEDY}")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": metadata.flag(f"{PREFIX}add_space_prefix") or False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return pre.starts, {
        "normalizer": {"type": "NFC"} if pre.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "decoder": {**to_bytes, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocabulary.ids,
            "merges": [_pair(merge) for merge in merges],
        },
    }


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text(f"{PREFIX}pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{PREFIX}pre={name!r} is not supported, these are: {', '.join(PRE_TOKENIZERS)}; {REMEDY}"
        )
    return PRE_TOKENIZERS[name]


def _pair(merge: str) -> tuple[str, str]:
    # A token may begin with a space.
    left, _, right = merge[1:].partition(" ")
    if not right:
        raise WeightsError(f"{PREFIX}merges has {merge!r}, which is no pair; {REMEDY}")
    return merge[:1] + left, right


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are recognised in a text before it is split into words."""
    kinds = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
    return [
        {
            "id": id_,
            "content": vocabulary.tokens[id_],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.kinds[id_] != TokenKind.USER_DEFINED,
        }
        for id_ in vocabulary.of_kind(*kinds)
    ]


def _ends(metadata: Metadata, vocabulary: Vocabulary, *, starts: bool) -> dict[str, Any] | None:
    """The post-processor, which adds the bos and eos tokens that the file asks for."""
    asked = {
        "bos": metadata.flag(f"{PREFIX}add_bos_token"),
        "eos": metadata.flag(f"{PREFIX}add_eos_token"),
    }
    if asked["bos"] is None:
        asked["bos"] = starts and "bos" in vocabulary.named
    for name, wanted in asked.items():
        if wanted and name not in vocabulary.named:
            raise WeightsError(
                f"{PREFIX}add_{name}_token is set, and the file has no {PREFIX}{name}_token_id"
            )
    if not any(asked.values()):
        return None
    special = [
        {"SpecialToken": {"id": vocabulary.text(name), "type_id": 0}}
        for name, wanted in asked.items()
        if wanted
    ]
    place = 1 if asked["bos"] else 0

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        return [
            *special[:place],
            {"Sequence": {"id": sequence, "type_id": type_id}},
            *special[place:],
        ]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]}
            for text in (vocabulary.text(name) for name, wanted in asked.items() if wanted)
            if text is not None
        },
    }
