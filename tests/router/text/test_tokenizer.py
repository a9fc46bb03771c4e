"""Tokenizer: the Rust tokenizer behind bounds, with byte offsets; and the files of a model."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.config import RouterConfig
from millrace_router.start.files import with_model_folder
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_router.text.model_files import ModelFiles, ModelFilesError, find_snapshot
from millrace_router.text.tokenizer import (
    LONG_CHARS,
    NFC_SHRINKS,
    SEPARATOR,
    Tokenizer,
    TokenizerError,
    TokenTexts,
    longest_token,
)
from millrace_testing.text.texts import (
    CORPUS,
    KINDS,
    byte_fallback,
    byte_level,
    tokenizer,
    word_piece,
    write_model,
)


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_as_the_rust_tokenizer_does(kind: str) -> None:
    rust = KINDS[kind]()
    one = Tokenizer(rust)
    for line in CORPUS[:6]:
        assert one.encode(line) == tuple(rust.encode(line).ids)
    one.close()


def test_a_panic_of_the_library_is_an_error_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> str:
        return decoders.Strip("a", 0, 5).decode(["a"])

    one = Tokenizer(KINDS["byte_level"]())
    methods = dict.fromkeys(("encode_batch", "encode_batch_fast", "decode"), panic)
    monkeypatch.setattr(one, "_rust", SimpleNamespace(**methods))
    for call in (
        lambda: one.encode("a"),
        lambda: one.encode_with_offsets("a"),
        lambda: one.encode_with_starts("a"),
        lambda: one.decode([1], skip_special_tokens=True),
    ):
        with pytest.raises(TokenizerError, match="index out of bounds"):
            call()
    one.close()


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from("ab the好😀é \n"), max_size=30))
def test_spans_are_byte_slices_that_cover_the_text(text: str) -> None:
    spans = tokenizer("byte_level").encode_with_offsets(text)
    raw = text.encode()
    assert [span.id for span in spans] == list(tokenizer("byte_level").encode(text))
    for span in spans:
        assert raw[span.start : span.stop].decode() == span.text
    covered = {offset for span in spans for offset in range(span.start, span.stop)}
    assert covered == set(range(len(raw)))


def test_offsets_count_bytes_not_characters() -> None:
    spans = tokenizer("metaspace").encode_with_offsets("é the")
    assert (spans[-1].text, spans[-1].start, spans[-1].stop) == (" the", 2, 6)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b"])
def test_lone_surrogates_are_a_clear_error(text: str) -> None:
    with pytest.raises(TokenizerError):
        tokenizer("byte_level").encode(text)
    with pytest.raises(TokenizerError):
        tokenizer("byte_level").encode_with_offsets(text)


@pytest.mark.parametrize(
    "text", ["", "\x00", "\U0010ffff", " " * 5000, "a" * 20000, "\ufeff\u200d", "<|end|>" * 50]
)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_text_is_only_text(kind: str, text: str) -> None:
    assert isinstance(tokenizer(kind).encode(text), tuple)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    rust = byte_level()
    rust.enable_truncation(3)
    rust.enable_padding(length=64)
    rust.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    try:
        assert loaded.encode(CORPUS[0]) == tokenizer("byte_level").encode(CORPUS[0])
    finally:
        loaded.close()


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_special_tokens_are_known_and_left_out_on_request(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_model(tmp_path))
    try:
        end = loaded.encode("<|end|>")
        assert len(end) == 1
        assert loaded.is_special(end[0])
        ids = (*loaded.encode("hello"), *end)
        assert not loaded.is_special(ids[0])
        assert loaded.decode(ids, skip_special_tokens=True) == "hello"
        assert loaded.decode(ids, skip_special_tokens=False) == "hello<|end|>"
        assert loaded.vocab_size == 420
    finally:
        loaded.close()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "word_piece"])
def test_token_text_keeps_its_leading_space(kind: str) -> None:
    one = tokenizer(kind)
    ids = one.encode("the dog the dog the dog")
    assert "".join(map(one.token_text, ids)).lstrip() == "the dog the dog the dog"
    assert one.token_text(10**6) == ""


def test_special_tokens_are_added_unless_switched_off() -> None:
    from tokenizers.processors import TemplateProcessing

    rust = byte_fallback()
    rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    one = Tokenizer(rust)
    try:
        with_start = one.encode("the cat")
        assert with_start == (1, *one.encode("the cat", add_special_tokens=False))
        first = one.encode_with_offsets("the cat")[0]
        assert (first.id, first.text, first.start, first.stop) == (1, "", 0, 0)
    finally:
        one.close()


async def test_encode_async_uses_a_bounded_number_of_other_threads() -> None:
    one = _RecordingTokenizer(byte_level(), validation_workers=2)
    try:
        texts = [f"{line} {i}" for i, line in enumerate(CORPUS)]
        encoded = await asyncio.gather(*(one.encode_async(text) for text in texts))
        assert encoded == [Tokenizer.encode(one, text) for text in texts]
        assert threading.get_ident() not in one.threads
        assert len(one.threads) <= 2
        with pytest.raises(TokenizerError):
            await one.encode_async("\ud800")
    finally:
        one.close()


async def test_long_texts_do_not_delay_short_ones() -> None:
    one = Tokenizer(byte_level(), validation_workers=1)
    gate = threading.Event()
    try:
        long = asyncio.create_task(one.in_thread(gate.wait, num_chars=LONG_CHARS + 1))
        async with asyncio.timeout(30.0):
            assert await one.encode_async(CORPUS[0]) == one.encode(CORPUS[0])
            behind = asyncio.create_task(one.encode_async("a" * (LONG_CHARS + 1)))
            assert await one.encode_async(CORPUS[0]) == one.encode(CORPUS[0])
        assert not behind.done()
        gate.set()
        assert await long
        assert len(await behind)
    finally:
        gate.set()
        one.close()


class _RecordingTokenizer(Tokenizer):
    def __init__(self, rust: RustTokenizer, *, validation_workers: int) -> None:
        super().__init__(rust, validation_workers=validation_workers)
        self.threads: set[int] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if threading.current_thread() is not threading.main_thread():
            self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_the_loop_goes_on_while_a_long_text_is_encoded() -> None:
    """With no forced switch of threads, the loop turns only if the encoder lets it."""
    turns = 0
    during: list[int] = []

    class Watched(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            before = turns
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            during.append(turns - before)
            return ids

    one = Watched(byte_level(), validation_workers=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        # On a busy machine the event loop may not run within the few milliseconds of one text.
        while len(during) < 100 and not any(during):
            encoding = asyncio.ensure_future(one.encode_async(" ".join(CORPUS) * 200))
            while not encoding.done():
                turns += 1
                await asyncio.sleep(0.0001)
            assert len(await encoding) > 10_000
        assert any(during)
    finally:
        sys.setswitchinterval(interval)
        one.close()


SHRINKING = "\u1fbe\u0308\u0301\u212a\u1112\u1161\u11ab"


def composing() -> RustTokenizer:
    """A tokenizer as in Qwen: characters are composed first."""
    rust = byte_level()
    rust.normalizer = normalizers.NFC()
    return rust


def llama_like() -> RustTokenizer:
    """A tokenizer as in Llama 2: byte-pair with a token for each byte."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁", "ab", "▁ab", "▁▁"]
    rust = RustTokenizer(
        models.BPE(
            {piece: id_ for id_, piece in enumerate(pieces)},
            [("a", "b"), ("▁", "ab"), ("▁", "▁")],
            byte_fallback=True,
        )
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return rust


def splitting() -> RustTokenizer:
    """A tokenizer as in Llama 3: text is split by a pattern first."""
    rust = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return rust


BOUNDED = {"byte_level": byte_level(), "composing": composing(), "byte_fallback": llama_like()}
BOUNDED["splitting"] = splitting()


@pytest.mark.parametrize("kind", BOUNDED)
@given(
    text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(SHRINKING)))
)
@example(text=" " * 4000)
@example(text="the quick" * 500)
@example(text="\u1fbe\u0308\u0301" * 500)
@example(text="<|user|>" * 100)
def test_no_text_becomes_fewer_tokens(kind: str, text: str) -> None:
    rust = BOUNDED[kind]
    most = longest_token(rust)
    assert most is not None
    ids = rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert len(ids) * most >= len(text.encode())


