"""The ranks of one tensor-parallel model: collectives over torch.distributed, which a single rank skips.

Supervisors on several hosts restart ranks one by one, but a group whose rank is gone cannot go on: its collectives wait
for that process. So a rank that comes back makes the ranks that it left end, too; then all meet anew.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from millrace_shard.device.one_shot import MAX_BYTES, OneShotAllReduce, SharedMemory

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
DISCARD_PORT = 9
"""Connecting a datagram socket sends nothing; the port is of no account."""

logger = logging.getLogger(__name__)


def use_interface_to(host: str) -> None:
    """Make gloo and NCCL use the interface that leads to `host`; settings of the environment are kept.

    By default they take the interface of this machine's name, or the first one, which may not reach the other ranks.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    interface = interface_to(host) if missing else None
    if interface is not None:
        os.environ.update(dict.fromkeys(missing, interface))
        logger.debug("collectives use the interface %s, which leads to %s", interface, host)


def interface_to(host: str) -> str | None:
    """The interface from which `host` is reached; None if no route leads there."""
    try:
        family, socket_type, _, _, address = socket.getaddrinfo(
            host, DISCARD_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket_type) as probe:
            probe.connect(address)
            local_address = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # An IPv6 address of a link has its interface after a percent sign.
        if any(
            each.address.partition("%")[0] == local_address.partition("%")[0] for each in addresses
        ):
            return name
    return None


LEFT = "a-rank-has-left"
RETRY_SECONDS = 0.2
FIRST_RETRY_SECONDS = 0.004
CONNECT_SECONDS = 5.0
FOREVER = timedelta(days=365)


def meet(
    rank: int, world_size: int, *, master_addr: str, master_port: int, timeout: timedelta
) -> Store:
    """The store of rank 0, in which this rank is for the first time.

    Waits up to `timeout` for rank 0; a store in which this rank has been before belongs to a group that now ends.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank > 0:
        _await_listener(master_addr, master_port, deadline)
    while True:
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = TCPStore(
            master_addr,
            master_port,
            world_size,
            is_master=rank == 0,
            timeout=left,
            wait_for_workers=False,
        )
        if store.add(f"rank-{rank}", 1) == 1:
            return store
        logger.info("rank %d was in this group before; waiting until the group has ended", rank)
        try:
            store.set(LEFT, str(rank))
        except dist.DistError:
            logger.debug("rank 0 has ended")
        del store
        if time.monotonic() > deadline:
            raise dist.DistStoreError("the group that this rank left does not end")
        time.sleep(RETRY_SECONDS)


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Return once `host` listens on `port`, or at `deadline`: a store that is refused waits up to 0.75 s."""
    pause = FIRST_RETRY_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError:
            time.sleep(pause)
            pause = min(pause * 1.2, RETRY_SECONDS)
        else:
            return


def watch_members(master_addr: str, master_port: int, *, then: Callable[[str], None]) -> None:
    """Call `then` with the reason, from another thread, once a rank of the group has left or rank 0 is gone."""
    # Waiting in a store occupies it.
    store = TCPStore(master_addr, master_port, is_master=False, wait_for_workers=False)

    def watch() -> None:
        try:
            store.wait([LEFT], FOREVER)
        except (dist.DistError, RuntimeError):
            then("rank 0 has ended")
        else:
            then(f"rank {store.get(LEFT).decode()} has left its group")

    Thread(target=watch, name="membership", daemon=True).start()


COLLECTIVE_TIMEOUT = timedelta(seconds=120)
GROUP_ID_BITS = 63
GLOO = "gloo"
"""Part of every error of gloo: the file in which it was raised."""
REFUSALS = ("ncclInvalidUsage", "ncclInvalidArgument", "stream is capturing")
"""Texts of NCCL's errors for calls that it refuses before ranks communicate, which leave the group usable."""


class GroupError(RuntimeError):
    """The ranks could not form a group."""


class RanksMissing(GroupError):  # noqa: N818
    """Other ranks did not come in time, or are gone; they may come later."""


class RanksGone(RanksMissing):
    """Other ranks have left a group that served."""


class CollectiveError(GroupError):
    """A collective failed or timed out. The ranks are out of step, so the group is unusable."""


