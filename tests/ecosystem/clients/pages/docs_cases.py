"""The documentation of the API and the page of figures in headless Chromium."""

from __future__ import annotations

import json
import re

from browsing import opened, overflow, shown_name
from cases import run
from chatting import NARROW, get


def docs_list_every_operation(url: str) -> None:
    paths = json.loads(get(f"{url}/openapi.json"))["paths"]
    expected = {
        operation["operationId"]: (method, path)
        for path, methods in paths.items()
        for method, operation in methods.items()
    }
    for address in (f"{url}/docs", f"{url}/docs/"):
        with opened(address) as page:
            page.locator(".operation").first.wait_for()
            listed = page.locator(".operation").evaluate_all(
                """(all) => all.map((one) => [one.id, [one.querySelector(".method").textContent,
                    one.querySelector(".path").textContent]])"""
            )
            assert {id_: tuple(pair) for id_, pair in listed} == expected
            assert len(listed) == len(expected)
            assert page.locator("#entries a").count() == len(expected)
            # Every one of them can be opened, and all that is inside.
            page.locator(".operation > summary").evaluate_all(
                "(all) => all.forEach((one) => one.click())"
            )
            assert page.locator(".inside .listing").count() >= len(expected)
            page.evaluate(
                """async () => {
                    for (let round = 0; round < 5; round += 1) {
                        document.querySelectorAll(".inside details").forEach((one) => { one.open = true; });
                        await new Promise((resolve) => setTimeout(resolve));
                    }
                }"""
            )
            assert overflow(page) == 0


def docs_show_schemas_and_try_requests(url: str) -> None:
    with opened(f"{url}/docs#chat_completions") as page:
        operation = page.locator("#chat_completions")
        operation.locator(".inside").wait_for()
        messages = operation.locator("li", has=page.locator("code.name", has_text="messages")).first
        assert "required" in messages.inner_text()
        messages.locator("summary").first.click()
        assert "role" in messages.locator(".rows").first.inner_text()
        curl = operation.locator(".listing code").first.inner_text()
        assert f"curl '{url}/v1/chat/completions'" in curl
        operation.locator(".trial > summary").click()
        operation.get_by_role("button", name="Send").click()
        operation.locator(".status", has_text="200 OK").wait_for()
        operation.locator("output code", has_text='"chat.completion"').wait_for()
        page.fill("#filter", "/chat_tok")
        shown = page.locator(".operation:visible .path").all_inner_texts()
        assert shown == ["/chat_tokenize"]


def docs_say_what_each_field_is_for(url: str) -> None:
    with opened(f"{url}/docs#chat_completions") as page:
        page.locator("#chat_completions .inside").wait_for()
        rows = page.locator("#chat_completions h3", has_text="Body").locator("+ ul > li")
        told = [row.locator(".told").first.inner_text() for row in rows.all()]
        assert len(told) > 40
        assert [text for text in told if not re.search("Range: .+ Default: .+", text)] == []


def docs_are_searched_for_fields(url: str) -> None:
    with opened(f"{url}/docs") as page:
        page.locator(".operation").first.wait_for()
        page.fill("#filter", "likel tokens")
        page.locator("#found").wait_for()
        names = set(page.locator("#found .name").all_inner_texts())
        assert names >= {"temperature", "parameters.temperature", "top_k"}, names
        page.fill("#filter", "repetition_penalty")
        row = page.locator("#found li").first
        assert row.locator(".name").inner_text() == "repetition_penalty"
        assert "Range: above 0; 1 is off." in row.inner_text()
        row.get_by_role("link", name="/v1/chat/completions").click()
        page.fill("#filter", "")
        page.locator("#chat_completions[open]").wait_for()
        assert page.is_hidden("#found")
        page.fill("#filter", "zzzz")
        page.get_by_text("Nothing is like that.").wait_for()
        assert overflow(page) == 0


def figures_are_shown_and_read_again(url: str) -> None:
    with opened(f"{url}/status") as page:
        page.get_by_role("img", name="The server is ready").wait_for()
        titles = page.locator("dt").all_inner_texts()
        expected = ["Running", "Waiting", "Tokens per second", "KV cache in use", "Cache hits"]
        assert titles == [*expected, "Time to first token", "Recoveries", "Uptime"]
        assert page.locator("dd.value").first.inner_text().isdecimal()
        body = json.dumps({"inputs": "What is prefill?", "parameters": {"max_new_tokens": 20}})
        page.evaluate(
            """(body) => fetch("generate", {
                method: "POST", headers: { "content-type": "application/json" }, body,
            })""",
            body,
        )
        page.wait_for_function(
            """() => /^\\d+(\\.\\d+)? m?s$/.test(document.querySelectorAll("dd.value")[5].textContent)
                && document.querySelectorAll("dd.value")[2].textContent !== "0" """
        )
        answer = json.loads(get(f"{url}/status"))
        assert page.inner_text("#model") == shown_name(answer["model_id"])
        assert overflow(page) == 0
        page.route("**/status", lambda route: route.abort())
        page.locator("#trouble", has_text="The server cannot be reached.").wait_for()
        page.unroute("**/status")
        page.locator("#trouble").wait_for(state="hidden")


def figures_fit_a_phone(url: str) -> None:
    with opened(f"{url}/status", **NARROW) as page:
        page.locator("#figures[aria-busy=false]").wait_for()
        assert overflow(page) == 0
        assert page.locator(".figure").count() == 8
        boxes = [box for one in page.locator(".figure").all() if (box := one.bounding_box())]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in boxes)


def docs_examples_are_accepted(url: str) -> None:
    with opened(f"{url}/docs") as page:
        page.locator(".operation").first.wait_for()
        refused = []
        for operation in page.locator(".operation", has=page.locator(".method.post")).all():
            operation.locator("> summary").click()
            operation.locator(".trial > summary").click()
            operation.get_by_role("button", name="Send").click()
            status = operation.locator("output .status", has_text=re.compile("^[0-9]{3}.* in "))
            status.wait_for()
            said = f"{operation.locator('.path').inner_text()}: {operation.locator('output').inner_text()}"
            if not status.inner_text().startswith("200"):
                refused.append(said)
        assert not refused, refused


def docs_fit_a_phone(url: str) -> None:
    with opened(f"{url}/docs", **NARROW) as page:
        page.locator(".operation").first.wait_for()
        assert overflow(page) == 0
        page.locator("#chat_completions > summary").click()
        page.locator("#chat_completions .inside").wait_for()
        assert overflow(page) == 0


if __name__ == "__main__":
    run(globals())
