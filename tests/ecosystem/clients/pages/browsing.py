"""Headless Chromium on a page of the server."""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}
CHAT_ROUTE = "**/v1/chat/completions"


def shown_name(model: str) -> str:
    """The name of a model in the bar: of a path, its last two parts."""
    return "/".join(model.split("/")[-2:]) if model.startswith("/") else model


@cache
def browser() -> Browser:
    """One browser for the whole script."""
    playwright = sync_playwright().start()
    # Chromium refuses its sandbox to root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
    atexit.register(playwright.stop)
    atexit.register(chromium.close)
    return chromium


@contextmanager
def opened(url: str, *, expecting: str | None = None, **options: Any) -> Iterator[Page]:
    """A page in a context of its own, with `options`.

    At the end of the block it has written nothing to the console but what was expected, and has asked no other server.
    """
    context = browser().new_context(**(DESKTOP | options))
    page = context.new_page()
    server = "/".join(url.split("/")[:3])
    outside: list[str] = []
    failures: list[str] = []

    def heed(message: ConsoleMessage) -> None:
        # Chromium writes a line for each answer of 400 and more: those are part of some cases.
        expected = ["Failed to load resource", *([expecting] if expecting else [])]
        if message.type in {"error", "warning"} and not any(
            one in message.text for one in expected
        ):
            failures.append(message.text)

    def check(address: str) -> None:
        if not address.startswith((f"{server}/", "data:", f"blob:{server}/")):
            outside.append(address)

    page.on("console", heed)
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("dialog", lambda dialog: failures.append(dialog.message))
    page.on("request", lambda request: check(request.url))
    page.goto(url)
    try:
        yield page
        assert not failures, failures
        assert not outside, outside
    finally:
        context.close()


def send(page: Page, text: str) -> None:
    """Write a message and press Enter."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def settled(page: Page, answers: int = 1) -> str:
    """Text of the last of so many answers, once it has ended."""
    page.wait_for_function(
        """(answers) => document.querySelectorAll(".turn.assistant").length === answers
            && document.querySelector("#log").getAttribute("aria-busy") === "false" """,
        arg=answers,
    )
    return page.locator(".turn.assistant .text").last.inner_text()


def eventually(page: Page, condition: str) -> None:
    """Wait until an async function of the page returns true; `wait_for_function` takes its promise for true."""
    page.evaluate(
        f"""async () => {{
            for (let left = 600; left > 0; left -= 1) {{
                if (await ({condition})()) return;
                await new Promise((resolve) => setTimeout(resolve, 50));
            }}
            throw new Error("in vain");
        }}"""
    )


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
