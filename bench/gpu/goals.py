"""The checks and the goals on one GPU, computed from the figures of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.gpu.figures import CHECK, UNCHECKED, Figure, shown

READ_RATE, COPY_RATE, MATRIX_RATE = "memory read", "memory copy", "matrix product, bfloat16"
DECODE, PREFILL, SMALL = "decode", "prefill", "small"
ENGINE, SERVER, PEER, VLLM, TESTS = "engine", "server", "transformers", "vllm", "tests"
ACTIVITY, RATE, TRACE, READY = "activity", "rate", "trace", "ready"
THROTTLED = "throttled"
"""The detail of a figure during which the GPU was throttled: how often, and why."""
STOPPED = -1
"""Stands for the tests' exit status when their time limit ended them."""
UNIT = {READ_RATE: "GB/s", COPY_RATE: "GB/s", MATRIX_RATE: "TFLOP/s"}
PREFIX = {READ_RATE: 1e9, COPY_RATE: 1e9, MATRIX_RATE: 1e12}

Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table."""

    case: str
    measured: str
    reached: str
    """The measured value in the unit of the goal."""
    goal: str
    verdict: Verdict


class Figures:
    """A run's figures by their kind."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self._by_kind: dict[str, list[Figure]] = {}
        for figure in figures:
            self._by_kind.setdefault(figure.kind, []).append(figure)

    def all(self, kind: str) -> list[Figure]:
        """All figures of a kind, in order."""
        return self._by_kind.get(kind, [])

    def last(self, kind: str) -> Figure | None:
        """The last figure of a kind."""
        figures = self._by_kind.get(kind)
        return figures[-1] if figures else None

    def value(self, kind: str) -> float | None:
        """The value of the last figure of a kind."""
        figure = self.last(kind)
        return None if figure is None else figure.value

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the memory: the faster of reading and copying."""
        rates = [rate for kind in (READ_RATE, COPY_RATE) if (rate := self.value(kind)) is not None]
        return max(rates) * 1e9 if rates else None

    @property
    def matrix_rate(self) -> float | None:
        """Operations a second."""
        value = self.value(MATRIX_RATE)
        return None if value is None else value * 1e12


def checks(figures: Iterable[Figure]) -> list[Line]:
    """Every check that was made or could not be made, then the tests."""
    found = [figure for figure in figures if figure.kind in (CHECK, UNCHECKED)]
    return [*map(_checked, found), *_tests(Figures(figures))]


def speeds(figures: Iterable[Figure]) -> list[Line]:
    """Every goal of speed, measured or not."""
    found = Figures(figures)
    vllm = [_ratio(found, "engine against vLLM", (ENGINE, VLLM), least=1.0)]
    return [
        *_decodes(found),
        *_prefills(found),
        *_small(found),
        _ratio(found, "server against engine", (SERVER, ENGINE), least=0.92),
        _ratio(found, "engine against transformers", (ENGINE, PEER), least=2.0),
        # A check says where it is not installed.
        *(vllm if found.all(VLLM) else []),
    ]


def _checked(figure: Figure) -> Line:
    if figure.kind == UNCHECKED:
        return Line(
            case=figure.name,
            measured=str(figure.detail["reason"]),
            reached="",
            goal="",
            verdict="not measured",
        )
    return Line(
        case=figure.name,
        measured=_measured(figure),
        reached=str(figure.detail.get("checked", "")),
        goal=f"<= {shown(figure.most)}",
        verdict=_verdict(figure.value <= figure.most),
    )


def _decodes(found: Figures) -> Sequence[Line]:
    def share(figure: Figure) -> float | None:
        if found.bandwidth is None:
            return None
        return float(figure.detail["bytes"]) / found.bandwidth / (figure.value / 1e3)

    return _shares(found.all(DECODE), DECODE, share, (0.85, "of the memory's rate"))


def _prefills(found: Figures) -> Sequence[Line]:
    def share(figure: Figure) -> float | None:
        if found.matrix_rate is None:
            return None
        return float(figure.detail["flops"]) / found.matrix_rate / (figure.value / 1e3)

    return _shares(found.all(PREFILL), PREFILL, share, (0.65, "of the matrix rate"))


def _shares(
    figures: Sequence[Figure],
    kind: str,
    share: Callable[[Figure], float | None],
    goal: tuple[float, str],
) -> Sequence[Line]:
    least, what = goal
    text = f">= {least:.0%} {what}"
    lines = []
    for figure in figures:
        reached = share(figure)
        lines.append(
            Line(
                case=figure.name,
                measured=_measured(figure),
                reached="" if reached is None else f"{reached:.1%}",
                goal=text,
                verdict=_verdict(
                    reached is not None and reached >= least, known=reached is not None
                ),
            )
        )
    return lines or [_missing(kind, text)]


def _small(found: Figures) -> Sequence[Line]:
    most = 1.2
    goal = f"<= {most} ms"
    lines = [
        Line(
            case=figure.name,
            measured=_measured(figure),
            reached=f"{figure.value:.3f} ms",
            goal=goal,
            verdict=_verdict(figure.value <= most),
        )
        for figure in found.all(SMALL)
    ]
    return lines or [_missing("small model, decode", goal)]


def _ratio(found: Figures, case: str, kinds: tuple[str, str], *, least: float) -> Line:
    goal = f">= {least:g} x"
    above, below = (found.last(kind) for kind in kinds)
    if above is None or below is None:
        return _missing(case, goal)
    ratio = above.value / below.value
    return Line(
        case=case,
        measured=f"{shown(above.value)} and {shown(below.value)} tok/s{throttle_mark(above, below)}",
        reached=f"{ratio:.3f} x",
        goal=goal,
        verdict=_verdict(ratio >= least),
    )


def _tests(found: Figures) -> Sequence[Line]:
    lines = [
        Line(
            case=figure.name,
            measured=str(figure.detail["summary"]),
            reached="" if figure.value == STOPPED else f"exit status {figure.value:.0f}",
            goal="all pass",
            verdict=_tests_verdict(figure),
        )
        for figure in found.all(TESTS)
    ]
    return lines or [_missing("GPU tests", "all pass")]


def _tests_verdict(figure: Figure) -> Verdict:
    """Failed if any test failed; unknown if tests were skipped or not all ran."""
    if figure.detail["failed"]:
        return "missed"
    is_cut = figure.value == STOPPED or (figure.value == 0 and figure.detail["skipped"] > 0)
    return _verdict(figure.value == 0, known=not is_cut)


def _measured(figure: Figure) -> str:
    return f"{shown(figure.value)} {figure.unit}{throttle_mark(figure)}"


def throttle_mark(*figures: Figure) -> str:
    """What stands after figures of which one was measured while the GPU was throttled; empty after others."""
    return next(
        (f" ({THROTTLED}: {f.detail[THROTTLED]})" for f in figures if THROTTLED in f.detail), ""
    )


def _missing(case: str, goal: str) -> Line:
    return Line(case=case, measured="", reached="", goal=goal, verdict="not measured")


def _verdict(is_met: bool, *, known: bool = True) -> Verdict:  # noqa: FBT001
    if not known:
        return "not measured"
    return "met" if is_met else "missed"
