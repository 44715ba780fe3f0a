"""The chat of the server's page, in a real browser: conversations, failures, hostile answers, keyboard and phones.

Texts that a tiny model of random weights cannot write come from scripted answers (page_visit.py).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.chat_folders import END, save_chat_folder
from support.page_visit import CHAT, USAGE, Visit, answer, delta, events, files, new_visit, running_browser, usage_chunk
from support.serving import Running, running_server

from graphcore import Engine
from graphcore.sampling_params import SamplingParams

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-the-server"
LONGEST_FREEZE = 1000.0  # milliseconds for which the page may not listen; below 200 where nothing else runs
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
TOOLS = '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
MARKDOWN = """# A title

Some *words* and a [link](https://example.org/a "b"), `code`, ~~gone~~ &amp; <b>no element</b>.

1. one
2. two
   - inner

| a | b |
|:--|--:|
| 1 | 2 |

```python
print("<i>")
```

> said

- [x] done
"""
HOSTILE = """<script>alert(1)</script> <img src=x onerror="alert(2)"> <svg onload=alert(3)><a xlink:href="x">

<iframe src="https://evil.example/a"></iframe>

<style>body { display: none }</style>

![picture](https://evil.example/b.png) ![x](javascript:alert(4)) ![d](data:image/png;base64,AA)

[one](javascript:alert(5)) [two](JaVaScRiPt:alert(6)) [three](data:text/html,<script>alert(7)</script>)
[four](vbscript:x) [five](//evil.example/c) [six](&#106;avascript:alert(8)) [seven]( javascript:alert(9) )
[eight](https://evil.example/d" onclick="alert(10)) <javascript:alert(11)> [nine][ref]

[ref]: javascript:alert(12)

```html
<script>alert(13)</script>
```

<form action="https://evil.example/e"><input autofocus onfocus=alert(14)></form>
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_chat_folder(tmp_path_factory.mktemp("page") / "model")
    sizes = ["batching.max_sequences=2", "context_length=4096"]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    (end,) = engine.tokenizer.encode(END, add_special_tokens=False)
    endless = SamplingParams(logit_bias={end: -100.0})
    with running_server(lambda: engine, sampling=endless) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, running: Running) -> Iterator[Visit]:
    with new_visit(browser, running.url) as visit:
        yield visit
        visit.check_errors()
        visit.check_own_addresses()


@pytest.fixture(scope="module")
def open_tab(browser: Browser, running: Running) -> Iterator[Visit]:
    with new_visit(browser, running.url) as visit:
        yield visit.open()


@pytest.fixture(scope="module")
def scripted_tab(browser: Browser, running: Running) -> Iterator[Visit]:
    with new_visit(browser, running.url) as visit:
        yield visit.script().open()


@pytest.fixture
def anew(open_tab: Visit) -> Iterator[Visit]:
    """A new conversation in a tab that tests share: to load the page takes a browser most of a second."""
    yield from in_new_conversation(open_tab)


@pytest.fixture
def scripted(scripted_tab: Visit) -> Iterator[Visit]:
    """A new conversation in a tab that tests share, whose answers the test writes."""
    yield from in_new_conversation(scripted_tab)


def in_new_conversation(tab: Visit) -> Iterator[Visit]:
    """Begin a conversation, and check the tab at the end; what a test leaves is at most a complete answer."""
    tab.page.unroute(CHAT)
    tab.page.get_by_role("link", name="New conversation").click()
    expect(tab.page.locator(".assistant")).to_have_count(0)
    tab.page.evaluate("longTasks.length = 0, globalThis.asked?.splice(0)")
    yield tab
    tab.check_errors()
    tab.check_own_addresses()


def ask_scripted(visit: Visit) -> Visit:
    """Ask something that the test answers."""
    visit.say("Hello?")
    visit.wait_for("asked.length === 1")
    return visit


def open_scripted(visit: Visit, question: str = "Hello?") -> Visit:
    """Open the page, and ask something that the test answers."""
    visit.script().open().say(question)
    visit.wait_for("asked.length === 1")
    return visit


def set_settings(visit: Visit, **values: str | bool) -> None:
    visit.page.click("#settings-button")
    for name, value in values.items():
        field = visit.page.locator(f"#setting-{name}")
        if isinstance(value, bool):
            field.set_checked(value)
        elif name == "effort":
            field.select_option(value)
        else:
            field.fill(value)
    visit.page.click(".settings .main-button")
    expect(visit.page.locator("dialog")).to_have_count(0)


def test_a_conversation_of_two_turns(visit: Visit, running: Running) -> None:
    visit.open()
    set_settings(visit, maxTokens="60", seed="1", system="Be brief.")
    visit.say("Hello?")
    visit.wait_answer()
    sent: list[Any] = []
    visit.page.on(
        "request", lambda request: request.url.endswith("completions") and sent.append(request.post_data_json)
    )
    visit.say("And then?")
    visit.wait_answer(2)
    first, second = visit.answers()
    body = {"messages": sent[0]["messages"][:2], "max_tokens": 60, "seed": 1}
    with running.client() as http:
        expected = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        body["messages"] = sent[0]["messages"]
        assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 60
    assert [message["role"] for message in sent[0]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[0]["messages"][2]["content"] == expected
    assert "".join(first.split()) == "".join(expected.split())
    assert second
    facts = visit.page.locator(".facts").all_inner_texts()
    # no rate: a page that waits for its processor reads all sixty tokens at once
    assert all("Answer 60 tokens" in text and "first token after" in text for text in facts)
    assert "from the cache" in facts[1]
    expect(visit.page.locator("#model-name")).to_have_text("tiny")
    expect(visit.page.locator("#model-state")).to_have_text("ready")
    expect(visit.page.locator(".conversation-link")).to_have_text("Hello?")


def test_an_answer_is_continued_where_its_length_ended(visit: Visit) -> None:
    visit.open()
    set_settings(visit, maxTokens="5", seed="1")
    visit.say("Hello?")
    visit.wait_answer()
    expect(visit.page.locator(".end")).to_contain_text("Cut")
    before = visit.page.locator(".assistant").inner_text()
    assert "Answer 5 tokens" in before
    visit.page.get_by_role("button", name="Continue").click()
    expect(visit.page.locator(".facts")).to_contain_text("Answer 10 tokens")
    assert len(visit.answers()) == 1


def test_stop_by_button_and_by_escape(visit: Visit, running: Running) -> None:
    visit.open()
    for at, stop in enumerate(
        (lambda: visit.page.get_by_role("button", name="Stop").click(), lambda: visit.page.keyboard.press("Escape")), 1
    ):
        visit.say("Talk.")
        visit.wait_for(f"document.querySelectorAll('.assistant')[{at - 1}]?.querySelector('.answer-text').innerText")
        stop()
        visit.wait_answer(at)
        running.wait_for(lambda: running.num_requests() == 0)
        expect(visit.page.locator(".end").nth(at - 1)).to_have_text("Stopped.")
    expect(visit.page.get_by_role("button", name="Continue")).to_have_count(1)


def test_a_click_that_was_meant_to_stop_an_answer_sends_nothing(visit: Visit) -> None:
    open_scripted(visit)
    visit.page.fill("#message-field", "Half of a que")
    visit.page.evaluate("""() => {
        const send = document.querySelector(".send-button");
        const click = () => send.dispatchEvent(new MouseEvent("click", { detail: 1, bubbles: true, cancelable: true }));
        new MutationObserver((_, observer) => (observer.disconnect(), click(), window.clicked = true))
          .observe(send, { childList: true });
    }""")
    visit.push(delta("stop", content="Done."), is_last=True)
    visit.wait_for("window.clicked")
    visit.wait_answer()
    expect(visit.page.locator("#message-field")).to_have_value("Half of a que")
    assert len(visit.asked()) == 1
    visit.page.press("#message-field", "Enter")
    visit.wait_for("asked.length === 2")


def test_a_reload_keeps_what_had_arrived(visit: Visit, running: Running) -> None:
    open_scripted(visit)
    visit.push(delta(content="It had **begun"))
    expect(visit.page.locator(".answer-text")).to_contain_text("begun")
    visit.page.fill("#message-field", "a draft")
    visit.page.reload()
    expect(visit.page.locator(".end")).to_contain_text("Interrupted")
    expect(visit.page.locator(".answer-text")).to_contain_text("It had **begun")
    expect(visit.page.locator("#message-field")).to_have_value("a draft")
    visit.page.get_by_role("button", name="Continue").click()
    visit.push(delta(content="** and ended."), delta("stop"), usage_chunk(), is_last=True)
    visit.wait_answer()
    body = visit.asked()[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "It had **begun"}
    assert body["continue_final_message"] is True
    assert visit.answers() == ["It had begun and ended."]


def test_a_reload_while_the_server_answers_is_no_error(visit: Visit) -> None:
    visit.open().say("Talk.")
    visit.wait_for("document.querySelector('.answer-text')?.innerText")
    visit.page.evaluate("""() => {
      new MutationObserver(() => {
        const found = document.querySelector(".message-error, [data-state=unreachable]");
        if (found) sessionStorage.setItem("broken", found.outerHTML);
      }).observe(document.body, { childList: true, subtree: true, attributes: true });
    }""")
    visit.page.reload()
    expect(visit.page.locator(".end")).to_contain_text("Interrupted")
    expect(visit.page.locator(".message-error")).to_have_count(0)
    assert visit.page.evaluate("sessionStorage.getItem('broken')") is None


def test_a_draft_outlives_a_reload_that_the_database_did_not_wait_for(visit: Visit) -> None:
    open_scripted(visit)
    visit.push(delta("stop", content="Done."), is_last=True)
    visit.wait_answer()
    visit.page.evaluate("IDBObjectStore.prototype.put = () => {}")  # until the reload, nothing is written
    visit.page.fill("#message-field", "typed last")
    visit.page.reload()
    field = visit.page.locator("#message-field")
    expect(field).to_have_value("typed last")
    visit.page.reload()
    expect(field).to_have_value("typed last")
    visit.page.fill("#message-field", "")
    visit.page.reload()
    expect(visit.page.locator(".answer-text")).to_contain_text("Done.")
    expect(field).to_have_value("")


def test_progress_comes_from_the_status(visit: Visit) -> None:
    open_scripted(visit)
    own = visit.page.evaluate("asked[0].id")
    shown: dict[str, Any] = {"id": own, "prompt_tokens": 40, "computed_tokens": 0, "new_tokens": 0, "decode_seconds": 0}
    visit.page.unroute("**/status?*")
    visit.page.route(
        "**/status?*", lambda route: route.fulfill(json={"requests": [{"id": "x", "state": "waiting"}, shown]})
    )
    facts = visit.page.locator(".facts")
    shown["state"] = "waiting"
    expect(facts).to_have_text("Waiting in the queue, place 2")
    shown |= {"state": "prefill", "computed_tokens": 16}
    expect(facts).to_have_text("Reading the prompt: 16 of 40 tokens")
    shown |= {"state": "decode", "computed_tokens": 50, "new_tokens": 10, "decode_seconds": 0.5}
    expect(facts).to_have_text("10 tokens \u00b7 20.0 tokens/s")
    visit.push(delta(content="Hi"))
    visit.page.wait_for_timeout(100)
    visit.push(delta(content="."), delta("stop"), usage_chunk(), is_last=True)
    expect(facts).to_contain_text("Prompt 20 tokens (16 from the cache) \u00b7 Answer 9 tokens")
    rate = re.search(r"([\d.]+) tokens/s", facts.inner_text())
    assert rate
    assert 0 < float(rate[1]) <= 8 / 0.1  # eight tokens follow the first


def test_the_key_is_asked_once_and_kept_in_the_session_only(browser: Browser, engine: Engine) -> None:
    with running_server(lambda: engine, api_key=KEY) as running, new_visit(browser, running.url) as visit:
        page = visit.open().page
        dialog = page.get_by_role("dialog", name="This server needs a key")
        expect(dialog).to_be_visible()
        assert page.locator("#key-field").get_attribute("type") == "password"
        visit.check_axe()
        page.locator("#key-field").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("does not take this key")
        page.keyboard.type(KEY)  # what was wrong is selected
        page.keyboard.press("Enter")
        expect(page.locator("#model-name")).to_have_text("tiny")
        expect(page.locator("dialog")).to_have_count(0)
        page.reload()
        expect(page.locator("#model-name")).to_have_text("tiny")
        set_settings(visit, maxTokens="2")
        visit.say("Hello?")
        visit.wait_answer()
        expect(page.locator("dialog")).to_have_count(0)
        assert page.evaluate("JSON.stringify(sessionStorage)").count(KEY) == 1
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        assert KEY not in page.evaluate("(async () => JSON.stringify(await Promise.all(" + ALL_RECORDS + ")))()")
        assert KEY not in page.content()
        visit.check_errors(401)


ALL_RECORDS = """["conversations", "messages", "drafts"].map((name) => new Promise((done) => {
  const opening = indexedDB.open("graphcore");
  opening.onsuccess = () => {
    const request = opening.result.transaction(name).objectStore(name).getAll();
    request.onsuccess = () => (opening.result.close(), done(request.result));
  };
}))"""


def test_without_the_key_a_message_waits_with_a_retry(browser: Browser, engine: Engine) -> None:
    with running_server(lambda: engine, api_key=KEY) as running, new_visit(browser, running.url) as visit:
        page = visit.open().page
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#notice")).to_contain_text("This server needs a key")
        visit.say("Hello?")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".message-error")).to_contain_text("needs its key")
        page.get_by_role("button", name="Retry").click()
        page.locator("#key-field").fill(KEY)
        page.keyboard.press("Enter")
        visit.wait_answer()
        expect(page.locator(".message-error")).to_have_count(0)
        expect(page.locator("#notice")).to_be_empty()
        visit.check_errors(401)


ERRORS: list[tuple[int, Any, dict[str, str], str]] = [
    (400, {"message": "the prompt has 900", "code": "context_length_exceeded"}, {}, "longer than the model can read"),
    (400, {"message": "top_p is wrong", "code": None}, {}, "Check the settings. The server says: top_p is wrong."),
    (413, {"message": "the body is larger"}, {}, "too large for the server"),
    (429, {"message": "the queue is full"}, {"Retry-After": "7"}, "Try again in 7 seconds"),
    (500, {"message": "it failed"}, {}, "look into the server's log. The server says: it failed."),
    (502, None, {}, "The proxy before the server got no answer"),
    (503, {"message": "the server is draining"}, {}, "takes no requests at present"),
]


def test_errors_say_what_to_do_and_a_retry_replaces_them(browser: Browser, running: Running) -> None:
    with new_visit(browser, running.url) as visit:
        visit.open()
        for number, (status, error, headers, words) in enumerate(ERRORS, 1):
            visit.answer_with(json.dumps({"error": error}) if error else "<html>", status, headers)
            visit.say("Hello?")
            expect(visit.page.locator(".message-error")).to_contain_text(words)
            visit.answer_with(answer(f"Now it works, {number}."))
            visit.page.get_by_role("button", name="Retry").last.click()
            expect(visit.page.locator(".assistant .answer-text").last).to_have_text(f"Now it works, {number}.")
            expect(visit.page.locator(".message-error")).to_have_count(0)
            expect(visit.page.locator(".assistant")).to_have_count(number)
        expect(visit.page.locator(".versions")).to_have_count(0)
        visit.check_errors(400, 413, 429, 500, 502, 503)


def test_an_error_inside_of_the_stream_keeps_the_text(scripted: Visit) -> None:
    ask_scripted(scripted)
    scripted.push(delta(content="Half of it"), {"error": {"message": "the request has failed inside the server"}})
    expect(scripted.page.locator(".message-error")).to_contain_text("failed inside the server")
    scripted.wait_answer()
    assert scripted.answers() == ["Half of it"]
    expect(scripted.page.get_by_role("button", name="Retry")).to_be_visible()
    expect(scripted.page.get_by_role("button", name="Continue")).to_be_visible()


def test_a_stream_that_breaks_off_is_an_error(scripted: Visit) -> None:
    ask_scripted(scripted)
    scripted.push(delta(content="Half of it"))
    scripted.page.evaluate("asked[0].close()")
    expect(scripted.page.locator(".message-error")).to_contain_text("broke off")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", "<!doctype html><p>Log in"),
        ("application/json", '{"choices": []}'),
        ("text/event-stream", "data: <p>no</p>\n\n"),
        ("text/event-stream", "data: null\n\n"),
    ],
)
def test_what_is_no_answer_is_told_in_words(anew: Visit, kind: str, body: str) -> None:
    anew.page.route(CHAT, lambda route: route.fulfill(body=body, headers={"Content-Type": kind}))
    anew.say("Hello?")
    error = anew.page.locator(".message-error")
    expect(error).to_contain_text("has not the form of OpenAI's interface")
    assert "Error" not in error.inner_text()


