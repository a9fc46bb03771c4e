"""The chat page in headless Chromium: what is asked, what is shown, what goes wrong."""

from __future__ import annotations

import json
import re
from functools import partial

from browsing import CHAT_ROUTE, eventually, opened, overflow, send, settled, shown_name
from cases import run
from chatting import (
    ANSWER,
    LENGTH,
    NARROW,
    QUESTION,
    answer_with,
    asked_of,
    at_length,
    events,
    get,
    greedily,
    paced,
    refuse_with,
    says,
    thinks,
)
from playwright.sync_api import Route

HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>\n\n"
    "**<b onclick=alert(3)>bold</b>** `<i>code</i>` [click](javascript:alert(4)) [press](javascript:void%200) "
    "![seen](https://example.org/pixel.png)\n\n```html\n<script>alert(5)</script>\n```\n"
)
FORMULAS = r"With \(a_1 * b_1\), \[x \{y\}\] and $$z_1 * z_2$$."
MARKDOWN = (
    "# Title\n\nSome **bold**, *slanted* and `code_of_it`, snake_case_name, 2 * 3 * 4.\n\n"
    "- one\n- two\n  1. inner\n\n```python\nprint('*no*')\n```\n\n| a | b |\n|:-:|--:|\n| 1 | 2 |\n\n"
    f"{FORMULAS}\n"
)


def page_says_what_is_served(url: str) -> None:
    info = json.loads(get(f"{url}/info"))
    with opened(url) as page:
        page.get_by_text(shown_name(info["model_id"]), exact=True).wait_for()
        assert page.get_attribute("#model", "title") == info["model_id"]
        page.get_by_role("img", name="The server is ready").wait_for()
        assert f"{info['max_total_tokens']:,}" in page.inner_text("#limits")
        links = page.locator("nav a").evaluate_all("(links) => links.map((link) => link.href)")
        assert links == [f"{url}/docs", f"{url}/status", f"{url}/info"]
        assert page.locator(":focus").get_attribute("id") == "prompt"
        assert page.is_disabled("#send")


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
        for _ in range(15):
            page.keyboard.press("Tab")
            order.append(
                page.evaluate(
                    """() => ((one) => one.id || one.ariaLabel || (one.querySelector(".title") ?? one).textContent)(
                        document.activeElement)"""
                )
            )
        expected = [
            *("Millrace", "toggle-chats", "new", "export", "toggle"),
            *(QUESTION, "Rename", "Delete", "import", "export-all"),
            *("Edit", "Copy", "Copy", "Retry", "prompt"),
        ]
        assert [name for name in order if name != "log"] == expected, order


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
            eventually(
                page,
                "async () => /^millrace_requests_running 0$/m.test(await (await fetch('metrics')).text())",
            )
            assert page.locator(".trouble").count() == 0


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
SETTINGS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "max_tokens": 7,
    "seed": -5,
    "frequency_penalty": 0.25,
    "presence_penalty": -1,
    "repetition_penalty": 1.1,
}


def parameters_are_sent(url: str) -> None:
    with opened(url) as page:
        page.wait_for_function("() => document.querySelector('#max_tokens').max !== ''")
        model = page.get_attribute("#model", "title")
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
        for name, value in SETTINGS.items():
            page.fill(f"#{name}", str(value))
        page.fill("#stop_sequences", "END\n\\n\\n")
        page.click("#advanced summary")
        page.fill("#schema", json.dumps(SCHEMA))
        full = asked_of(page, partial(send, page, QUESTION))
        assert full == plain | SETTINGS | {
            "messages": [{"role": "system", "content": "Be brief."}, *plain["messages"]],
            "stop": ["END", "\n\n"],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            },
        }
        settled(page)
        assert page.locator(".turn.assistant pre code").inner_text().startswith("{")
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
            ("tools", "[1]"),
        ):
            page.evaluate(
                "document.querySelectorAll('details').forEach((one) => { one.open = true })"
            )
            page.fill(f"#{name}", value)
            send(page, QUESTION)
            assert page.locator(":focus").get_attribute("id") == name
            assert page.get_attribute(f"#{name}", "aria-invalid") == "true"
            assert page.input_value("#prompt") == QUESTION
            fault, field = page.locator("#fault"), page.locator(f"#{name}")
            assert page.get_attribute(f"#{name}", "aria-describedby") == "fault"
            assert fault.inner_text()
            box, beside = fault.bounding_box(), field.bounding_box()
            assert box
            assert beside
            assert box["y"] + box["height"] <= 800, name
            assert 0 <= box["y"] - (beside["y"] + beside["height"]) < 40, name
            page.fill(f"#{name}", "")
            assert page.get_attribute(f"#{name}", "aria-invalid") is None
        assert not asked


def errors_are_the_server_s_words(url: str) -> None:
    with opened(url) as page:
        page.evaluate("document.querySelector('#temperature').max = 1000")
        page.fill("#temperature", "500")
        send(page, QUESTION)
        settled(page)
        trouble = page.inner_text(".trouble")
        assert "`temperature`" in trouble
        assert "HTTP 422" in trouble
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
        page.keyboard.type("wrong")
        page.get_by_role("button", name="Retry").click()
        page.get_by_text("The server does not accept this API key.").wait_for()
        settled(page)
        page.fill("#key", "s3cret")
        page.press("#key", "Enter")
        assert settled(page) == ANSWER
        assert page.locator(":focus").get_attribute("id") == "prompt"
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
        assert texts("pre .token.function, pre .token.keyword") == ["print"]
        assert texts("pre .token.string") == ["'*no*'"]
        assert texts("figcaption span") == ["python"]
        assert texts("th, td") == ["a", "b", "1", "2"]
        sides = "(all) => all.map((one) => getComputedStyle(one).textAlign)"
        assert answer.locator("td").evaluate_all(sides) == ["center", "right"]
        assert texts("p")[-1] == FORMULAS


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


if __name__ == "__main__":
    run(globals())
