"""Which package index `make install` gives to pip for torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tools.torch_index import PipSettings, ask, choose

from millrace_testing.project import ROOT

LONG = 30.0
SHORT = 0.2
PAGE = b'<a href="torch-2.13.0%2Bcpu-cp312-cp312-linux_x86_64.whl">torch</a>'
NO_GPU = {"PATH": ""}


class Index(ThreadingHTTPServer):
    """A package index that answers every path with `page`; a page of None never ends."""

    daemon_threads = True

    def __init__(self, page: bytes | None, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.page, self.status = page, status
        self.paths: list[str] = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Index)
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()
        if self.server.page is not None:
            self.wfile.write(self.server.page)
            return
        while not self.server.stopped.wait(0.01):
            self.wfile.write(b"<br>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving(page: bytes | None, status: int = 200) -> Iterator[Index]:
    with Index(page, status) as index:
        thread = threading.Thread(target=index.serve_forever)
        thread.start()
        yield index
        index.stopped.set()
        index.shutdown()
        thread.join()


def test_an_index_that_answers_is_used_after_one_request(tmp_path: Path) -> None:
    with serving(PAGE) as index:
        cpu = f"{index.url}/whl/cpu"
        choice = choose(NO_GPU, PipSettings(), root=tmp_path, cpu_index=cpu, seconds=LONG)
        assert index.paths == ["/whl/cpu/torch/"]
    assert choice.index == cpu
    assert "no NVIDIA GPU" in choice.reason


@pytest.mark.parametrize(("page", "status"), [(b"<html>Log in</html>", 200), (PAGE, 404)])
def test_an_index_without_wheels_of_torch_is_not_used(
    page: bytes, status: int, tmp_path: Path
) -> None:
    with serving(page, status) as index:
        choice = choose(NO_GPU, PipSettings(), root=tmp_path, cpu_index=index.url, seconds=LONG)
    assert choice.index is None
    assert index.url in choice.reason


def test_an_index_whose_answer_never_ends_is_not_waited_for() -> None:
    with serving(None) as index:
        assert ask(index.url, PipSettings(), SHORT) == "did not answer within 0.2 s"


def test_the_proxy_of_pip_is_used() -> None:
    with serving(PAGE) as proxy:
        assert ask("http://index.invalid/cpu", PipSettings(proxy=proxy.url), LONG) is None
        assert proxy.paths == ["http://index.invalid/cpu/torch/"]


@pytest.mark.parametrize(
    ("device", "is_folder"),
    [("proc/driver/nvidia", True), ("dev/nvidia0", False), ("dev/nvidiactl", False)],
)
def test_a_gpu_means_the_default_index(device: str, is_folder: bool, tmp_path: Path) -> None:
    (tmp_path / device).parent.mkdir(parents=True)
    (tmp_path / device).mkdir() if is_folder else (tmp_path / device).touch()
    with serving(PAGE) as index:
        choice = choose(NO_GPU, PipSettings(), root=tmp_path, cpu_index=index.url, seconds=LONG)
        assert index.paths == []
    assert choice.index is None
    assert choice.reason == "this machine has an NVIDIA GPU"


@pytest.mark.parametrize(
    "settings",
    [
        PipSettings(index_url="http://a/cpu/"),
        PipSettings(extra_index_urls=("http://b", "http://a/cpu")),
        PipSettings(has_no_index=True),
    ],
)
def test_a_configured_index_is_enough(settings: PipSettings, tmp_path: Path) -> None:
    choice = choose(NO_GPU, settings, root=tmp_path, cpu_index="http://a/cpu", seconds=LONG)
    assert choice.index is None
    assert choice.reason.startswith("pip's configuration")


def test_the_environment_overrides_pip_s_files() -> None:
    listed = (
        ":env:.extra-index-url='http://e  http://f'\n:env:.no-index='0'\nglobal.cert='/c'\n"
        "global.extra-index-url='http://g'\nglobal.proxy='http://p'\ninstall.proxy='http://q'\n"
        "global.trusted-host='\\nh\\ni:81'\ndownload.index-url='http://d'\n:env:.index-url=''\n"
    )
    settings = PipSettings.parse(listed)
    assert settings == PipSettings(
        extra_index_urls=("http://e", "http://f"),
        proxy="http://q",
        certificates="/c",
        trusted_hosts=("h", "i:81"),
    )
    assert settings.trusts("h:80")
    assert settings.trusts("i:81")
    assert not settings.trusts("i")


def run(environment: dict[str, str], path: str) -> tuple[str, str]:
    """The output of the program and its line for people."""
    done = subprocess.run(
        [sys.executable, "tools/torch_index.py"],
        cwd=ROOT,
        env={"PATH": path, "PIP_CONFIG_FILE": os.devnull, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("\n") == 1
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("environment", "indexes", "line"),
    [
        ({"TORCH_INDEX": "http://t"}, "http://t", "torch: from http://t (TORCH_INDEX is this URL)"),
        (
            {"TORCH_INDEX": "http://t", "PIP_EXTRA_INDEX_URL": "http://e"},
            "http://e http://t",
            "torch: from http://t (TORCH_INDEX is this URL)",
        ),
        (
            {"TORCH_INDEX": "", "PIP_EXTRA_INDEX_URL": "http://e"},
            "http://e",
            "torch: from pip's default index (TORCH_INDEX is empty)",
        ),
        (
            {"PIP_NO_INDEX": "1"},
            "",
            "torch: from pip's default index (pip's configuration allows no index)",
        ),
    ],
)
def test_the_program_adds_to_pip_s_own_indexes(
    environment: dict[str, str], indexes: str, line: str
) -> None:
    assert run(environment, os.defpath) == (f"{indexes}\n", f"{line}\n")
