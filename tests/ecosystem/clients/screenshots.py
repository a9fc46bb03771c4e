"""Pictures of the pages as the README shows them: `screenshots.py URL FOLDER`; wants a server with the demo model.

`.venvs/pages/bin/python tests/ecosystem/clients/screenshots.py http://127.0.0.1:3000 docs/images` makes those of the
repository, after `python -m tests.ecosystem.prepare`; with `--all`, every state of both pages in both colours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from browsing import CHAT_ROUTE, DESKTOP, PHONE, opened, settled
from playwright.sync_api import Page

QUESTIONS = ("What is prefill?", "What is a KV cache?", "What is a token?")
SIZES: dict[str, dict[str, Any]] = {
    "desktop": DESKTOP,
    "phone": PHONE | {"device_scale_factor": 1.5},
}
KEPT = {"chat-desktop-light", "chat-phone-dark"}
OVERLOADED = (
    '{"error": {"message": "Model is overloaded: the request would wait for 14.2 s, and may wait for 10.0 s",'
    ' "type": "overloaded", "http_status_code": 429}, "error_type": "overloaded"}'
)


def talk(page: Page) -> None:
    """A short conversation, the same one every time."""
    page.evaluate("document.querySelector('#temperature').value = '0'")
    # The first answer finds a browser that has never shown one.
    page.fill("#prompt", QUESTIONS[0])
    page.click("#send")
    settled(page)
    page.click("#new")
    for answers, question in enumerate(QUESTIONS, start=1):
        page.fill("#prompt", question)
        page.click("#send")
        settled(page, answers)


def take(page: Page, folder: Path, name: str, *, everything: bool) -> None:
    """Write `name`.png if it is one of the repository's, or everything is wanted."""
    if everything or name in KEPT:
        page.screenshot(path=folder / f"{name}.png")
        sys.stdout.write(f"passed {name}\n")


def shoot(url: str, folder: Path, size: str, scheme: str, *, everything: bool) -> None:
    """Take screenshots of all states of both pages in one size and colour."""
    kind = f"{size}-{scheme}"
    with opened(url, color_scheme=scheme, **SIZES[size]) as page:
        page.locator("#starters button").first.wait_for()
        page.locator(".state.ready").wait_for()
        take(page, folder, f"empty-{kind}", everything=everything)
        talk(page)
        take(page, folder, f"chat-{kind}", everything=everything)
        headers = {"retry-after": "4", "content-type": "application/json"}
        page.route(
            CHAT_ROUTE, lambda route: route.fulfill(status=429, headers=headers, body=OVERLOADED)
        )
        page.fill("#prompt", "And decode?")
        page.click("#send")
        settled(page, len(QUESTIONS) + 1)
        take(page, folder, f"error-{kind}", everything=everything)
    with opened(f"{url}/docs", color_scheme=scheme, **SIZES[size]) as page:
        page.locator(".operation").first.wait_for()
        take(page, folder, f"docs-{kind}", everything=everything)
        page.locator("#chat_completions > summary").click()
        page.locator("#chat_completions .inside").wait_for()
        take(page, folder, f"operation-{kind}", everything=everything)


def main() -> None:
    """Make them."""
    url, folder = sys.argv[1], Path(sys.argv[2])
    everything = "--all" in sys.argv
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for scheme in ("light", "dark"):
            if everything or f"chat-{size}-{scheme}" in KEPT:
                shoot(url, folder, size, scheme, everything=everything)


if __name__ == "__main__":
    main()
