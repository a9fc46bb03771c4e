"""Fetches an adapter from the Hugging Face hub: the commit and the sizes first, then two files of that commit.

A redirect is followed to the hub itself, and over HTTPS to its hosts for files; the token goes only to the hub.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from millrace_router.adapters.fetching.errors import (
    FetchError,
    Forbidden,
    NotFound,
    Unavailable,
)
from millrace_router.adapters.fetching.source_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    SourceFiles,
    check_listing,
)

FILE_DOMAINS = ("hf.co", "huggingface.co")
"""The hub's hosts for files are below these."""
DEFAULT_REVISION = "main"
MAX_REDIRECTS = 5
MAX_LISTING_BYTES = 16 << 20
SOCKET_SECONDS = 20.0
CHUNK_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a repository, and its files."""

    repository: str
    commit: str
    sizes: dict[str, int]
    sha256: dict[str, str]
    """SHA-256 of the files that the hub keeps by their hash."""

    def digest(self) -> str:
        """Return the key under which a refusal of this commit is remembered."""
        return hashlib.sha256(f"{self.repository}@{self.commit}".encode()).hexdigest()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the caller, which decides about the host and the token."""

    def http_error_302(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
    ) -> None:
        """Make an error of the redirect."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub at `endpoint`, with a client's token or none."""

    endpoint: str
    token: str | None = field(default=None, repr=False)

    def commit_of(self, repository: str, revision: str | None) -> Commit:
        """Ask for the commit of a branch, tag or commit, and for its files.

        Raises:
            NotFound, Forbidden: by what the hub answers, with and without a token.
            Unavailable: the server did not answer, or not as a hub does.

        """
        revision = revision or DEFAULT_REVISION
        if not (_NAME.fullmatch(repository) and _REVISION.fullmatch(revision)):
            raise NotFound
        if ".." in repository or ".." in revision:
            raise NotFound
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise Forbidden
        url = f"{self.endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        with self._open(url) as response:
            text = response.read(MAX_LISTING_BYTES + 1)
        try:
            return _commit(repository, text)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unavailable("the hub's list of the adapter's files cannot be read") from None

    def read(self, commit: Commit, max_bytes: int) -> SourceFiles:
        """Download the two files, whose sizes the listing has; raises FetchError."""
        check_listing(commit.sizes, max_bytes)
        return SourceFiles(
            self._download(commit, CONFIG_FILE), self._download(commit, WEIGHTS_FILE)
        )

    def _download(self, commit: Commit, name: str) -> bytes:
        size = commit.sizes[name]
        url = f"{self.endpoint}/{commit.repository}/resolve/{commit.commit}/{name}"
        data = bytearray(size)
        view, filled = memoryview(data), 0
        with self._open(url) as response:
            while filled < size:
                chunk = response.read(min(CHUNK_BYTES, size - filled))
                if not chunk:
                    raise Unavailable(f"the download of {name} was cut short")
                view[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            if response.read(1):
                raise Unavailable(f"{name} is longer than in the hub's list of files")
        if commit.sha256.get(name, digest := hashlib.sha256(data).hexdigest()) != digest:
            raise Unavailable(f"the download of {name} is damaged")
        return bytes(data)

    def _open(self, url: str) -> _Response:
        """Follow redirects as far as they are allowed."""
        opener = urllib.request.build_opener(_NoRedirect)
        for _ in range(MAX_REDIRECTS + 1):
            request = urllib.request.Request(url, headers=self.headers_for(url))  # noqa: S310
            try:
                return _Response(opener.open(request, timeout=SOCKET_SECONDS))
            except urllib.error.HTTPError as error:
                with error:
                    location = error.headers.get("location")
                    if not (300 <= error.code < 400 and location):
                        raise self._refusal(error) from None
                url = self.redirect(url, location)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise Unavailable(f"the hub does not answer ({type(error).__name__})") from None
        raise Unavailable("the hub redirects too often")

    def headers_for(self, url: str) -> dict[str, str]:
        """Headers of a request; the token goes only to the endpoint."""
        headers = {"user-agent": "millrace", "accept-encoding": "identity"}
        if self.token is not None and _origin(urlsplit(url)) == _origin(urlsplit(self.endpoint)):
            headers["authorization"] = f"Bearer {self.token}"
        return headers

    def redirect(self, url: str, location: str) -> str:
        """Return the address that a redirect leads to; raises Unavailable for another host than the hub's."""
        try:
            target = urljoin(url, location)
            parts, endpoint = urlsplit(target), urlsplit(self.endpoint)
            is_hub = _origin(parts) == _origin(endpoint)
        except ValueError:
            raise Unavailable("the hub redirects to no address") from None
        host = parts.hostname or ""
        domains = (*FILE_DOMAINS, endpoint.hostname or "")
        is_of_hub = any(host == domain or host.endswith(f".{domain}") for domain in domains)
        if not is_hub and not (parts.scheme == "https" and parts.port in (None, 443) and is_of_hub):
            raise Unavailable("the hub redirects to another host, which is not followed")
        return target

    def _refusal(self, error: urllib.error.HTTPError) -> FetchError:
        if error.code in (401, 403):
            return NotFound() if self.token is None else Forbidden()
        if error.code == 404:
            return NotFound()
        after = error.headers.get("retry-after", "")
        seconds = float(after) if re.fullmatch(r"\d{1,5}", after) else None
        return Unavailable(f"the hub answers {error.code}", retry_after_seconds=seconds)


class _Response:
    """A response whose failures while it is read are Unavailable."""

    def __init__(self, response: IO[bytes]) -> None:
        self._response = response

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def read(self, count: int) -> bytes:
        try:
            return self._response.read(count)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"the hub's answer breaks off ({type(error).__name__})") from None


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    default = {"https": 443, "http": 80}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default


def _commit(repository: str, text: bytes) -> Commit:
    answer = json.loads(text)
    commit = answer["sha"]
    if not _COMMIT.fullmatch(commit):
        raise ValueError
    sizes, sha256 = {}, {}
    for file in answer["siblings"]:
        name, size = file["rfilename"], file.get("size")
        if type(size) is int and size >= 0:
            sizes[name] = size
        if large := file.get("lfs"):
            sha256[name] = str(large["sha256"])
    return Commit(repository, commit, sizes, sha256)
