"""`python -m tests.ecosystem.operating.dashboard_picture FILE.svg`: the dashboard's panels over two minutes of load.

Grafana does not draw it. A Prometheus scrapes a server with the demo model, and this program draws the queries of the
panels at the panels' places.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from bench.harness.server import RunningServer, serving
from tests.ecosystem.operating.prometheus import DASHBOARD, ROOT, Prometheus, scraping

from millrace.charts.svg import COLOURS, FAINT, line, rectangle, short, text

SECONDS = 120
KILL_AT = 80.0
"""Seconds after which a shard is killed."""
STEP = 2.0
WINDOW = "10s"
CELL, ROW = 50, 26
"""Width and height of one of Grafana's 24 columns, and of a row."""
SMALL = 0.8
"""Scale of texts that have little room."""
CHARACTER = 5.6
"""Width of one at this scale."""
MOST_SERIES = 4
OVERLOADED = 429
PROMPTS = (
    "What is a KV cache?",
    "Explain continuous batching. " * 30,
    "What is prefill?",
    "What is a token? " * 80,
)
MODELS = ("tgi", "tgi", "pirate", "butler")


async def talk(client: httpx.AsyncClient, number: int, until: float) -> None:
    """One client, which asks and waits in turn."""
    turn = number
    while time.monotonic() < until:
        turn += 1
        body = {
            "model": MODELS[turn % len(MODELS)],
            "messages": [{"role": "user", "content": PROMPTS[turn % len(PROMPTS)]}],
            "max_tokens": 20 + 13 * (turn % 17),
            "stream": True,
        }
        if turn % 40 == 0:
            body["max_tokens"] = 10**7
        if turn % 9 == 0:
            body["response_format"] = {"type": "json_object"}
        answer = await client.post("/v1/chat/completions", json=body)
        await asyncio.sleep(0.2 * (turn % 5) + 2.0 * (answer.status_code == OVERLOADED))


async def load(server: RunningServer) -> None:
    """More clients from third to third, and the death of a shard."""
    end = time.monotonic() + SECONDS
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        clients = []
        for third, num_clients in enumerate((4, 16, 24)):
            clients += [asyncio.create_task(talk(client, n, end)) for n in range(num_clients)]
            if third == 2:
                break
            await asyncio.sleep(SECONDS / 3)
        for process in server.processes():
            if "millrace_shard" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
        await asyncio.gather(*clients)


