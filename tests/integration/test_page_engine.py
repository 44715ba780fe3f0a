"""The page's view of the engine at work, in a browser: a simulated run's numbers, and a recorded run's file."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect
from support.chat_folders import TINY
from support.page_visit import running_browser
from support.serving import Running, running_server
from support.streaming import LAYER, NUM_SLOTS, TABLE, SimulatedRun, load, plan_of, request, ring_events
from support.task_runs import run_in
from support.tiny_models import TinyModel

from graphcore.serving.page_files import HEADERS, page_files
from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.timeline import Event
from graphcore.tasks.report.timeline_page import timeline_page
from graphcore.tasks.report.timeline_plot import pass_starts

pytestmark = pytest.mark.thorough

FILES = page_files()
HOST = "http://localhost:1"  # every address of it is answered by the test
INDEX = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Engine</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="page/style.css"><link rel="stylesheet" href="page/engine/engine.css">
<script type="module" src="page/test.js"></script></head>
<body class="engine-file"><main><h1>Engine</h1><div id="root"></div></main></body></html>"""
MAIN = """import { startEngineView } from "./engine/view.js";
async function get(path) {
  const response = await fetch(path);
  const body = await response.json();
  if (!response.ok) throw Object.assign(new Error(body.error.message), { status: response.status });
  return body;
}
globalThis.view = startEngineView(document.getElementById("root"), { get });
view.show();
"""
STREAMED = frozenset(range(13, 81))  # of 80 layers: the first twelve stay
SIZES = "context_length=8192 task.max_sequences=8"
HOSTILE = "<img src=x onerror='globalThis.broken=1'>\"'`${1}</script>"


@dataclass
class FakeServer:
    """Answers to a page: its files, and what a test says of /status and /plan.

    Attributes:
        run: the run that they tell about.
        now: the server's clock; each answer moves it on by `step`.
        state: state of the model.
        failure: status and message of errors that every question gets, or None.
        may_fail: True if answers may be errors, which the browser reports, too.
        plans: function from the budget of a what-if to its answer: status and body.
        asked: the questions so far.
        complaints: errors and violations that the browser reported.
    """

    run: SimulatedRun
    now: float = 101.0
    step: float = 0.25
    state: str = "ready"
    failure: tuple[int, str] | None = None
    may_fail: bool = False
    plans: Callable[[str], tuple[int, Any]] = lambda budget: (404, {})
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    held: list[Route] = field(default_factory=list)
    holds: bool = False

    def answer(self, route: Route) -> None:
        url = urlsplit(route.request.url)
        assert url.netloc == "localhost:1", f"{route.request.url} is elsewhere"
        if url.path == "/":
            route.fulfill(content_type="text/html", body=INDEX, headers=dict(HEADERS))
        elif url.path == "/page/test.js":
            route.fulfill(content_type="text/javascript", body=MAIN, headers=dict(HEADERS))
        elif url.path in FILES:
            found = FILES[url.path]
            route.fulfill(content_type=found.media_type, body=found.content, headers=dict(HEADERS))
        else:
            self.asked.append(url.path + (f"?{url.query}" if url.query else ""))
            if self.holds and url.path == "/status":
                self.held.append(route)
            else:
                self.answer_question(route)

    def answer_question(self, route: Route) -> None:
        url = urlsplit(route.request.url)
        if self.failure is not None:
            status, message = self.failure
            self.fulfil(route, status, {"error": {"message": message}})
        elif url.path == "/status":
            self.now += self.step
            self.fulfil(route, 200, self.status())
        elif "memory_budget" in url.query:
            self.fulfil(route, *self.plans(parse_qs(url.query)["memory_budget"][0]))
        else:
            self.fulfil(route, 200, self.run.plan)

    def status(self) -> dict[str, Any]:
        found = self.run.status(self.now)
        if self.state == "ready":
            return found
        keys = ("model", "version", "uptime_seconds", "time")
        return {**{key: found[key] for key in keys}, "state": self.state}

    @staticmethod
    def fulfil(route: Route, status: int, body: Any) -> None:
        route.fulfill(status=status, content_type="application/json", body=json.dumps(body))

    def num_asked(self, path: str) -> int:
        return sum(one.partition("?")[0] == path for one in self.asked)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@contextmanager
