"""The chat page in headless Chromium, with a model that reads pictures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from browsing import CHAT_ROUTE, opened, overflow, send, settled
from cases import run
from chatting import NARROW, answer_with, asked_of, events, greedily, says
from images.shown import base64_of, shown, url_of
from playwright.sync_api import Page

GIVE = """
([kind, images]) => {
    const data = new DataTransfer();
    images.forEach(([name, type, text], at) => {
        const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
        data.items.add(new File([bytes], name, { type }));
    });
    const target = document.querySelector("#prompt");
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: data })
        : new DragEvent(kind, { ...options, dataTransfer: data });
    return !target.dispatchEvent(event);
}
"""
"""Pastes or drops files; whether the page takes them."""


def give(page: Page, kind: str, *contents: bytes, media_type: str = "image/png") -> bool:
    files = [["it.png", media_type, base64_of(content)] for content in contents]
    return bool(page.evaluate(GIVE, [kind, files]))


def wait_for_thumbnails(page: Page, count: int) -> None:
    page.wait_for_function(
        "(count) => document.querySelectorAll('#attached img').length === count", arg=count
    )


def ready(page: Page, *, is_greedy: bool = True) -> None:
    page.get_by_role("button", name="Add images").wait_for()
    if is_greedy:
        greedily(page)


def part_of(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(content)}}


def a_chosen_a_pasted_and_a_dropped_picture_are_read(url: str) -> None:
    with opened(url) as page:
        ready(page)
        for number, (text, content) in enumerate(list(shown().items())[:3]):
            if number == 0:
                file = {"name": "it.png", "mimeType": "image/png", "buffer": content}
                page.set_input_files("#image-files", file)
            else:
                kind = ("paste", "drop")[number - 1]
                assert give(page, kind, content)
            wait_for_thumbnails(page, 1)
            body = asked_of(page, partial(send, page, "Read it."))
            question = {"type": "text", "text": "Read it."}
            assert body["messages"][-1]["content"] == [part_of(content), question]
            assert settled(page) == text
            assert page.locator(".turn.user img").get_attribute("src") == url_of(content)
            assert page.is_hidden("#attached")
            page.click("#new")


def a_picture_is_sent_without_a_text_and_can_be_removed(url: str) -> None:
    pictures = list(shown().items())
    with opened(url) as page:
        ready(page)
        assert page.is_disabled("#send")
        give(page, "paste", *(content for _, content in pictures[:2]))
        wait_for_thumbnails(page, 2)
        page.get_by_role("button", name="Remove image 1").click()
        wait_for_thumbnails(page, 1)
        page.click("#send")
        assert settled(page) == pictures[1][0]
        page.get_by_role("button", name="Retry").click()
        assert settled(page) == pictures[1][0]
        page.get_by_role("button", name="Edit").click()
        page.keyboard.type("Again.")
        body = asked_of(page, partial(page.keyboard.press, "Enter"))
        again = {"type": "text", "text": "Again."}
        assert body["messages"] == [{"role": "user", "content": [part_of(pictures[1][1]), again]}]
        assert settled(page) == pictures[1][0]


def pictures_are_kept_exported_and_imported(url: str) -> None:
    (text, content), *_ = shown().items()
    with opened(url) as page:
        ready(page)
        give(page, "drop", content)
        wait_for_thumbnails(page, 1)
        send(page, "Read it.")
        assert settled(page) == text
        page.reload()
        page.locator(".turn.user img").wait_for()
        with page.expect_download() as download:
            page.click("#export")
        exported = json.loads(Path(download.value.path()).read_text())
        assert exported["messages"][0]["content"][0] == part_of(content)
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Really delete?").click()
        page.locator(".turn").first.wait_for(state="detached")
        page.set_input_files("#file", download.value.path())
        page.get_by_text("1 conversation read.").wait_for()
        assert page.locator(".turn.user img").get_attribute("src") == url_of(content)
        assert page.locator(".turn.user .text").inner_text() == "Read it."
        page.set_input_files("#file", download.value.path())
        page.get_by_text("1 conversation read: nothing new.").wait_for()


def a_large_picture_is_sent_smaller(url: str) -> None:
    with opened(url) as page:
        ready(page)
        answer_with(page, events(says("large")))
        # Noise, which no format makes small.
        size = page.evaluate(
            """async () => {
                const canvas = new OffscreenCanvas(3000, 900);
                const context = canvas.getContext("2d");
                const noise = context.createImageData(3000, 900);
                for (let at = 0; at < noise.data.length; at += 65536) {
                    crypto.getRandomValues(noise.data.subarray(at, at + 65536));
                }
                context.putImageData(noise, 0, 0);
                const blob = await canvas.convertToBlob();
                await attached.add([new File([blob], "noise.png", { type: blob.type })]);
                return blob.size;
            }"""
        )
        body = asked_of(page, partial(send, page, "Large?"))
        sent = body["messages"][0]["content"][0]["image_url"]["url"]
        assert sent.startswith("data:image/jpeg;base64,")
        assert len(sent) < size
        width = page.locator(".turn.user img").evaluate("(image) => image.naturalWidth")
        assert width == 2048


def files_that_are_no_pictures_are_not_taken(url: str) -> None:
    with opened(url) as page:
        ready(page)
        give(page, "drop", b"%PDF", media_type="application/pdf")
        page.get_by_text("Images are PNG, JPEG, WEBP, GIF or TIFF files.").wait_for()
        assert page.locator("#attached img").count() == 0
        give(page, "drop", b"no picture")
        wait_for_thumbnails(page, 1)
        assert page.is_hidden("#refused")
        send(page, "Read it.")
        settled(page)
        assert "messages.0.content.0" in page.inner_text(".trouble")


def a_later_turn_has_the_earlier_pictures(url: str) -> None:
    pictures = list(shown().values())
    with opened(url) as page:
        ready(page)
        for number, content in enumerate(pictures[:2], start=1):
            give(page, "paste", content)
            wait_for_thumbnails(page, 1)
            body = asked_of(page, lambda: page.click("#send"))
            settled(page, number)
        parts = [message["content"] for message in body["messages"][::2]]
        assert parts == [[part_of(content)] for content in pictures[:2]]
        assert page.locator(".turn.user img").count() == 2


def a_model_of_text_takes_no_pictures(url: str) -> None:
    with opened(url) as page:
        ready(page)
        info = page.evaluate("async () => (await fetch('info')).json()")
        page.route("**/info", lambda route: route.fulfill(json=info | {"images": None}))
        page.reload()
        page.locator(".state.ready").wait_for()
        assert page.is_hidden("#attach")
        assert not give(page, "paste", *shown().values())
        assert page.is_hidden("#attached")


def an_address_in_a_file_is_named_and_not_loaded(url: str) -> None:
    address = "https://example.org/it.png"
    part = {"type": "image_url", "image_url": {"url": address}}
    with TemporaryDirectory() as folder, opened(url) as page:
        path = Path(folder) / "one.json"
        path.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}]}))
        page.set_input_files("#file", path)
        page.locator(".turn.user .address").get_by_text(address).wait_for()
        assert page.locator(".turn.user img").count() == 0


def a_phone_has_room_for_pictures(url: str) -> None:
    with opened(url, **NARROW) as page:
        ready(page, is_greedy=False)
        page.route(CHAT_ROUTE, lambda route: route.abort())
        contents = list(shown().values())
        give(page, "drop", *contents, *contents, *contents)
        wait_for_thumbnails(page, 3 * len(contents))
        assert overflow(page) == 0
        page.click("#send")
        settled(page)
        assert overflow(page) == 0


if __name__ == "__main__":
    run(globals())
