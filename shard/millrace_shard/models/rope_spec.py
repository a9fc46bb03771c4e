"""Values that describe rotary embeddings and their scalings; they compute nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """The base grows with the length of the sequence past the trained length (dynamic NTK)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Long waves are stretched by `factor`, short ones kept, and those in between interpolated (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    attention_factor: float
    """Scales cosines and sines."""
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True
    """Whether the bounds of the interpolated channels are rounded to whole channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """One factor per frequency: short ones within `original_positions`, long ones past them (arXiv 2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float
    """Scales cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long waves are stretched, short ones kept, and those in between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Only the first `angles` pairs of channels are rotated, with the frequencies that they have among all pairs."""

    angles: int


RopeScaling = (
    LinearScaling
    | DynamicScaling
    | YarnScaling
    | LongRopeScaling
    | Llama3Scaling
    | ProportionalScaling
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeAxes:
    """Positions of three axes: time, rows and columns. Each pair of channels is rotated by one of them (mrope)."""

    sections: tuple[int, ...]
    """Pairs of channels of each axis."""
    alternate: bool = False
    """Whether pairs of the axes alternate, as in Qwen 3 VL; otherwise an axis comes after the other."""

    def of_channels(self, rotary_dim: int) -> tuple[int, ...]:
        """The axis of each of `rotary_dim` channels, whose halves are alike."""
        pairs = [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        if self.alternate:
            pairs = [0] * (rotary_dim // 2)
            for axis in (1, 2):
                last = min(3 * self.sections[axis], len(pairs))
                pairs[axis:last:3] = [axis] * len(range(axis, last, 3))
        return (*pairs, *pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotation of the first `rotary_dim` channels of a head; the others are not rotated."""

    rotary_dim: int
    theta: float
    """The base of the frequencies."""
    max_positions: int
    """The trained length, `max_position_embeddings`."""
    scaling: RopeScaling | None = None
    interleaved: bool = False
    """Whether channel 2 i is paired with 2 i + 1; otherwise channel i is paired with i + rotary_dim / 2."""
    axes: RopeAxes | None = None
    """None: a token has one position."""