def opened(browser: Browser, server: FakeServer, waits: bool = True, **options: Any) -> Iterator[Page]:
    """Open the page; nothing may be reported as an error or a violation."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.on("pageerror", lambda error: server.complaints.append(str(error)))
    page.on("console", lambda message: server.complaints.append(message.text) if message.type == "error" else None)
    page.route("**/*", server.answer)
    page.goto(HOST)
    if waits:
        expect(panel(page, "Layers")).to_be_visible()
    try:
        yield page
        assert [one for one in server.complaints if not (server.may_fail and "Failed to load resource" in one)] == []
    finally:
        context.close()


def panel(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title, exact=True)


def streaming_run() -> SimulatedRun:
    run = SimulatedRun.of(80, STREAMED, 4)
    run.requests = [
        request(),
        request(id="chatcmpl-2", state="prefill", prompt_tokens=3000, computed_tokens=1024, new_tokens=0, pages=9)
        | {"decode_seconds": 0.0},
        request(id="chatcmpl-3", state="waiting", computed_tokens=0, new_tokens=0, pages=0, shared_pages=0)
        | {"waiting_seconds": 3.214, "decode_seconds": 0.0},
    ]
    return run


def digits(value: float) -> str:
    """Return three digits of a number, without zeros at the end."""
    return f"{float(f'{value:.3g}'):g}"


def size(nbytes: float) -> str:
    """Return a size in the largest binary unit that it reaches."""
    power = max(power for power in range(4) if power == 0 or nbytes >= 1024**power)
    return f"{digits(nbytes / 1024**power)} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def test_the_story_has_the_plan_s_numbers(browser: Browser) -> None:
    server = FakeServer(streaming_run())
    total, moved = 80 * LAYER + 2 * TABLE + 40_000_000, 68 * LAYER
    with opened(browser, server) as page:
        lead = panel(page, "What happens").locator(".engine-lead")
        expect(lead).to_have_text(
            f"The weights are {size(total)}; this machine may use 22.4 GiB. 12 of 80 layers stay in memory. "
            "The other 68 are read from the disk again for every token (and for every pass over a prompt), through 2 "
            "slots: while one group of layers computes, the next is read. One token therefore moves "
            f"{size(moved)}; at the measured 5.82 GiB/s that takes {digits(moved / 6.25e9)} s."
        )


STORIES = {
    "host": (
        {"device": "cuda:0", "streaming": {"source": "host"}},
        "this GPU may use 22.4 GiB. 1 of 4 layers stays in the GPU's memory. The other 3 are copied from RAM to",
    ),
    "no layer": (
        {"groups": [{"name": "layers.0-3", "numbers": [1], "bytes": 4, "place": "streamed"}]},
        "None of the 4 layers stays in memory. They are read from the disk again",
    ),
    "one slot": ({"streaming": {"slots": 1}}, "through 1 slot: each part is fetched when it is needed, and then"),
    "sync": ({"streaming": {"mode": "sync"}}, "through 2 slots: each part is fetched when it is needed, and then"),
    "no link": ({"link_bytes_per_second": None}, "One token therefore moves 3.63 GiB."),
}


@pytest.mark.parametrize("case", STORIES)
def test_the_story_tells_other_ways_of_streaming(browser: Browser, case: str) -> None:
    changes, words = STORIES[case]
    run = SimulatedRun.of(4, frozenset({2, 3, 4}), 3)
    streaming = run.plan["streaming"] | changes.get("streaming", {})
    run.plan = {**run.plan, **changes, "streaming": streaming}
    with opened(browser, FakeServer(run)) as page:
        expect(panel(page, "What happens")).to_contain_text(words)


def test_experts_and_gathered_tables_are_told_of(browser: Browser) -> None:
    run = SimulatedRun.of(4, frozenset(), 3)
    run.plan["groups"][0]["place"] = "gathered"
    run.plan["groups"].append({"name": "experts", "numbers": [], "bytes": 57_000_000_000, "place": "cached"})
    run.plan["is_streaming"] = True
    run.plan["streaming"] |= {"expert_slots": 412, "expert_hit_rate": 0.5, "source": "disk"}
    run.plan["streaming"]["expected_bytes_per_token"] = 1.5e9
    with opened(browser, FakeServer(run)) as page:
        told = panel(page, "What happens")
        expect(told).to_contain_text("All 4 layers stay in memory. One token therefore moves 1.4 GiB")
        expect(told).to_contain_text("All of them are 53.1 GiB; 412 experts fit in memory at a time")
        expect(told).to_contain_text("About 50% of those needed should be there already")
        expect(told).to_contain_text("Of the embedding (1,001 MiB) only the rows of the tokens in use are fetched")
        expect(panel(page, "Slots")).to_be_hidden()
        held = SimulatedRun.streaming
        run.streaming = lambda *given: held(run, *given) | {"expert_hit_rate": 0.834}  # type: ignore[method-assign]
        expect(told).to_contain_text("So far 83% of those needed were there already.")


def test_a_model_in_memory_has_no_slots_and_no_link(browser: Browser) -> None:
    run = SimulatedRun.of(4, frozenset(), 3)
    run.plan["budget_bytes"] = None
    with opened(browser, FakeServer(run)) as page:
        told = f"All weights of this model, {size(4 * LAYER + 2 * TABLE + 40_000_000)}, are in memory. Nothing is"
        expect(panel(page, "What happens")).to_contain_text(told)
        for title in ("Slots", "Timeline", "Reading weights"):
            expect(panel(page, title)).to_be_hidden()
        expect(panel(page, "Memory")).to_contain_text("there is no budget")


def test_cells_and_slots_show_what_the_server_says(browser: Browser) -> None:
    server = FakeServer(streaming_run(), step=0.0)
    computing = next(one for one in server.run.events if one.lane == "compute" and one.group == 20)
    server.now = (computing.begin + computing.end) / 2
    reading = {one.group for one in server.run.events if one.lane == "copy" and one.begin <= server.now < one.end}
    assert reading == {21}
    with opened(browser, server) as page:
        cells = panel(page, "Layers").locator(".engine-cells > .engine-cell")
        expect(cells).to_have_count(83)
        expect(cells.nth(20)).to_have_attribute("data-state", "computing")
        expect(panel(page, "Layers").locator(".engine-cells [data-state=reading]")).to_have_count(1)
        expect(cells.nth(21).locator("[data-state=reading]")).to_have_count(1)
        assert cells.nth(5).get_attribute("class") == "engine-cell at-resident"
        assert cells.nth(20).get_attribute("class") == "engine-cell at-streamed"
        slots = panel(page, "Slots")
        texts = [" ".join(slots.locator(".engine-slot").nth(slot).all_inner_texts()).split("\n") for slot in (0, 1)]
        order = sorted(STREAMED)
        said = {20: "layer 19 computing", 21: "layer 20 being read"}
        expected = {order.index(group) % NUM_SLOTS: text for group, text in said.items()}
        assert [" ".join(text) for text in texts] == [f"Slot {slot} {expected[slot]}" for slot in (0, 1)]
        expect(slots.locator(".engine-station").last).to_contain_text("layer 19")
        panel(page, "Layers").get_by_text("All groups as a table").click()
        row = panel(page, "Layers").get_by_role("row").filter(has_text=re.compile("^layer 20"))
        expect(row).to_have_text(re.compile("1.21 GiBis read through a slot each timebeing read"))


def test_a_group_that_stays_is_marked_while_it_computes(browser: Browser) -> None:
    server = FakeServer(streaming_run(), step=0.0)
    computing = next(one for one in server.run.events if one.lane == "compute" and one.group == 5)
    server.now = (computing.begin + computing.end) / 2
    with opened(browser, server) as page:
        expect(panel(page, "Layers").locator(".engine-cells > [data-state=computing]")).to_have_text("4")
        expect(panel(page, "Slots").locator(".engine-station").last).to_contain_text("layer 4")


def test_the_link_s_rate_is_bytes_over_the_time_of_copying(browser: Browser) -> None:
    run = streaming_run()
    totals = {"bytes": 0, "copy_seconds": 0.0, "stall_seconds": 0.0, "hidden_seconds": 0.0}
    held = SimulatedRun.streaming

    def streaming(now: float, *rest: Any) -> dict[str, Any]:
        grown = {"bytes": round(3.21e9 * now), "copy_seconds": 0.6 * now, "stall_seconds": 0.35 * now}
        return held(run, now, *rest) | totals | grown | {"hidden_seconds": 0.45 * now}

    run.streaming = streaming  # type: ignore[method-assign]
    with opened(browser, FakeServer(run)) as page:
        link = panel(page, "Reading weights")
        expect(link).to_contain_text(f"{size(3.21e9 / 0.6)}/s")
        expect(link).to_contain_text("The ceiling is 5.82 GiB/s")
        expect(link).to_contain_text(re.compile(r"75% of 1\.2 s"))
        expect(link).to_contain_text(re.compile(r"700 ms in the last 2 seconds, "))
        meter = link.get_by_role("meter")
        expect(meter).to_have_attribute("aria-valuetext", "4.98 GiB/s of 5.82 GiB/s")
        width, whole = (meter.locator("i").bounding_box(), meter.bounding_box())
        assert width is not None
        assert whole is not None
        expect(meter.locator("i")).to_have_attribute("style", re.compile(r"width: 85\.6"))


def test_the_memory_bar_is_to_scale_and_names_its_parts(browser: Browser) -> None:
    run = streaming_run()
    memory = run.plan["memory"]
    with opened(browser, FakeServer(run)) as page:
        shown = panel(page, "Memory")
        unused = 24e9 - memory["total_bytes"]
        parts = {
            "Resident weights": memory["resident_bytes"],
            "Slots": 2 * LAYER,
            "Norms and biases": 40e6,
            "KV cache": 2e9,
            "Workspace": 300e6,
            "Programs": 100e6,
            "Read buffers": 20e6,
            "Unused": unused,
        }
        entries = shown.locator(".engine-parts > li")
        expect(entries).to_have_count(len(parts))
        whole = shown.locator(".engine-stack").evaluate("bar => bar.getBoundingClientRect().width")
        for index, (name, nbytes) in enumerate(parts.items()):
            expect(entries.nth(index).locator(".engine-part-name")).to_have_text(name)
            expect(entries.nth(index).locator("strong")).to_have_text(size(nbytes))
            width = shown.locator(".engine-piece").nth(index).evaluate("piece => piece.getBoundingClientRect().width")
            assert width == pytest.approx(whole * nbytes / 24e9, abs=0.6)


def test_pages_of_the_cache_are_shown_by_what_holds_them(browser: Browser) -> None:
    with opened(browser, FakeServer(streaming_run())) as page:
        shown = panel(page, "KV cache")
        expect(shown.locator("h3")).to_have_text("full attention: 22% of 128 pages in use, 64 tokens each")
        names = shown.locator(".engine-part-name")
        expect(names).to_have_text(["Request chatcmpl-1", "Request chatcmpl-2", "Shared", "Prefix cache", "Free"])
        expect(shown.locator("strong")).to_have_text(["5 pages", "8 pages", "3 pages", "12 pages", "100 pages"])


def test_requests_have_numbers_rates_and_rows(browser: Browser) -> None:
    with opened(browser, FakeServer(streaming_run())) as page:
        shown = panel(page, "Requests")
        boxes = shown.locator(".engine-tile").all()
        tiles = {box.locator("dt").inner_text(): box.locator(".engine-figure") for box in boxes}
        expect(tiles["Running"]).to_have_text("2")
        expect(tiles["Waiting"]).to_have_text("1")
        expect(tiles["Answer tokens/s"]).to_have_text("20")  # SimulatedRun.status
        expect(tiles["Time to first token"]).to_have_text("213 ms")
        expect(shown).to_contain_text("median; 95% within 400 ms, of the last 12 answers")
        expect(tiles["Drafts accepted"]).to_be_hidden()
        rows = [row.inner_text().split("\t") for row in shown.locator("tbody tr").all()]
        cached, none = ", 16 from the cache", "0 of at most 200"
        assert rows == [
            ["chatcmpl-1", "answering", f"20 tokens{cached}", "10 of at most 200", "25", "0 s"],
            ["chatcmpl-2", "reading the prompt", f"1,024 of 3,000 tokens{cached}", none, "\u2013", "0 s"],
            ["chatcmpl-3", "waiting", f"0 of 20 tokens{cached}", none, "\u2013", "3.21 s"],
        ]


def test_drafts_are_shown_where_a_server_counts_them(browser: Browser) -> None:
    run = streaming_run()
    held = SimulatedRun.status
    counted = {"draft_tokens": 400, "accepted_tokens": 292, "draft_seconds": 1.2, "draft_steps": 400}
    drafts = {"speculation": {**counted, "check_seconds": 5.0, "check_steps": 50}}
    run.status = lambda *given: held(run, *given) | drafts  # type: ignore[method-assign]
    with opened(browser, FakeServer(run)) as page:
        expect(panel(page, "Requests")).to_contain_text(
            re.compile("73%292 of 400 draft tokens; a draft step takes 3 ms; a check takes 100 ms")
        )


def test_ranks_of_a_ring_are_shown(browser: Browser) -> None:
    run = streaming_run()
    held = SimulatedRun.status
    one = {"layers": 40, "weight_bytes": 2 << 30, "streamed_bytes": 8_000_000_000, "part_seconds": 2.0}
    ranks = [{"rank": 0, **one}, {"rank": 1, **one, "streamed_bytes": 0, "part_seconds": None}]
    ring = {"ring": {"pass_seconds": 4.0, "hand_over_share": 0.03, "ranks": ranks}}
    run.status = lambda *given: held(run, *given) | ring  # type: ignore[method-assign]
    with opened(browser, FakeServer(run)) as page:
        shown = panel(page, "Ranks")
        expect(shown).to_contain_text("A pass takes 4 s, 3% of it between ranks.")
        rows = [row.inner_text().split("\t") for row in shown.locator("tbody tr").all()]
        assert rows == [
            ["0", "40", "2 GiB", "7.45 GiB", "2 s", "3.73 GiB/s"],
            ["1", "40", "2 GiB", "nothing", "\u2013", "\u2013"],
        ]


def test_the_timeline_draws_the_newest_whole_pass(browser: Browser) -> None:
    """600 events are more than one pass that streams 68 groups in six jobs each, and fewer than two."""
    run = streaming_run()
    server = FakeServer(run, step=0.0, now=run.events[-1].end)
    newest = run.events[-600:]
    begin, end = pass_starts(newest)[-1], max(one.end for one in newest)
    with opened(browser, server) as page:
        shown = panel(page, "Timeline")
        expect(shown.locator("p")).to_contain_text(f"These {digits(end - begin)} s: what computed")
        waits = [one for one in newest if one.lane == "stall" and one.end > begin]
        longest = max(one.end - one.begin for one in waits)
        expect(shown.get_by_role("img")).to_have_accessible_name(
            re.compile(f"Longest wait: {digits(longest * 1e3)} ms for layer")
        )
        shown.get_by_text("The lanes as a table").click()
        row = shown.get_by_role("row").filter(has_text=re.compile("^waiting"))
        waited = sum(one.end - one.begin for one in waits)
        assert 0.1 < waited < 1
        expect(row.locator("td")).to_have_text([f"{digits(waited * 1e3)} ms", "", str(len(waits))])


def test_labels_of_the_timeline_are_read_on_bars_and_between_them(browser: Browser) -> None:
    """A label over bars with gaps has a line of the bars' colour around it, which its ink is legible on."""
    run = SimulatedRun.of(4, frozenset({2, 3, 4}), 3)
    short = [replace(one, end=one.begin + (one.end - one.begin) / 4) for one in run.events]
    run.events = sorted(short, key=lambda event: event.end)
    server = FakeServer(run, step=0.0, now=run.events[-1].end)
    with opened(browser, server) as page:
        page.evaluate(RECORD_LABELS)
        page.set_viewport_size({"width": 1100, "height": 800})  # is drawn again
        for _ in range(100):
            page.wait_for_timeout(50)
            if labels := page.evaluate("drawn.labels"):
                break
    assert any(not one["isOnBar"] for one in labels), "no label is over a gap"
    assert all(one["halo"] == one["bar"] for one in labels)


