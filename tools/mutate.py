"""Whether the tests of the core notice errors: `python -m tools.mutate --count 200 --out sites.json`.

Draws mutations of single operators, constants and conditions in the core's rooms, applies one after the other in a worktree
of HEAD, and runs the tests of its room. A mutation that no test notices survives. `--sites` repeats the mutations of an
earlier run on the present tree, and so says whether a change of the tests lost any: a site is known by its function, the
text of its line and its operator, so it survives a move to another file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "router": ("scheduler", "engine", "request", "text", "validation", "recovery"),
    "shard": ("batch", "sampling", "engine"),
}
TEST_SECONDS = 240
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}


@dataclass(frozen=True)
class Site:
    """One mutation: the source of an expression and what replaces it."""

    plane: str
    room: str
    function: str
    line: str
    before: str
    after: str
    nth: int
    """Which of the equal expressions on the line."""


@dataclass(frozen=True)
class Span:
    """Where a site is in the present tree, in bytes of the file."""

    path: Path
    start: int
    end: int


def mutations(node: ast.AST, text: str) -> Iterator[tuple[ast.expr, str]]:
    """Expressions at `node` with the source that replaces them."""

    def segment(one: ast.AST) -> str:
        return ast.get_source_segment(text, one) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = COMPARISONS[type(node.ops[0])]
        yield node, f"{segment(node.left)} {sign} {segment(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield node, f"({segment(node.left)} {OPERATORS[type(node.op)]} {segment(node.right)})"
    elif isinstance(node, ast.BoolOp):
        sign = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({sign.join(f'({segment(one)})' for one in node.values)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({segment(node.operand)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, str(not node.value)


def sites_of(path: Path, plane: str, room: str) -> Iterator[tuple[Site, Span]]:
    """All mutations of the functions of a file."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    counts: Counter[tuple[str, ...]] = Counter()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                for one, after in mutations(node, text):
                    if one.end_lineno is None or one.end_col_offset is None:
                        continue
                    before = ast.get_source_segment(text, one) or ""
                    line = lines[one.lineno - 1].strip()
                    key = (function.name, line, before, after)
                    site = Site(plane, room, *key, nth=counts[key])
                    counts[key] += 1
                    start = starts[one.lineno - 1] + one.col_offset
                    end = starts[one.end_lineno - 1] + one.end_col_offset
                    yield site, Span(path, start, end)


def all_sites(folder: Path) -> dict[Site, Span]:
    sites: dict[Site, Span] = {}
    for plane, rooms in ROOMS.items():
        for room in rooms:
            source = folder / plane / f"millrace_{plane}" / room
            for path in sorted(source.rglob("*.py")):
                sites.update(sites_of(path, plane, room))
    return sites


def is_killed(folder: Path, site: Site, span: Span) -> bool:
    """Whether a test of the room fails with the mutation."""
    source = span.path.read_bytes()
    span.path.write_bytes(source[: span.start] + site.after.encode() + source[span.end :])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", f"tests/{site.plane}/{site.room}"],
            cwd=folder,
            env={**os.environ, "CI": "true", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        span.path.write_bytes(source)
    return done.returncode != 0


def work(queue: SimpleQueue[Site], outcomes: dict[Site, bool]) -> None:
    """Take sites from the queue, each in a worktree of this worker."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as parent:
        folder = Path(parent) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder), "HEAD"], check=True)
        try:
            subprocess.run([sys.executable, "proto/compile.py"], cwd=folder, check=True)
            spans = all_sites(folder)
            while True:
                site = queue.get_nowait()
                outcomes[site] = is_killed(folder, site, spans[site])
                mark = "killed" if outcomes[site] else "SURVIVED"
                print(
                    f"{mark:8} {site.room}: {site.function}: {site.line}  # {site.after}",
                    flush=True,
                )
        except Empty:
            pass
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def draw(sites: Sequence[Site], count: int, seed: int, repeated: Sequence[Site]) -> list[Site]:
    """The repeated sites that are still there, filled up with new ones of the rooms of those that are gone."""
    generator = random.Random(seed)
    present = set(sites)
    chosen = [site for site in repeated if site in present]
    print(f"{len(repeated) - len(chosen)} of {len(repeated)} repeated sites are gone", flush=True)
    rooms = Counter((site.plane, site.room) for site in repeated if site not in present)
    for (plane, room), gone in rooms.items():
        others = [s for s in sites if (s.plane, s.room) == (plane, room) and s not in chosen]
        chosen += generator.sample(others, min(gone, len(others)))
    rest = [site for site in sites if site not in set(chosen)]
    return chosen + generator.sample(rest, max(0, count - len(chosen)))


def main() -> None:
    """Run the mutations, print those that survive and the share that is killed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sites", type=Path, help="outcomes of an earlier run, to repeat")
    parser.add_argument("--out", type=Path, help="where outcomes are written")
    options = parser.parse_args()
    rows = json.loads(options.sites.read_text()) if options.sites else []
    repeated = [Site(**{key: row[key] for key in row if key != "killed"}) for row in rows]
    queue: SimpleQueue[Site] = SimpleQueue()
    for site in draw(list(all_sites(ROOT)), options.count, options.seed, repeated):
        queue.put(site)
    outcomes: dict[Site, bool] = {}
    threads = [Thread(target=work, args=(queue, outcomes)) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if options.out:
        done = [{**asdict(site), "killed": killed} for site, killed in outcomes.items()]
        options.out.write_text(json.dumps(done, indent=1) + "\n")
    killed = sum(outcomes.values())
    print(f"{killed} of {len(outcomes)} killed, {killed / max(1, len(outcomes)):.1%}")


if __name__ == "__main__":
    main()
