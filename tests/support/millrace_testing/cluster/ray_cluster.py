"""A Ray cluster whose nodes are hosts of this machine. Its head keeps its state in Redis where there is one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace_testing.cluster.hosts import NETWORK, Host, Program
from millrace_testing.launcher.e2e import END_SECONDS, wait_for

HEAD_PORT, REDIS_PORT = 6379, 6390
RAY = ("-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--block")
ANSWER = "the answer:"
HEAD_SECONDS = 25
"""The cluster ends if its head is away for longer."""
VARIABLES = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_SECONDS)}


class RayCluster:
    """A head without CPUs, and nodes with one each."""

    def __init__(self, hosts: Sequence[Host], folder: Path, redis: str | None) -> None:
        """`redis`: its address; without it the cluster ends with its head."""
        self.head, *self.hosts = hosts
        self.has_redis = redis is not None
        self._folder = folder
        self._redis = {} if redis is None else {"RAY_REDIS_ADDRESS": redis}
        self.start_head()
        started = [self.join(host) for host in self.hosts]
        wait_for(lambda: all("Ray runtime started" in program.log for program in started))

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{self.head.address}:{HEAD_PORT}"

    def start_head(self) -> Program:
        """Start the head, at first or again."""
        flags = ("--head", f"--port={HEAD_PORT}", "--num-cpus=0", "--include-dashboard=false")
        password = ("--redis-password=",) if self.has_redis else ()
        # Hosts share their processes' numbers, so Ray takes the nodes' processes for those of a head that runs here.
        (self._folder / self.head.name / "ray_current_cluster").unlink(missing_ok=True)
        return self._start(self.head, *flags, *password)

    def join(self, host: Host) -> Program:
        """Start Ray on a host."""
        shutil.rmtree(self._folder / host.name, ignore_errors=True)
        return self._start(host, f"--address={self.address}", "--num-cpus=1")

    def rejoin(self) -> Sequence[Program]:
        """Have all hosts that died join again, without waiting for it."""
        return [self.join(host) for host in self.hosts if not host.pids()]

    def ask(self, expression: str, *statements: str) -> str:
        """The value of a Python expression on the head, in a program of the cluster, after some statements."""
        join = "import ray; ray.init(address='auto', log_to_driver=False, logging_level='error')"
        code = "\n".join((join, *statements, f"print('{ANSWER}', {expression})"))
        environment = {"RAY_ADDRESS": self.address}
        program = self.head.python("-c", code, environment=environment)
        assert program.process.wait(END_SECONDS) == 0, program.log
        line = wait_for(lambda: next((x for x in program.lines if x.startswith(ANSWER)), ""))
        return line.removeprefix(ANSWER).strip()

    def drain(self, host: Host) -> None:
        """Tell the cluster that a host is going to end."""
        is_it = f"n['Alive'] and n['NodeManagerAddress'] == '{host.address}'"
        node = self.ask(f"*[n['NodeID'] for n in ray.nodes() if {is_it}]")
        flags = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test")
        program = self.head.python(
            *("-m", "ray.scripts.scripts", "drain-node", f"--address={self.address}"),
            *(f"--node-id={node}", *flags),
        )
        assert program.process.wait(END_SECONDS) == 0, program.log

    def _start(self, host: Host, *flags: str) -> Program:
        memory = "--object-store-memory=80000000"
        folder = self._folder / host.name
        return host.python(
            *(*RAY, f"--node-ip-address={host.address}", f"--temp-dir={folder}", memory, *flags),
            environment={**VARIABLES, **self._redis},
        )


class Redis:
    """A Redis that hosts reach."""

    def __init__(self, program: str, folder: Path) -> None:
        self.address = f"{NETWORK}.1:{REDIS_PORT}"
        flags = ("--bind", f"{NETWORK}.1", "--port", str(REDIS_PORT), "--protected-mode", "no")
        self._process = subprocess.Popen(
            [program, *flags, "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
        )

    def kill(self) -> None:
        """End it, with what it knows."""
        self._process.kill()
        self._process.wait(END_SECONDS)


@contextmanager
def redis(folder: Path) -> Iterator[Redis | None]:
    """A running Redis; None if it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    found = Redis(program, folder)
    try:
        yield found
    finally:
        found.kill()