def without_a_byte() -> RustTokenizer:
    rust = RustTokenizer(models.BPE({"a": 0, "b": 1}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return rust


def swallowing_blanks() -> RustTokenizer:
    rust = byte_level()
    rust.add_special_tokens([AddedToken("<|x|>", rstrip=True, special=True)])
    return rust


def removing_blanks() -> RustTokenizer:
    rust = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return rust


def stripping() -> RustTokenizer:
    rust = byte_level()
    rust.normalizer = normalizers.Strip()
    return rust


def cutting_short() -> RustTokenizer:
    rust = byte_level()
    rust.normalizer = normalizers.Replace("abcdef" * 5, "a")
    return rust


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (word_piece, "x" * 999),
        (without_a_byte, "c" * 999),
        (swallowing_blanks, "<|x|>" + " " * 999),
        (removing_blanks, " " * 999),
        (stripping, " " * 999),
        (cutting_short, "abcdef" * 5 * 999),
    ],
)
def test_where_a_token_may_stand_for_any_text_nothing_is_promised(
    make: Callable[[], RustTokenizer], text: str
) -> None:
    rust = make()
    ids = rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
    # The text really has far fewer tokens than its length divided by the longest vocabulary entry.
    longest = max(map(len, rust.get_vocab()))
    assert len(ids) * longest < len(text)
    assert longest_token(rust) is None