RECORD_LABELS = """() => {
  globalThis.drawn = { labels: [], bars: [], halo: null };
  const { fillRect, fillText, strokeText, clearRect } = CanvasRenderingContext2D.prototype;
  Object.assign(CanvasRenderingContext2D.prototype, {
    clearRect(...place) { drawn.labels.length = drawn.bars.length = 0; clearRect.apply(this, place); },
    fillRect(x, y, width, height) {
      if (height === 20) drawn.bars.push({ x, y, width, colour: this.fillStyle });
      fillRect.call(this, x, y, width, height);
    },
    strokeText(text, x, y) {
      drawn.halo = { text, x, y, colour: this.strokeStyle };
      strokeText.call(this, text, x, y);
    },
    fillText(text, x, y) {
      const lane = drawn.bars.filter((bar) => y > bar.y && y < bar.y + 20);
      const left = lane.filter((bar) => bar.x <= x).at(-1);
      if (left && this.textAlign === "center") {
        const isSame = drawn.halo?.text === text && drawn.halo.x === x && drawn.halo.y === y;
        const isOnBar = x < left.x + left.width;
        drawn.labels.push({ text, isOnBar, bar: left.colour, halo: isSame ? drawn.halo.colour : null });
      }
      fillText.call(this, text, x, y);
    },
  });
}"""