def name_of(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """The legend of a series, with its labels in the place of `{{name}}`."""
    name: str = target.get("legendFormat", "")
    for label, value in labels.items():
        name = name.replace(f"{{{{{label}}}}}", value)
    return name


def points_of(
    panel: Mapping[str, Any], prometheus: Prometheus, start: float, end: float
) -> dict[str, list[tuple[float, float]]]:
    """(Unix time, value) of each series of a panel, without those that are no numbers."""
    series: dict[str, list[tuple[float, float]]] = {}
    for target in panel.get("targets", []):
        expression = target["expr"].replace("$container", ".*")
        expression = expression.replace("$__rate_interval", WINDOW)
        for found in prometheus.query_range(expression, start=start, end=end, step=STEP):
            values = [(at, float(value)) for at, value in found["values"]]
            series[name_of(target, found["metric"])] = [p for p in values if math.isfinite(p[1])]
    return {name: points for name, points in series.items() if points}


def in_unit(value: float, unit: str) -> str:
    """A value as Grafana would write it, nearly."""
    if unit == "percentunit":
        return f"{value * 100:.0f} %"
    if unit == "s" and value < 1:
        return f"{short(value * 1000)} ms"
    return f"{short(value)} s" if unit == "s" else short(value)


def small(x: float, y: float, content: str, *, anchor: str = "start") -> str:
    """A line of small text."""
    inside = text(0, 0, content, anchor=anchor)
    return f"<g transform='translate({x:.0f} {y:.0f}) scale({SMALL})'>{inside}</g>"


class Picture:
    """SVG parts of panels, at their places below the headline."""

    def __init__(self, start: float, end: float) -> None:
        self.parts: list[str] = []
        self._start, self._end = start, end

    def draw(self, panel: Mapping[str, Any], series: Mapping[str, Sequence[Any]]) -> None:
        """One panel."""
        box = panel["gridPos"]
        x, y, width = box["x"] * CELL + 8, box["y"] * ROW + 40, box["w"] * CELL - 8
        if panel["type"] == "row":
            self.parts.append(text(x, y + 20, panel["title"], weight="bold"))
            return
        height = box["h"] * ROW - 8
        self.parts += [
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='none' stroke='{FAINT}'/>",
            small(x + 8, y + 16, panel["title"]),
        ]
        unit = panel["fieldConfig"]["defaults"].get("unit", "short")
        if panel["type"] in ("stat", "gauge"):
            last = "".join(in_unit(points[-1][1], unit) for points in series.values())
            self.parts.append(
                text(x + width / 2, y + height * 0.7, last, anchor="middle", weight="bold")
            )
        elif panel["type"] == "heatmap":
            self._cells(series, x + 60, y + 26, width - 70, height - 36)
        else:
            self._lines(series, unit, x + 50, y + 26, width - 60, height - 50)

    def _place(self, at: float, x: float, width: float) -> float:
        return x + (at - self._start) / (self._end - self._start) * width

    def _lines(
        self,
        series: Mapping[str, Sequence[Any]],
        unit: str,
        x: float,
        y: float,
        width: float,
        height: float,
    ) -> None:
        if not series:
            self.parts.append(small(x + width / 2, y + height / 2, "no data", anchor="middle"))
            return
        most = max(value for points in series.values() for _, value in points) or 1.0
        for share in (0.0, 0.5, 1.0):
            level = y + height * (1 - share)
            label = in_unit(most * share, unit) if share else "0"
            self.parts += [
                line(x, level, x + width, level, FAINT),
                small(x - 6, level + 4, label, anchor="end"),
            ]
        at = x
        for number, (name, points) in enumerate(list(series.items())[:MOST_SERIES]):
            colour = COLOURS[number % len(COLOURS)]
            path = " ".join(
                f"{self._place(when, x, width):.0f},{y + height * (1 - value / most):.0f}"
                for when, value in points
            )
            self.parts += [
                f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>",
                rectangle(at, y + height + 9, 8, 8, colour),
                small(at + 11, y + height + 17, name),
            ]
            at += len(name) * CHARACTER + 22

    def _cells(
        self, series: Mapping[str, Sequence[Any]], x: float, y: float, width: float, height: float
    ) -> None:
        """Counts of a histogram's buckets, from the cumulative ones."""
        bounds = sorted(series, key=float)
        counts = {bound: dict(series[bound]) for bound in bounds}
        used = [
            b
            for a, b in itertools.pairwise(bounds)
            if any(counts[b].get(at, 0) > counts[a].get(at, 0) for at in counts[b])
        ]
        most = max((counts[b].get(at, 0) for b in used for at in counts[b]), default=1.0)
        for row, bound in enumerate(used):
            below = counts[bounds[bounds.index(bound) - 1]]
            level = y + height * (1 - (row + 1) / len(used))
            if row % 2 == 0:
                self.parts.append(
                    small(
                        x - 6, level + height / len(used), in_unit(float(bound), "s"), anchor="end"
                    )
                )
            for at, count in counts[bound].items():
                if (here := count - below.get(at, 0)) > 0:
                    cell = rectangle(
                        self._place(at, x, width),
                        level,
                        width * STEP / SECONDS,
                        height / len(used),
                        COLOURS[0],
                    )
                    opacity = 0.15 + 0.85 * here / most
                    self.parts.append(cell.replace("/>", f" fill-opacity='{opacity:.2f}'/>"))


def draw(prometheus: Prometheus, start: float, end: float) -> str:
    """The SVG document."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    picture = Picture(start, end)
    for panel in panels:
        picture.draw(panel, points_of(panel, prometheus, start, end))
    width = 24 * CELL + 8
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) * ROW + 40
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>",
            "<title>The dashboard's panels over two minutes of load</title>",
            f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
            text(
                8,
                24,
                "Millrace: two minutes, 4, 20, then 44 clients; a shard is killed at 80 s",
                weight="bold",
            ),
            *picture.parts,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Make it."""
    executable = shutil.which("prometheus")
    if executable is None:
        sys.exit("prometheus is not installed")
    flags = [
        "--speculate",
        "2",
        "--max-concurrent-requests",
        "32",
        "--kv-memory",
        "24M",
        "--lora-adapters",
    ]
    flags.append(",".join(f"{name}={ROOT}/demo/adapters/{name}" for name in ("pirate", "butler")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (
            serving(ROOT / "demo" / "model", log=folder / "log", flags=flags) as server,
            scraping(server, executable, folder) as prometheus,
        ):
            start = time.time()
            asyncio.run(load(server))
            end = time.time()
            Path(sys.argv[1]).write_text(draw(prometheus, start, end))


if __name__ == "__main__":
    main()
