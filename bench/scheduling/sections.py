"""Sections of RESULTS.md that are written anew, each between markers of its own."""

from __future__ import annotations

from pathlib import Path


def replace(text: str, section: str, *, key: str, topic: str = "scheduling") -> str:
    """`text` with what stands between the markers of `key` replaced, or with a new section at its end.

    ValueError where a marker stands alone or twice.
    """
    begin, end = f"<!-- {topic}: {key} -->", f"<!-- end of {topic}: {key} -->"
    marked = f"{begin}\n{section.strip()}\n{end}"
    counts = (text.count(begin), text.count(end))
    if counts == (0, 0):
        return f"{text.rstrip()}\n\n{marked}\n"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if counts != (1, 1) or not (found and ended):
        raise ValueError(f"the markers of {key!r} are not a pair")
    return before + marked + after


def record(section: str, path: Path, *, key: str, topic: str = "scheduling") -> None:
    """Write the section into a document."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmark results\n"
    path.write_text(replace(text, section, key=key, topic=topic), encoding="utf-8")
