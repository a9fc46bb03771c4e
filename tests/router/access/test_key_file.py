"""The file of API keys: its form, its mistakes, its mode."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from millrace_router.access.keys import MAX_BYTES, KeyFileError, read_keys
from millrace_testing.router.edge import logging_to


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    return path


def test_names_and_keys(file: Path) -> None:
    file.write_text(
        "# teams\n\nsearch : sk-1:2\n  # old and new\nops@acme.org:a\r\nops@acme.org:b\nx.y_z-1:wörld"
    )
    assert read_keys(file) == [
        ("search", "sk-1:2"),
        ("ops@acme.org", "a"),
        ("ops@acme.org", "b"),
        ("x.y_z-1", "wörld"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not contain a key"),
        (b"# nothing\n\n", "does not contain a key"),
        (b"a:secret\nsecret", "line 2: must be NAME:KEY"),
        (b":secret", "line 1: must be NAME:KEY"),
        (b"a b:secret", "line 1: must be NAME:KEY"),
        (b"a\xc3\xa4:secret", "line 1: must be NAME:KEY"),
        (b"a" * 65 + b":secret", "line 1: must be NAME:KEY"),
        (b"a:", "line 1: the key is empty, or has white space"),
        (b"a:secret word", "line 1: the key is empty, or has white space"),
        (b"a:secret\x00", "line 1: the key is empty, or has white space"),
        (b"a:secret\nb:secret", "line 2: another name has the same key"),
        (b"a:\xff", "is not UTF-8"),
        (b"#" * (MAX_BYTES + 1), f"has more than {MAX_BYTES} bytes"),
    ],
)
def test_mistakes_are_named_without_the_key(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(KeyFileError) as error:
        read_keys(file)
    assert str(error.value).startswith(str(file))
    assert str(error.value).endswith(message)
    assert "secret" not in str(error.value)


def test_a_missing_key_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(KeyFileError, match="cannot read"):
            read_keys(path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_all_may_read_is_a_warning(file: Path, mode: int, warns: bool) -> None:
    file.write_text("a:secret")
    file.chmod(mode)
    output = io.BytesIO()
    with logging_to(output):
        read_keys(file)
    logged = output.getvalue().decode()
    assert ("every user of this host can read" in logged) == warns
    assert "secret" not in logged
