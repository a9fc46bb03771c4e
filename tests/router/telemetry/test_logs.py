"""Log lines: both formats, other libraries' lines, requests that were given up."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import select
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import LogRecord, makeLogRecord
from pathlib import Path
from threading import Event

import orjson
import pytest
import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from millrace_router.config import RouterConfig
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_router.telemetry import request_log
from millrace_router.telemetry import request_log as progress_log
from millrace_router.telemetry.instruments import Counter
from millrace_router.telemetry.request_log import (
    NUM_FULL_FILES,
    ProgressLog,
    RequestFile,
    RequestLog,
)
from millrace_testing.router.edge import logging_to, serving
from millrace_testing.router.fake_router import tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard


def fields(output: io.BytesIO) -> list[dict[str, object]]:
    return [orjson.loads(line)["fields"] for line in output.getvalue().splitlines()]


def test_json_lines_have_the_shape_of_tgis() -> None:
    output = io.BytesIO()
    with logging_to(output):
        structlog.get_logger("millrace_router.engine.batcher").warning("step %d", 7, took=0.5)
    line = orjson.loads(output.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "WARN",
        "fields": {"message": "step 7", "took": 0.5},
        "target": "millrace_router.engine.batcher",
    }


def test_text_lines_are_one_line_each() -> None:
    output = io.BytesIO()
    with logging_to(output, json_output=False):
        structlog.get_logger("millrace_router.x").info("Connected", url="http://a")
    line = output.getvalue().decode()
    assert line.endswith("Z  INFO millrace_router.x: Connected url=http://a\n")


@pytest.mark.parametrize("json_output", [True, False])
def test_failures_come_with_their_traceback(json_output: bool) -> None:
    output = io.BytesIO()
    with logging_to(output, json_output=json_output):
        try:
            raise ValueError("odd")
        except ValueError:
            structlog.get_logger("x").exception("failed")
    assert b"ValueError: odd" in output.getvalue()
    assert b"ERROR" in output.getvalue()


def test_other_libraries_are_relayed_and_narrowed() -> None:
    output = io.BytesIO()
    with logging_to(output):
        logging.getLogger("grpc").error("lost %s", "it")
        logging.getLogger("asyncio").debug("noise")
    line = orjson.loads(output.getvalue())
    assert (line["target"], line["fields"]["message"]) == ("grpc", "lost it")


def test_lesser_lines_are_left_out() -> None:
    output = io.BytesIO()
    with logging_to(output, level="warning"):
        structlog.get_logger("x").info("no")
        logging.getLogger("y").info("no")
    assert output.getvalue() == b""


async def test_a_request_that_its_client_left_has_its_line() -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving(None) as edge:
            asked = {"inputs": "secret words"}
            task = asyncio.create_task(edge.post("/generate_stream", asked))
            await edge.batcher.arrived.wait()
            task.cancel()
            await edge.services.infer.permits.all_free()
    (line,) = [line for line in fields(output) if line["message"] == "request"]
    assert line["status"] == 499
    assert (line["prompt_tokens"], line["generated_tokens"]) == (2, 0)
    assert b"secret" not in output.getvalue()


@pytest.mark.parametrize("json_output", [True, False])
async def test_malformed_requests_are_not_quoted(json_output: bool) -> None:
    output = io.BytesIO()
    with logging_to(output, json_output=json_output):
        async with serving() as edge:
            broken = b"GET /health HTTP/1.1\r\nauthorization: hush\r\nb\x00d secret\r\n\r\n"
            reader, writer = await edge.send(broken)
            assert b"400" in await reader.readline()
            writer.close()
    assert b"an HTTP connection failed" in output.getvalue()
    assert b"BadHttpMessage" in output.getvalue() or b"InvalidHeader" in output.getvalue()
    assert b"ERROR" not in output.getvalue(), "it is the client's mistake"
    for quoted in (b"hush", b"secret", b"Traceback", b"127.0.0.1"):
        assert quoted not in output.getvalue()


@pytest.mark.parametrize("json_output", [True, False])
def test_tracebacks_do_not_show_variables(json_output: bool) -> None:
    output = io.BytesIO()

    def fail(prompt: str) -> None:
        assert prompt
        raise ValueError("odd")

    with logging_to(output, json_output=json_output):
        try:
            fail("sec" + "ret")
        except ValueError:
            structlog.get_logger("x").exception("failed")
    assert b"in fail" in output.getvalue()
    assert b"secret" not in output.getvalue()


def test_line_breaks_in_values_start_no_line() -> None:
    output = io.BytesIO()
    forged = "x\n2026 INFO forged\r\x1b[2J\x85\u2028é"
    with logging_to(output, json_output=False):
        structlog.get_logger("a").info(forged, route=forged)
        try:
            raise ValueError(forged)
        except ValueError:
            structlog.get_logger("a").exception("failed")
    text = output.getvalue().decode()
    first, *rest = text.removesuffix("\n").split("\n")
    assert first.endswith(
        "a: x\\u000a2026 INFO forged\\u000d\\u001b[2J\\u0085\\u2028é"
        " route=x\\u000a2026 INFO forged\\u000d\\u001b[2J\\u0085\\u2028é"
    )
    assert not {"\r", "\x1b", "\x85", "\u2028"} & set(text)
    assert [line for line in rest if not line.startswith("  ")] == rest[:1]


async def test_paths_are_logged_as_they_came_and_cut() -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving() as edge:
            await edge.client.get(edge.url + "/a%0Ab")
            await edge.client.get(edge.url + "/" + "%C3%A9" * 100)
    routes = [str(line["route"]) for line in fields(output) if line["message"] == "request"]
    assert routes == ["/a%0Ab", ("/" + "%C3%A9" * 100)[:200]]


async def test_every_minute_has_a_line_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_log, "INTERVAL_SECONDS", 0.0)
    written: list[int] = []
    third = asyncio.Event()

    def generated() -> int:
        written.append(7 * len(written))
        if len(written) == 3:
            third.set()
        return written[-1]

    with capture_logs(processors=[merge_contextvars]) as lines:
        with bound_contextvars(request_id="abc"):
            progress = ProgressLog(100, generated)
        await third.wait()
        progress.close()
        count = len(lines)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(lines) == count == 3
    assert [line["minutes"] for line in lines] == [1, 2, 3]
    assert [line["generated_tokens"] for line in lines] == [0, 7, 14]
    assert {(line["request_id"], line["max_new_tokens"]) for line in lines} == {("abc", 100)}


def write(file: RequestFile, *lines: str) -> None:
    for line in lines:
        file.handle(makeLogRecord({"msg": line}))


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().split("\n") if line]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.log"


@contextmanager
def opened(path: Path, *, max_bytes: int = 0) -> Iterator[RequestFile]:
    file = RequestFile(path, max_bytes=max_bytes)
    try:
        yield file
    finally:
        file.close()


async def test_the_request_file_has_the_lines_of_the_log(path: Path) -> None:
    output = io.BytesIO()
    log = RequestLog(RequestFile(path, max_bytes=0), Counter())
    with logging_to(output, level="info"):
        async with serving(request_log=log) as edge:
            await edge.post("/generate", {"inputs": "secret words"}, headers={"x-request-id": "é"})
            await edge.post("/v1/chat/completions", {"messages": []})
            await edge.get("/health")
            await edge.get("/nowhere")
    log.close()
    logged = [orjson.loads(line) for line in output.getvalue().splitlines()]
    kept = [orjson.loads(line) for line in lines_of(path)]
    assert [line["fields"]["route"] for line in kept] == [
        "/generate",
        "/v1/chat/completions",
        "/nowhere",
    ]
    for line in (*logged, *kept):
        assert line.pop("timestamp").endswith("Z")
    assert kept == [line for line in logged if line["fields"]["message"] == "request"]
    assert "secret" not in path.read_text()


async def test_lines_do_not_depend_on_the_level_of_the_log(path: Path) -> None:
    log = RequestLog(RequestFile(path, max_bytes=0), Counter())
    with logging_to(io.BytesIO(), level="error"):
        async with serving(request_log=log) as edge:
            await edge.post("/generate", {"inputs": "a"})
    log.close()
    assert len(lines_of(path)) == 1


def test_only_its_user_may_read_the_request_file(path: Path) -> None:
    with opened(path, max_bytes=4) as file:
        write(file, "1", "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_name("requests.log.1").stat().st_mode) == 0o600


def test_a_file_that_is_there_is_continued(path: Path) -> None:
    path.write_text("before\n")
    path.chmod(0o640)
    with opened(path) as file:
        write(file, "after")
    assert lines_of(path) == ["before", "after"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_full_files_are_set_aside_and_the_oldest_goes(path: Path) -> None:
    with opened(path, max_bytes=8) as file:
        write(file, *[f"line {n}" for n in range(9)])
    assert lines_of(path) == ["line 8"]
    old = [lines_of(path.with_name(f"requests.log.{n}")) for n in range(1, NUM_FULL_FILES + 1)]
    assert old == [["line 7"], ["line 6"], ["line 5"], ["line 4"], ["line 3"]]
    assert len(list(path.parent.iterdir())) == NUM_FULL_FILES + 1


def test_a_file_that_another_process_moved_is_not_written(path: Path) -> None:
    with opened(path) as file:
        write(file, "1")
        path.rename(path.with_name("moved"))
        write(file, "2")
        path.unlink()
        write(file, "3")
        path.rename(path.with_name("moved again"))
        path.write_text("made by another\n")
        write(file, "4")
    assert lines_of(path.with_name("moved")) == ["1"]
    assert lines_of(path.with_name("moved again")) == ["3"]
    assert lines_of(path) == ["made by another", "4"]


def test_a_file_that_another_empties_is_filled_from_its_beginning(path: Path) -> None:
    with opened(path) as file:
        write(file, "1", "2")
        path.write_text("")
        write(file, "3")
    assert path.read_text() == "3\n"


def test_a_full_disk_loses_only_lines(path: Path) -> None:
    output = io.BytesIO()
    path.symlink_to("/dev/full")
    with logging_to(output), opened(path) as file:
        write(file, "1", "2")
        assert file.num_lost == 2
        path.unlink()
        write(file, "3", "4")
    assert lines_of(path) == ["3", "4"]
    assert file.num_lost == 2
    told = [orjson.loads(line)["fields"]["message"] for line in output.getvalue().splitlines()]
    assert told == ["the request log cannot be written", "the request log is written again"]


def test_a_partial_line_does_not_damage_other_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logging_to(io.BytesIO()), opened(path) as file:
        write(file, "1")
        with monkeypatch.context() as patched:

            def fail() -> None:
                raise OSError("no space left")

            patched.setattr(file, "flush", fail)
            write(file, "2")
        path.write_text("1\nhalf of ")
        write(file, "3")
    assert lines_of(path) == ["1", "half of ", "3"]
    assert file.num_lost == 1


def test_a_removed_folder_loses_only_lines(path: Path) -> None:
    folder = path.parent / "logs"
    folder.mkdir()
    with logging_to(io.BytesIO()), opened(folder / "requests.log") as file:
        write(file, "1")
        (folder / "requests.log").unlink()
        folder.rmdir()
        write(file, "2", "3")
        folder.mkdir()
        write(file, "4")
    assert lines_of(folder / "requests.log") == ["4"]
    assert file.num_lost == 2


class StuckFile(RequestFile):
    """A disk that does not answer until `gate` is set."""

    def __init__(self, path: Path) -> None:
        self.gate, self.reached = Event(), Event()
        super().__init__(path, max_bytes=0)

    def emit(self, record: LogRecord) -> None:
        self.reached.set()
        self.gate.wait()
        super().emit(record)


def test_a_hanging_disk_delays_no_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_WAITING_LINES", 2)
    file, lost = StuckFile(path), Counter()
    log = RequestLog(file, lost)
    log.write({"n": 0})
    file.reached.wait()
    for n in range(1, 6):
        log.write({"n": n})
    assert lost.value == 3
    file.gate.set()
    while log._waiting.qsize():
        pass
    log.close()
    assert [orjson.loads(line)["fields"]["n"] for line in lines_of(path)] == [0, 1, 2]


def test_a_disk_that_hangs_does_not_keep_the_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "CLOSE_SECONDS", 0.0)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        file = RequestFile(path, max_bytes=0)
        stream = file.stream
        assert stream is not None
        log = RequestLog(file, Counter())
        log.write({"more": "than a pipe holds" * 10_000})
        select.select([reader], [], [])
        log.close()
        # What the interpreter does at its exit.
        logging.shutdown([weakref.ref(file)])
        with logging_to(io.BytesIO()):
            while log._thread.is_alive():
                select.select([reader], [], [], 0.1)
                with suppress(BlockingIOError):
                    os.read(reader, 1 << 20)
        stream.close()
    finally:
        os.close(reader)


def test_lost_lines_are_counted_with_the_next_one(path: Path) -> None:
    path.symlink_to("/dev/full")
    with logging_to(io.BytesIO()):
        file, lost = RequestFile(path, max_bytes=0), Counter()
        for _ in range(2):
            log = RequestLog(file, lost)
            log.write({})
            log.close()
    assert file.num_lost == 2
    assert lost.value == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer()._rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    return tmp_path


def config_of(folder: Path, log_requests: Path) -> RouterConfig:
    return RouterConfig(
        model_folder=folder,
        shard_addresses=(f"unix:{folder}/shard",),
        max_batch_prefill_tokens=64,
        log_requests=log_requests,
    )


async def test_a_file_that_cannot_be_written_ends_the_start(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"--log-requests: .*nowhere"):
        await start(config_of(folder, folder / "nowhere" / "requests.log"))


async def test_the_flag_opens_the_file(folder: Path) -> None:
    address = f"unix:{folder}/shard"
    with serve_fake_shard(address, FakeShard(num_blocks=600, max_batch_size=256)):
        running = await start(config_of(folder, folder / "requests.log"))
        try:
            log = running.services.request_log
            assert log is not None
            log.write({"n": 1})
        finally:
            await running.stop_batcher()
            await running.close()
    assert len(lines_of(folder / "requests.log")) == 1