class ProcessGroup:
    """One rank's view of its group. Every method is a collective: all ranks call it, in the same order.

    Collectives raise CollectiveError when another rank is gone or exceeds the timeout. Other errors of the device, such
    as torch.OutOfMemoryError, are raised as they are.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        if not 0 <= rank < world_size:
            raise GroupError(f"rank {rank} is outside a group of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.id = secrets.randbits(GROUP_ID_BITS)
        """The same on all ranks once they are connected; ranks that met others have another number."""
        self._one_shot: OneShotAllReduce | None = None
        self._in_rank_order = False
        self._add: Callable[[Tensor], Tensor] = sum_in_order

    @classmethod
    def single(cls) -> ProcessGroup:
        """A group of one rank, whose collectives return their input."""
        return cls(0, 1, torch.device("cpu"))

    def join(
        self,
        master_addr: str,
        master_port: int,
        *,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
        when_broken: Callable[[str], None] | None = None,
    ) -> None:
        """Wait for all ranks at rank 0's address; the backend is NCCL for CUDA devices, gloo otherwise.

        `timeout` also bounds every later collective. `when_broken` is called, from another thread, when a rank comes
        back that has left this group, or rank 0 is gone. Raises GroupError when ranks are missing or share a GPU.
        """
        # Forks of one process are different groups.
        self.id = secrets.randbits(GROUP_ID_BITS)
        rank, world_size = self.rank, self.world_size
        if world_size == 1:
            return
        use_interface_to(master_addr)
        try:
            store = meet(
                rank, world_size, master_addr=master_addr, master_port=master_port, timeout=timeout
            )
            if when_broken is not None:
                watch_members(master_addr, master_port, then=when_broken)
            self._meet_in(store, timeout)
        except GroupError:
            raise
        except (dist.DistError, RuntimeError, ValueError) as error:
            endpoint = f"{master_addr}:{master_port}"
            raise RanksMissing(
                f"rank {rank} of {world_size} found no group at {endpoint}: {error}"
            ) from error

    def _meet_in(self, store: Store, timeout: timedelta) -> None:
        """Wait for the others in the store, and agree on the number of the group."""
        rank, world_size, device = self.rank, self.world_size, self.device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
            refuse_shared_gpus(store, rank, world_size, gpu_name(device))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        self.id = self.broadcast(self.id)
        if cuda:
            logger.info("%s", limits_of_waits(timeout))

    def add_in_rank_order(self, add: Callable[[Tensor], Tensor] | None = None) -> None:
        """From now on, add in the order of ranks, so that the sum of an element does not depend on its place.

        A ring starts each part of a tensor at another rank, and the part of an element depends on the number of rows.
        The sum of two numbers is the same in any order, so this changes nothing for two ranks. `add` has the bits of
        `sum_in_order`, which it replaces for the floats of all ranks, [world_size, …].
        """
        self._add = add or sum_in_order
        self._in_rank_order = self.world_size > 2

    def use_one_shot(self, memory: SharedMemory, *, is_requested: bool = True) -> None:
        """From now on, sum tensors that fit through `memory`, if all ranks can share it and a trial has the right sums.

        Otherwise that is logged, as a warning if it `is_requested`. It has no effect where sums are added in the order
        of ranks, which is logged, too. A collective.
        """
        if self.world_size == 1:
            return
        level = logging.WARNING if is_requested else logging.INFO
        if self._in_rank_order:
            if is_requested:
                logger.info(
                    "--one-shot-all-reduce has no effect: with --deterministic on, more than two ranks"
                    " add in their order"
                )
            return
        if not self.is_on_one_host():
            logger.log(level, "all sums go through NCCL: the ranks are on several hosts")
            return
        one_shot, problem = None, "another rank cannot"
        try:
            one_shot = OneShotAllReduce(memory, self.world_size)
        except RuntimeError as error:
            problem = str(error)
        if not self.minimum(int(one_shot is not None)):
            logger.log(level, "all sums go through NCCL, as GPUs cannot share memory: %s", problem)
            return
        assert one_shot is not None
        try:
            wrong = one_shot.problem(self.rank)
        except RuntimeError as error:
            wrong = str(error)
        if not self.minimum(int(wrong is None)):
            logger.warning(
                "all sums go through NCCL, as those through shared memory failed a trial: %s",
                wrong or "on another rank",
            )
            return
        self._one_shot = one_shot
        logger.info("sums of up to %d MiB go through memory that the GPUs share", MAX_BYTES >> 20)

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over the ranks; every rank gets the same bits. `t` may be overwritten."""
        if self.world_size == 1:
            return t
        if self._in_rank_order:
            return self._sum_in_rank_order(t)
        with as_collective_errors():
            if self._one_shot is not None and self._one_shot.fits(t):
                return self._one_shot(t)
            dist.all_reduce(t)
        return t

    def _sum_in_rank_order(self, t: Tensor) -> Tensor:
        """Gather the parts of all ranks and add them in order."""
        add = self._add if t.is_floating_point() else sum_in_order
        return add(self._gather(t))

    def all_gather(self, t: Tensor) -> Tensor:
        """The `t` of all ranks, concatenated in the last dimension, rank 0 first."""
        return t if self.world_size == 1 else self._gather(t).movedim(0, -2).flatten(-2)

    def all_gather_logits(self, part: Tensor, vocab_size: int) -> Tensor:
        """Logits [R, vocab_size] float32, contiguous, of the parts [R, share] of all ranks, rank 0 first.

        Parts are sent in their own dtype, so that no bit is lost. Those of the last ranks may extend past the last id.
        """
        if self.world_size == 1:
            return part[:, :vocab_size].float().contiguous()
        share = part.shape[1]
        whole = part.new_empty(part.shape[0], vocab_size, dtype=torch.float32)
        for start, rank_part in zip(range(0, vocab_size, share), self._gather(part), strict=False):
            columns = whole[:, start : start + share]
            columns.copy_(rank_part[:, : columns.shape[1]])
        return whole

    def _gather(self, t: Tensor) -> Tensor:
        """The `t` of all ranks in one buffer, [world_size, *t.shape]."""
        gathered = t.new_empty(self.world_size, *t.shape)
        whole = t.contiguous()
        # The newer name, which older versions of torch lack, and the older one, which newer versions warn of.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with as_collective_errors():
            # gloo takes the concatenation only, NCCL either form.
            gather(gathered.flatten(0, 1), whole)
        return gathered

    def broadcast(self, value: int) -> int:
        """Rank 0's `value`, of at most 63 bits."""
        if self.world_size == 1:
            return value
        theirs = torch.tensor(value, dtype=torch.int64, device=self.device)
        with as_collective_errors():
            dist.broadcast(theirs, src=0)
        return int(theirs)

    def minimum(self, value: int) -> int:
        """The smallest `value` over all ranks."""
        if self.world_size == 1:
            return value
        smallest = torch.tensor(value, dtype=torch.int64, device=self.device)
        with as_collective_errors():
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)

    def is_on_one_host(self) -> bool:
        """Whether no two ranks are on different hosts."""
        number = host_number()
        return self.minimum(number) == -self.minimum(-number)

    def close(self) -> None:
        """Leave the group; collectives that other ranks are running fail."""
        if self.world_size > 1:
            dist.destroy_process_group()


