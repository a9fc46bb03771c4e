"""Folders that clients name: below the root with every link resolved, or not found; and files that are not adapters."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from millrace_router.adapters.fetching.errors import FetchError
from millrace_router.adapters.fetching.local import read_folder
from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
    RouterError,
)
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.adapters.fetch_jobs import fetch_folder
from millrace_testing.adapters.fuzz_files import AdapterFuzz, check_header
from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_llama
from millrace_testing.mutations import mutated_file
from millrace_testing.router.edge import serving

LLAMA = modules_of(tiny_llama())
NOT_FOUND = {"error": "not_found", "reason": ""}
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`root/team/good` is an adapter, and so is `secret` next to the root."""
    save_adapter(tmp_path / "root" / "team" / "good")
    save_adapter(tmp_path / "secret")
    return tmp_path / "root"


def fetch(root: Path, name: str, **options: Any) -> dict[str, Any]:
    return fetch_folder(name, root.parent / "cache", LLAMA, root=root, **options)


@pytest.mark.parametrize("name", ["team/good", "team/./good/", "team/../team/good"])
def test_folders_below_the_root_are_fetched(root: Path, name: str) -> None:
    assert "digest" in fetch(root, name)


def test_an_absolute_path_below_the_root_is_fetched(root: Path) -> None:
    assert "digest" in fetch(root, str(root / "team" / "good"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "nothing",
        "team/nothing",
        "../secret",
        "team/../../secret",
        "team/good/../../../secret",
        "../root2",
        "team/good\0",
        "team/good\n",
        "team/g\x1bood",
        "\ud800",
        "~",
        "team/good/adapter_config.json",
        "x" * 300,
        "x/" * 3000,
        "/proc/self/cwd",
    ],
    ids=lambda name: repr(name[:20]),
)
def test_names_of_no_adapter_below_the_root_are_unknown(root: Path, name: str) -> None:
    save_adapter(root.parent / "root2")
    assert fetch(root, name) == NOT_FOUND
    assert fetch(root, f"{root.parent}/{name}") == NOT_FOUND