def test_half_a_pair_of_an_answer_does_not_break_the_next_question(scripted: Visit, running: Running) -> None:
    ask_scripted(scripted)
    scripted.page.evaluate(r"""asked[0].write('data: {"choices":[{"delta":{"content":"a \\ud83d"}}]}\n\n')""")
    scripted.push(delta("stop"), is_last=True)
    scripted.wait_answer()
    scripted.say("And now?")
    scripted.wait_for("asked.length === 2")
    assert scripted.asked()[1]["messages"][1]["content"] == "a \ufffd"
    scripted.push(delta("stop", content="Well."), is_last=True)
    scripted.wait_answer(2)


def test_a_server_that_cannot_be_reached(browser: Browser, running: Running) -> None:
    with new_visit(browser, running.url) as visit:
        visit.open().answer_with(answer("An answer."))
        visit.say("Hello?")
        visit.wait_answer()
        for path in ("**/health", CHAT, "**/v1/models"):
            visit.page.route(path, lambda route: route.abort())
        visit.say("Are you there?")
        expect(visit.page.locator(".message-error")).to_contain_text("cannot be reached")
        visit.page.evaluate("window.dispatchEvent(new Event('online'))")
        expect(visit.page.locator("#notice")).to_contain_text("cannot be reached")
        assert visit.answers()[0] == "An answer."
        visit.page.fill("#message-field", "still typing")
        for path in ("**/health", CHAT, "**/v1/models"):
            visit.page.unroute(path)
        visit.answer_with(answer("Yes."))
        expect(visit.page.locator("#notice")).to_be_empty()
        expect(visit.page.locator("#message-field")).to_have_value("still typing")
        visit.page.get_by_role("button", name="Retry").last.click()
        visit.wait_for("document.querySelectorAll('.message-error').length === 0")
        assert all("ERR_FAILED" in error for error in visit.errors)


