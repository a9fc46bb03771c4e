"""Pictures of the pages as the docs show them: `screenshots.py URL FOLDER`; wants a server with the demo model.

`.venvs/pages/bin/python tests/ecosystem/clients/pages/screenshots.py http://127.0.0.1:3000 docs/images` makes those of
the repository, after `python -m tests.ecosystem.prepare`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browsing import CHAT_ROUTE, DESKTOP, PHONE, opened, settled
from chatting import answer_with, events, says, thinks
from playwright.sync_api import Page

QUESTIONS = ("What is prefill?", "What is a KV cache?", "What is a token?")
SIZES: dict[str, dict[str, Any]] = {
    "desktop": DESKTOP,
    "phone": PHONE | {"device_scale_factor": 1.5},
}
KEPT = {
    *("chat-desktop-light", "chat-phone-dark", "tools-desktop-light", "code-phone-light"),
    *("status-desktop-light", "status-phone-dark", "fields-desktop-dark", "operation-phone-light"),
}
THOUGHT = "The mill needs wind at the river. I do not know it, so I ask the tool for it first."
CODE = """Yes. A small script can watch it:

```python
import time

def watch(read, limit: float = 9.5) -> None:
    \"\"\"Stop the mill in a storm.\"\"\"
    while read()["speed"] < limit:
        time.sleep(60)  # a minute
```

- [x] read the wind
- [ ] stop the mill

More at https://example.org/mill.
"""


@dataclass(frozen=True)
class Shooter:
    """Takes pictures of one size and colour."""

    url: str
    folder: Path
    size: str
    scheme: str

    def wants(self, *names: str) -> bool:
        """Whether one of these pictures is to be made."""
        return any(f"{name}-{self.size}-{self.scheme}" in KEPT for name in names)

    def take(self, page: Page, name: str) -> None:
        """Write the picture if it is wanted."""
        if self.wants(name):
            file = f"{name}-{self.size}-{self.scheme}.png"
            page.screenshot(path=self.folder / file)
            sys.stdout.write(f"passed {file}\n")

    @contextmanager
    def page(self, path: str = "") -> Iterator[Page]:
        """A page of the server."""
        with opened(self.url + path, color_scheme=self.scheme, **SIZES[self.size]) as page:
            yield page

    def say(self, page: Page, text: str, answers: int = 1) -> None:
        """Send a message and wait for its answer."""
        page.fill("#prompt", text)
        page.click("#send")
        settled(page, answers)


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool as a chunk."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
    return {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}]}


def shoot_chat(shooter: Shooter) -> None:
    """A short conversation with the demo model, the same one every time."""
    with shooter.page() as page:
        page.locator("#starters button").first.wait_for()
        page.locator(".state.ready").wait_for()
        page.evaluate("document.querySelector('#temperature').value = '0'")
        # The first answer finds a browser that has never shown one.
        shooter.say(page, QUESTIONS[0])
        page.click("#new")
        for answers, question in enumerate(QUESTIONS, start=1):
            shooter.say(page, question, answers)
        shooter.take(page, "chat")


def shoot_tools(shooter: Shooter) -> None:
    """A folded thought, a call with its result, and code; the answers are made up."""
    with shooter.page() as page:
        page.locator(".state.ready").wait_for()
        answer_with(page, events(thinks(THOUGHT), call("wind", {"place": "river"})))
        shooter.say(page, "Is there wind at the river?")
        page.unroute(CHAT_ROUTE)
        answer_with(page, events(says("Yes, 6.2 m/s from the west: the mill can grind.")))
        page.fill(".results textarea", '{"speed": 6.2, "unit": "m/s", "from": "west"}')
        page.click(".results button")
        settled(page, 2)
        shooter.take(page, "tools")
        page.unroute(CHAT_ROUTE)
        answer_with(page, events(says(CODE)))
        shooter.say(page, "Can that be watched?", 3)
        shooter.take(page, "code")


def shoot_status(shooter: Shooter) -> None:
    """The figures while the demo model answers."""
    with shooter.page("/status") as page:
        page.locator("#figures[aria-busy=false]").wait_for()
        # One connection: the page needs one of the six that a browser has.
        body = {"prompt": "What is prefill?", "n": 12, "max_tokens": 1000, "ignore_eos": True}
        page.evaluate(
            """(body) => { fetch("v1/completions", {
                method: "POST", headers: { "content-type": "application/json" }, body }); }""",
            json.dumps(body),
        )
        page.wait_for_function(
            """() => [0, 2, 5].every((at) => !["0", "\\u2013"].includes(
                document.querySelectorAll("dd.value")[at].textContent))"""
        )
        shooter.take(page, "status")


def shoot_docs(shooter: Shooter) -> None:
    """A search in fields, and an operation."""
    with shooter.page("/docs") as page:
        page.locator(".operation").first.wait_for()
        page.fill("#filter", "penalty")
        page.locator("#found").wait_for()
        shooter.take(page, "fields")
    with shooter.page("/docs#chat_completions") as page:
        body = page.locator("#chat_completions h3", has_text="Body")
        body.evaluate("(title) => { title.scrollIntoView(); scrollBy(0, -70); }")
        shooter.take(page, "operation")


PARTS = {
    shoot_chat: ("chat",),
    shoot_tools: ("tools", "code"),
    shoot_status: ("status",),
    shoot_docs: ("fields", "operation"),
}


def main() -> None:
    """Make them."""
    url, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for scheme in ("light", "dark"):
            shooter = Shooter(url, folder, size, scheme)
            for shoot, names in PARTS.items():
                if shooter.wants(*names):
                    shoot(shooter)


if __name__ == "__main__":
    main()
