"""The keys that clients may present, the file of `--api-key-file`, and their comparison."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from hmac import compare_digest
from pathlib import Path

import structlog
from aiohttp import web

from millrace_router.config import RouterConfig
from millrace_router.request.scheduling import API_KEY_HEADER, authorization

MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

log = structlog.get_logger(__name__)
KEY_NAME: web.RequestKey[str] = web.RequestKey("key_name", str)
"""Name of the key that a request presented; absent for the key of `--api-key`, and on servers without keys."""


class KeyFileError(Exception):
    """The file of keys cannot be used; the message does not contain a key."""


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
        raise KeyFileError(f"{path} does not contain a key")
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


class ApiKeys:
    """The key of `--api-key`, which is unnamed, and the keys of `--api-key-file`."""

    def __init__(self, unnamed: str | None, file: Path | None = None) -> None:
        """Read the file; raises KeyFileError."""
        self._unnamed = [] if unnamed is None else [("", unnamed)]
        self._file = file
        self._keys = _encoded(self._unnamed if file is None else self._unnamed + read_keys(file))

    @classmethod
    def of(cls, config: RouterConfig) -> ApiKeys:
        """Return the keys of the flags; raises KeyFileError."""
        return cls(config.api_key, config.api_key_file)

    @property
    def are_required(self) -> bool:
        """Whether clients need a key at all."""
        return bool(self._keys)

    @property
    def can_change(self) -> bool:
        """Whether there is a file to read again."""
        return self._file is not None

    def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the key in the headers, "" for the key without a name; None without a right key."""
        presented = _presented(headers)
        match = None
        # Every key is compared whole, even after a match, so that the time reveals nothing.
        for name, bearer, bare in self._keys:
            if _matches(presented, bearer, bare):
                match = name
        return match

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request with these headers has a right key, or needs none."""
        return not self._keys or self.name_of(headers) is not None

    def reload(self) -> None:
        """Read the file again; a bad one leaves the keys as they are, and is logged."""
        if self._file is None:
            return
        try:
            named = read_keys(self._file)
        except KeyFileError as error:
            log.error("the API keys stay as they were", error=str(error))  # noqa: TRY400
            return
        self._keys = _encoded(self._unnamed + named)
        log.info("API keys were read", names=len({name for name, _ in named}))


def presents_key(headers: Mapping[str, str], key: str) -> bool:
    """Return whether `key` is in the headers, exactly: as a bearer token, or in `x-api-key` for Anthropic's clients."""
    ((_, bearer, bare),) = _encoded([("", key)])
    return _matches(_presented(headers), bearer, bare)


def _encoded(keys: Iterable[tuple[str, str]]) -> list[tuple[str, bytes, bytes]]:
    """Name, bearer token and bare key of each."""
    return [(name, f"Bearer {key}".encode(), key.encode()) for name, key in keys]


def _presented(headers: Mapping[str, str]) -> tuple[bytes, bytes]:
    presented = authorization(headers), headers.get(API_KEY_HEADER, "")
    return presented[0].encode(errors="surrogateescape"), presented[1].encode(
        errors="surrogateescape"
    )


def _matches(presented: tuple[bytes, bytes], bearer: bytes, bare: bytes) -> bool:
    as_bearer = compare_digest(presented[0], bearer)
    as_bare = compare_digest(presented[1], bare)
    return as_bearer or as_bare
