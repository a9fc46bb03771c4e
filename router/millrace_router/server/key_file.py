"""The file of `--api-key-file`: one `NAME:KEY` a line."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

log = structlog.get_logger(__name__)


class KeyFileError(Exception):
    """The file cannot be read, or a line is none; the message has no key."""


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Read (name, key) of every line; a name may occur again, so that a key can be replaced without a gap.

    Empty lines, and lines that begin with `#`, are skipped. A name has up to 64 letters, digits and `._@-`; a key has
    no white space. Logs a warning for a file that every user of the host may read.

    Raises:
        KeyFileError: as above.

    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
            is_public = bool(path.stat().st_mode & stat.S_IROTH)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise KeyFileError(f"{path} has more than {MAX_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is not UTF-8") from None
    keys = list(_entries(path, text))
    if not keys:
        raise KeyFileError(f"{path} has no key")
    if is_public:
        log.warning("every user of this host can read the file of API keys", path=str(path))
    return keys


def _entries(path: Path, text: str) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, colon, key = (part.strip() for part in entry.partition(":"))
        where = f"{path}, line {number}"
        if not colon or _NAME.fullmatch(name) is None:
            raise KeyFileError(f"{where}: must be NAME:KEY")
        if not key or not key.isprintable() or any(character.isspace() for character in key):
            raise KeyFileError(f"{where}: the key is empty, or has white space")
        if owners.setdefault(key, name) != name:
            raise KeyFileError(f"{where}: another name has the same key")
        yield name, key