def test_the_page_waits_while_the_model_is_being_loaded(browser: Browser, running: Running) -> None:
    with new_visit(browser, running.url) as visit:
        state = {"status": "loading"}
        visit.page.route(
            "**/health", lambda route: route.fulfill(json=state, status=503 if state["status"] != "ready" else 200)
        )
        visit.open().answer_with(answer("Ready now."))
        expect(visit.page.locator("#notice")).to_contain_text("being loaded")
        visit.say("Hello?")
        expect(visit.page.locator(".facts")).to_have_text("Waiting for the model to be loaded")
        state["status"] = "ready"
        visit.wait_answer()
        assert visit.answers() == ["Ready now."]
        expect(visit.page.locator("#notice")).to_be_empty()
        visit.check_errors(503)


def test_markdown_becomes_elements(visit: Visit) -> None:
    open_scripted(visit)
    for at in range(0, len(MARKDOWN), 3):
        visit.push(delta(content=MARKDOWN[at : at + 3]))
    visit.push(delta("stop"), usage_chunk(), is_last=True)
    visit.wait_answer()
    text = visit.page.locator(".answer-text")
    expect(text.locator("pre code")).to_have_text('print("<i>")')
    expect(text.locator("h3")).to_have_text("A title")
    expect(text.locator("em")).to_have_text("words")
    expect(text.locator("del")).to_have_text("gone")
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol ul > li")).to_have_text("inner")
    expect(text.locator("td")).to_have_text(["1", "2"])
    expect(text.locator("blockquote")).to_have_text("said")
    expect(text.locator("p").first).to_contain_text("& <b>no element</b>.")
    link = text.locator("a")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert (link.get_attribute("target"), link.get_attribute("title")) == ("_blank", "https://example.org/a")
    streamed = text.inner_html()
    visit.page.reload()
    expect(visit.page.locator(".answer-text h3")).to_have_text("A title")
    visit.wait_for("document.querySelector('.answer-text .task')")
    assert visit.page.locator(".answer-text").inner_html() == streamed


def test_a_list_goes_on_after_an_empty_line(scripted: Visit) -> None:
    ask_scripted(scripted)
    scripted.push(delta(content="1. one\n\n2"))
    expect(scripted.page.locator(".answer-text")).to_contain_text("2")
    scripted.push(delta(content=". two"), delta("stop"), usage_chunk(), is_last=True)
    scripted.wait_answer()
    expect(scripted.page.locator(".answer-text ol")).to_have_count(1)
    expect(scripted.page.locator(".answer-text ol > li")).to_have_text(["one", "two"])


