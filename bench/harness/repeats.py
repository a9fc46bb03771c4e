"""Repeated measurements of one figure: their median, and whether other load disturbed it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

BUSY_CORES = 0.1
"""The most CPU, in cores, that other processes may use during an undisturbed measurement."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition."""

    value: float
    other_cores: float
    """CPU, in cores, that other processes used meanwhile."""

    @property
    def is_clean(self) -> bool:
        """Whether it was undisturbed."""
        return self.other_cores <= BUSY_CORES


@dataclass(frozen=True, slots=True)
class Repeated:
    """Samples of one figure in order; ValueError for none."""

    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("no sample")

    @property
    def is_clean(self) -> bool:
        """Whether at least one repetition was undisturbed."""
        return any(sample.is_clean for sample in self.samples)

    @property
    def median(self) -> float:
        """The median of the clean samples, or of all samples without a clean one."""
        clean = [sample.value for sample in self.samples if sample.is_clean]
        return statistics.median(clean or [sample.value for sample in self.samples])

    def as_json(self) -> dict[str, float | int]:
        """Plain containers: the median, the ends of several, and the most CPU, in cores, of other processes."""
        values = [sample.value for sample in self.samples]
        return {
            "median": self.median,
            **({"least": min(values), "most": max(values)} if len(values) > 1 else {}),
            "repeats": len(values),
            "other_cores": max(sample.other_cores for sample in self.samples),
        }

    @property
    def text(self) -> str:
        """The median, after a `~` where no sample was clean."""
        return ("" if self.is_clean else "~") + figure(self.median)

    def all_text(self) -> str:
        """Every sample, each disturbed one after a `~`."""
        return " ".join(("" if s.is_clean else "~") + figure(s.value) for s in self.samples)


def ratio_text(numerator: Repeated | None, denominator: Repeated | None) -> str:
    """Ratio of medians, after a `~` where either was disturbed; empty where one is missing."""
    if numerator is None or denominator is None or denominator.median == 0:
        return ""
    mark = "" if numerator.is_clean and denominator.is_clean else "~"
    return f"{mark}{numerator.median / denominator.median:.2f}"


def figure(value: float) -> str:
    """The value with about three digits."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
