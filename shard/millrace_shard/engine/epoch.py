"""The open epoch, whose steps run in the order of their numbers until one of them fails."""

from __future__ import annotations

from millrace_shard.batch.step import Open, Step


class Epoch:
    """The open epoch, if any. `Open` starts the next one, even after a failure."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._number = 0
        self._has_failed = False
        self.last_answered = 0

    def is_current(self, epoch: int) -> bool:
        """Whether `epoch` is the open one."""
        return self._epoch == epoch

    def refusal(self, step: Step) -> str | None:
        """The reason not to run `step`; None accepts the step and counts it."""
        if isinstance(step.work, Open):
            if step.number != 0 or step.epoch == self._epoch:
                return f"an epoch opens once, with step 0, not with step {step.number}"
            self._epoch, self._number, self._has_failed = step.epoch, 0, False
            return None
        if step.epoch != self._epoch:
            return f"epoch {step.epoch} is not open"
        if self._has_failed:
            return "an earlier step of this epoch failed"
        if step.number != self._number + 1:
            return f"step {step.number} instead of {self._number + 1}"
        self._number += 1
        return None

    def answered(self, step: Step) -> None:
        """Count the answer to `step`, if the step was accepted."""
        if step.epoch == self._epoch and step.number <= self._number:
            self.last_answered = step.number

    def fail(self, epoch: int) -> None:
        """A step of `epoch` failed."""
        if epoch == self._epoch:
            self._has_failed = True

    def end(self) -> None:
        """Close the epoch."""
        self._epoch = None
        self._has_failed = False
