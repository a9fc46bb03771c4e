"""The supervisor of ranks for a router elsewhere."""

from __future__ import annotations

import socket

import pytest

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.settings.commands import Programs
from millrace_launcher.settings.rank_arguments import prepare_ranks, read_rank_settings
from millrace_launcher.supervision.rank_host import RankHost


async def test_a_port_that_is_taken_is_told_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = ["--device=cpu", "--model-id=no/model", f"--address=127.0.0.1:{port}"]
        host = RankHost(prepare_ranks(*read_rank_settings(flags, {}), Programs()))
        with pytest.raises(ArgumentValidation, match=f"port {port} .*choose another --address"):
            await host.run()
