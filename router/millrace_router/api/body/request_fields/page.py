"""The table of request fields as Markdown, for the documentation."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from millrace_router.api.body.request_fields.field import Fields, Support
from millrace_router.api.body.request_fields.table import TABLE

ORDER = tuple(Support)


def page() -> str:
    """Return one table for each object with fields: those that work first, then by name."""
    return "\n".join(
        "\n".join((f"## `{place}`", "", *_lines(fields), "")) for place, fields in TABLE.items()
    )


def _lines(fields: Fields) -> Iterator[str]:
    yield "| field | of | here | |"
    yield "|---|---|---|---|"
    for field in sorted(fields.values(), key=lambda one: (ORDER.index(one.support), one.name)):
        yield f"| `{field.name}` | {', '.join(field.servers)} | {field.support} | {field.note} |"


if __name__ == "__main__":
    sys.stdout.write(page())
