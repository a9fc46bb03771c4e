"""Stand-ins for the launcher's children; run as `python FILE ROLE ARGUMENT…`.

They write `{FAKE_DIR}/{name}.pid` and append to `{FAKE_DIR}/events`; `FAKE_{ROLE}` says how one misbehaves:
`crash` ends at once with a line on stderr, `deaf` ignores SIGTERM, `mute` never becomes ready.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc

FOLDER = Path(os.environ.get("FAKE_DIR", "."))


def event(text: str) -> None:
    with (FOLDER / "events").open("a") as file:
        file.write(f"{text}\n")


def begin(name: str, role: str) -> threading.Event:
    """Register the process, misbehave if told to; the event is set by SIGTERM."""
    (FOLDER / f"{name}.pid").write_text(str(os.getpid()))
    (FOLDER / f"{name}.json").write_text(
        json.dumps({"argv": sys.argv[2:], "environ": dict(os.environ)})
    )
    behaviour = os.environ.get(f"FAKE_{role.upper()}")
    if behaviour == "crash":
        sys.stderr.write(f"{name} cannot find its feet\n")
        sys.exit(7)
    stop = threading.Event()
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if behaviour == "mute":
        say(f"{name} is mute")
        stop.wait()
        event(f"{name} stopped")
        sys.exit(0)
    return stop


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
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(f"unix:{known.uds_path}-{known.rank}")
    server.start()
    say(f"{name} serves")
    stop.wait()
    event(f"{name} stopped")
    server.stop(None).wait()


def router(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=3000)
    known, _ = parser.parse_known_args(argv)
    stop = begin("router", "router")
    server = ThreadingHTTPServer(("127.0.0.1", known.port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stop.wait()
    event("router stopped")


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

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
    else:
        shard(argv[1:])


if __name__ == "__main__":
    main()