IN_PIECES = """async ([text, step]) => {
  const { StreamedMarkdown } = await import("/page/streamed_markdown.js");
  const drawn = (ends) => {
    const root = document.createElement("div");
    const markdown = new StreamedMarkdown(root);
    for (const end of ends) {
      markdown.set(text.slice(0, end), end >= text.length);
      while (!markdown.draw(1000));
    }
    for (const box of root.querySelectorAll(".blocks, .open-block, code > span")) box.replaceWith(...box.childNodes);
    root.normalize();
    return root;
  };
  const steps = Array.from({ length: Math.ceil(text.length / step) }, (_, at) => (at + 1) * step);
  const [streamed, whole] = [drawn(steps), drawn([text.length])];
  return [streamed.innerHTML === whole.innerHTML, whole.querySelectorAll(".as-written").length, whole.textContent];
}"""


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_a_streamed_text_is_drawn_as_a_whole_one(anew: Visit, name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    is_equal, num_as_written, drawn = anew.page.evaluate(IN_PIECES, [text, 61])
    assert is_equal
    assert num_as_written == 0
    assert len(drawn) > len(text) / 2


INTERRUPTED = """async ([text, number]) => {
  const { StreamedMarkdown } = await import("/page/streamed_markdown.js");
  let calls = 0;
  performance.now = () => (++calls >= number ? 100 : 0);
  const root = document.createElement("div");
  const markdown = new StreamedMarkdown(root);
  markdown.set(text, true);
  while (!markdown.draw(1000));
  delete performance.now;
  return [calls, root.querySelectorAll("li").length, root.querySelectorAll(".as-written").length];
}"""


def test_a_long_list_stays_markdown_on_a_machine_that_stops_for_a_moment(anew: Visit) -> None:
    text = "- an *item*\n" * 800
    num_calls = anew.page.evaluate(INTERRUPTED, [text, 0])[0]
    assert num_calls > 6
    for number in range(1, num_calls + 1):
        assert anew.page.evaluate(INTERRUPTED, [text, number])[1:] == [800, 0], number


@pytest.mark.parametrize("marker", ["1. ", "- ", "- [x] ", "> - ", "-\t", "1. one\n   - "])
def test_a_list_that_is_drawn_after_its_marker_stays_markdown(scripted: Visit, marker: str) -> None:
    ask_scripted(scripted)
    scripted.push(delta(content=f"Some *words*.\n\n{marker}"))
    text = scripted.page.locator(".answer-text")
    expect(text.locator("em")).to_have_text("words")
    scripted.push(delta(content="*first*"), delta("stop"), usage_chunk(), is_last=True)
    scripted.wait_answer()
    expect(text.locator("li em")).to_have_text("first")
    expect(text.locator(".as-written")).to_have_count(0)


def test_a_hostile_answer_is_text(anew: Visit) -> None:
    anew.answer_with(answer(HOSTILE, piece=7))
    anew.say("Be evil.")
    anew.wait_answer()
    expect(anew.page.locator(".answer-text")).to_contain_text("alert(14)")
    text = anew.page.locator(".answer-text")
    for forbidden in (
        "script",
        "img",
        "svg",
        "iframe",
        "style",
        "form",
        "input",
        "object",
        "embed",
        "[onclick]",
        "[onload]",
    ):
        expect(text.locator(forbidden)).to_have_count(0)
    addresses = text.locator("a").evaluate_all("(links) => links.map(({ href }) => href)")
    assert addresses
    assert all(address.startswith("https://evil.example/") for address in addresses)
    expect(text.get_by_role("link", name="Picture: picture")).to_be_visible()
    for shown in ("<script>alert(1)</script>", "javascript:alert(5)", '<img src=x onerror="alert(2)">', "<iframe"):
        expect(text).to_contain_text(shown)
    assert anew.page.locator("body").is_visible()


MEGABYTE = 1_000_000
LONG_ANSWERS = {
    "paragraphs": "Words of **an** answer with `code` and a [link](https://example.org), and more.\n\n" * 12_000,
    "tiny paragraphs": "ab\n\n" * (MEGABYTE // 4),
    "one line": "word " * (MEGABYTE // 5),
    "one block of code": "```python\n" + "x = [1, 2, 3]  # numbers\n" * (MEGABYTE // 25) + "```\n",
    "one line of code": "```\n" + "x" * MEGABYTE,
    "a table": "| a | b | c |\n|-|-|-|\n" + ("| one | two | " + "x" * 180 + " |\n") * 5_000,
    "lists": "".join(" " * (2 * (at % 30)) + "- item\n" for at in range(MEGABYTE // 40)),
    "deep quotes": "> " * (MEGABYTE // 2) + "a",
    "deep list": "- " * (MEGABYTE // 2) + "a",
    "brackets": "![[*_`<a>|" * (MEGABYTE // 10),
    "deep JSON": "[" * (MEGABYTE // 2) + "]" * (MEGABYTE // 2),
}
IN_CI = ("tiny paragraphs", "deep quotes", "brackets")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.slow) for kind in LONG_ANSWERS]
)
def test_a_megabyte_does_not_freeze_the_page(anew: Visit, kind: str) -> None:
    text = LONG_ANSWERS[kind]
    anew.answer_with(answer(text, piece=400))
    anew.say("Talk.")
    anew.wait_answer()
    last = text.rstrip("` \n")[-1]
    anew.wait_for(f"document.querySelector('.answer-text').textContent.trim().length > {len(text) // 5}")
    anew.page.evaluate("document.querySelector('#messages').scrollTop = 5e3")
    anew.page.evaluate("document.querySelector('#messages').scrollTop = 1e9")
    assert last in anew.page.evaluate("document.querySelector('.answer-text').textContent.slice(-2000)")
    assert anew.longest_task() < LONGEST_FREEZE
    assert anew.fits()


def test_the_view_follows_the_newest_text_only_at_the_end(visit: Visit) -> None:
    open_scripted(visit)
    at_end = "(() => { const { scrollHeight, scrollTop, clientHeight } = document.querySelector('#messages');"
    at_end += "return scrollHeight - scrollTop - clientHeight < 2 && scrollTop > 0; })()"
    for _ in range(5):
        visit.push(delta(content="A paragraph of the answer.\n\n" * 20))
        visit.wait_for(at_end)
    visit.page.evaluate("document.querySelector('#messages').scrollTop = 100")
    button = visit.page.get_by_role("button", name="Go to the newest text")
    expect(button).to_be_visible()
    visit.push(delta(content="The newest paragraph.\n\n"))
    expect(visit.page.locator(".answer-text")).to_contain_text("The newest paragraph.")
    assert visit.page.evaluate("document.querySelector('#messages').scrollTop") == 100
    button.click()
    visit.wait_for(at_end)
    expect(button).to_be_hidden()


def test_a_call_of_a_tool_and_its_result(visit: Visit) -> None:
    visit.script().open()
    set_settings(visit, tools=TOOLS, effort="low", showsThinking=True)
    visit.say("What is the weather?")
    visit.push(delta(role="assistant", content=""), delta(reasoning_content="I must *look* it up."))
    expect(visit.page.locator(".thinking")).to_have_attribute("open", "")
    expect(visit.page.locator(".thinking em")).to_have_text("look")
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": ""}}
    visit.push(delta(tool_calls=[call]))
    for piece in ('{"city": ', '"Paris"}'):
        visit.push(delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}]))
    visit.push(delta("tool_calls"), usage_chunk(), is_last=True)
    visit.wait_answer()
    expect(visit.page.locator(".tool-name")).to_have_text("Calls the tool get_weather")
    expect(visit.page.locator(".tool-call code").last).to_have_text('{\n  "city": "Paris"\n}')
    visit.check_axe()
    visit.page.get_by_label("Result of get_weather").fill("18 degrees")
    visit.page.get_by_role("button", name="Send result").click()
    visit.wait_for("asked.length === 2")
    first, second = visit.asked()
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert first["reasoning_effort"] == "low"
    called, result = second["messages"][1:]
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert called["reasoning_content"] == "I must *look* it up."
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}
    visit.push(delta(content="It is mild."), delta("stop"), usage_chunk(), is_last=True)
    visit.wait_answer(2)
    assert visit.answers()[-1] == "It is mild."


def test_thinking_is_folded_unless_it_is_wished(scripted: Visit) -> None:
    ask_scripted(scripted)
    scripted.push(delta(reasoning_content="Hm."), delta(content="Yes."), delta("stop"), usage_chunk(), is_last=True)
    scripted.wait_answer()
    summary = scripted.page.locator(".thinking summary")
    expect(summary).to_have_text("Thinking 3 characters")
    assert scripted.page.locator(".thinking").get_attribute("open") is None
    summary.click()
    expect(scripted.page.locator(".thinking .markdown")).to_have_text("Hm.")


def test_json_is_shown_indented(visit: Visit) -> None:
    visit.open().answer_with(answer('{"a": [1, 2], "b": "<c>"}', piece=3))
    set_settings(visit, schema='{"type": "object"}')
    visit.say("JSON?")
    visit.wait_answer()
    expect(visit.page.locator(".answer-text pre")).to_have_text('{\n  "a": [\n    1,\n    2\n  ],\n  "b": "<c>"\n}')


def test_settings_reach_the_server_and_empty_ones_do_not(visit: Visit) -> None:
    visit.script().open()
    visit.page.click("#settings-button")
    visit.page.get_by_text("Advanced sampling").click()
    for name, wrong, words in (
        ("temperature", "warm", "Enter a number from 0 to 100"),
        ("topP", "1.5", "Enter a number from 0 to 1"),
        ("topK", "-1", "Enter a whole number from 0"),
        ("minP", "2", "Enter a number from 0 to 1"),
        ("repetition", "0", "Enter a number from 0.01 to 100"),
        ("presence", "3", "Enter a number from -2 to 2"),
        ("dryMultiplier", "-1", "Enter a number from 0 to"),
        ("dryBase", "x", "Enter a number from 0 to"),
        ("dryAllowedLength", "1.5", "Enter a whole number from 0"),
        ("dryLast", "-2", "Enter a whole number from -1"),
        ("xtcProbability", "2", "Enter a number from 0 to 1"),
        ("xtcThreshold", "-0.1", "Enter a number from 0 to 1"),
        ("topNSigma", "-2", "Enter a number from -1 to"),
        ("maxTokens", "0", "Enter a whole number from 1"),
        ("tools", "[{]", "This is not valid JSON"),
        ("tools", '{"a": 1}', "must be a JSON list"),
        ("schema", "[]", "must be a JSON object"),
    ):
        visit.page.fill(f"#setting-{name}", wrong)
        visit.page.click(".settings .main-button")
        expect(visit.page.locator(f"#setting-{name}-error")).to_contain_text(words)
        expect(visit.page.locator(f"#setting-{name}")).to_be_focused()
        visit.page.fill(f"#setting-{name}", "")
    visit.page.fill("#setting-temperature", "0,5")
    visit.page.fill("#setting-minP", "0.1")
    visit.page.fill("#setting-repetition", "1.1")
    visit.page.check("#setting-for-all")
    visit.page.click(".settings .main-button")
    visit.say("Hello?")
    visit.push(delta(content="Hi."), delta("stop"), is_last=True)
    visit.wait_answer()
    own = {"messages", "stream", "stream_options", "repetition_detection"}
    asked = visit.asked()[0]
    assert set(asked) == own | {"temperature", "min_p", "repetition_penalty"}
    assert (asked["temperature"], asked["min_p"], asked["repetition_penalty"]) == (0.5, 0.1, 1.1)
    expect(visit.page.locator("#settings-button")).to_have_text("Settings (3 set)")
    visit.page.click("#settings-button")
    visit.page.get_by_role("button", name="Reset to defaults").click()
    visit.page.click(".settings .main-button")
    expect(visit.page.locator("#settings-button")).to_have_text("Settings")
    visit.say("And now?")
    visit.wait_for("asked.length === 2")
    assert set(visit.asked()[1]) == own
    visit.push(delta(content="Hi."), delta("stop"), is_last=True)
    visit.wait_answer(2)
    visit.page.get_by_role("link", name="New conversation").click()
    expect(visit.page.locator("#settings-button")).to_have_text("Settings (3 set)")


def test_advanced_settings_reach_the_server_and_are_unfolded_if_set(visit: Visit) -> None:
    values = {
        "dryMultiplier": ("dry_multiplier", 0.8),
        "dryBase": ("dry_base", 2),
        "dryAllowedLength": ("dry_allowed_length", 3),
        "dryLast": ("dry_penalty_last_n", -1),
        "xtcProbability": ("xtc_probability", 0.5),
        "xtcThreshold": ("xtc_threshold", 0.2),
        "topNSigma": ("top_n_sigma", 1),
    }
    visit.script().open()
    visit.page.click("#settings-button")
    expect(visit.page.locator("#setting-dryBase")).to_be_hidden()
    visit.page.get_by_text("Advanced sampling").click()
    for name, (_, value) in values.items():
        visit.page.fill(f"#setting-{name}", str(value))
    visit.page.click(".settings .main-button")
    visit.say("Hello?")
    visit.push(delta(content="Hi."), delta("stop"), is_last=True)
    visit.wait_answer()
    asked = visit.asked()[0]
    assert {field: asked[field] for field, _ in values.values()} == dict(values.values())
    visit.page.click("#settings-button")
    expect(visit.page.locator("#setting-dryBase")).to_have_value("2")
    visit.page.get_by_role("button", name="Close").click()


def test_empty_fields_show_what_the_server_takes(visit: Visit) -> None:
    visit.page.unroute("**/status?*")
    visit.open()
    visit.page.click("#settings-button")
    advanced = (("dryBase", "1.75"), ("dryLast", "-1"), ("xtcThreshold", "0.1"), ("topNSigma", "0"))
    basic = (("temperature", "1"), ("topK", "0"), ("topP", "1"), ("repetition", "1"), ("presence", "0"))
    for name, value in (*basic, *advanced):
        expect(visit.page.locator(f"#setting-{name}")).to_have_attribute("placeholder", value)
    expect(visit.page.locator("#setting-seed")).not_to_have_attribute("placeholder", "0")
    visit.page.get_by_role("button", name="Close").click()


def test_edit_retry_and_versions(visit: Visit) -> None:
    visit.open().answer_with(answer("First."))
    visit.say("One?")
    visit.wait_answer()
    visit.answer_with(answer("Second."))
    visit.page.get_by_role("button", name="Retry").click()
    visit.wait_for("document.querySelector('.answer-text').innerText === 'Second.'")
    expect(visit.page.locator(".assistant .versions")).to_have_text("2 of 2")
    visit.page.get_by_role("button", name="Earlier version").click()
    visit.wait_for("document.querySelector('.answer-text')?.innerText === 'First.'")
    visit.answer_with(answer("Third."))
    visit.page.get_by_role("button", name="Edit").click()
    visit.page.get_by_label("Edit the message").fill("Two?")
    visit.page.keyboard.press("Enter")
    visit.wait_for("document.querySelector('.answer-text')?.innerText === 'Third.'")
    expect(visit.page.locator(".user-body")).to_have_text("Two?")
    visit.page.reload()
    visit.wait_for("document.querySelector('.answer-text')?.innerText === 'Third.'")
    visit.page.get_by_role("button", name="Earlier version").click()
    visit.wait_for("document.querySelector('.answer-text')?.innerText === 'First.'")
    expect(visit.page.locator(".user-body")).to_have_text("One?")
    visit.answer_with(answer("Fourth."))
    visit.page.get_by_role("button", name="Retry").click()
    expect(visit.page.locator(".assistant .answer-text")).to_have_text("Fourth.")
    expect(visit.page.locator(".assistant .versions")).to_have_text("3 of 3")


def test_copy_of_a_message_and_of_code(browser: Browser, running: Running) -> None:
    with new_visit(browser, running.url, permissions=["clipboard-read", "clipboard-write"]) as visit:
        text = "See **this**:\n\n```python\nprint(1)\n```\n"
        visit.open().answer_with(answer(text))
        visit.say("Code?")
        visit.wait_answer()
        for name, expected in (("Copy code", "print(1)"), ("Copy answer", text), ("Copy message", "Code?")):
            visit.page.get_by_role("button", name=name).click()
            expect(visit.page.get_by_role("button", name=name)).to_have_text("Copied")
            assert visit.page.evaluate("navigator.clipboard.readText()") == expected
        visit.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
        visit.page.get_by_role("button", name="Copy code").click()
        visit.page.focus("#message-field")
        visit.page.keyboard.press("Control+V")
        expect(visit.page.locator("#message-field")).to_have_value("print(1)")
        visit.check_errors()


def test_files_of_text_become_part_of_the_message(visit: Visit) -> None:
    visit.script().open()
    picked = files(
        ("notes.md", "a ``` fence\n````\nin it, \u00fc\n".encode()), ("a.bin", b"\xff\xfeab"), ("zero.txt", b"a\0b")
    )
    with visit.page.expect_file_chooser() as chooser:
        visit.page.get_by_role("button", name="Add files of text").click()
    chooser.value.set_files(picked)
    expect(visit.page.locator("#composer-said")).to_contain_text("a.bin was not added: it is no text")
    expect(visit.page.locator("#composer-said")).to_contain_text("zero.txt was not added")
    expect(visit.page.locator(".chip")).to_have_count(1)
    drop(visit, "big.txt", "y" * 9_000_000)
    expect(visit.page.locator("#composer-said")).to_contain_text(
        "big.txt was not added: the files of a message may have"
    )
    drop(visit, "dropped.py", "print(1)")
    expect(visit.page.locator(".chip-name")).to_have_text(["notes.md", "dropped.py"])
    visit.page.get_by_role("button", name="Remove dropped.py").click()
    expect(visit.page.locator(".chip")).to_have_count(1)
    visit.page.reload()
    expect(visit.page.locator(".chip-name")).to_have_text(["notes.md"])
    visit.say("Read this.")
    visit.wait_for("asked.length === 1")
    content = visit.asked()[0]["messages"][0]["content"]
    assert content == "File notes.md:\n`````\na ``` fence\n````\nin it, \u00fc\n`````\n\nRead this."
    visit.page.locator(".file summary").click()
    expect(visit.page.locator(".file .as-written")).to_contain_text("in it, \u00fc")


def drop(visit: Visit, name: str, text: str) -> None:
    visit.page.evaluate(
        """([name, text]) => {
          const data = new DataTransfer();
          data.items.add(new File([text], name));
          const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
          document.querySelector("#chat").dispatchEvent(drop);
        }""",
        [name, text],
    )


COUNT_CLAIMS = """() => {
  window.claims = 0;
  window.watched = new BroadcastChannel("graphcore.answers");
  watched.onmessage = ({ data }) => { claims += data.type === "mine"; };
}"""
"""How often a tab has said that it makes an answer."""


def test_two_tabs_stay_in_step(browser: Browser, running: Running) -> None:
    context = browser.new_context()
    with new_visit(browser, running.url, context) as one, new_visit(browser, running.url, context) as two:
        open_scripted(one, "From one?")
        one.push(delta(content="One writes"))
        two.script().open(one.page.evaluate("location.hash"))
        expect(two.page.locator(".answer-text")).to_have_text("One writes")
        two.page.evaluate(COUNT_CLAIMS)
        two.wait_for("claims > 0")
        expect(two.page.locator(".facts")).to_have_text("Being answered in another tab")
        one.push(delta(content=" and ends."), delta("stop"), usage_chunk(), is_last=True)
        expect(two.page.locator(".answer-text")).to_have_text("One writes and ends.")
        one.say("More?")
        one.wait_for("asked.length === 2")
        expect(two.page.locator(".user-body")).to_have_count(2)
        two.page.get_by_role("button", name="Stop").click()
        one.wait_answer(2)
        two.say("From two?")
        two.push(delta(content="Two writes."), delta("stop"), usage_chunk(), is_last=True)
        for visit in (one, two):
            expect(visit.page.locator(".answer-text").last).to_have_text("Two writes.")
            assert visit.answers()[0] == "One writes and ends."
        two.page.get_by_role("link", name="New conversation").click()
        expect(two.page.locator("#conversation-title")).to_have_text("New conversation")
        two.say("Another?")
        expect(one.page.locator(".conversation-link")).to_have_text(["Another?", "From one?"])
        two.wait_for("asked.length === 2")
        two.push(delta("stop"), is_last=True)
        for visit in (one, two):
            visit.check_errors()
    context.close()


def test_an_answer_of_a_tab_that_was_closed_is_marked(browser: Browser, running: Running) -> None:
    context = browser.new_context()
    with new_visit(browser, running.url, context) as two:
        with new_visit(browser, running.url, context) as one:
            open_scripted(one)
            one.push(delta(content="One writes"))
            two.open(one.page.evaluate("location.hash"))
            expect(two.page.locator(".answer-text")).to_have_text("One writes")
        expect(two.page.locator(".end")).to_contain_text("Interrupted")
        expect(two.page.get_by_role("button", name="Continue")).to_be_visible()
    context.close()


def test_conversations_are_renamed_and_deleted(visit: Visit) -> None:
    visit.open().answer_with(answer("An answer."))
    visit.say("A question?")
    visit.wait_answer()
    visit.page.get_by_role("button", name="Rename A question?").click()
    visit.page.get_by_role("textbox", name="Name").fill("A better name")
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#conversation-title")).to_have_text("A better name")
    expect(visit.page.locator(".conversation-link")).to_have_text("A better name")
    visit.page.fill("#message-field", "a draft")
    visit.page.get_by_role("button", name="Delete A better name").click()
    visit.check_axe()
    visit.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(visit.page.locator(".conversation-link")).to_have_count(0)
    expect(visit.page.locator("#conversation-title")).to_have_text("New conversation")
    visit.page.reload()
    expect(visit.page.locator(".empty")).to_be_visible()
    assert visit.page.evaluate("(async () => Promise.all(" + ALL_RECORDS + "))()") == [[], [], []]


def test_a_search_finds_titles_and_texts(visit: Visit) -> None:
    visit.open().answer_with(answer("The \u00c4pfel of (this) answer are *red*."))
    visit.say("About apples?")
    visit.wait_answer()
    visit.page.get_by_role("link", name="New conversation").click()
    visit.answer_with(answer("Nothing of that."))
    visit.say("About *pears*?")
    visit.wait_answer()
    field = visit.page.get_by_role("searchbox", name="Search conversations")
    links, said = visit.page.locator(".conversation-link"), visit.page.locator(".list-said")
    for wanted, found in {
        "about *PEARS": ["About *pears*?"],
        "\u00e4PFEL": ["About apples?"],
        "(this) a": ["About a"],
    }.items():
        field.fill(wanted)
        expect(said).to_have_text("Found in 1 conversation.")
        expect(links).to_contain_text(found)
    expect(links.locator(".excerpt")).to_have_text("The \u00c4pfel of (this) answer are *red*.")
    expect(links.locator("mark")).to_have_text("(this) a")
    visit.check_axe()
    links.click()
    expect(visit.page.locator("#conversation-title")).to_have_text("About apples?")
    field.fill("(((")
    expect(said).to_have_text("Nothing found.")
    expect(links).to_have_count(0)
    field.press("Escape")
    expect(links).to_have_count(2)
    expect(said).to_be_empty()


def test_a_search_in_many_texts_does_not_freeze_the_page(visit: Visit) -> None:
    visit.open()
    visit.page.evaluate(
        """(one) => {
          const conversations = Array.from({ length: 100 }, (_, at) => ({ ...one, id: `c${at}` }));
          const made = { format: "graphcore.conversations", version: 1, conversations };
          const list = new DataTransfer();
          list.items.add(new File([JSON.stringify(made)], "saved.json"));
          const field = document.querySelector(".list-files input");
          field.files = list.files;
          field.dispatchEvent(new Event("change"));
        }""",
        conversation("c", "word " * 100_000),
    )
    expect(visit.page.locator(".list-said")).to_have_text("Imported 100 conversations.")
    visit.page.evaluate("longTasks.length = 0")
    visit.page.get_by_role("searchbox").fill("in no conversation")
    expect(visit.page.locator(".list-said")).to_have_text("Nothing found.", timeout=30_000)
    assert visit.longest_task() < LONGEST_FREEZE


def test_an_export_can_be_imported_where_nothing_is_kept(browser: Browser, running: Running, tmp_path: Path) -> None:
    with new_visit(browser, running.url) as one, new_visit(browser, running.url) as two:
        one.open().answer_with(answer("First."))
        set_settings(one, temperature="0.5")
        one.say("A question?")
        one.wait_answer()
        one.answer_with(answer("Second **version**."))
        one.page.get_by_role("button", name="Retry").click()
        expect(one.page.locator(".answer-text")).to_have_text("Second version.")
        one.wait_answer()
        one.page.get_by_role("button", name="Export A question?").click()
        one.check_axe()
        with one.page.expect_download() as markdown:
            one.page.get_by_role("button", name="Markdown").click()
        assert markdown.value.suggested_filename == "A-question.md"
        text = markdown.value.path().read_text("utf-8")
        assert text == "# A question?\n\n## User\n\nA question?\n\n## Assistant\n\nSecond **version**.\n"
        with one.page.expect_download() as saved:
            one.page.get_by_role("button", name="Export all").click()
        content = saved.value.path().read_text("utf-8")
        two.open()
        import_file(two, content)
        two.page.get_by_role("link", name="A question?").click()
        expect(two.page.locator(".answer-text")).to_have_text("Second version.")
        expect(two.page.locator(".versions")).to_contain_text("2 of 2")
        expect(two.page.locator("#settings-button")).to_have_text("Settings (1 set)")
        kept, copied = [
            [
                sorted(map(bare, records), key=json.dumps)
                for records in one_of.page.evaluate(f"Promise.all({ALL_RECORDS})")[:2]
            ]
            for one_of in (one, two)
        ]
        assert copied == kept
        import_file(two, content)
        expect(two.page.locator(".list-said")).to_contain_text("Here already, and left as they are: 1.")
        two.page.get_by_role("button", name="Delete A question?").click()
        two.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(two.page.locator(".conversation-link")).to_have_count(0)
        import_file(two, content)
        two.page.get_by_role("link", name="A question?").click()
        two.answer_with(answer("Third."))
        two.say("And?")
        two.wait_answer(2)
        two.page.reload()
        expect(two.page.locator(".answer-text").last).to_have_text("Third.")
        for visit in (one, two):
            visit.check_errors()


def bare(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the ids that an import renews."""
    return {name: value for name, value in record.items() if name not in ("id", "parentId", "chosen")}


def conversation(name: str, *texts: str, **changes: Any) -> dict[str, Any]:
    """Return a conversation of an exported file, with messages of the user one after another."""
    messages = [
        {
            "id": f"m{at}",
            "parentId": f"m{at - 1}" if at else "",
            "role": "user",
            "createdAt": at,
            "text": text,
            "files": [],
        }
        for at, text in enumerate(texts)
    ]
    return {"id": name, "title": name, "updatedAt": 1, "settings": {}, "chosen": {}, "messages": messages, **changes}


def exported(*conversations: Any) -> dict[str, Any]:
    return {"format": "graphcore.conversations", "version": 1, "conversations": conversations}


def import_file(visit: Visit, content: str) -> None:
    visit.page.locator(".list-files input").set_input_files(files(("saved.json", content.encode())))


def with_message(**changes: Any) -> dict[str, Any]:
    """Return a file with one conversation, whose message is changed."""
    made = conversation("c", "text")
    made["messages"][0] |= changes
    return exported(made)


REFUSED = {
    "[" * 100_000: "it is no JSON",
    "\ud800": "it is no JSON",
    "[]": "the file is no JSON object",
    "null": "the file is no JSON object",
    json.dumps({"a": 1}): "it is no export of conversations of this page",
    json.dumps(exported() | {"version": 2}): "it has version 2",
    json.dumps(exported() | {"conversations": {}}): "the file has no list of conversations",
    json.dumps(exported(*[0] * 10_001)): "10,001 conversations, and at most 10,000",
    json.dumps(exported("c")): "conversation 1 is no JSON object",
    json.dumps(exported(conversation("c"), conversation("c"))): "two conversations have the same id",
    json.dumps(exported(conversation("<img>"))): "id of conversation 1 is not",
    json.dumps(exported(conversation("c", title=7))): "title of conversation 1 is no text",
    json.dumps(exported(conversation("c", updatedAt=1e300))): "updatedAt of conversation 1",
    json.dumps(exported(conversation("c", settings={"system": 1}))): "the setting system of conversation 1",
    json.dumps(
        exported(conversation("c", settings={"temperature": "hot"}))
    ): "the setting temperature of conversation 1",
    json.dumps(exported(conversation("c", messages=[None]))): "message 1 of conversation 1 is no JSON object",
    json.dumps(with_message(role="system")): "message 1 of conversation 1 has no role",
    json.dumps(with_message(text=["a"])): "text of message 1 of conversation 1 is no text",
    json.dumps(with_message(files=[{"name": "a", "size": -1, "text": ""}])): "size of a file of message 1",
    json.dumps(exported(conversation("c", messages=conversation("c", "a")["messages"] * 2))): "the same id",
}


def test_files_that_are_no_export_are_refused_in_a_sentence(visit: Visit) -> None:
    visit.open()
    said = visit.page.locator(".list-said")
    for content, words in REFUSED.items():
        file = files(("saved.json", content.encode("utf-8", "surrogatepass")))
        visit.page.locator(".list-files input").set_input_files(file)
        expect(said).to_contain_text(words)
        expect(said).to_contain_text("saved.json was not imported: ")
    visit.page.evaluate("""() => {
      const field = document.querySelector(".list-files input");
      const file = new File([new Uint8Array(64 * 2 ** 20 + 1)], "huge.json");
      const list = new DataTransfer();
      list.items.add(file);
      field.files = list.files;
      field.dispatchEvent(new Event("change"));
    }""")
    expect(said).to_contain_text("huge.json was not imported: it has 64.0 MiB, and at most 64.0 MiB are read.")
    assert visit.page.evaluate("(async () => Promise.all(" + ALL_RECORDS + "))()") == [[], [], []]


def test_the_theme_is_chosen_and_kept(browser: Browser, running: Running) -> None:
    with new_visit(browser, running.url, color_scheme="dark") as visit:
        visit.open()
        background = "getComputedStyle(document.body).backgroundColor"
        light, dark = "rgb(245, 246, 248)", "rgb(15, 18, 22)"  # --page of style.css
        assert visit.page.evaluate(background) == dark
        button = visit.page.locator("#theme-button")
        expect(button).to_have_accessible_name("Theme: as the system")
        button.click()
        expect(button).to_have_accessible_name("Theme: light")
        assert visit.page.evaluate(background) == light
        visit.page.reload()
        expect(button).to_have_accessible_name("Theme: light")
        assert visit.page.evaluate(background) == light
        visit.check_axe()
        button.click()
        visit.page.emulate_media(color_scheme="light")
        assert visit.page.evaluate(background) == dark
        visit.check_axe()
        button.click()
        assert visit.page.evaluate(background) == light
        visit.check_errors()


def test_the_composer_says_how_much_of_the_context_is_used(scripted: Visit) -> None:
    fill = scripted.page.locator(".context-fill")
    expect(fill).to_be_hidden()
    for at, (used, words) in enumerate(
        {29: "Context: 29 of 4,096 tokens", 4000: "Context nearly full: 4,000 of"}.items(), 1
    ):
        scripted.say("Hello?")
        scripted.wait_for(f"asked.length === {at}")
        usage = {"choices": [], "usage": USAGE | {"prompt_tokens": used - 9, "completion_tokens": 9}}
        scripted.push(delta(content="Hi."), delta("stop"), usage, is_last=True)
        scripted.wait_answer(at)
        expect(fill).to_contain_text(words)
        widths = [scripted.page.locator(f".fill-bar{part}").bounding_box() for part in ("", " i")]
        assert all(widths)
        assert widths[1]["width"] == pytest.approx(widths[0]["width"] * used / 4096, abs=0.6)  # type: ignore[index]


def test_everything_by_keyboard(visit: Visit) -> None:
    visit.script().open()
    page = visit.page
    tab_to(visit, "#message-field")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there?")
    expect(page.locator("#message-field")).to_have_value("Hello\nthere?")
    is_taken = """() => {
      const composing = { key: "Enter", isComposing: true, bubbles: true, cancelable: true };
      return !document.querySelector("#message-field").dispatchEvent(new KeyboardEvent("keydown", composing));
    }"""
    assert not page.evaluate(is_taken)
    page.keyboard.press("Enter")
    visit.push(delta(content="Hi.\n\n```\ncode\n```\n"), delta("stop"), usage_chunk(), is_last=True)
    visit.wait_answer()
    expect(page.locator("#message-field")).to_be_focused()
    tab_to(visit, "[aria-label='Copy code']", "Shift+Tab")
    tab_to(visit, ".assistant .foot-buttons button")
    page.keyboard.press("Enter")
    visit.wait_for("asked.length === 2")
    assert page.evaluate("document.activeElement !== document.body")
    page.keyboard.press("Escape")
    visit.wait_answer()
    tab_to(visit, "#settings-button", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings-button")).to_be_focused()
    tab_to(visit, "#engine-link", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#engine-link")).to_have_attribute("aria-current", "page")
    expect(page.locator("#chat")).to_be_hidden()
    page.go_back()
    expect(page.locator("#chat")).to_be_visible()


def tab_to(visit: Visit, selector: str, key: str = "Tab") -> None:
    """Go to an element by the keyboard alone."""
    for _ in range(40):
        if visit.page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        visit.page.keyboard.press(key)
    raise AssertionError(f"{selector} is not reached by {key}")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, running: Running, colours: str) -> None:
    with new_visit(browser, running.url, color_scheme=colours) as visit:
        visit.open()
        visit.check_axe()
        visit.answer_with(answer(MARKDOWN, "length"))
        visit.say("Hello?")
        visit.wait_answer()
        visit.check_axe()
        visit.page.get_by_role("button", name="Edit").click()
        visit.check_axe()
        visit.page.click("#settings-button")
        visit.page.fill("#setting-tools", "[{]")
        visit.page.click(".settings .main-button")
        visit.check_axe()
        visit.page.keyboard.press("Escape")
        visit.answer_with("{}", 500)
        visit.say("And now?")
        expect(visit.page.locator(".message-error")).to_be_visible()
        visit.check_axe()
        visit.check_errors(500)


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_phone(browser: Browser, running: Running, colours: str) -> None:
    with new_visit(browser, running.url, color_scheme=colours, **PHONE) as visit:
        visit.open()
        assert visit.fits()
        wide = "| " + " | ".join(["a wide cell"] * 12) + " |\n" + "|-" * 12 + "|\n" + "| b " * 12 + "|\n\n"
        visit.answer_with(answer(MARKDOWN + "\n\n" + wide + "`" + "x" * 300 + "`\n\n```\n" + "y" * 300 + "\n```\n"))
        visit.say("Hello? " + "z" * 200)
        visit.wait_answer()
        visit.wait_for("document.querySelectorAll('.answer-text pre').length === 2")
        assert visit.fits()
        expect(visit.page.locator(".context-fill")).to_be_visible()
        expect(visit.page.get_by_text("Enter sends")).to_have_count(0)  # a phone has no such keys
        visit.check_axe()
        assert small_targets(visit) == []
        menu = visit.page.get_by_role("button", name="Conversations")
        menu.click()
        expect(visit.page.locator(".conversation-link")).to_be_visible()
        assert visit.fits()
        visit.check_axe()
        visit.page.keyboard.press("Escape")
        expect(menu).to_be_focused()
        visit.page.click("#settings-button")
        assert visit.fits()
        visit.check_axe()
        visit.check_errors()


def small_targets(visit: Visit) -> list[str]:
    """Return the buttons and links beside texts that are smaller than 24 pixels."""
    found: list[str] = visit.page.evaluate(
        """(() => {
          const isSmall = (one) => {
            const { width, height } = one.getBoundingClientRect();
            return one.checkVisibility() && Math.min(width, height) < 24;
          };
          const found = [...document.querySelectorAll("button, select, input, textarea, summary, nav a")];
          return found.filter(isSmall).map((one) => one.outerHTML.slice(0, 100));
        })()"""
    )
    return found


def test_a_stream_may_be_cut_anywhere(scripted: Visit) -> None:
    ask_scripted(scripted)
    chunks = events(delta(content="\u00fc\U0001f600 "), delta(content="ok"), delta("stop"))
    body = ": ping\n\n" + chunks.replace(", ", ",\ndata: ")  # the data of an event may have several lines
    scripted.page.evaluate(
        "(body) => [...body].forEach((letter) => asked[0].write(letter))", body.replace("\n", "\r\n")
    )
    scripted.wait_answer()
    assert scripted.answers() == ["\u00fc\U0001f600 ok"]