def test_composition_shrinks_no_text_by_more_than_the_bound() -> None:
    """Texts that compose to one character have its decomposition."""
    longest_source: dict[str, int] = defaultdict(int)
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for char in characters:
        plain = unicodedata.normalize("NFD", char)
        if len(plain) == 1:
            longest_source[plain] = max(longest_source[plain], len(char.encode()))
    worst = max(
        sum(longest_source[part] for part in unicodedata.normalize("NFD", char))
        / len(char.encode())
        for char in characters
    )
    assert 3 < worst <= NFC_SHRINKS


TEXTS = st.text("ab\n🙂", max_size=4)


@given(texts=st.lists(TEXTS, max_size=8), part=st.text("ab\n🙂", min_size=1, max_size=3))
@example(texts=["ab", "ba", "", "aa"], part="a")
@example(texts=["a", "b"], part="ab")
def test_each_token_with_the_part_is_listed_once(texts: list[str], part: str) -> None:
    tokens = list(TokenTexts(texts).having(part))
    assert tokens == [index for index, text in enumerate(texts) if part in text]


def test_no_part_reaches_over_two_tokens() -> None:
    assert not list(TokenTexts(["a", "b"]).having(f"a{SEPARATOR}b"))


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    files = ModelFiles.load(tmp_path)
    assert files == ModelFiles()
    assert files.model_type is None
    assert files.special_tokens == {}
    assert files.chat_template is None


def test_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "llama"})
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    files = ModelFiles.load(tmp_path)
    assert files.model_type == "llama"
    assert files.generation_config == {"eos_token_id": [1, 2]}


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    tokens = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
    }
    write(tmp_path, "tokenizer_config.json", tokens)
    assert ModelFiles.load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates_are_taken_in_order(tmp_path: Path) -> None:
    def found() -> str | None:
        return ModelFiles.load(tmp_path).chat_template

    write(tmp_path, "processor_config.json", {"chat_template": "processor"})
    assert found() == "processor"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert found() == "config"
    write(tmp_path, "chat_template.jinja", "jinja file\n")
    assert found() == "jinja file\n"
    write(tmp_path, "chat_template.json", {"chat_template": "json file"})
    assert found() == "json file"


def test_a_chosen_config_replaces_the_folder_s(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config", "bos_token": "<a>"})
    write(tmp_path, "chat_template.jinja", "jinja file")
    chosen = write(tmp_path, "other.json", {"chat_template": "chosen", "bos_token": "<b>"})
    files = ModelFiles.load(tmp_path, tokenizer_config_path=chosen)
    assert files.chat_template == "chosen"
    assert files.special_tokens == {"bos_token": "<b>"}
    chosen.write_text("{}")
    assert ModelFiles.load(tmp_path, tokenizer_config_path=chosen).chat_template == "jinja file"


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NAMED, ("d", "t")),
        ([*NAMED, {"name": "rag", "template": "r"}], ("d", "t")),
        ({"default": "d", "tool_use": "t"}, ("d", "t")),
        (NAMED[:1], (None, "t")),
        ([{"name": [], "template": {}}, 3], (None, None)),
        ("d", ("d", None)),
        (None, (None, None)),
        (17, (None, None)),
    ],
    ids=str,
)
def test_named_templates_are_read(
    tmp_path: Path, template: object, expected: tuple[str | None, str | None]
) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": template})
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tool_template) == expected


