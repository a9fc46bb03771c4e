"""`python -m tests.ecosystem.agents.record [NAME ...]`: keep what agents send, for the tests that need no agent.

The last request of each conversation is kept, without what differs from machine to machine, and without long texts.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.ecosystem import prepare
from tests.ecosystem.agents.coding import NotInstalled
from tests.ecosystem.agents.conversations import conversations
from tests.ecosystem.agents.server import proxy, scripted_server

RECORDED = prepare.ROOT / "tests" / "router" / "agents" / "recorded"
LONGEST = 60
"""Characters of a text that is kept whole; grammars always are."""
BEGINNING = 30
"""Characters that are kept of a longer one."""
HEADERS = ("anthropic-beta", "anthropic-version")
_NAME = re.compile(r"script:(\w+)")
_PATH = re.compile(r"/(?:tmp|root|home|work)/[\w./-]*")
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{24,}\b")

Sent = dict[str, dict[str, Any]]


def keeping(sent: Sent) -> Callable[[web.Request, bytes], bytes]:
    """What a proxy does with bodies to keep the last one of each script in `sent`."""
    names: list[str] = []

    def keep(request: web.Request, body: bytes) -> bytes:
        names.extend(_NAME.findall(body.decode(errors="replace"))[:1])
        if request.method == "POST" and not request.path.endswith("count_tokens"):
            headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
            kept = {"path": request.path_qs, "headers": headers, "body": shrunk(json.loads(body))}
            # A request that refers to an earlier one does not have its text.
            sent[names[-1]] = kept
        return body

    return keep


def shrunk(value: Any) -> Any:
    """Return JSON without long texts, ids and paths."""
    if isinstance(value, Mapping):
        return {key: one if key == "definition" else shrunk(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shrunk(one) for one in value]
    if not isinstance(value, str):
        return value
    short = value if len(value) <= LONGEST or "script:" in value else f"{value[:BEGINNING]}…"
    return _ID.sub(lambda found: "0" * len(found[0]), _PATH.sub("/mill", short))


async def record(names: Collection[str]) -> None:
    """Hold these conversations, or all; an agent that is not installed keeps what was recorded of it."""
    sent: Sent = {}
    with tempfile.TemporaryDirectory() as scratch, scripted_server(Path(scratch)) as server:
        async with proxy(server.url, keeping(sent)) as url:
            for name, hold in conversations().items():
                if names and name not in names:
                    continue
                folder = Path(scratch) / name
                folder.mkdir()
                try:
                    await asyncio.to_thread(hold, url, folder)
                except NotInstalled as error:
                    sys.stdout.write(f"{name}: {error}\n")
    for name, kept in sent.items():
        text = json.dumps(kept, indent=1, ensure_ascii=False)
        (RECORDED / f"{name}.json").write_text(text + "\n")
    sys.stdout.write(f"recorded {', '.join(sorted(sent))}\n")


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1:]))