def test_hostile_names_are_text(browser: Browser) -> None:
    run = streaming_run()
    run.requests = [request(id=HOSTILE)]
    run.plan["model"] = HOSTILE
    run.plan["groups"][3]["name"] = HOSTILE
    server = FakeServer(run, plans=lambda _: (200, plan_of(80, STREAMED, 30_000_000_000)), may_fail=True)
    with opened(browser, server) as page:
        expect(panel(page, "Requests").get_by_role("rowheader")).to_have_text(HOSTILE)
        expect(panel(page, "KV cache")).to_contain_text(f"Request {HOSTILE}")
        page.get_by_label("Memory budget", exact=True).first.fill("30GB")
        quoted = "model='" + HOSTILE.replace("'", "'\\''") + "'"
        expect(panel(page, "What if").locator("code")).to_have_text(
            f"graphcore serve {quoted} streaming=auto streaming.memory_budget=30GB {SIZES}"
        )
        assert page.locator("img").count() == 0
        assert page.evaluate("globalThis.broken") is None
        server.failure = (500, HOSTILE)
        expect(page.get_by_role("status").first).to_contain_text(HOSTILE)


def test_a_server_is_asked_four_times_a_second_and_not_while_hidden(browser: Browser) -> None:
    server = FakeServer(streaming_run())
    with opened(browser, server) as page:
        before = server.num_asked("/status")
        page.wait_for_timeout(1500)
        assert 5 <= server.num_asked("/status") - before <= 7
        assert server.num_asked("/plan") == 1
        assert {one for one in server.asked if one.startswith("/status")} == {"/status?events=600"}
        page.evaluate("view.hide()")
        page.wait_for_timeout(300)
        before = server.num_asked("/status")
        page.wait_for_timeout(500)
        assert server.num_asked("/status") == before
        page.evaluate("view.show()")
        page.wait_for_timeout(300)
        assert server.num_asked("/status") > before


def test_a_slow_server_is_asked_one_question_at_a_time(browser: Browser) -> None:
    server = FakeServer(streaming_run())
    with opened(browser, server) as page:
        server.holds = True
        page.wait_for_timeout(700)
        assert len(server.held) == 1
        page.evaluate("view.hide(); view.show()")
        page.wait_for_timeout(400)
        assert len(server.held) == 1
        server.holds = False
        page.evaluate("view.hide()")
        server.answer_question(server.held[0])
        before = server.num_asked("/status")
        page.wait_for_timeout(400)
        assert server.num_asked("/status") == before