def limits_of_waits(timeout: timedelta) -> str:
    """What ends a rank that waits for others on GPUs: NCCL's watchdog does not see collectives in CUDA graphs."""
    return (
        f"NCCL ends the process if a rank waits more than {timeout.total_seconds():.0f} s for the others outside CUDA"
        " graphs; decodes, which replay graphs, end by the router's --step-timeout"
    )


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A number of the running kernel, which the containers of a host have in common."""


def host_number() -> int:
    """A number of at most 62 bits that no other host has; 0 where the system has none."""
    try:
        return int(BOOT_ID.read_text().replace("-", ""), 16) >> 66
    except OSError:
        return 0


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum of `parts` [N, …] in order, in their dtype; floats are added in float32 or wider, and rounded once."""
    first, *others = parts.unbind()
    is_float = parts.is_floating_point()
    total = first.to(torch.promote_types(parts.dtype, torch.float32)) if is_float else first
    for part in others:
        total = total + part
    return total.to(parts.dtype)


@contextmanager
def as_collective_errors() -> Iterator[None]:
    """Convert the errors of gloo and NCCL that leave the ranks out of step; others are raised as they are."""
    try:
        yield
    except RuntimeError as error:
        if not _leaves_out_of_step(error):
            raise
        raise CollectiveError(f"a collective of the ranks failed: {error}") from error


def _leaves_out_of_step(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError):
        return not any(words in str(error) for words in REFUSALS)
    # gloo raises RuntimeError itself, whose subclasses are errors of the device.
    return type(error) is RuntimeError and GLOO in str(error)


def gpu_name(device: torch.device) -> str:
    """A name of a GPU that no other GPU of any host has."""
    return str(torch.cuda.get_device_properties(device).uuid)


def refuse_shared_gpus(store: Store, rank: int, world_size: int, name: str) -> None:
    """Exchange the names of the ranks' GPUs; raises GroupError if another rank has the GPU `name` too. A collective."""
    store.set(f"gpu-{rank}", name)
    names = [store.get(f"gpu-{each}").decode() for each in range(world_size)]
    owners = [str(each) for each in range(world_size) if names[each] == name]
    if len(owners) > 1:
        raise GroupError(
            f"ranks {' and '.join(owners)} have the same GPU, {name}; each shard needs its own GPU"
        )
