"""The page of a traced run: one file that nothing can be added to, with what its events say."""

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from support.streaming import plan_of, ring_events

from graphcore.serving.page_files import FOLDER
from graphcore.streaming.timeline import join_copies
from graphcore.tasks.report import timeline_page as module
from graphcore.tasks.report.timeline_page import bundle, newest_passes, timeline_page
from graphcore.tasks.report.timeline_plot import pass_starts

STREAMED = frozenset({2, 3, 4})
PLAN = plan_of(4, STREAMED, 24_000_000_000)


class Elements(HTMLParser):
    """The elements of a document, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_policy_lets_only_this_script_and_this_style_run() -> None:
    page = timeline_page(ring_events(3, 6, STREAMED), "a model", PLAN)
    elements = Elements(page)
    policy = next(attrs["content"] for tag, attrs in elements.found if attrs.get("http-equiv"))
    assert policy is not None
    asked = dict(part.split(" ", 1) for part in policy.split("; "))
    script = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert (len(script), len(style)) == (1, 1)

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    expected = {"script-src": source(script[0]), "style-src": source(style[0])}
    assert asked == {"default-src": "'none'", **expected, "base-uri": "'none'", "form-action": "'none'"}
    assert not [attrs for _, attrs in elements.found if {"src", "href", "style"} & attrs.keys()]
    assert not re.search(r"https?://", re.sub(r"http://www\.w3\.org/2000/svg", "", page))


def test_text_that_looks_like_markup_stays_text() -> None:
    title = "</title><script>alert(1)</script> & \u2028 \u2029 <!--"
    plan = json.loads(json.dumps(PLAN))
    plan["groups"][1]["name"] = title
    page = timeline_page(ring_events(2, 6, STREAMED), title, plan)
    tags = [tag for tag, _ in Elements(page).found]
    assert (tags.count("script"), tags.count("title")) == (2, 1)
    assert unescape(page.partition("<title>")[2].partition("</title>")[0]) == title
    assert data_of(page)["title"] == data_of(page)["plan"]["groups"][1]["name"] == title
    block = page.partition('id="data">')[2].partition("</script>")[0]
    assert not set(block) & {"<", "\u2028", "\u2029"}


def test_the_page_has_every_event_relative_to_the_first() -> None:
    events = ring_events(3, 6, STREAMED)
    data = data_of(timeline_page(events, "a model", PLAN))
    assert data["plan"] == PLAN
    assert data["omitted_events"] == 0
    zero = min(event.begin for event in events)
    for lane, group, begin, end, _, worker in data["events"]:
        inside = [
            event
            for event in events
            if (event.lane, event.group, event.worker) == (lane, group, worker)
            and event.begin - zero >= begin - 1e-6
            and event.end - zero <= end + 1e-6
        ]
        assert inside, (lane, group, begin, end)
    for lane in ("compute", "stall", "copy"):
        assert sum(row[4] for row in data["events"] if row[0] == lane) == sum(
            event.nbytes for event in events if event.lane == lane
        )


def test_a_long_run_keeps_its_last_whole_passes() -> None:
    events = join_copies(ring_events(20, 6, STREAMED))
    each = len(events) / 20
    shown, omitted = newest_passes(events, round(3.5 * each))
    assert len(shown) + omitted == len(events)
    starts = pass_starts(events)
    assert min(event.begin for event in shown if event.lane == "compute") == pytest.approx(starts[-3])
    assert all(event in shown for event in events if event.begin >= starts[-3])
    assert newest_passes(events, len(events)) == (events, 0)
    some, omitted = newest_passes(events, 5)  # one pass alone has more
    assert (some, omitted) == (events[-5:], len(events) - 5)


def test_every_module_but_those_of_a_server_s_page_is_in_the_bundle() -> None:
    script = bundle(module.MODULES)
    there = {path.name.removesuffix(".js") for path in (FOLDER / "engine").iterdir() if path.name.endswith(".js")}
    of_a_server = {"cache", "history", "poller", "ranks", "requests", "view", "what_if"}
    assert there - of_a_server == set(module.MODULES)
    assert "import" not in re.sub(r'import\("\./\w+\.js"\)|//.*|"[^"\n]*"', "", script)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"one": "const A = 1;\n", "two": "function A() {}\n"}, "A is declared by one.js and two.js"),
        ({"one": 'import { B } from "./two.js";\n', "two": "export const B = 1;\n"}, "which is not before it"),
        ({"one": 'import {\n  B,\n} from "./two.js";\n'}, "no single line"),
        ({"one": 'import { B as C } from "./two.js";\n'}, "which is not before it"),
        ({"one": 'const A = "</script>";\n'}, "would end the script"),
    ],
)
def test_modules_that_cannot_be_one_script_are_refused(
    monkeypatch: pytest.MonkeyPatch, texts: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(module, "page_text", lambda name: texts[name.removeprefix("engine/").removesuffix(".js")])
    with pytest.raises(AssertionError, match=message):
        bundle(list(texts))