def test_separate_template_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "tools")
    write(tmp_path, "additional_chat_templates/rag.jinja", "documents")
    write(tmp_path, "tokenizer_config.json", {"chat_template": NAMED})
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tool_template) == ("d", "tools")
    write(tmp_path, "chat_template.jinja", "default")
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tool_template) == ("default", "tools")


def test_a_chosen_template_is_the_one_for_tools_too(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": NAMED})
    chosen = write(tmp_path, "other.json", {"chat_template": "chosen"})
    files = ModelFiles.load(tmp_path, tokenizer_config_path=chosen)
    assert (files.chat_template, files.tool_template) == ("chosen", None)
    write(tmp_path, "other.json", {"chat_template": [{"name": "tool_use", "template": "mine"}]})
    files = ModelFiles.load(tmp_path, tokenizer_config_path=chosen)
    assert (files.chat_template, files.tool_template) == (None, "mine")


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_malformed_files_are_named(tmp_path: Path, content: str) -> None:
    write(tmp_path, "config.json", content)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        ModelFiles.load(tmp_path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFilesError, match=r"chat_template\.jinja cannot be read"):
        ModelFiles.load(tmp_path)
    with pytest.raises(ModelFilesError, match="does not exist"):
        ModelFiles.load(tmp_path, tokenizer_config_path=tmp_path / "none.json")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two commits of org/model, of which main and refs/pr/1 are names, as the hub's client lays them out."""
    model = tmp_path / "hub" / "models--org--model"
    for commit in (COMMIT, OTHER):
        (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs" / "refs" / "pr").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "refs" / "refs" / "pr" / "1").write_text(f"{OTHER}\n")
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, COMMIT), ("main", COMMIT), ("refs/pr/1", OTHER), (OTHER, OTHER)],
)
def test_the_snapshot_of_a_revision_is_located(
    cache: Path, revision: str | None, commit: str
) -> None:
    folder = find_snapshot("org/model", revision=revision, cache=cache)
    assert folder == cache / "models--org--model" / "snapshots" / commit


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("org/model", "v9"),
        ("org/other", None),
        ("model", None),
        ("a/b/c", None),
        ("/nowhere", None),
        ("..", None),
    ],
)
def test_the_remedy_is_named(cache: Path, name: str, revision: str | None) -> None:
    with pytest.raises(ModelFilesError) as caught:
        find_snapshot(name, revision=revision, cache=cache)
    assert f"download-weights {name}" in str(caught.value)
    assert str(cache) in str(caught.value)
    assert ("at revision v9" in str(caught.value)) == (revision == "v9")


def test_the_router_takes_a_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    config = with_model_folder(RouterConfig.from_args(["--tokenizer-name=org/model"]))
    assert config.model_folder == cache / "models--org--model" / "snapshots" / COMMIT
    assert (config.model_id, config.revision) == ("org/model", COMMIT)


def test_the_router_takes_folders_as_they_are(tmp_path: Path) -> None:
    for flag in ("--tokenizer-name", "--model-folder"):
        config = RouterConfig.from_args([f"{flag}={tmp_path}"])
        assert with_model_folder(config) is config


async def test_a_name_that_is_not_there_ends_the_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(cache))
    with pytest.raises(StartupError, match="org/absent is neither a folder nor"):
        await start(RouterConfig.from_args(["--tokenizer-name=org/absent"]))


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/c"}, "/c"),
        ({"HF_HUB_CACHE": "/d", "HUGGINGFACE_HUB_CACHE": "/c"}, "/d"),
    ],
)
def test_the_cache_folder_follows_the_hubs_variables(
    variables: dict[str, str], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert RouterConfig.from_args(["--model-folder=m"]).hub_cache == Path(cache).expanduser()
