"""A running server, here one that answers by arithmetic, is checked over HTTP."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.server import LocalServers
from millrace.verify.__main__ import main, replay
from millrace.verify.client import MOST_TRIES, Client
from millrace.verify.comparison import Verdict
from millrace.verify.inside import verify_model
from millrace.verify.options import CASES, read_options
from millrace.verify.questions import Question
from millrace.verify.suite import (
    ServerInfo,
    questions_for,
    unrelated_questions,
)
from millrace_launcher.settings.commands import Programs
from millrace_testing.launcher import fake_launcher
from millrace_testing.launcher.verify import BLOCK, FakeServer, fake_server, tokens_of


def check(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    code = main([fake.url, "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {row["title"]: row["verdict"] for row in report["rows"]}


def test_a_server_that_keeps_its_promise_is_green(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as fake:
        code, report = check(fake, capsys)
    assert code == 0
    assert report["passed"]
    assert report["server"]["deterministic"]
    assert verdicts(report) == {
        "solo / batched": "equal",
        "solo / unrelated traffic": "equal",
        "cold cache / warm cache": "equal",
        **dict.fromkeys(CASES.keys() - {"batched", "cached"}, "not_checked"),
    }
    by_title = {row["title"]: row for row in report["rows"]}
    assert by_title["solo / batched"]["requests"] == 12
    assert by_title["solo / batched"]["tokens"] > 12 * 24
    assert "its own servers" in by_title["preempted"]["note"]


def test_one_different_bit_turns_the_check_red(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(again_adds=1e-6) as fake:
        code, report = check(fake, capsys, "--cases", "batched")
    assert code == 1
    (row, _) = report["rows"]
    assert row["verdict"] == "broken"
    assert row["requests_with_other_tokens"] == 0
    assert row["first_difference"]["position"] == 2
    assert 0 < row["largest_gap"] < 1e-5


@pytest.mark.parametrize(
    ("part", "in_prompt"), [("candidate", False), ("prompt", True)], ids=["candidate", "prompt"]
)
@pytest.mark.parametrize("case", ["batched", "cached"])
def test_one_bit_of_a_value_that_comes_with_a_token_turns_the_check_red(
    part: str, in_prompt: bool, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(again_adds=1e-6, again_adds_to=part) as fake:
        code, report = check(fake, capsys, "--cases", case)
    assert code == 1
    row = report["rows"][0]
    assert row["verdict"] == "broken"
    assert row["requests_with_other_tokens"] == 0
    assert 0 < row["requests"] - row["requests_equal"] < row["requests"], "who asked for it"
    place = row["first_difference"]
    assert (place["in_prompt"], place["position"]) == (in_prompt, 2)
    assert 0 < row["largest_gap"] < 1e-5


def test_fast_mode_promises_closeness_and_shows_its_tolerance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(deterministic=False, again_adds=1e-4) as fake:
        code = main([fake.url])
        shown = capsys.readouterr().out
    assert code == 0
    assert "deterministic: false" in shown
    assert "within tolerance (within 0.001)" in shown


def test_a_cache_that_is_never_used_is_not_taken_for_equal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(caches=False) as fake:
        code, report = check(fake, capsys, "--cases", "cached")
    assert code == 1
    assert verdicts(report) == {"cold cache / warm cache": "not_exercised"}


def test_a_requested_case_that_cannot_be_checked_is_red(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server() as fake:
        code, report = check(fake, capsys, "--cases", "preempted")
    assert (code, verdicts(report)) == (1, {"preempted": "not_exercised"})


def test_requests_that_fail_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(fails=True) as fake:
        code, report = check(fake, capsys, "--cases", "batched")
    assert code == 1
    assert "it broke" in report["rows"][0]["note"]
    assert report["rows"][0]["tokens"] == report["rows"][0]["requests"], "those that had come"


def test_a_request_to_a_full_server_is_retried() -> None:
    question = Question(text="a", input_ids=(97,), max_new_tokens=3, parameters={})
    with fake_server(refuses=2) as fake:
        assert Client(fake.url).answer(question).error is None
        fake.refuses = MOST_TRIES
        error = Client(fake.url).answer(question).error
    assert error is not None
    assert "overloaded" in error
    assert fake.refuses == 0


def test_the_table_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(again_adds=1.0) as fake:
        assert main([fake.url, "--requests", "3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fake/model: float32 on cpu, 1 shard(s), deterministic")
    (line,) = [line for line in lines if line.startswith("solo / batched")]
    assert "0/3" in line
    assert "token 2" in line
    assert "BROKEN (same bits)" in line


@pytest.mark.parametrize("content", [None, "\n \n", b"\xff\xfe"], ids=["none", "blank", "binary"])
def test_a_file_without_prompts_is_refused(
    content: str | bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with fake_server() as fake:
        assert main([fake.url, "--prompts", str(path)]) == 2
    assert "prompt" in capsys.readouterr().err


def test_a_server_that_does_not_listen_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as fake:
        url = fake.url
    assert main([url]) == 2
    assert "no server at" in capsys.readouterr().err


def test_requests_fit_the_server() -> None:
    with fake_server() as fake:
        client = Client(fake.url)
        info = ServerInfo.of(client)
        found = questions_for(
            client, info, ["x" * 3000, "short"], num_requests=8, max_new_tokens=20, cut=False
        )
    assert [question.text[0] for question in found] == ["x", "s"] * 4
    for question in found:
        assert question.input_ids == tuple(tokens_of(question.text)[-len(question.input_ids) :])
        assert question.num_tokens <= info.max_total_tokens
        assert len(question.input_ids) <= info.max_input_tokens
    assert found[0].max_new_tokens > 2 * BLOCK, "it grows by blocks"
    assert len({(question.text, str(question.body)) for question in found}) == len(found)
    assert {question.is_greedy for question in found} == {True, False}


def test_requests_include_candidates_biases_and_scored_prompts() -> None:
    """In as few requests as `verify_architectures.py` asks."""
    with fake_server() as fake:
        client = Client(fake.url)
        found = questions_for(
            client,
            ServerInfo.of(client),
            ["some words"],
            num_requests=8,
            max_new_tokens=9,
            cut=True,
        )
    bodies = [question.body for question in found]
    with_candidates = [q.is_greedy for q in found if "top_n_tokens" in q.parameters]
    assert set(with_candidates) == {True, False}
    assert len(with_candidates) < len(found)
    (completion,) = [body for body in bodies if "prompt" in body]
    ids = tokens_of("some words")
    assert completion["prompt"] == tuple(ids)
    assert completion["logit_bias"].keys() == {str(id_) for id_ in ids[-4:]}
    assert (completion["echo"], completion["logprobs"]) == (True, 3)


@pytest.mark.parametrize("grammars", [True, False])
def test_no_grammar_is_sent_to_a_server_without_grammars(grammars: bool) -> None:
    with fake_server(grammars=grammars) as fake:
        client = Client(fake.url)
        info = ServerInfo.of(client)
        found = questions_for(client, info, ["x"], num_requests=9, max_new_tokens=20, cut=True)
        found += unrelated_questions(client, info)
    guided = [question for question in found if "grammar" in question.parameters]
    assert bool(guided) == grammars
    assert not any(question.parameters["ignore_eos"] for question in guided), (
        "a server refuses that"
    )


SERVER = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
with socket.socket() as probe:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        print(port, "kept", flush=True)
    else:
        print(port, "given away", flush=True)
HTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""


def test_the_port_is_reserved_until_the_server_listens(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVER)
    servers = LocalServers(model=None, logs=tmp_path, launcher=(str(program),))
    with servers.running("x") as server:
        pass
    port, what = (tmp_path / "x.log").read_text().split("\n")[0].split(maxsplit=1)
    assert (f"http://127.0.0.1:{port}", what) == (server.url, "kept")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(port)))


KERNEL_SERVER = """
import sys, threading
from millrace_testing.launcher.verify import fake_server
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
other = {{{other}}} if "--prefix-caching=on" in sys.argv else {{}}
with fake_server(port=port, **other):
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ('"attention": "plain"', "plain attention, the first one cpu"),
        ('"activations": "int8"', "int8 activations, the first one exact ones"),
    ],
)
def test_a_server_on_other_kernels_breaks_no_promise_and_is_red_all_the_same(
    other: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    program = tmp_path / "program.py"
    program.write_text(KERNEL_SERVER.format(other=other))
    servers = LocalServers(model="m", logs=tmp_path, launcher=(str(program),))
    options = read_options(["m", "--requests", "3", "--cases", "chunked,cached"], environ={})
    report = verify_model(options, servers)
    chunked, cached = report.rows
    assert (chunked.verdict, chunked.comparison is None) == (Verdict.NOT_EXERCISED, False)
    assert (cached.verdict, cached.comparison) == (Verdict.NOT_EXERCISED, None)
    assert words in cached.note
    assert report.exit_code == 1


ROUTER = """
import pathlib, sys
found = next(word for word in sys.argv if word.startswith("--shard-addresses="))
for address in found.partition("=")[2].split(","):
    assert pathlib.Path(address.removeprefix("unix:")).is_socket(), address
pathlib.Path(LOG).write_text(" ".join(sys.argv[1:]))
sys.exit(5)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    script = tmp_path / "router.py"
    script.write_text(ROUTER.replace("LOG", repr(str(tmp_path / "argv"))))
    shard = (*fake_launcher.CHILDREN, "shard")
    return Programs(shard=shard, router=(sys.executable, str(script)))


def test_the_router_drives_shards_that_are_started_for_it(
    tmp_path: Path, programs: Programs
) -> None:
    argv = ["some/model", "--replay", "journal", "--epoch", "3", "--json", "--", "--num-shard=2"]
    options = read_options(argv, environ={})
    assert options.replay is not None
    assert replay(options, options.replay, programs) == 5
    words = (tmp_path / "argv").read_text().split()
    assert words[0] == "replay"
    assert words[1].count("unix:") == 2
    assert words[2:] == ["journal", "--epoch=3", "--json"]
    pids = [int((tmp_path / f"shard-{rank}.pid").read_text()) for rank in (0, 1)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_shards_that_do_not_start_are_explained(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SHARD", "crash")
    options = read_options(["some/model", "--replay", "journal"], environ={})
    assert options.replay is not None
    assert replay(options, options.replay, programs) == 2
    shown = capsys.readouterr().err
    assert "cannot find its feet" in shown
    assert "error: shard-0: exit code 1" in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cases", "nonsense"], "unknown case nonsense"),
        (["--cases", ""], "no case is named"),
        (["--requests", "0"], "at least 1"),
        (["--num-shard", "1"], "at least 2"),
        (["--max-new-tokens", "x"], "at least 1"),
        (["http://host:1", "--", "--dtype", "float32"], "not for a URL"),
        (["http://host:1", "--replay", "j"], "--replay needs the model"),
        (["--epoch", "1"], "--epoch is for --replay"),
        (["--nonsense"], "unrecognized"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_lines_end_with_2_and_a_reason(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(argv, environ={})
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
