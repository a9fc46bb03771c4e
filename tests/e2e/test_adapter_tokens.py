"""Tokens of adapters in the whole system: no answer, page, log, journal, file or process shows one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millrace_router.journal.frames import read_frames
from millrace_router.journal.rotation import SUFFIX
from millrace_testing.adapters.hub_stub import Repository, hub_in_thread
from millrace_testing.launcher.e2e import END_SECONDS, ROOT, Server, launch, wait_for

PIRATE, BUTLER = (ROOT / "demo" / "adapters" / name for name in ("pirate", "butler"))
READER, STRANGER, OWNER = "hf_reader-41c7", "hf_stranger-8e02", "hf_owner-d95b"
BEARER, WRONG_BEARER, ADMIN_KEY = "key-3fa6", "hf_bearer-70d8", "admin-c21e"
SECRETS = (READER, STRANGER, OWNER, BEARER, WRONG_BEARER, ADMIN_KEY)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PRIVATE, DAMAGED, DOWN = "org/private", "org/damaged", "org/down"
NAMES = (PRIVATE, DAMAGED, DOWN, "org/none", "own", "other/name")
PAGES = ("/info", "/metrics", "/health", "/v1/models", "/adapters", "/v1/quarantine", "/nowhere")
Texts = dict[str, str]
"""Texts that were collected, by where they were found."""


def repositories() -> dict[str, Repository]:
    """A private adapter, the operator's, one whose weights are damaged, and one that the hub does not give."""
    damaged = Repository.of_folder(PIRATE, {READER})
    damaged.files = {**damaged.files, "adapter_model.safetensors": b"\x08" + bytes(15)}
    down = Repository.of_folder(PIRATE, {READER})
    down.status = 502
    return {
        PRIVATE: Repository.of_folder(BUTLER, {READER}),
        "org/own": Repository.of_folder(PIRATE, {OWNER}),
        DAMAGED: damaged,
        DOWN: down,
    }