def test_the_plan_is_asked_for_again_after_each_load(browser: Browser) -> None:
    server = FakeServer(streaming_run(), state="loading")
    with opened(browser, server, waits=False) as page:
        expect(page.get_by_role("status").first).to_contain_text("The model is being loaded")
        expect(panel(page, "Layers")).to_be_hidden()
        assert server.num_asked("/plan") == 0
        server.state = "ready"
        expect(panel(page, "Layers")).to_be_visible()
        assert server.num_asked("/plan") == 1
        server.state = "rebuilding"
        expect(page.get_by_role("status").first).to_contain_text("loaded again")
        server.run = SimulatedRun.of(4, frozenset({2}), 3)
        server.state = "ready"
        expect(panel(page, "Layers").locator(".engine-cells > .engine-cell")).to_have_count(7)
        assert server.num_asked("/plan") == 2
        server.state = "failed"
        expect(page.get_by_role("status").first).to_contain_text("The engine has failed")


def test_a_server_that_fails_leaves_the_last_values_and_is_asked_more_rarely(browser: Browser) -> None:
    server = FakeServer(streaming_run(), may_fail=True)
    with opened(browser, server) as page:
        expect(page.locator(".engine-notice")).to_be_hidden()
        server.failure = (503, "It is out.")
        notice = page.locator(".engine-notice")
        expect(notice).to_contain_text("this page asks again. It is out. The values below are its last ones.")
        expect(page.locator(".is-stale")).to_be_visible()
        expect(panel(page, "Requests")).to_contain_text("chatcmpl-1")
        assert serious(page) == []
        before = server.num_asked("/status")
        page.wait_for_timeout(1500)
        assert server.num_asked("/status") - before <= 3  # six, if it were asked as often as before
        server.failure = None
        expect(notice).to_be_hidden(timeout=10_000)
        expect(page.locator(".is-stale")).to_have_count(0)


def test_a_server_that_was_started_again_meanwhile_has_another_plan(browser: Browser) -> None:
    server = FakeServer(streaming_run())
    with opened(browser, server) as page:
        cells = panel(page, "Layers").locator(".engine-cells > .engine-cell")
        expect(cells).to_have_count(83)
        server.run, server.now = SimulatedRun.of(4, frozenset({2}), 3), 50.0
        expect(cells).to_have_count(7)
        server.run.plan["model"], server.run.plan["groups"] = "another", server.run.plan["groups"][1:]
        expect(cells).to_have_count(6)


@pytest.mark.parametrize("answer", [None, [], {"state": "ready"}, {"requests": None}, {"totals": {}}, {"kv_cache": {}}])
def test_an_answer_of_another_version_is_told_in_words(browser: Browser, answer: Any) -> None:
    server = FakeServer(streaming_run())
    with opened(browser, server) as page:
        good = server.status
        bad = {**good(), **answer} if isinstance(answer, dict) and "state" not in answer else answer
        server.status = lambda: bad  # type: ignore[method-assign]
        expect(page.locator(".engine-notice")).to_contain_text("may be of another version. Reload the page")
        assert "undefined" not in page.locator(".engine-notice").inner_text()
        server.status = good  # type: ignore[method-assign]
        expect(page.locator(".engine-notice")).to_be_hidden(timeout=10_000)


def test_a_server_that_ends_while_it_loads_says_so(browser: Browser) -> None:
    server = FakeServer(streaming_run(), state="draining")
    with opened(browser, server, waits=False) as page:
        expect(page.locator(".engine-notice")).to_contain_text("The server is shutting down")
        assert server.num_asked("/plan") == 0


def test_a_long_pause_is_not_told_as_the_last_two_seconds(browser: Browser) -> None:
    server = FakeServer(streaming_run())
    with opened(browser, server) as page:
        shown = panel(page, "Reading weights")
        expect(shown).to_contain_text("in the last 2 seconds")
        server.now += 20
        expect(shown).to_contain_text(re.compile("in the last 2[0-9] seconds"))


def test_the_slider_ends_where_all_weights_stay(browser: Browser) -> None:
    run = SimulatedRun.of(4, frozenset({2}), 3)
    run.plan |= {"memory_bytes": 10**15, "budget_bytes": 10_000_000_000, "smallest_budget_bytes": 5_000_000_000}
    with opened(browser, FakeServer(run, plans=lambda _: (200, run.plan))) as page:
        shown = panel(page, "What if")
        shown.get_by_role("slider").press("End")
        whole = sum(group["bytes"] for group in run.plan["groups"]) + 2_420_000_000
        expect(shown.get_by_role("textbox", name="Memory budget")).to_have_value(f"{int(12.5 * whole / 2**30) / 10}GiB")


def other_plan(budget: str) -> tuple[int, Any]:
    """Answer a what-if: 9.9 to 64 GB fit, less says the smallest budget that works, and more what is free."""
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", budget).groups()  # type: ignore[union-attr]
    nbytes = float(number) * {"GB": 1e9, "GiB": 2**30, "TiB": 2**40, "": 1}[unit]
    if not 9_876_543_210 <= nbytes <= 64_000_000_000:
        message = "needs more; the smallest streaming.memory_budget that works is 9876543210 bytes"
        message = message if nbytes < 64_000_000_000 else "59.60 GiB can be taken"
        return 200, plan_of(80, STREAMED, None, fits=False, error=message)
    predicted = {"tokens_per_second": 2.346}
    return 200, plan_of(80, frozenset(range(31, 81)), round(nbytes), predicted=predicted)