def test_links_that_lead_out_are_not_followed(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    (root / "up").symlink_to("..")
    (root / "loop").symlink_to("loop")
    for name in ("link", "up/secret", "loop", "up/root/team/good/../../../secret"):
        assert fetch(root, name) == NOT_FOUND
    (root / "inner").symlink_to("team/good")
    assert "digest" in fetch(root, "inner")


def test_a_root_may_be_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    assert "digest" in fetch(root.parent / "alias", "team/good")
    assert fetch(root.parent / "alias", "../secret") == NOT_FOUND
    assert fetch(root.parent / "nothing", "team/good") == NOT_FOUND


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_files_that_lead_out_are_not_read(root: Path, file: str) -> None:
    path = root / "team" / "good" / file
    path.unlink()
    path.symlink_to(root.parent / "secret" / file)
    answer = fetch(root, "team/good")
    assert answer["error"] == "invalid"
    assert answer["reason"] == f"there is no {file}"
    # Files of the hub's own cache are links to blobs next to them.
    (root / "blob").write_bytes((root.parent / "secret" / file).read_bytes())
    path.unlink()
    path.symlink_to(root / "blob")
    assert "digest" in fetch(root, "team/good")


def test_an_operators_folder_may_have_links(root: Path) -> None:
    path = root / "team" / "good" / WEIGHTS
    path.unlink()
    path.symlink_to(root.parent / "secret" / WEIGHTS)
    assert "digest" in fetch_folder(root / "team" / "good", root.parent / "cache", LLAMA)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("change", [Path.unlink, pipe, folder, device])
@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_folders_in_place_of_files_count_as_missing(
    root: Path, file: str, change: Callable[[Path], None]
) -> None:
    change(root / "team" / "good" / file)
    for answer in (
        fetch(root, "team/good"),
        fetch_folder(root / "team" / "good", root.parent / "cache", LLAMA),
    ):
        assert (answer["error"], answer["reason"]) == ("invalid", f"there is no {file}")


@pytest.mark.parametrize("file", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_is_never_read(root: Path, file: str) -> None:
    (root / "team" / "good" / WEIGHTS).unlink()
    (root / "team" / "good" / file).write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    answer = fetch(root, "team/good")
    assert answer["error"] == "invalid"
    assert f"{file} is a pickle, which can run code and is never loaded" in answer["reason"]


def test_sizes_are_checked_before_anything_is_read(root: Path) -> None:
    path = root / "team" / "good" / WEIGHTS
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert fetch(root, "team/good", max_bytes=1 << 20) == {
        "error": "too_large",
        "reason": f"{1 << 40} bytes, and at most {1 << 20} are allowed",
        "num_bytes": 1 << 40,
        "limit": 1 << 20,
    }
    with (root / "team" / "good" / CONFIG).open("r+b") as file:
        file.truncate((1 << 20) + 1)
    assert "adapter_config.json has more than" in fetch(root, "team/good")["reason"]


def test_a_file_that_cannot_be_read_is_unavailable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, **options: Any) -> int:
        if path == WEIGHTS:
            raise PermissionError(13, "no")
        return opened(path, flags, **options)

    monkeypatch.setattr(os, "open", refuse)
    answer = fetch(root, "team/good")
    assert answer["error"] == "unavailable"
    assert answer["reason"] == f"{WEIGHTS} cannot be read: Permission denied"


def test_a_folder_that_becomes_a_link_after_resolution_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, good = os.open, root / "team" / "good"

    def swap(path: Any, flags: int, **options: Any) -> int:
        if path == "/" and not good.is_symlink():
            good.rename(root / "away")
            good.symlink_to(root.parent / "secret")
        return opened(path, flags, **options)

    monkeypatch.setattr(os, "open", swap)
    assert fetch(root, "team/good")["error"] == "unavailable"
    assert good.is_symlink()


def test_a_file_that_becomes_a_link_after_resolution_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, path = os.open, root / "team" / "good" / WEIGHTS

    def swap(name: Any, flags: int, **options: Any) -> int:
        if name == WEIGHTS:
            path.unlink()
            path.symlink_to(root.parent / "secret" / WEIGHTS)
        return opened(name, flags, **options)

    monkeypatch.setattr(os, "open", swap)
    assert fetch(root, "team/good")["error"] == "unavailable"


def test_a_name_with_control_characters_is_none(root: Path) -> None:
    save_adapter(root / "go\nod")
    assert fetch(root, "go\nod") == NOT_FOUND


def test_files_of_two_versions_are_never_mixed(tmp_path: Path) -> None:
    """The folder is replaced all the time by one of another version, and back."""
    live, spare, gone = tmp_path / "live", tmp_path / "spare", tmp_path / "gone"
    save_adapter(live, seed=1, lora_alpha=1)
    save_adapter(spare, seed=2, lora_alpha=2)
    versions = {read_folder(str(one), None, 1 << 24).digest() for one in (live, spare)}
    ended = Event()

    def replace() -> None:
        while not ended.is_set():
            live.rename(gone)
            spare.rename(live)
            gone.rename(spare)

    thread = Thread(target=replace)
    thread.start()
    digests = set()
    try:
        for _ in range(2000):
            with suppress(FetchError):
                digests.add(read_folder(str(live), None, 1 << 24).digest())
    finally:
        ended.set()
        thread.join()
    assert digests <= versions
    assert digests, "no folder was read"


CASES: list[tuple[RouterError, int, str, str | None, str]] = [
    (AdapterNotFound("a"), 404, "adapter_not_found", "model_not_found", "not_found_error"),
    (AdapterForbidden("a"), 403, "adapter_forbidden", None, "permission_error"),
    (AdapterInvalid("a", "no"), 422, "validation", None, "invalid_request_error"),
    (AdapterTooLarge("a", num_bytes=9, limit=8), 413, "validation", None, "request_too_large"),
    (
        AdapterUnavailable("a", "no", retry_after_seconds=6.5),
        503,
        "unavailable",
        None,
        "overloaded_error",
    ),
]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("error", "status", "error_type", "code", "anthropic"), CASES, ids=lambda case: str(case)[:20]
)
async def test_each_dialect_reports_the_error(
    error: RouterError, status: int, error_type: str, code: str | None, anthropic: str
) -> None:
    def fail(_: ValidRequest, stream: TokenStream) -> None:
        stream.fail(error)

    async with serving(fail, template="a") as edge:
        answered, answer, response = await edge.post("/generate", {"inputs": "a"})
        assert (answered, answer) == (status, {"error": str(error), "error_type": error_type})
        assert response.headers.get("retry-after") == ("7" if status == 503 else None)
        answered, answer, response = await edge.post("/v1/chat/completions", CHAT)
        assert (answered, answer["error_type"]) == (status, error_type)
        assert (answer["error"]["message"], answer["error"]["code"]) == (str(error), code)
        assert ("retry-after" in response.headers) == (status == 503)
        answered, answer, response = await edge.post("/v1/messages", CHAT)
        assert answered == (400 if status == 422 else status)
        assert answer["error"] == {"type": anthropic, "message": str(error)}
        assert ("retry-after" in response.headers) == (status == 503)


def test_names_in_messages_are_short_and_on_one_line() -> None:
    for error in (AdapterNotFound("a\nb\x1b[0m\x00\u2028" + "x" * 5000), AdapterInvalid("\r", "z")):
        assert str(error).isprintable()
        assert len(str(error)) < 300


@pytest.mark.parametrize("seed", range(4))
def test_mutated_adapter_headers_are_accepted_or_refused(seed: int, tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["q_proj"], r=2)
    data, random_ = (tmp_path / "adapter_model.safetensors").read_bytes(), random.Random(seed)
    taken = Counter(check_header(mutated_file(data, random_)) for _ in range(1000))
    assert taken[True] > 20
    assert taken[False] > 500


@pytest.mark.parametrize("seed", range(2))
def test_mutated_adapters_are_accepted_or_refused(seed: int, tmp_path: Path) -> None:
    save_adapter(tmp_path / "good", target_modules=["q_proj"], r=2)
    fuzz = AdapterFuzz(tmp_path / "good", modules_of(tiny_llama()), tmp_path)
    random_ = random.Random(seed)
    for check, count in ((fuzz.check, 1000), (fuzz.fetch, 100)):
        kinds = Counter(check(random_) for _ in range(count))
        assert kinds["taken"] > count / 20
        assert kinds["invalid"] > count / 10
