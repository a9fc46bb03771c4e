"""Meeting the other ranks, and learning that one of them has left.

Supervisors on several hosts restart ranks one by one, but a group whose rank is gone cannot go on: its collectives wait
for that process. So a rank that comes back makes the ranks that it left end, too; then all meet anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

LEFT = "a-rank-has-left"
RETRY_SECONDS = 0.2
FOREVER = timedelta(days=365)

logger = logging.getLogger(__name__)


def meet(
    rank: int, world_size: int, *, master_addr: str, master_port: int, timeout: timedelta
) -> Store:
    """The store of rank 0, in which this rank is for the first time.

    Waits up to `timeout` for rank 0; a store in which this rank has been before belongs to a group that now ends.
    """
    deadline = time.monotonic() + timeout.total_seconds()
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


def when_broken(master_addr: str, master_port: int, *, then: Callable[[str], None]) -> None:
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