def test_what_if_compares_plans_by_keyboard_and_loads_nothing(browser: Browser) -> None:
    server = FakeServer(streaming_run(), plans=other_plan)
    with opened(browser, server, permissions=["clipboard-read", "clipboard-write"]) as page:
        shown = panel(page, "What if")
        budget = shown.get_by_role("textbox", name="Memory budget")
        expect(budget).to_have_value("22.3GiB")
        budget.focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("60GB", delay=20)
        expect(shown.locator("thead")).to_contain_text("With 60GB")
        assert [one for one in server.asked if one.startswith("/plan?")] == ["/plan?memory_budget=60GB"]
        rows = [row.inner_text().split("\t") for row in shown.locator("tbody tr").all()]
        assert rows[:3] == [
            ["Layers that stay in memory", "12 of 80 layers", "30 of 80 layers"],
            ["Read again for each token", size(68 * LAYER), size(50 * LAYER)],
            ["Predicted speed of one request", f"{digits(1 / 0.05123)} s for a token", "2.35 tokens/s"],
        ]
        page.keyboard.press("Tab")
        expect(shown.get_by_role("slider")).to_be_focused()
        page.keyboard.press("Home")
        expect(shown.locator("code")).to_contain_text("streaming.memory_budget=9876543210")
        page.keyboard.press("End")
        expect(shown.locator("code")).to_have_text(
            f"graphcore serve model=llama3_70b streaming=auto streaming.memory_budget=59.6GiB {SIZES}"
        )
        shown.get_by_role("button", name="Copy").press("Enter")
        expect(shown).to_contain_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == shown.locator("code").inner_text()
        shown.get_by_label("Context length").fill("4096")
        shown.get_by_label("Requests at once").fill("2")
        sizes = "context_length=4096 task.max_sequences=2"
        expect(shown.locator("code")).to_contain_text(f"streaming.memory_budget=59.6GiB {sizes}")
        assert server.asked[-1].startswith("/status") or server.asked[-1].endswith(sizes.replace(" task.", "&"))
        assert "/plan?memory_budget=59.6GiB&context_length=4096&max_sequences=2" in server.asked
        assert serious(page) == []


def test_what_if_says_what_does_not_fit_and_what_would(browser: Browser) -> None:
    server = FakeServer(streaming_run(), plans=other_plan)
    with opened(browser, server) as page:
        shown = panel(page, "What if")
        budget = shown.get_by_role("textbox", name="Memory budget")
        budget.fill("2GB")
        expect(shown.get_by_role("alert")).to_contain_text("the smallest streaming.memory_budget that works is")
        shown.get_by_role("button", name="Use the smallest budget, 9.2 GiB").press("Enter")
        expect(budget).to_have_value("9876543210")
        expect(shown.locator("code")).to_contain_text("streaming.memory_budget=9876543210")
        expect(shown.get_by_role("alert")).to_be_empty()
        budget.fill("1TiB")
        expect(shown.get_by_role("alert")).to_have_text("59.60 GiB can be taken")
        shown.get_by_role("button", name="Use the largest budget, 59.6 GiB").press("Enter")
        expect(shown.locator("code")).to_contain_text("streaming.memory_budget=59.6GiB")
        num_asked = server.num_asked("/plan")
        shown.get_by_label("Context length").fill("many")
        words = "many is no number of 1 or more. Context length is a whole number."
        expect(shown.get_by_role("alert")).to_have_text(words)
        shown.get_by_label("Context length").fill("8192")
        expect(shown.locator("code")).to_be_visible()
        num_asked = server.num_asked("/plan")
        budget.fill("much")
        expect(shown.get_by_role("alert")).to_have_text("much is no size. Write a number with a unit, such as 8GiB.")
        expect(budget).to_have_attribute("aria-invalid", "true")
        expect(shown.locator("code")).to_be_hidden()
        page.wait_for_timeout(400)
        assert server.num_asked("/plan") == num_asked
        assert serious(page) == []


def test_only_the_last_answer_of_what_if_counts(browser: Browser) -> None:
    server = FakeServer(streaming_run(), plans=other_plan)
    late: list[Route] = []
    with opened(browser, server) as page:
        page.route("**/plan?memory_budget=50GB", lambda route: late.append(route))
        shown = panel(page, "What if")
        budget = shown.get_by_role("textbox", name="Memory budget")
        with page.expect_request("**/plan?memory_budget=50GB"):
            budget.fill("50GB")
        budget.fill("60GB")
        expect(shown.locator("thead")).to_contain_text("With 60GB")
        server.answer_question(late[0])
        page.wait_for_timeout(300)
        expect(shown.locator("thead")).to_contain_text("With 60GB")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_from_using_it(browser: Browser, scheme: str) -> None:
    server = FakeServer(streaming_run(), plans=other_plan)
    with opened(browser, server, color_scheme=scheme) as page:
        panel(page, "What if").get_by_role("textbox", name="Memory budget").fill("60GB")
        expect(panel(page, "What if").locator("code")).to_be_visible()
        for name in ("All groups as a table", "The lanes as a table"):
            page.get_by_text(name).click()
        expect(panel(page, "Timeline").get_by_role("row")).to_have_count(6)
        assert serious(page) == []


def serious(page: Page) -> list[str]:
    """Return what axe finds serious or critical."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in ("serious", "critical")]


def test_a_phone_s_width_is_enough(browser: Browser) -> None:
    server = FakeServer(streaming_run(), plans=other_plan)
    with opened(browser, server, viewport={"width": 360, "height": 740}) as page:
        panel(page, "What if").get_by_role("textbox", name="Memory budget").fill("60GB")
        expect(panel(page, "What if").locator("code")).to_be_visible()
        for name in ("All groups as a table", "The lanes as a table"):
            page.get_by_text(name).click()
        wide = """() => [...document.querySelectorAll("body *")]
            .filter(one => !one.closest(".visually-hidden, thead"))
            .filter(one => one.getBoundingClientRect().right > innerWidth + 0.5)
            .map(one => one.outerHTML.slice(0, 100))"""
        assert page.evaluate(wide) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_look_costs_little(browser: Browser) -> None:
    """130 groups and 600 events: the time of scripts, styles and layout for one answer, by the browser's own count."""
    run = SimulatedRun.of(127, frozenset(range(20, 128)), 6)
    run.requests = [request(id=f"chatcmpl-{number}", pages=2) for number in range(8)]
    server = FakeServer(run, now=103.0)
    with opened(browser, server) as page:
        expect(page.locator("canvas")).to_be_visible()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def spent() -> float:
            found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
            return float(found["ScriptDuration"] + found["LayoutDuration"] + found["RecalcStyleDuration"])

        before, looks = spent(), server.num_asked("/status")
        page.wait_for_timeout(1500)
        each = (spent() - before) / (server.num_asked("/status") - looks)
        print(f"{each * 1e3:.2f} ms for a look")
        assert each < 0.025  # about 4 ms where nothing else runs


