"""Flame graphs from timed, nested events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from millrace.charts.svg import WIDTH, document, text

ROW = 18
MARGIN = 20
TOP = 84
LEAST_WIDTH = 1.5
"""The least width of a drawn frame, in pixels."""
CHARACTER = 6.2
PALETTE = ("#e8a35c", "#dd8f52", "#e6b56d", "#d97f4e", "#ecc07f")
OPERATOR = "#7fa9cc"


@dataclass(frozen=True, slots=True)
class Event:
    """One call on one thread, in microseconds."""

    name: str
    start: float
    duration: float
    is_operator: bool = False


@dataclass(slots=True)
class Frame:
    """All calls of one name in one place of the tree."""

    name: str
    total: float = 0.0
    is_operator: bool = False
    children: dict[str, Frame] = field(default_factory=dict)

    @property
    def own(self) -> float:
        """Time outside of all children."""
        return self.total - sum(child.total for child in self.children.values())

    def scaled(self, factor: float) -> Frame:
        """The same tree with every time multiplied."""
        children = {name: child.scaled(factor) for name, child in self.children.items()}
        return Frame(self.name, self.total * factor, self.is_operator, children)

    def depth(self) -> int:
        """Levels, this one included."""
        return 1 + max((child.depth() for child in self.children.values()), default=0)


def tree(name: str, events: Iterable[Event]) -> Frame:
    """Merge events into a tree: the parent of an event is the shortest one around it."""
    root = Frame(name)
    stack: list[tuple[float, Frame]] = []
    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        while stack and event.start >= stack[-1][0]:
            stack.pop()
        # Rounded clocks may let a child end after its parent.
        end = min([event.start + event.duration, *(end for end, _ in stack[-1:])])
        parent = stack[-1][1] if stack else root
        frame = parent.children.setdefault(
            event.name, Frame(event.name, is_operator=event.is_operator)
        )
        frame.total += end - event.start
        stack.append((end, frame))
    root.total = sum(child.total for child in root.children.values())
    return root


def own_times(frame: Frame) -> dict[str, float]:
    """Own time by name over the whole tree, longest first."""
    found: dict[str, float] = {}

    def visit(node: Frame) -> None:
        found[node.name] = found.get(node.name, 0.0) + node.own
        for child in node.children.values():
            visit(child)

    visit(frame)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def flame_graph(title: str, root: Frame, notes: Sequence[str]) -> str:
    """An SVG document with the root on top, and each frame below its caller."""
    parts = [text(MARGIN, 46 + 16 * row, note) for row, note in enumerate(notes)]
    scale = (WIDTH - 2 * MARGIN) / max(root.total, 1e-9)
    _draw(root, MARGIN, TOP, scale, parts, whole=root.total)
    return document(title, parts, height=TOP + (root.depth() + 1) * ROW)


def _draw(
    frame: Frame, x: float, y: float, scale: float, parts: list[str], *, whole: float
) -> None:
    width = frame.total * scale
    if width < LEAST_WIDTH:
        return
    colour = OPERATOR if frame.is_operator else PALETTE[sum(frame.name.encode()) % len(PALETTE)]
    label = f"{frame.name}: {frame.total:.0f} µs, {100 * frame.total / max(whole, 1e-9):.1f} %"
    parts.append(
        f"<rect x='{x:.1f}' y='{y}' width='{max(width - 0.5, 0.5):.1f}' height='{ROW - 1}'"
        f" fill='{colour}'><title>{escape(label)}</title></rect>"
    )
    room = int((width - 6) / CHARACTER)
    if room >= 4:
        shown = label if len(label) <= room else label[: room - 1] + "…"
        parts.append(text(x + 3, y + 13, shown))
    for child in sorted(frame.children.values(), key=lambda child: -child.total):
        _draw(child, x, y + ROW, scale, parts, whole=whole)
        x += child.total * scale
