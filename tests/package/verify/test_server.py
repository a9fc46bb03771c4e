"""A running server, here one that answers by arithmetic, is checked over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.verify.__main__ import main
from millrace.verify.client import MOST_TRIES, Client, ServerError, counting
from millrace.verify.options import CASES
from millrace.verify.questions import Question
from millrace.verify.suite import (
    ServerInfo,
    plain_greedy,
    questions_for,
    unrelated_questions,
)
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
    assert "servers of its own" in by_title["preempted"]["note"]


def test_one_bit_turns_it_red(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_one_bit_of_a_value_beside_the_tokens_turns_it_red(
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


def test_another_token_turns_it_red(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(again_changes_tokens=True) as fake:
        code, report = check(fake, capsys, "--cases", "cached")
    assert code == 1
    (row,) = report["rows"]
    assert (row["verdict"], row["requests_equal"]) == ("broken", 0)
    assert row["tokens"] == row["requests"], "compared up to the first that differs"


def test_fast_mode_promises_closeness_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(deterministic=False, again_adds=1e-4) as fake:
        code = main([fake.url])
        shown = capsys.readouterr().out
    assert code == 0
    assert "deterministic: false" in shown
    assert "within tolerance (within 0.001)" in shown


def test_fast_mode_still_finds_what_is_far(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(deterministic=False, again_adds=0.1) as fake:
        code, _ = check(fake, capsys)
    assert code == 1


def test_a_cache_that_is_never_used_is_not_taken_for_equal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(caches=False) as fake:
        code, report = check(fake, capsys, "--cases", "cached")
    assert code == 1
    assert verdicts(report) == {"cold cache / warm cache": "not_exercised"}


def test_a_case_that_was_asked_for_and_cannot_be_checked_is_red(
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


def test_a_server_without_room_is_asked_again() -> None:
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


def test_prompts_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\nsecond, which is longer than a block of sixteen\n")
    with fake_server() as fake:
        code, report = check(fake, capsys, "--prompts", str(path), "--requests", "4")
    assert code == 0
    assert report["rows"][0]["requests"] == 4


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


def test_a_server_that_does_not_listen(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as fake:
        url = fake.url
    assert main([url]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_the_key_is_presented() -> None:
    with fake_server() as fake:
        Client(fake.url, "secret").info()
    assert fake.keys == ["Bearer secret"]


def test_a_server_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "info", lambda _: {"model_id": "x"})
    with fake_server() as fake, pytest.raises(ServerError, match="is it Millrace"):
        ServerInfo.of(Client(fake.url))


def test_counters_are_summed_over_labels() -> None:
    with fake_server() as fake:
        client = Client(fake.url)
        found = client.metrics()
        assert (found['a{reason="x y"}'], found["b"]) == (3, 4.5)
        with counting(client) as counted:
            pass
    assert counted.of("a") == 0
    counted.between({}, {'a{l="1"}': 2.0, 'a{l="2"}': 3.0, "ab": 7.0})
    assert (counted.of("a"), counted.of('a{l="2"}')) == (5, 3)


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


def test_candidates_biases_and_scored_prompts_are_asked_for() -> None:
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


def test_no_more_candidates_are_asked_for_than_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server() as fake:
        granted = {**fake.info(), "max_top_n_tokens": 1}
        monkeypatch.setattr(FakeServer, "info", lambda _: granted)
        client = Client(fake.url)
        found = questions_for(
            client, ServerInfo.of(client), ["x"], num_requests=12, max_new_tokens=9, cut=True
        )
    counts = [
        question.parameters[name]
        for question in found
        for name in ("top_n_tokens", "logprobs")
        if name in question.parameters
    ]
    assert set(counts) == {0, 1}


@pytest.mark.parametrize("grammars", [True, False])
def test_no_grammar_is_asked_of_a_server_without_them(grammars: bool) -> None:
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


def test_the_reference_is_asked_each_prompt_once() -> None:
    with fake_server() as fake:
        client = Client(fake.url)
        info = ServerInfo.of(client)
        found = questions_for(
            client, info, ["one", "two"], num_requests=6, max_new_tokens=20, cut=True
        )
    greedy = plain_greedy(found, 16)
    assert [question.text for question in greedy] == ["one", "two"]
    assert all(question.parameters == {"ignore_eos": True} for question in greedy)
    assert all(question.max_new_tokens <= 16 for question in greedy)
