"""A visit of the server's page in the system's own Chromium, driven by playwright."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright

# A headless Chromium for tests of pages: the system's own, driven by playwright.

NAMES = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = "GRAPHCORE_TESTS_NEED_BROWSER"  # set where tests of pages must not be skipped


def browser_path() -> str:
    """Return the path of the system's Chromium; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        assert not os.environ.get(REQUIRED), "no Chromium is installed, and the tests of pages must run"
        pytest.skip("no Chromium is installed, which tests of the page drive: apt-get install chromium")
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser."""
    path = browser_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


# A visit of the server's page in a browser: what it logs, scripted answers, and what axe finds.

CHAT = "**/v1/chat/completions"
USAGE = {"prompt_tokens": 20, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}}
WATCH = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
window.longTasks = [];
new PerformanceObserver((list) => longTasks.push(...list.getEntries().map(({ duration }) => duration)))
  .observe({ type: "longtask", buffered: true });
"""
SCRIPT = """
window.fetched = window.fetch;
window.asked = [];
window.fetch = (path, options = {}) => {
  if (!String(path).includes("chat/completions")) return fetched(path, options);
  let control;
  const encoder = new TextEncoder();
  const body = new ReadableStream({ start(controller) { control = controller; } });
  options.signal?.addEventListener("abort", () => control.error(options.signal.reason));
  asked.push({
    body: JSON.parse(options.body),
    id: options.headers["X-Request-ID"],
    write: (text) => control.enqueue(encoder.encode(text)),
    send(...chunks) { chunks.forEach((chunk) => this.write(`data: ${JSON.stringify(chunk)}\\n\\n`)); },
    close: () => control.close(),
  });
  return Promise.resolve(new Response(body, { headers: { "Content-Type": "text/event-stream" } }));
};
"""
"""Answers that a test writes piece by piece: `asked` has an entry for each request."""


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk of a stream."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def usage_chunk() -> dict[str, Any]:
    """Return the chunk with the numbers of tokens."""
    return {"choices": [], "usage": USAGE}


def events(*chunks: dict[str, Any], is_whole: bool = True) -> str:
    """Return the body of a stream."""
    lines = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + (["[DONE]"] if is_whole else [])
    return "".join(f"data: {line}\n\n" for line in lines)


def answer(text: str, finish_reason: str = "stop", piece: int = 50_000) -> str:
    """Return the body of a stream with an answer."""
    pieces = [delta(content=text[at : at + piece]) for at in range(0, len(text), piece)]
    return events(delta(role="assistant", content=""), *pieces, delta(finish_reason), usage_chunk())


@dataclass
class Visit:
    """A page in a tab.

    Attributes:
        page: the tab.
        url: the server's address.
        errors: what the console had as errors.
        addresses: what was asked for.
    """

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self.page.add_init_script(WATCH)

    def open(self, address: str = "#chat") -> "Visit":
        """Go to the page, and wait until it can be used."""
        self.page.goto(f"{self.url}/{address}")
        self.page.wait_for_selector("#composer .send-button")
        return self

    def script(self) -> "Visit":
        """Let the test write the answers; to be called before the page is opened."""
        self.page.add_init_script(SCRIPT)
        return self

    def answer_with(self, body: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer every chat with a body."""
        kind = "text/event-stream" if status == 200 else "application/json"

        def fulfil(route: Route) -> None:
            route.fulfill(status=status, body=body, headers={"Content-Type": kind, **(headers or {})})

        self.page.unroute(CHAT)
        self.page.route(CHAT, fulfil)

    def push(self, *chunks: dict[str, Any], is_last: bool = False) -> None:
        """Write chunks of the newest scripted answer."""
        self.wait_for("asked.length > 0")
        self.page.evaluate("(chunks) => asked.at(-1).send(...chunks)", list(chunks))
        if is_last:
            self.page.evaluate("asked.at(-1).write('data: [DONE]\\n\\n'), asked.at(-1).close()")

    def asked(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests for scripted answers."""
        found: list[dict[str, Any]] = self.page.evaluate("asked.map(({ body }) => body)")
        return found

    def say(self, text: str) -> None:
        """Write a message and send it."""
        self.page.fill("#message-field", text)
        self.page.press("#message-field", "Enter")

    def wait_answer(self, number: int = 1) -> None:
        """Wait until the shown conversation has so many answers, and all are complete and drawn."""
        is_number = f"document.querySelectorAll('.assistant').length === {number}"
        self.wait_for(f"{is_number} && !document.querySelector('[aria-busy=true]')")

    def wait_for(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true; playwright's own way needs a policy that lets texts become code."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"it did not become true in time: {expression}"
            self.page.wait_for_timeout(10)

    def answers(self) -> list[str]:
        """Return the text of each answer."""
        return self.page.locator(".assistant .answer-text").all_inner_texts()

    def longest_task(self) -> float:
        """Return the longest time in milliseconds for which the page has not listened."""
        return float(self.page.evaluate("Math.max(0, ...longTasks)"))

    def fits(self) -> bool:
        """Return whether nothing of the page, and of its messages, is beside the window."""
        parts = "[document.documentElement, document.querySelector('#messages')]"
        return bool(self.page.evaluate(f"{parts}.every((part) => part.scrollWidth <= part.clientWidth)"))

    def check_axe(self) -> None:
        """Check that axe finds nothing serious."""
        found = Axe().run(self.page, options={"resultTypes": ["violations"]})
        serious = [one for one in found.response["violations"] if one["impact"] in ("serious", "critical")]
        assert not serious, [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in serious]

    def check_errors(self, *statuses: int) -> None:
        """Check that the console had no errors but those for answers with some statuses, and no policy was violated."""
        allowed = tuple(f"status of {status} " for status in statuses)
        unexpected = [one for one in self.errors if not any(status in one for status in allowed)]
        assert not unexpected

    def check_own_addresses(self) -> None:
        """Check that nothing but the server was asked."""
        assert all(address.startswith(self.url) for address in self.addresses)


@contextmanager
def new_visit(browser: Browser, url: str, context: BrowserContext | None = None, **look: Any) -> Iterator[Visit]:
    """Open a tab, of a browser that knows nothing yet unless a context is given; at its end no error is left.

    Args:
        look: settings of a context, such as the size of the window and the colours.
    """
    own = context or browser.new_context(**look)
    page = own.new_page()
    page.set_default_timeout(10_000)
    visit = Visit(page, url)
    page.route("**/status?*", lambda route: route.fulfill(json={"state": "ready", "requests": []}))
    try:
        yield visit
    finally:
        page.close() if context else own.close()


def files(*named: tuple[str, bytes]) -> Sequence[Any]:
    """Return files as playwright's file choosers take them."""
    return [{"name": name, "mimeType": "application/octet-stream", "buffer": content} for name, content in named]
