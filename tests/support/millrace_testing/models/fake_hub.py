"""A model hub on a local port, as far as downloading needs one."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from millrace_shard.weights.published import PublishedModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/model"
HOLD_SECONDS = 30


@dataclass
class Hub:
    """One repository at one commit, named main; `port` is where it is served."""

    files: Mapping[str, bytes]
    port: int = 0
    token: str | None = None
    """The token that the repository requires; requests without it get 403 with `gated`."""
    hidden: bool = False
    """Answer 401 RepoNotFound, as for private and missing repositories."""
    drop_after: dict[str, int] = field(default_factory=dict)
    """Cut the connection once after this many bytes of a file."""
    held: dict[str, threading.Event] = field(default_factory=dict)
    """Send the second half of a file once its event is set."""
    failures: list[int] = field(default_factory=list)
    """Statuses to answer the next requests for the repository's description with."""
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Server(ThreadingHTTPServer):
    """Lets all threads of a download connect at once: the usual queue of 5 is shorter than they are many."""

    request_queue_size = 128


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("BoundHandler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None: ...

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if REPO not in path or self.hub.hidden:
            return self._fail(401, "RepoNotFound", with_body=with_body)
        wanted = self.hub.token
        if wanted is not None and self.headers.get("Authorization") != f"Bearer {wanted}":
            return self._fail(403, "GatedRepo", with_body=with_body)
        api = f"/api/models/{REPO}"
        if path.startswith(api):
            return self._describe(path.removeprefix(api), with_body=with_body)
        revision, _, name = path.removeprefix(f"/{REPO}/resolve/").partition("/")
        if revision not in ("main", COMMIT):
            return self._fail(404, "RevisionNotFound", with_body=with_body)
        if name not in self.hub.files:
            return self._fail(404, "EntryNotFound", with_body=with_body)
        return self._file(name, with_body=with_body)

    def _describe(self, rest: str, *, with_body: bool) -> None:
        if self.hub.failures:
            return self._fail(self.hub.failures.pop(0), "", with_body=with_body)
        if rest not in ("", "/revision/main", f"/revision/{COMMIT}", f"/tree/{COMMIT}"):
            return self._fail(404, "RevisionNotFound", with_body=with_body)
        if rest == f"/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": "0" * 40}
                for name, body in self.hub.files.items()
            ]
            return self._json(tree, with_body=with_body)
        siblings = [{"rfilename": name, "size": len(body)} for name, body in self.hub.files.items()]
        body = {
            "id": REPO,
            "modelId": REPO,
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
            "tags": [],
        }
        return self._json(body, with_body=with_body)

    def _json(self, body: object, *, with_body: bool) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(200, json.dumps(body).encode(), headers, with_body=with_body)

    def _file(self, name: str, *, with_body: bool) -> None:
        body = self.hub.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start, status = 0, 200
        asked = self.headers.get("Range")
        if asked and with_body:
            self.hub.ranges.append(f"{name} {asked}")
            start, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        cut = self.hub.drop_after.pop(name, None) if with_body else None
        release = self.hub.held.get(name)
        self._send(status, body[start:], headers, with_body=with_body, cut=cut, release=release)

    def _fail(self, status: int, code: str, *, with_body: bool) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"{code} {status}"}
        self._send(status, b'{"error": "no"}', headers, with_body=with_body)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        with_body: bool,
        cut: int | None = None,
        release: threading.Event | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            half = len(body) // 2 if release else 0
            self.wfile.write(body[:half])
            if release is not None:
                assert release.wait(HOLD_SECONDS)
            self.wfile.write(body[half:cut])
        if cut is not None:
            self.close_connection = True


class Halfway(logging.Handler):
    """Waits for a record that tells progress of more than a third."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the share in one record."""
        if getattr(record, "fields", {}).get("fraction", 0) > 0.33:
            self.seen.set()


@contextmanager
def halfway() -> Iterator[threading.Event]:
    """An event that is set once the log of this process tells progress of more than a third."""
    handler = Halfway()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.seen
    finally:
        logging.getLogger().removeHandler(handler)


CONTENT = b"GGUF" + bytes(range(256)) * 400
TINY = PublishedModel(
    name="tiny",
    title="Tiny",
    package="llm-tiny",
    version="1.0",
    wheel_bytes=100_000,
    member="llm_tiny/Tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
)


def publish(index: Path, files: Mapping[str, bytes]) -> Path:
    """Write a wheel of the tiny model with these files to the folder `index`."""
    about = "llm_tiny-1.0.dist-info"
    path = index / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, body in files.items():
            wheel.writestr(name, body)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    return path
