"""Ranks that meet, leave and come back, as processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from millrace_testing.launcher.deployment import kept_port

CODE = """
import sys
from datetime import timedelta
from threading import Event
from millrace_shard.device.process_group import ProcessGroup
import torch

rank, port = map(int, sys.argv[1:])
broken = Event()

def when_broken(reason):
    print(reason, flush=True)
    broken.set()

group = ProcessGroup.connect(
    rank, 2, master_addr="127.0.0.1", master_port=port, device=torch.device("cpu"),
    timeout=timedelta(seconds=60), when_broken=when_broken,
)
print(group.id, flush=True)
broken.wait()
import os
os._exit(75)
"""
SECONDS = 60


class Rank:
    """A process of a rank, and what it says."""

    def __init__(self, rank: int, port: int) -> None:
        command = [sys.executable, "-c", CODE, str(rank), str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def says(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def ranks() -> Iterator[ExitStack]:
    """Kills what is left."""
    with ExitStack() as stack:
        yield stack


def started(ranks: ExitStack, rank: int, port: int) -> Rank:
    found = Rank(rank, port)
    # It waits for the process and closes its pipe.
    ranks.enter_context(found.process)
    ranks.callback(found.process.kill)
    return found


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_comes_back_ends_the_group_that_it_left(ranks: ExitStack, gone: int) -> None:
    with kept_port() as port:
        both = [started(ranks, rank, port) for rank in range(2)]
        first = {each.says() for each in both}
        assert len(first) == 1
        stays = both[1 - gone]
        both[gone].process.kill()
        both[gone].process.wait()
        back = started(ranks, gone, port)
        reason = "rank 0 has ended" if gone == 0 else "rank 1 has left its group"
        assert stays.says() == reason
        assert stays.process.wait(SECONDS) == 75
        other = started(ranks, 1 - gone, port)
        again = {back.says(), other.says()}
        assert len(again) == 1
        assert again != first
