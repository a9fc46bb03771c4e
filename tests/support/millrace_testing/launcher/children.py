"""Fakes of the launcher's children; run as `python FILE ROLE ARGUMENT…`.

They write `{FAKE_DIR}/{name}.pid`, append it to `{name}.lives`, and append to `events`. `FAKE_{ROLE}` says how they
behave, a word for each life and the last for all further ones: `serve`; `crash` says why on stderr and exits 1;
`refuse` says it in the log and exits 1; `lost` is killed at once; `gone` exits 0 at once; `deaf` ignores SIGTERM;
`mute` never becomes ready, and crashes at SIGUSR1; `parent` has a child of its own. With `FAKE_FORKS` shards are forks,
of a process that crashes at its start while there is a file `broken`, and
is not ready while there is a file `slow`.

The router waits for the shards, logs the further events from the launcher, and sends it the bodies of POST requests.
`FAKE_FORMS` are the forms in which the routers of all lives relay.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

from millrace_shard.process import die_with_parent

FOLDER = Path(os.environ.get("FAKE_DIR", "."))


def event(text: str) -> None:
    with (FOLDER / "events").open("a") as file:
        file.write(f"{text}\n")


def begin(name: str, role: str) -> threading.Event:
    """Register the process and behave as configured; SIGTERM sets the event."""
    (FOLDER / f"{name}.pid").write_text(str(os.getpid()))
    (FOLDER / f"{name}.json").write_text(
        json.dumps({"argv": sys.argv[2:], "environ": dict(os.environ)})
    )
    with (FOLDER / f"{name}.lives").open("a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        life = len(file.readlines())
    words = os.environ.get(f"FAKE_{role.upper()}", "serve").split(",")
    behaviour = words[min(life, len(words)) - 1]
    if behaviour == "crash":
        crash(name)
    if behaviour == "refuse":
        say("there is no such thing", level="ERROR")
        sys.stderr.write("not worth a look\n")
        sys.exit(1)
    if behaviour == "lost":
        sys.stderr.write(f"{name} has met its end\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "gone":
        sys.exit(0)
    if behaviour == "parent":
        # The alarm ends it after a failed test.
        code = "import signal; signal.alarm(120); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code])
    stop = threading.Event()
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if behaviour == "mute":
        signal.signal(signal.SIGUSR1, lambda *_: crash(name))
        say(f"{name} is mute")
        stop.wait()
        event(f"{name} stopped")
        sys.exit(0)
    return stop


def crash(name: str) -> NoReturn:
    sys.stderr.write(f"{name} cannot find its feet\n")
    sys.exit(1)


def say(message: str, level: str = "INFO") -> None:
    line = {"level": level, "fields": {"message": message}, "target": "fake"}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def shard(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds-path", required=True)
    parser.add_argument("--rank", type=int, default=0)
    known, _ = parser.parse_known_args(argv)
    name = f"shard-{known.rank}"
    stop = begin(name, "shard")
    # Imported late, since it takes most of the start and many fakes do not need it.
    import grpc
    from grpc_health.v1 import health, health_pb2_grpc

    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(f"unix:{known.uds_path}-{known.rank}")
    server.start()
    say(f"{name} serves")
    stop.wait()
    event(f"{name} stopped")
    server.stop(None).wait()


def fork_server(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher-fd", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    known, _ = parser.parse_known_args(argv)
    with (FOLDER / f"fork-server-{known.rank}.lives").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if (FOLDER / "broken").exists():
        crash("fork-server")
    while (FOLDER / "slow").exists():
        time.sleep(0.01)
    control = socket.socket(fileno=known.launcher_fd)
    control.send(b'{"event": "loaded"}')
    while descriptors := (received := socket.recv_fds(control, 100, 3))[1]:
        with (FOLDER / f"fork-server-{known.rank}.requests").open("ab") as file:
            file.write(received[0] + b"\n")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            die_with_parent(parent)
            control.close()
            for target, fd in enumerate(descriptors[:2], start=1):
                os.dup2(fd, target)
                os.close(fd)
            try:
                shard(argv)
            except SystemExit as error:
                sys.stderr.flush()
                os._exit(int(error.code or 0))
            os._exit(0)
        for fd in descriptors:
            os.close(fd)
        control.send(json.dumps({"event": "forked", "pid": pid}).encode())
        threading.Thread(target=reap, args=(control, pid), daemon=True).start()


def reap(control: socket.socket, pid: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    control.send(json.dumps({"event": "ended", "pid": pid, "status": status}).encode())


def router(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--supervisor-fd", type=int, required=True)
    known, _ = parser.parse_known_args(argv)
    stop = begin("router", "router")
    launcher = socket.socket(fileno=known.supervisor_fd)
    forms = os.environ.get("FAKE_FORMS", "1").split(",")
    life = len((FOLDER / "router.lives").read_text().split())
    form = int(forms[min(life, len(forms)) - 1])
    launcher.sendall(json.dumps({"event": "opened", "relay": form}).encode() + b"\n")
    ready = threading.Event()
    hearing = threading.Thread(target=hear, args=(launcher, ready), daemon=True)
    hearing.start()
    while not ready.wait(0.05) and not stop.is_set():
        pass
    if stop.is_set():
        return
    try:
        server = Server(known.listen_fd)
    except OSError as error:
        sys.exit(f"router cannot listen: {error}")
    server.launcher = launcher
    if any(argument.startswith("--api-key-file") for argument in argv):
        signal.signal(signal.SIGHUP, lambda *_: event("router hung up"))
    launcher.sendall(b'{"event": "listening"}\n')
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stop.wait()
    launcher.shutdown(socket.SHUT_RD)
    hearing.join()
    event("router stopped")


def hear(launcher: socket.socket, ready: threading.Event) -> None:
    with launcher.makefile("r") as lines:
        for line in lines:
            if json.loads(line)["event"] == "ready" and not ready.is_set():
                ready.set()
                continue
            if json.loads(line)["event"] == "release":
                launcher.sendall(b'{"event": "released"}\n')
            event(f"router heard {line.strip()}")
            say(f"router heard {line.strip()}")


class Server(ThreadingHTTPServer):
    launcher: socket.socket
    request_queue_size = 128

    def __init__(self, fd: int) -> None:
        """Listen on an inherited socket; raises OSError."""
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=fd)
        self.server_activate()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.server.launcher.sendall(self.rfile.read(int(self.headers["Content-Length"])))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


def download(argv: list[str]) -> None:
    begin("download", "download")
    sys.stdout.write(json.dumps({"model_folder": str(FOLDER)}) + "\n")


def main() -> None:
    role, *argv = sys.argv[1:]
    if role == "router":
        router(argv)
    elif argv[0] == "download-weights":
        download(argv[1:])
    elif argv[0] == "fork-server" and "FAKE_FORKS" in os.environ:
        fork_server(argv[1:])
    else:
        shard(argv[1:])


if __name__ == "__main__":
    main()
