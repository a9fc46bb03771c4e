"""The chat page and the documentation in headless Chromium."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from browsing import CHAT_ROUTE, PHONE, opened, overflow, send, settled
from cases import run
from playwright.sync_api import Page, Route

QUESTION = "What is prefill?"
ANSWER = (
    "Prefill is the first phase of a request: the model reads all prompt tokens at once, "
    "fills the KV cache and produces the first new token."
)
LENGTH = 1000
NARROW = PHONE | {"viewport": {"width": 360, "height": 740}}
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>\n\n"
    "**<b onclick=alert(3)>bold</b>** `<i>code</i>` [click](javascript:alert(4)) [press](javascript:void%200) "
    "![seen](https://example.org/pixel.png)\n\n```html\n<script>alert(5)</script>\n```\n"
)
MARKDOWN = (
    "# Title\n\nSome **bold**, *slanted* and `code_of_it`, snake_case_name, 2 * 3 * 4.\n\n"
    "- one\n- two\n  1. inner\n\n```python\nprint('*no*')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def greedily(page: Page) -> None:
    page.fill("#temperature", "0")


def events(*chunks: dict[str, Any], done: bool = True) -> str:
    """A stream of these chunks."""
    data = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return "".join(f"data: {one}\n\n" for one in data)


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def thinks(text: str) -> dict[str, Any]:
    delta = {"reasoning_content": text, "reasoning": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def answer_with(page: Page, body: str, *, status: int = 200, **headers: str) -> None:
    """Answer chats with this instead of what the server says."""
    kind = "text/event-stream" if status == 200 else "application/json"

    def answer(route: Route) -> None:
        route.fulfill(status=status, headers={"content-type": kind, **headers}, body=body)

    page.route(CHAT_ROUTE, answer)


def refuse_with(page: Page, message: str, *, status: int, type_: str, **headers: str) -> None:
    error = {"message": message, "type": type_, "http_status_code": status}
    body = json.dumps({"error": error, "error_type": type_})
    answer_with(page, body, status=status, **headers)


def asked_of(page: Page, act: Callable[[], object]) -> dict[str, Any]:
    """The body of the chat that `act` asks for."""
    with page.expect_request(CHAT_ROUTE) as asked:
        act()
    body: dict[str, Any] = asked.value.post_data_json
    return body


def page_says_what_is_served(url: str) -> None:
    info = json.loads(get(f"{url}/info"))
    with opened(url) as page:
        page.get_by_text(info["model_id"], exact=True).wait_for()
        page.get_by_role("img", name="The server is ready").wait_for()
        assert f"{info['max_total_tokens']:,}" in page.inner_text("#limits")
        links = page.locator("nav a").evaluate_all("(links) => links.map((link) => link.href)")
        assert links == [f"{url}/docs", f"{url}/metrics", f"{url}/info"]
        assert page.locator(":focus").get_attribute("id") == "prompt"
        assert page.is_disabled("#send")


def at_length(route: Route) -> None:
    """Let the model go on for seconds, whatever it says."""
    body = route.request.post_data_json | {"ignore_eos": True, "max_tokens": LENGTH}
    route.continue_(post_data=json.dumps(body))


class Paced(ThreadingHTTPServer):
    """Streams the pieces of an answer, each when it is asked for."""

    def __init__(self) -> None:
        pieces = self.pieces = SimpleQueue[str]()

        class Chat(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                while piece := pieces.get(timeout=60):
                    self.wfile.write(piece.encode())

            def log_message(self, *_: object) -> None:
                """The output is for what passed and what failed."""

        super().__init__(("127.0.0.1", 0), Chat)


@contextmanager
def paced(page: Page) -> Iterator[SimpleQueue[str]]:
    """Answer chats with the pieces put into this queue, until an empty one."""
    with Paced() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        page.route(CHAT_ROUTE, lambda route: route.continue_(url=address))
        try:
            yield server.pieces
        finally:
            server.pieces.put("")
            server.shutdown()


def answer_is_shown_as_it_comes(url: str) -> None:
    with opened(url) as page, paced(page) as pieces:
        send(page, QUESTION)
        shown = ""
        for word in ("one", " two", " three"):
            pieces.put(events(says(word), done=False))
            shown += word
            page.locator(".turn.assistant .text").get_by_text(shown, exact=True).wait_for()
        pieces.put("data: [DONE]\n\n")
        pieces.put("")
        assert settled(page) == shown


def a_thought_is_folded(url: str) -> None:
    with opened(url) as page, paced(page) as pieces:
        send(page, QUESTION)
        fold = page.locator(".turn.assistant .thought")
        pieces.put(events(thinks("Hm <b>"), done=False))
        fold.get_by_text("Thinking …", exact=True).wait_for()
        assert not page.is_visible(".thought .words")
        pieces.put(events(thinks(", so."), says("Yes."), done=False))
        fold.get_by_text("Thought", exact=True).wait_for()
        fold.locator("summary").click()
        fold.locator(".words").get_by_text("Hm <b>, so.", exact=True).wait_for()
        pieces.put("data: [DONE]\n\n")
        pieces.put("")
        assert settled(page) == "Yes."
        page.unroute(CHAT_ROUTE)
        asked = asked_of(page, lambda: send(page, QUESTION))
        assert asked["messages"][1]["reasoning_content"] == "Hm <b>, so."


def answers_have_their_figures(url: str) -> None:
    with opened(url) as page:
        page.route(CHAT_ROUTE, at_length)
        send(page, QUESTION)
        settled(page)
        figures = page.inner_text(".turn.assistant .meta")
        assert re.search(r"\d tokens/s", figures)
        assert re.search(r"first token [\d.]+ m?s", figures)
        assert re.search(rf"8 tokens in.*, {LENGTH} out", figures)
        assert "cut at max tokens" in figures


def answers_are_counted_and_announced(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        for answers in (1, 2, 3):
            send(page, QUESTION)
            said = settled(page, answers)
            if answers == 1:
                assert said == ANSWER
            assert page.inner_text("#status") == said
            assert page.locator(".turn.assistant .meta").last.inner_text().endswith(" out")
        assert "cached)" in page.locator(".turn.assistant .meta").last.inner_text()


def keys_send_and_break_lines(url: str) -> None:
    with opened(url) as page:
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        body = asked_of(page, partial(page.keyboard.press, "Enter"))
        assert body["messages"] == [{"role": "user", "content": "one\ntwo"}]
        settled(page)
        page.keyboard.press("Enter")
        assert page.locator(".turn.user").count() == 1
        assert page.input_value("#prompt") == ""


def focus_goes_from_top_to_bottom(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        send(page, QUESTION)
        settled(page)
        page.focus(".brand")
        order = ["Millrace"]
        for _ in range(12):
            page.keyboard.press("Tab")
            order.append(
                page.evaluate(
                    "() => ((one) => one.id || one.ariaLabel || one.textContent)(document.activeElement)"
                )
            )
        expected = [
            "Millrace",
            "new",
            "export",
            "toggle",
            "Edit",
            "Copy",
            "Copy",
            "Retry",
            "prompt",
        ]
        assert [name for name in order if name != "log"][:9] == expected, order


def stop_ends_the_generation_on_the_server(url: str) -> None:
    for stop in ("click", "escape"):
        with opened(url) as page:
            page.route(CHAT_ROUTE, at_length)
            send(page, "Count from 1 to 20")
            page.wait_for_function(
                "() => document.querySelector('.turn.assistant .text').innerText.length > 20"
            )
            if stop == "click":
                page.click("#stop")
            else:
                page.keyboard.press("Escape")
            text = settled(page)
            assert text
            assert "stopped" in page.inner_text(".turn.assistant .meta")
            assert page.locator(":focus").get_attribute("id") == "prompt"
            page.wait_for_function(
                """async (url) => /^millrace_requests_running 0$/m.test(await (await fetch(url)).text())""",
                arg=f"{url}/metrics",
            )
            assert page.locator(".trouble").count() == 0


def parameters_are_sent(url: str) -> None:
    with opened(url) as page:
        page.wait_for_function("() => document.querySelector('#max_tokens').max !== ''")
        model = page.inner_text("#model")
        plain = asked_of(page, partial(send, page, QUESTION))
        assert plain == {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": QUESTION}],
        }
        settled(page)
        page.click("#new")
        page.fill("#system", "Be brief.")
        for name, value in (
            ("temperature", "0.5"),
            ("top_p", "0.9"),
            ("max_tokens", "7"),
            ("seed", "-5"),
        ):
            page.fill(f"#{name}", value)
        page.fill("#frequency_penalty", "0.25")
        page.fill("#presence_penalty", "-1")
        page.fill("#stop_sequences", "END\n\\n\\n")
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        page.click("#advanced summary")
        page.fill("#schema", json.dumps(schema))
        full = asked_of(page, partial(send, page, QUESTION))
        assert full == plain | {
            "messages": [{"role": "system", "content": "Be brief."}, *plain["messages"]],
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 7,
            "seed": -5,
            "frequency_penalty": 0.25,
            "presence_penalty": -1,
            "stop": ["END", "\n\n"],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
        }
        assert settled(page).startswith("{")
        page.click("#reset")
        page.click("#new")
        assert asked_of(page, partial(send, page, QUESTION)) == plain
        settled(page)


def wrong_settings_are_shown_and_nothing_is_sent(url: str) -> None:
    with opened(url) as page:
        asked = []
        page.on(
            "request",
            lambda request: asked.append(request.url) if request.method == "POST" else None,
        )
        for name, value in (
            ("temperature", "-1"),
            ("top_p", "2"),
            ("seed", "many"),
            ("schema", "{"),
        ):
            page.evaluate("document.querySelector('#advanced').open = true")
            page.fill(f"#{name}", value)
            send(page, QUESTION)
            assert page.locator(":focus").get_attribute("id") == name
            assert page.get_attribute(f"#{name}", "aria-invalid") == "true"
            assert page.input_value("#prompt") == QUESTION
            page.fill(f"#{name}", "")
            assert page.get_attribute(f"#{name}", "aria-invalid") is None
        assert not asked


def errors_are_the_server_s_words(url: str) -> None:
    with opened(url) as page:
        page.fill("#max_tokens", "1000")
        page.evaluate("document.querySelector('#max_tokens').max = 100000")
        page.fill("#max_tokens", "5000")
        send(page, QUESTION)
        settled(page)
        trouble = page.inner_text(".trouble")
        assert "5000" in trouble
        assert "HTTP 422" in trouble
        page.fill("#max_tokens", "")
        greedily(page)
        page.get_by_role("button", name="Retry").click()
        assert settled(page) == ANSWER
        assert page.locator(".trouble").count() == 0


def refusals_say_when_to_come_back(url: str) -> None:
    with opened(url) as page:
        refuse_with(
            page, "Model is overloaded", status=429, type_="overloaded", **{"retry-after": "7"}
        )
        send(page, QUESTION)
        settled(page)
        assert "Model is overloaded" in page.inner_text(".trouble")
        assert "try again in 7 s" in page.inner_text(".trouble")
        page.unroute(CHAT_ROUTE)
        refuse_with(page, "The model server is down: lost", status=503, type_="unavailable")
        page.get_by_role("button", name="Retry").click()
        page.get_by_text("The model server is down: lost").wait_for()
        settled(page)
        page.unroute(CHAT_ROUTE)
        page.route(CHAT_ROUTE, lambda route: route.abort())
        page.get_by_role("button", name="Retry").click()
        page.get_by_text("The server cannot be reached.").wait_for()
        assert page.locator(".turn.user").count() == 1


def streams_that_break_off_keep_what_came(url: str) -> None:
    failure = {"error": {"message": "out of luck", "type": "generation", "http_status_code": 424}}
    for body, message in (
        (events(says("Half a "), says("sentence"), done=False), "The connection was lost."),
        (events(says("Half a "), says("sentence"), failure), "out of luck"),
    ):
        with opened(url) as page:
            answer_with(page, body)
            send(page, QUESTION)
            assert settled(page) == "Half a sentence"
            assert message in page.inner_text(".trouble")


def a_key_is_asked_for_and_kept(url: str) -> None:
    def check(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer s3cret":
            route.continue_()
        else:
            route.fulfill(status=401)

    with opened(url) as page:
        greedily(page)
        page.route(CHAT_ROUTE, check)
        send(page, QUESTION)
        settled(page)
        assert "The server wants an API key." in page.inner_text(".trouble")
        assert page.locator(":focus").get_attribute("id") == "key"
        page.keyboard.type("s3cret")
        page.get_by_role("button", name="Retry").click()
        assert settled(page) == ANSWER
        page.reload()
        assert page.input_value("#key") == "s3cret"
        assert page.evaluate("localStorage.length") == 0
        assert page.context.cookies() == []
    with opened(url) as page:
        assert page.input_value("#key") == ""


def a_model_without_a_template_continues_text(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        refuse_with(page, "Template error: template not found", status=422, type_="template_error")
        with page.expect_request("**/v1/completions") as asked:
            send(page, QUESTION)
        assert asked.value.post_data_json["prompt"] == QUESTION
        assert asked.value.post_data_json["stream_options"] == {"include_usage": True}
        assert "first phase of a request" in settled(page)
        assert re.search(r"\d+ tokens in.*, \d+ out", page.inner_text(".turn.assistant .meta"))
        assert page.is_visible("#plain")
        assert page.locator(".trouble").count() == 0


def a_template_that_refuses_is_an_error(url: str) -> None:
    with opened(url) as page:
        refuse_with(page, "Template error: no system role", status=422, type_="template_error")
        send(page, QUESTION)
        settled(page)
        assert "no system role" in page.inner_text(".trouble")


def hostile_answers_stay_text(url: str) -> None:
    with opened(url) as page:
        answer_with(page, events(*(says(HOSTILE[at : at + 5]) for at in range(0, len(HOSTILE), 5))))
        send(page, "<img src=y onerror=alert(0)>")
        settled(page)
        assert page.locator(".turn.user .text").inner_text() == "<img src=y onerror=alert(0)>"
        answer = page.locator(".turn.assistant .text")
        assert answer.locator("img, script, b, i").count() == 0
        links = answer.locator("a").evaluate_all("(links) => links.map((link) => link.href)")
        assert links == ["https://example.org/pixel.png"]
        text = answer.inner_text()
        assert "<img src=x onerror=alert(1)><script>alert(2)</script>" in text
        assert "[click](javascript:alert(4)) [press](javascript:void%200)" in text
        assert answer.locator("strong").inner_text() == "<b onclick=alert(3)>bold</b>"
        assert answer.locator("pre code").inner_text() == "<script>alert(5)</script>"
        page.reload()
        assert "<img src=x" in page.locator(".turn.assistant .text").inner_text()


def no_script_can_take_text_for_markup(url: str) -> None:
    for path in ("", "/docs"):
        with opened(url + path, expecting="TrustedHTML") as page:
            assign = "() => { try { document.body.innerHTML = '<p></p>'; return false } catch { return true } }"
            assert page.evaluate(assign)


def markdown_is_shown_as_meant(url: str) -> None:
    with opened(url) as page:
        answer_with(page, events(*map(says, MARKDOWN)))
        send(page, QUESTION)
        settled(page)
        answer = page.locator(".turn.assistant .text")

        def texts(selector: str) -> list[str]:
            return answer.locator(selector).all_inner_texts()

        assert texts("h2") == ["Title"]
        assert texts("p strong") == ["bold"]
        assert texts("p em") == ["slanted"]
        assert texts("p code") == ["code_of_it"]
        assert "snake_case_name, 2 * 3 * 4." in answer.inner_text()
        assert answer.locator(":scope > ul > li").count() == 2
        assert texts("ul ol li") == ["inner"]
        assert texts("pre code") == ["print('*no*')"]
        assert texts("figcaption span") == ["python"]
        assert texts("th, td") == ["a", "b", "1", "2"]


def turns_can_be_edited_tried_again_and_copied(url: str) -> None:
    with opened(url, permissions=["clipboard-read", "clipboard-write"]) as page:
        greedily(page)
        send(page, "What is a token?")
        settled(page)
        page.get_by_role("button", name="Edit").click()
        page.keyboard.press("Escape")
        assert page.locator(".turn.user .text").inner_text() == "What is a token?"
        page.get_by_role("button", name="Edit").click()
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.type(QUESTION)
        body = asked_of(page, partial(page.keyboard.press, "Enter"))
        assert body["messages"] == [{"role": "user", "content": QUESTION}]
        assert settled(page) == ANSWER
        again = asked_of(page, page.get_by_role("button", name="Retry").click)
        assert again == body
        assert settled(page) == ANSWER
        page.get_by_role("button", name="Copy").last.click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == ANSWER


def a_conversation_survives_reload_and_can_be_cleared_and_exported(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        page.fill("#system", "Be brief.")
        send(page, QUESTION)
        said = settled(page)
        page.reload()
        assert page.locator(".turn").all_inner_texts()[1].count(said) == 1
        assert page.input_value("#temperature") == "0"
        body = asked_of(page, partial(send, page, "And decode?"))
        assert [message["role"] for message in body["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
        settled(page, 2)
        with page.expect_download() as download:
            page.click("#export")
        exported = json.loads(Path(download.value.path()).read_text())
        assert exported["messages"][:4] == body["messages"]
        assert len(exported["messages"]) == 5
        assert exported["parameters"] == {"temperature": 0}
        page.click("#new")
        assert page.locator(".turn").count() == 0
        page.get_by_role("button", name="Bring back the last conversation").click()
        assert page.locator(".turn").count() == 4
        page.click("#new")
        page.reload()
        assert page.locator(".turn").count() == 0


def a_phone_shows_all_of_it(url: str) -> None:
    long = (
        "word" * 200 + "\n\n```\n" + "x" * 400 + "\n```\n\n|" + "a|" * 40 + "\n|" + "-|" * 40 + "\n"
    )
    with opened(url, **NARROW) as page:
        assert overflow(page) == 0
        answer_with(page, events(says(long)))
        page.fill("#prompt", "y" * 300)
        page.click("#send")
        settled(page)
        assert overflow(page) == 0
        for name in ("send", "toggle", "new"):
            box = page.locator(f"#{name}").bounding_box()
            assert box
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["y"] + box["height"] <= 740
        assert page.is_hidden("#settings")
        page.click("#toggle")
        assert page.locator(":focus").get_attribute("id") == "done"
        assert overflow(page) == 0
        page.keyboard.press("Escape")
        assert page.is_hidden("#settings")
        # Enter is a line break where fingers type.
        page.fill("#prompt", "a")
        page.press("#prompt", "Enter")
        assert page.input_value("#prompt") == "a\n"


def colours_follow_the_reader(url: str) -> None:
    shades = []
    for scheme in ("light", "dark"):
        with opened(url, color_scheme=scheme) as page:
            shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
            shades.append(sum(map(int, re.findall(r"\d+", shade))))
    assert shades[0] > 700
    assert shades[1] < 100


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


CASES = [
    page_says_what_is_served,
    answer_is_shown_as_it_comes,
    a_thought_is_folded,
    answers_have_their_figures,
    answers_are_counted_and_announced,
    keys_send_and_break_lines,
    focus_goes_from_top_to_bottom,
    stop_ends_the_generation_on_the_server,
    parameters_are_sent,
    wrong_settings_are_shown_and_nothing_is_sent,
    errors_are_the_server_s_words,
    refusals_say_when_to_come_back,
    streams_that_break_off_keep_what_came,
    a_key_is_asked_for_and_kept,
    a_model_without_a_template_continues_text,
    a_template_that_refuses_is_an_error,
    hostile_answers_stay_text,
    no_script_can_take_text_for_markup,
    markdown_is_shown_as_meant,
    turns_can_be_edited_tried_again_and_copied,
    a_conversation_survives_reload_and_can_be_cleared_and_exported,
    a_phone_shows_all_of_it,
    colours_follow_the_reader,
    docs_list_every_operation,
    docs_show_schemas_and_try_requests,
    docs_examples_are_accepted,
    docs_fit_a_phone,
]

if __name__ == "__main__":
    run(CASES)
