"""The threads of the engine: one owns the device and runs all work, one answers steps."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

import torch

Call = Callable[[], None]


class EngineThreads:
    """Two threads, each of which runs the calls of its queue in order."""

    def __init__(
        self, device: torch.device, *, cpu_threads: int | None, on_end: Callable[[], None]
    ) -> None:
        """Each thread calls `on_end` when it ends. `cpu_threads` is the number of OpenMP threads of each."""
        self._device = device
        self._cpu_threads = cpu_threads
        self._on_end = on_end
        self._work: SimpleQueue[Call | None] = SimpleQueue()
        self._answers: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, args=(self._work,), name="engine", daemon=True),
            Thread(target=self._run, args=(self._answers,), name="answers", daemon=True),
        ]
        self._lock = Lock()
        self._has_ended = False
        self._when_ended: list[Call] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def work(self, call: Call) -> None:
        """Run `call` on the engine thread, after all earlier work."""
        self._work.put(call)

    def answer(self, call: Call) -> None:
        """Run `call` on the thread for answers."""
        self._answers.put(call)

    def has_work(self) -> bool:
        """Whether calls wait for the engine thread."""
        return not self._work.empty()

    def end(self) -> None:
        """Let the engine thread end after the work that was submitted; later work never runs."""
        self._work.put(None)

    def close(self) -> None:
        """Finish the submitted calls and wait for both threads to end."""
        for thread, calls in zip(self._threads, (self._work, self._answers), strict=True):
            calls.put(None)
            thread.join()

    def when_ended(self, call: Call) -> None:
        """Run `call` when a thread ends for any reason, or at once if one has ended."""
        with self._lock:
            self._when_ended.append(call)
            has_ended = self._has_ended
        if has_ended:
            call()

    def are_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def _run(self, calls: SimpleQueue[Call | None]) -> None:
        # Each thread has its own number of OpenMP threads and its own current GPU.
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            with torch.inference_mode():
                while (call := calls.get()) is not None:
                    call()
                    # A waiting thread must not hold the tensors of a step.
                    del call
        finally:
            self._on_end()
            self._call_ended()

    def _call_ended(self) -> None:
        with self._lock:
            calls = () if self._has_ended else tuple(self._when_ended)
            self._has_ended = True
        for call in calls:
            call()