@pytest.fixture(scope="module")
def streaming_server(tiny_model: Callable[[str], TinyModel]) -> Iterator[Running]:
    """A server of a tiny model that streams."""
    with load(tiny_model("llama3").folder) as engine, running_server(lambda: engine) as running:
        yield running


def test_a_true_server_fills_every_panel(browser: Browser, streaming_server: Running) -> None:
    with streaming_server.client() as http:
        asked = {"prompt": [1, 2, 3, 4], "max_tokens": 8, "ignore_eos": True}
        assert http.post("/v1/completions", json=asked).status_code == 200
        plan = http.get("/plan").json()
    server = FakeServer(streaming_run())
    with opened(browser, server, waits=False) as page:
        page.route(re.compile("/(status|plan)"), lambda route: forward(route, streaming_server))
        page.reload()
        expect(panel(page, "Layers").locator(".engine-cells > .engine-cell")).to_have_count(len(plan["groups"]))
        kept = plan["groups"][-1]["bytes"]
        expect(panel(page, "Memory")).to_contain_text(re.compile(f"Norms and biases{size(kept)}"))
        expect(panel(page, "Slots").locator(".engine-slot")).to_have_count(plan["streaming"]["slots"])
        expect(panel(page, "Reading weights")).to_contain_text("while copying")
        expect(panel(page, "Timeline").locator("canvas")).to_be_visible()
        expect(panel(page, "KV cache")).to_contain_text("full attention")
        expect(panel(page, "Requests")).to_contain_text(
            re.compile("Since the start: 1 request, 4 prompt tokens.*8 answer")
        )
        panel(page, "What if").get_by_role("textbox", name="Memory budget").fill("1GB")
        expect(panel(page, "What if").locator("tbody tr").first).to_contain_text("3 of 3 layers")
        too_small = str(plan["smallest_budget_bytes"] // 2)
        panel(page, "What if").get_by_role("textbox", name="Memory budget").fill(too_small)
        panel(page, "What if").get_by_role("button", name="Use the smallest budget").click()
        expect(panel(page, "What if").locator("code")).to_contain_text(str(plan["smallest_budget_bytes"]))


def forward(route: Route, running: Running) -> None:
    """Answer a question as a true server does."""
    url = urlsplit(route.request.url)
    with running.client() as http:
        answer = http.get(f"{url.path}?{url.query}")
    route.fulfill(status=answer.status_code, content_type="application/json", body=answer.content)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a tiny streamed model with trace=true."""
    folder = tmp_path_factory.mktemp("traced")
    sizes = ("context_length=256", "task.prompt_tokens=8", "task.new_tokens=8", "task.repeats=1", "threads=1")
    streaming = ("streaming=on", "dtype=fp32", "trace=true")
    found = run_in(folder, "task=bench", f"model.checkpoint={TINY / 'qwen3'}", *sizes, *streaming)
    assert found.error is None
    return folder


@contextmanager
def opened_file(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """Open a page's file; it may ask for nothing else and report no error."""
    context = browser.new_context(offline=True, **options)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    expect(panel(page, "Layers")).to_be_visible()
    try:
        yield page
        assert complaints == []
        assert asked == [path.as_uri()]
    finally:
        context.close()


def raw_events(folder: Path) -> list[Event]:
    """Return the events of a run's trace.json, in seconds from the first."""
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return [
        Event(one["cat"], one["args"]["group"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6, one["args"]["bytes"])
        for one in trace
        if one["ph"] == "X"
    ]


def seek(page: Page, seconds: float) -> float:
    """Move the scrubber; return the time that it has taken."""
    move = """(slider, value) => {
        slider.value = value;
        slider.dispatchEvent(new Event("input"));
        return slider.value;
    }"""
    return float(page.get_by_role("slider", name="Time").evaluate(move, seconds))


def test_a_recorded_run_shows_what_its_events_say_at_any_time(browser: Browser, traced: Path) -> None:
    events = raw_events(traced)
    result = json.loads((traced / "result.json").read_text(encoding="utf-8"))
    streamed = sorted({one.group for one in events if one.lane == "copy"})
    assert len(streamed) > 2
    longest = sorted(events, key=lambda event: event.begin - event.end)
    long = [one for lane in ("compute", "copy") for one in [event for event in longest if event.lane == lane][:20]]
    with opened_file(browser, traced / "timeline.html") as page:
        expect(page.get_by_role("heading", level=1)).to_contain_text("streaming=on")
        checked = {"compute": 0, "copy": 0}
        for event in long:
            now = seek(page, (event.begin + event.end) / 2)
            running = [one for one in events if one.begin < now < one.end]
            computing = {one.group for one in running if one.lane == "compute"}
            copying = {one.group for one in running if one.lane == "copy"} - computing
            marked = page.locator(".engine-cells [data-state=computing].engine-cell")
            expect(marked).to_have_count(len(computing))
            assert numbers_at(page, "reading") >= copying
            checked["compute"] += len(computing)
            checked["copy"] += len(copying)
            busy = [one for one in computing if one in streamed]
            for group in busy:
                slot = page.locator(".engine-slot").nth(streamed.index(group) % 2)
                expect(slot).to_have_attribute("data-state", "computing")
        assert min(checked.values()) > 5
        link = result["streaming"]["raw_link_gb_per_second"] * 1e9
        expect(panel(page, "Reading weights")).to_contain_text(f"The ceiling is {size(link)}/s")


def numbers_at(page: Page, state: str) -> set[int]:
    """Return the numbers of the groups whose cells have a state."""
    data = json.loads(page.locator("#data").inner_text())
    states = "cells => cells.map(cell => [...cell.querySelectorAll('i')].map(part => part.dataset.state))"
    found = page.locator(".engine-cells > .engine-cell").evaluate_all(states)
    return {
        group["numbers"][index]
        for group, parts in zip(data["plan"]["groups"], found, strict=True)
        for index, part in enumerate(parts)
        if part == state
    }


def simulated_page(folder: Path, num_passes: int = 6) -> tuple[Path, list[Event]]:
    """Write the page of a run of 24 layers, four of which stay."""
    streamed = frozenset(range(5, 25))
    events = ring_events(num_passes, 26, streamed, 0.02, 0.006, nbytes=120_000_000)
    path = folder / "timeline.html"
    path.write_text(timeline_page(events, "a <model> & more", plan_of(24, streamed, 24_000_000_000)), encoding="utf-8")
    return path, events


def test_a_slot_belongs_to_the_group_that_computes_or_waits_in_it(browser: Browser, tmp_path: Path) -> None:
    """Threads read the next group of a slot into their own buffers meanwhile."""
    events = [
        Event("compute", 0, 0.0, 0.5),
        Event("copy", 1, 0.0, 1.0, 8),  # slot 0
        Event("copy", 2, 1.0, 2.0, 8),  # slot 1
        Event("copy", 3, 1.5, 6.0, 8),  # slot 0, which is in use until 4
        Event("stall", 1, 0.5, 1.0),
        Event("compute", 1, 3.0, 4.0),
        Event("compute", 2, 5.0, 5.5),
        Event("stall", 3, 5.5, 6.0),
        Event("compute", 3, 6.0, 7.0),
        Event("compute", 4, 7.0, 7.5),
        Event("compute", 5, 7.5, 8.0),
    ]
    path = tmp_path / "timeline.html"
    path.write_text(timeline_page(events, "crafted", plan_of(4, frozenset({1, 2, 3}), None)), encoding="utf-8")
    first, second, third = "layer 0", "layer 1", "layer 2"
    expected = {
        0.25: ((first, "being read"), ("empty", "free"), {1}),
        1.25: ((first, "ready"), (second, "being read"), {2}),
        2.5: ((first, "ready"), (second, "ready"), {3}),
        3.5: ((first, "computing"), (second, "ready"), {3}),
        4.5: ((third, "being read"), (second, "ready"), {3}),
        5.25: ((third, "being read"), (second, "computing"), {3}),
        5.75: ((third, "being read"), ("empty", "free"), {3}),
        6.5: ((third, "computing"), ("empty", "free"), set()),
        7.75: (("empty", "free"), ("empty", "free"), set()),
    }
    with opened_file(browser, path) as page:
        for time, (zero, one, reading) in expected.items():
            assert seek(page, time) == pytest.approx(time, abs=0.01)
            for slot, words in enumerate((zero, one)):
                box = page.locator(".engine-slot").nth(slot)
                assert (box.locator("strong").inner_text(), box.locator("span").last.inner_text()) == words, time
            assert numbers_at(page, "reading") == reading, time


def test_a_recorded_run_s_link_is_that_of_each_pass(browser: Browser, tmp_path: Path) -> None:
    path, events = simulated_page(tmp_path)
    starts = [*pass_starts(events), max(event.end for event in events)]
    with opened_file(browser, path) as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("a <model> & more")
        for number in (2, 4):
            begin, end = starts[number], starts[number + 1]
            seek(page, (begin + end) / 2 - starts[0])
            report = report_streaming(events, Measured(begin, end, 1, 100))
            assert report.busy_link is not None
            assert report.overlap is not None
            link = panel(page, "Reading weights")
            expect(link).to_contain_text(f"{size(report.busy_link)}/s")
            expect(link).to_contain_text(f"{report.overlap:.0%} of {digits(report.copy_seconds * 1e3)} ms")
            expect(link).to_contain_text(f"{digits(report.stall_seconds * 1e3)} ms in this pass")
            expect(page.locator("output")).to_contain_text(f"pass {number + 1} of 6")


def test_a_recorded_run_plays_and_steps_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    path, events = simulated_page(tmp_path)
    with opened_file(browser, path) as page:
        slider = page.get_by_role("slider", name="Time")
        slider.focus()
        page.keyboard.press("PageUp")
        page.keyboard.press("PageUp")
        starts = pass_starts(events)
        assert float(slider.input_value()) == pytest.approx(starts[2] - starts[0], abs=1e-3)
        page.keyboard.press("PageDown")
        expect(page.locator("output")).to_contain_text("pass 2 of 6")
        page.keyboard.press("ArrowRight")
        assert float(slider.input_value()) > starts[1] - starts[0]
        page.keyboard.press("Space")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        before = float(slider.input_value())
        moved = "before => document.querySelector('.engine-player input').value > before + 0.01"
        page.wait_for_function(moved, arg=before)
        page.keyboard.press("Space")
        expect(page.get_by_role("button", name="Play")).to_be_visible()
        page.keyboard.press("Tab")  # the scrubber is the last control of the player
        page.get_by_role("button", name="Previous pass").press("Enter")
        expect(page.locator("output")).to_contain_text("pass 1 of 6")
        page.get_by_label("Speed").select_option("10")
        page.get_by_role("button", name="Play").press("Enter")
        expect(page.locator("output")).to_contain_text("pass 6 of 6")
        expect(page.get_by_role("button", name="Play")).to_be_visible()
        canvas = page.locator("canvas")
        canvas.click(position={"x": 90, "y": 100})
        expect(page.locator("output")).to_contain_text("pass 5 of 6")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_nothing_keeps_people_from_using_the_file(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    path, _ = simulated_page(tmp_path)
    viewport = {"width": width, "height": 740}
    with opened_file(browser, path, viewport=viewport, color_scheme=scheme, bypass_csp=True) as page:
        seek(page, 1.0)
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_long_run_opens(browser: Browser, tmp_path: Path) -> None:
    path, events = simulated_page(tmp_path, num_passes=400)
    assert len(events) > 60_000
    assert path.stat().st_size < 2_000_000
    with opened_file(browser, path) as page:
        expect(page.locator("#trace > .engine-note")).to_contain_text("earlier events of this run are in trace.json")
        seek(page, 1.0)
        expect(page.locator("output")).to_contain_text("pass")
