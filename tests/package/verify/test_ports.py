"""The port of a server of millrace-verify stays reserved until the server listens."""

from __future__ import annotations

import socket
from pathlib import Path

from millrace.server import LocalServers

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
