"""The chat page in headless Chromium: what is kept, what goes on, and what the server is said to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, ClassVar

from browsing import CHAT_ROUTE, eventually, opened, overflow, send, settled
from cases import run
from chatting import (
    ANSWER,
    NARROW,
    QUESTION,
    answer_with,
    asked_of,
    at_length,
    events,
    get,
    greedily,
    paced,
    says,
    thinks,
)
from playwright.sync_api import Page, Route

DONE = "data: [DONE]\n\n"
RECOVERING = {
    "error": "unhealthy",
    "error_type": "healthcheck",
    "reason": "the shards are recovering: shard-0: killed by signal SIGKILL",
}


def calls(index: int, id_: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """A piece of a call."""
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "id": id_, "type": "function", "function": function}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .title").all_inner_texts()


def wait_for_titles(page: Page, expected: list[str]) -> None:
    page.wait_for_function(
        """(expected) => JSON.stringify([...document.querySelectorAll("#conversations .title")]
            .map((one) => one.textContent)) === JSON.stringify(expected)""",
        arg=expected,
    )


def a_conversation_survives_reload_and_is_exported(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        page.fill("#system", "Be brief.")
        send(page, QUESTION)
        said = settled(page)
        wait_for_titles(page, [QUESTION])
        page.reload()
        page.locator(".turn").nth(1).wait_for()
        assert page.locator(".turn").all_inner_texts()[1].count(said) == 1
        assert page.input_value("#temperature") == "0"
        body = asked_of(page, partial(send, page, "And decode?"))
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        settled(page, 2)
        with page.expect_download() as download:
            page.click("#export")
        exported = json.loads(Path(download.value.path()).read_text())
        assert exported["messages"][:4] == body["messages"]
        assert len(exported["messages"]) == 5
        assert exported["parameters"] == {"temperature": 0}
        assert exported["title"] == QUESTION
        page.click("#new")
        assert page.locator(".turn").count() == 0
        page.reload()
        wait_for_titles(page, [QUESTION])
        assert page.locator(".turn").count() == 0


def conversations_are_listed_named_and_deleted(url: str) -> None:
    with opened(url) as page:
        for question in ("one", "two"):
            answer_with(page, events(says(f"about {question}")))
            send(page, question)
            settled(page)
            page.unroute(CHAT_ROUTE)
            page.click("#new")
        wait_for_titles(page, ["two", "one"])
        page.get_by_role("button", name="one").click()
        page.locator(".turn.assistant").get_by_text("about one").wait_for()
        page.get_by_role("button", name="Rename").click()
        page.keyboard.type("<b>First</b>")
        page.keyboard.press("Enter")
        wait_for_titles(page, ["two", "<b>First</b>"])
        page.reload()
        wait_for_titles(page, ["two", "<b>First</b>"])
        page.locator(".turn.assistant").get_by_text("about one").wait_for()
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Really delete?").click()
        wait_for_titles(page, ["two"])
        assert page.locator(".turn").count() == 0
        page.reload()
        wait_for_titles(page, ["two"])


def conversations_are_written_to_files_and_read(url: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "wind", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Is it windy?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
        {"role": "assistant", "content": "No."},
    ]
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    other = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]}
    with TemporaryDirectory() as folder, opened(url) as page:
        path = Path(folder) / "all.json"
        path.write_text(json.dumps({"conversations": [{"messages": messages}, other]}))
        page.set_input_files("#file", path)
        page.get_by_text("2 conversations read.").wait_for()
        page.locator(".turn.assistant").get_by_text("No.", exact=True).wait_for()
        assert page.locator(".call code").all_inner_texts() == ["wind", "{}", "no"]
        assert sorted(titles(page)) == ["Is it windy?", "in parts"]
        with page.expect_download() as download:
            page.click("#export-all")
        exported = json.loads(Path(download.value.path()).read_text())
        found = {one["title"]: one["messages"] for one in exported["conversations"]}
        assert found["Is it windy?"] == messages
        assert found["in parts"] == [{"role": "user", "content": "in parts"}]
        page.set_input_files("#file", download.value.path())
        page.get_by_text("2 conversations read: nothing new.").wait_for()
        longer = [*messages, {"role": "user", "content": "Thanks."}]
        third = {"messages": [{"role": "user", "content": "third"}]}
        path.write_text(json.dumps([{"messages": longer}, third, other]))
        page.set_input_files("#file", path)
        page.get_by_text("3 conversations read, 1 of them known already.").wait_for()
        page.locator(".turn.user").get_by_text("Thanks.", exact=True).wait_for()
        assert sorted(titles(page)) == ["Is it windy?", "in parts", "third"]
        for text in ("{", "[1]", '{"messages": 1}', '{"messages": [{"role": "judge"}]}'):
            path.write_text(text)
            page.set_input_files("#file", path)
            page.locator("#import-said", has_text="cannot be read").wait_for()
            page.evaluate("document.querySelector('#import-said').textContent = ''")
        assert len(titles(page)) == 3


def an_answer_goes_on_while_another_conversation_is_read(url: str) -> None:
    with opened(url) as page, paced(page) as pieces:
        send(page, "slow")
        pieces.put(events(says("one"), done=False))
        page.locator(".turn.assistant .text").get_by_text("one", exact=True).wait_for()
        page.click("#new")
        assert page.locator(".turn").count() == 0
        assert page.is_hidden("#stop")
        pieces.put(events(says(" two"), done=False))
        page.get_by_role("button", name="slow").click()
        page.locator(".turn.assistant .text").get_by_text("one two", exact=True).wait_for()
        assert page.is_visible("#stop")
        pieces.put(events(says(" three"), done=False))
        page.locator(".turn.assistant .text").get_by_text("one two three", exact=True).wait_for()
        page.click("#new")
        pieces.put(events(says(" four")))
        pieces.put("")
        page.get_by_role("button", name="slow").click()
        page.locator(".turn.assistant .text").get_by_text("one two three four").wait_for()
        assert settled(page) == "one two three four"


def wait_until_kept(page: Page) -> None:
    """Wait until the page has written down a part of the answer that comes."""
    eventually(
        page,
        "async () => Number((await store.get(conversation.id))?.turns.at(-1).pending?.lastId) > 0",
    )


def a_reload_in_mid_answer_goes_on_with_it(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        page.route(CHAT_ROUTE, at_length)
        send(page, QUESTION)
        wait_until_kept(page)
        with page.expect_request(CHAT_ROUTE) as asked:
            page.reload()
        assert int(asked.value.headers["last-event-id"]) > 0
        whole = settled(page)
        assert page.locator(".trouble").count() == 0
        assert "1000 out" in page.inner_text(".turn.assistant .meta")
        page.get_by_role("button", name="Retry").click()
        assert settled(page) == whole


class Breaking(ThreadingHTTPServer):
    """A stream that breaks off after two events, and goes on after `last-event-id`."""

    asked: ClassVar[list[dict[str, str]]] = []

    def __init__(self) -> None:
        asked = self.asked = []

        class Chat(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                asked.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                known = int(self.headers.get("last-event-id", "0"))
                for number, text in list(enumerate(("a", "b", "c", "d", "e"), 1))[known:][:2]:
                    self.wfile.write(f"id: {number}\ndata: {json.dumps(says(text))}\n\n".encode())
                if known + 2 >= 5:
                    self.wfile.write(DONE.encode())

            def log_message(self, *_: object) -> None:
                """The output is for what passed and what failed."""

        super().__init__(("127.0.0.1", 0), Chat)


@contextmanager
def breaking(page: Page) -> Iterator[Breaking]:
    """Answer chats with streams that break off."""
    with Breaking() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        page.route(CHAT_ROUTE, lambda route: route.continue_(url=address))
        yield server
        server.shutdown()


def a_connection_that_breaks_off_is_made_anew(url: str) -> None:
    with opened(url) as page, breaking(page) as server:
        page.locator(".state.ready").wait_for()
        send(page, QUESTION)
        assert settled(page) == "abcde"
        assert page.locator(".trouble").count() == 0
        assert [one.get("last-event-id") for one in server.asked] == [None, "2", "4"]
        assert len({one["idempotency-key"] for one in server.asked}) == 1


def an_answer_that_the_server_forgot_can_be_continued(url: str) -> None:
    with opened(url) as page, paced(page) as pieces:
        page.locator(".state.ready").wait_for()
        send(page, QUESTION)
        pieces.put("id: 1\n" + events(says("Half"), done=False))
        page.locator(".turn.assistant .text").get_by_text("Half", exact=True).wait_for()
        wait_until_kept(page)
        page.unroute(CHAT_ROUTE)
        page.reload()
        page.get_by_role("button", name="Continue").wait_for()
        assert settled(page) == "Half"
        assert "stopped" in page.inner_text(".turn.assistant .meta")
        assert page.locator(".trouble").count() == 0


def a_cut_answer_is_continued(url: str) -> None:
    with opened(url) as page:
        greedily(page)
        page.fill("#max_tokens", "5")
        send(page, QUESTION)
        begin = settled(page)
        assert ANSWER.startswith(begin)
        assert "cut at max tokens" in page.inner_text(".turn.assistant .meta")
        page.fill("#max_tokens", "")
        body = asked_of(page, page.get_by_role("button", name="Continue").click)
        assert body["messages"][-1] == {"role": "assistant", "content": begin}
        assert body["continue_final_message"]
        assert not body["add_generation_prompt"]
        assert settled(page) == ANSWER
        assert page.get_by_role("button", name="Continue").count() == 0
        assert page.locator(".turn").count() == 2


def a_stopped_answer_is_continued(url: str) -> None:
    with opened(url) as page, paced(page) as pieces:
        send(page, QUESTION)
        pieces.put(events(says("Prefill is "), done=False))
        page.locator(".turn.assistant .text").get_by_text("Prefill is").wait_for()
        page.click("#stop")
        settled(page)
        page.unroute(CHAT_ROUTE)
        page.fill("#max_tokens", "4")
        page.get_by_role("button", name="Continue").click()
        assert settled(page).startswith("Prefill is ")


def calls_of_tools_are_shown_and_answered(url: str) -> None:
    tool = {"name": "wind", "parameters": {"type": "object"}}
    with opened(url) as page:
        page.click("#of-tools summary")
        page.fill("#tools", json.dumps([tool]))
        pieces = (
            thinks("Let me ask."),
            calls(0, "c1", "wind", '{"place": '),
            calls(0, None, None, '"sea"}'),
            calls(1, "c2", "wind", '{"place": "river"}'),
        )
        answer_with(page, events(*pieces))
        body = asked_of(page, partial(send, page, "Is it windy?"))
        assert body["tools"] == [{"type": "function", "function": tool}]
        settled(page, 1)
        assert page.locator(".call summary code").all_inner_texts() == ["wind", "wind"]
        assert json.loads(page.locator(".call pre").first.inner_text()) == {"place": "sea"}
        assert page.get_by_role("button", name="Continue").count() == 0
        page.unroute(CHAT_ROUTE)
        answer_with(page, events(says("Yes, at sea.")))
        page.locator(".results textarea").first.fill('{"speed": 9}')
        page.locator(".results textarea").last.fill("calm")
        body = asked_of(page, page.get_by_role("button", name="Send results").click)
        made = [
            {"id": id_, "type": "function", "function": {"name": "wind", "arguments": text}}
            for id_, text in (("c1", '{"place": "sea"}'), ("c2", '{"place": "river"}'))
        ]
        assert body["messages"][1:] == [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Let me ask.",
                "tool_calls": made,
            },
            {"role": "tool", "tool_call_id": "c1", "content": '{"speed": 9}'},
            {"role": "tool", "tool_call_id": "c2", "content": "calm"},
        ]
        assert settled(page, 2) == "Yes, at sea."
        assert page.locator(".results").count() == 0


def json_links_and_tasks_are_shown_as_meant(url: str) -> None:
    text = (
        "See https://example.org/a_(b), <https://example.org/c>, "
        '[there](https://example.org/d "Title") or http://example.org/e_f_g.\n\n'
        "- [x] done `so`\n- [ ] open\n  - [ ] inner\n"
    )
    with opened(url, permissions=["clipboard-read", "clipboard-write"]) as page:
        answer_with(page, events(says(text)))
        send(page, "links")
        settled(page)
        answer = page.locator(".turn.assistant .text").last
        links = answer.locator("a").evaluate_all("(links) => links.map((link) => link.href)")
        assert links == [f"https://example.org/{end}" for end in ("a_(b)", "c", "d")] + [
            "http://example.org/e_f_g"
        ]
        assert answer.locator("em").count() == 0
        boxes = answer.locator("input").evaluate_all("(all) => all.map((one) => one.checked)")
        assert boxes == [True, False, False]
        assert answer.locator(".task .task").inner_text() == "inner"
        page.unroute(CHAT_ROUTE)
        raw = '{"b":[1,2],"a":null}'
        answer_with(page, events(*map(says, raw)))
        send(page, "json")
        settled(page, 2)
        shown = page.locator(".turn.assistant pre code").last.inner_text()
        assert shown == json.dumps(json.loads(raw), indent=2)
        page.get_by_role("button", name="Copy").last.click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == raw


def empty_settings_show_what_the_server_takes(url: str) -> None:
    info = json.loads(get(f"{url}/info"))

    def change(route: Route) -> None:
        more = {
            "sampling_defaults": {"temperature": 0.6000000238418579, "top_k": 20},
            "default_max_new_tokens": 400,
            "max_new_tokens_limit": 500,
        }
        route.fulfill(body=json.dumps(info | more), content_type="application/json")

    with opened(url) as page:
        page.locator(".state.ready").wait_for()
        shown = page.locator("#form [placeholder]").evaluate_all(
            "(all) => Object.fromEntries(all.map((one) => [one.id, one.placeholder]))"
        )
        assert shown["temperature"] == str(info["sampling_defaults"].get("temperature", 1))
        assert shown["max_tokens"] == f"Up to {info['max_total_tokens']}"
        assert "Default" not in shown.values()
        page.route("**/info", change)
        page.reload()
        page.get_by_text("An answer ends after 400 tokens unless you ask for more.").wait_for()
        names = ("temperature", "top_p", "top_k", "max_tokens")
        found = [page.get_attribute(f"#{name}", "placeholder") for name in names]
        assert found == ["0.6", "1", "20", "400"]
        assert page.get_attribute("#max_tokens", "max") == "500"


def the_dot_and_the_name_are_true(url: str) -> None:
    info = json.loads(get(f"{url}/info"))
    with opened(url) as page:
        page.get_by_role("img", name="The server is ready").wait_for()
        for path in ("readyz", "info"):
            page.route(f"**/{path}", lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.get_by_role("img", name="The server cannot be reached.").wait_for()
        page.unroute("**/readyz")
        page.unroute("**/info")
        other = json.dumps(info | {"model_id": "org/other"})
        page.route(
            "**/info", lambda route: route.fulfill(body=other, content_type="application/json")
        )
        page.get_by_role("img", name="The server is ready").wait_for()
        assert page.inner_text("#model") == "org/other"
        with page.expect_request("**/readyz", timeout=15_000):
            pass
        page.route("**/readyz", lambda route: route.fulfill(status=503, json=RECOVERING))
        page.get_by_role("img", name="The server is not ready: unhealthy").wait_for()


def an_outage_is_told_while_an_answer_waits(url: str) -> None:
    note = "The server is recovering; your answer will go on."
    with opened(url) as page, paced(page) as pieces:
        page.locator(".state.ready").wait_for()
        send(page, QUESTION)
        pieces.put(events(says("one"), done=False))
        page.locator(".turn.assistant .text").get_by_text("one", exact=True).wait_for()
        page.route("**/readyz", lambda route: route.fulfill(status=503, json=RECOVERING))
        page.locator(".turn.assistant").get_by_text(note).wait_for()
        page.unroute("**/readyz")
        page.locator(".turn.assistant").get_by_text(note).wait_for(state="hidden")
        pieces.put(events(says(" two")))
        pieces.put("")
        assert settled(page) == "one two"


def a_short_outage_is_told_at_once(url: str) -> None:
    """The page's own clock: a second after the question the server's state is read again, and again."""
    note = "The server is recovering; your answer will go on."
    with opened(url) as page, paced(page) as pieces:
        page.clock.install()
        page.reload()
        page.locator(".state.ready").wait_for()
        with page.expect_request("**/readyz"):
            send(page, QUESTION)
        page.route("**/readyz", lambda route: route.fulfill(status=503, json=RECOVERING))
        page.clock.run_for(1500)
        page.locator(".turn.assistant").get_by_text(note).wait_for()
        page.unroute("**/readyz")
        page.clock.run_for(1500)
        page.locator(".turn.assistant").get_by_text(note).wait_for(state="hidden")
        pieces.put(events(says("one")))
        pieces.put("")
        page.clock.resume()
        assert settled(page) == "one"


def a_template_without_tools_is_told_beside_the_tools(url: str) -> None:
    info = json.loads(get(f"{url}/info"))
    with opened(url) as page:
        for knows in (True, False):
            told = info | {"grammars": True, "chat_template_tools": knows}
            page.route("**/info", partial(Route.fulfill, json=told))
            page.reload()
            page.locator(".state.ready").wait_for()
            page.click("#of-tools summary")
            assert page.locator("#without-tools").is_visible() is not knows
            page.unroute("**/info")


def a_phone_shows_the_list_and_calls(url: str) -> None:
    with opened(url, **NARROW) as page:
        answer_with(page, events(calls(0, "c1", "w" * 60, json.dumps({"x": "y" * 200}))))
        page.fill("#prompt", "z" * 100)
        page.click("#send")
        settled(page)
        assert overflow(page) == 0
        assert page.is_hidden("#chats")
        page.click("#toggle-chats")
        assert page.locator(":focus").get_attribute("id") == "chats-done"
        assert overflow(page) == 0
        page.keyboard.press("Escape")
        assert page.locator(":focus").get_attribute("id") == "toggle-chats"
        page.click("#toggle-chats")
        page.locator("#conversations .entry").click()
        assert page.is_hidden("#chats")
        assert page.locator(".turn").count() == 2


if __name__ == "__main__":
    run(globals())
