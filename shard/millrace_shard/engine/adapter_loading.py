"""Loads and unloads adapters: reads on the thread of the caller, and changes slots between two steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.engine.engine import Engine


class AdapterLoading:
    """Loads adapters into the slots of an engine's model. Methods raise WrongEpoch, and EngineEnded with the engine."""

    def __init__(self, engine: Engine, store: AdapterStore) -> None:
        self._engine = engine
        self._store = store

    def load(self, epoch: int, slot: int, digest: str) -> None:
        """Put the adapter `digest` into `slot`, in place of another one; returns when it is there.

        Raises AdapterInvalid and AdapterMemoryFull, and then the slot is as before.
        """
        self._engine.check_epoch(epoch)
        with self._store.loading():
            if self._store.holds(slot, digest):
                return
            adapter = self._store.read(slot, digest, partial(self._between_steps, epoch))
            try:
                self._between_steps(epoch, partial(self._store.put, slot, adapter))
            except BaseException:
                self._store.discard(slot, adapter)
                raise

    def unload(self, epoch: int, slot: int) -> None:
        """Empty `slot`; returns when it is empty."""
        self._between_steps(epoch, partial(self._store.remove, slot))

    def _between_steps(self, epoch: int, change: Callable[[], None]) -> None:
        """Run `change` on the engine thread, and wait for it."""
        self._engine.between_steps(epoch, change).result()