def bodies(name: str, token: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Requests of each form for an adapter; a token is in the body, and in a field of another type."""
    given = {} if token is None else {"api_token": token}
    own = {"adapter_id": name, "max_new_tokens": 2, **given}
    chat = {"model": name, "max_tokens": 2, **given}
    merged = {"merged_adapters": {"ids": [name, "own"], "merge_strategy": "cat"}, **given}
    return [
        ("/generate", {"inputs": "a", "parameters": own}),
        ("/generate", {"inputs": "a", "parameters": {**own, "api_token": [token]}}),
        ("/generate", {"inputs": "a", "parameters": {**merged, "max_new_tokens": 2}}),
        ("/generate_stream", {"inputs": "a", "parameters": own}),
        ("/v1/completions", {"prompt": "a", **chat}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **chat}),
    ]


def ask_all(http: httpx.Client) -> tuple[list[httpx.Response], Texts]:
    """Use each adapter with each token in body, header and `Authorization`; load one, and read the pages."""
    answers = list[httpx.Response]()
    for bearer, name, token in product((BEARER, WRONG_BEARER), NAMES, (None, STRANGER, READER)):
        headers = {"authorization": f"Bearer {bearer}", "traceparent": TRACE}
        for path, body in bodies(name, token):
            answers.append(http.post(path, json=body, headers=headers))
        if token is not None:
            path, body = bodies(name, None)[-1]
            own = {**headers, "x-adapter-token": token, "idempotency-key": f"{name}-{token[:6]}"}
            answers += [http.post(path, json=body, headers=own) for _ in range(2)]
    for key, source in product((ADMIN_KEY, BEARER), (PRIVATE, DAMAGED, DOWN, "org/own")):
        body = {"lora_name": "loaded", "lora_path": source, "load_inplace": True}
        headers = {"authorization": f"Bearer {key}"}
        answers.append(http.post("/v1/load_lora_adapter", json=body, headers=headers))
    for page, key in product(PAGES, (BEARER, ADMIN_KEY, WRONG_BEARER)):
        headers = {"authorization": f"Bearer {key}", "x-adapter-token": READER}
        answers.append(http.get(page, headers=headers))
    texts = {
        f"answer {number}: {answer.request.url.path} {answer.status_code}": (
            f"{answer.headers} {answer.text}"
        )
        for number, answer in enumerate(answers)
    }
    return answers, texts


def command_lines(server: Server) -> Texts:
    """The command line of each process."""
    launcher = psutil.Process(server.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    return {f"command line {one.pid}": " ".join(one.cmdline()) for one in processes}


def files_below(folder: Path) -> Texts:
    """Paths and bytes of all files; frames of a journal are inflated."""
    found: Texts = {}
    for path in sorted(folder.rglob("*")):
        found[f"path {path}"] = str(path.relative_to(folder))
        if path.suffix == SUFFIX:
            with path.open("rb") as stream:
                found[f"journal {path}"] = b"".join(read_frames(stream)).decode("latin-1")
        elif path.is_file():
            found[f"file {path}"] = path.read_bytes().decode("latin-1")
    return found


def kill_shard(server: Server, http: httpx.Client) -> None:
    """Kill the shard; the next answer comes from a new one."""
    server.shard.kill()
    path, body = bodies("own", None)[0]
    answer = http.post(path, json=body, headers={"authorization": f"Bearer {BEARER}"})
    assert answer.status_code == 200, answer.text
    wait_for(lambda: server.find("shard-0"))


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Everything that a server wrote, answered and left behind, its shard's end in between."""
    folder = tmp_path_factory.mktemp("server")
    for name in ("hub", "temporary"):
        (folder / name).mkdir()
    flags = [
        *("--log-level=trace", "--journal-tokens", f"--journal={folder / 'journal'}"),
        *(f"--log-requests={folder / 'requests.log'}", f"--adapter-cache={folder / 'adapters'}"),
        *("--adapter-allow=hub:org/*", "--lora-modules=own=org/own", "--env"),
    ]
    with hub_in_thread() as hub:
        hub.repositories |= repositories()
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": OWNER,
            "HUGGING_FACE_HUB_TOKEN": OWNER,
            "API_KEY": BEARER,
            "ADMIN_KEY": ADMIN_KEY,
            "HF_HOME": str(folder / "hub"),
            "TMPDIR": str(folder / "temporary"),
        }
        with launch(*flags, env=environment) as server:
            with httpx.Client(base_url=server.url, timeout=END_SECONDS) as http:
                answers, texts = ask_all(http)
                kill_shard(server, http)
            texts |= command_lines(server)
            assert server.end() == 0
            texts["log"] = server.log
    texts |= files_below(folder)
    assert {200, 401, 403, 404, 422, 503} <= {answer.status_code for answer in answers}
    assert {token for _, token in hub.asked} >= {f"Bearer {one}" for one in (READER, OWNER)}
    return texts


@pytest.mark.long
@pytest.mark.parametrize("secret", SECRETS)
def test_an_adapter_token_is_stored_and_shown_nowhere(collected: Texts, secret: str) -> None:
    assert [place for place, text in collected.items() if secret in text] == []


def test_all_places_were_searched(collected: Texts) -> None:
    """Each place holds what it should, so that a search there means something."""
    assert all(word in collected["log"] for word in (PRIVATE, "DEBUG", TRACE.split("-")[1]))
    (requests,) = texts_of(collected, "file", "/requests.log")
    assert PRIVATE in requests
    assert any("millrace_shard" in text for text in texts_of(collected, "command line"))
    assert 'adapter="own"' in texts_of(collected, "answer", "/metrics 200")[0]
    weights = [place for place in collected if place.endswith(".safetensors")]
    digests = {Path(place).parent.name for place in weights}
    journals = texts_of(collected, "journal")
    assert any(digest in text for digest in digests for text in journals)


def texts_of(collected: Texts, kind: str, end: str = "") -> list[str]:
    """The texts of places that begin and end so."""
    return [
        text for place, text in collected.items() if place.startswith(kind) and place.endswith(end)
    ]
