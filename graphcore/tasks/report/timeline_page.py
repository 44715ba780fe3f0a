"""HTML report of a traced run: one self-contained file, which needs no server and no network.

It has the panels that a server's page shows of an engine at work, with a clock that plays the run. Their modules are
written into the file one after another, as one script: what they import from each other is in the same script then.
The page's policy lets this script and this style run, and nothing else.
"""

import base64
import hashlib
import html
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import graphcore
from graphcore.serving.page_files import page_text
from graphcore.streaming.timeline import Event, join_copies
from graphcore.tasks.report.output_files import write_text
from graphcore.tasks.report.timeline_plot import pass_starts
from graphcore.tasks.task import Record

STYLES = ("style.css", "engine/engine.css")
MODULES = (  # each after those that it imports from
    "words",
    "elements",
    "groups",
    "passes",
    "story",
    "story_panel",
    "stacked_bar",
    "layers",
    "slots",
    "lanes",
    "link",
    "memory",
    "trace_states",
    "player",
    "trace",
)
START = 'showTrace(document.getElementById("trace"), JSON.parse(document.getElementById("data").textContent));\n'
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
MOST_EVENTS = 20_000  # events in a file, about 1 MB


def write_timeline_page(path: Path, events: Sequence[Event], title: str, plan: Record) -> None:
    """Write the page of a traced run.

    Args:
        events: at least one event, in any order.
        title: description of the run.
        plan: record of `what_if.plan_record`.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(path, timeline_page(events, title, plan))


def timeline_page(events: Sequence[Event], title: str, plan: Record) -> str:
    """Return the page's HTML; arguments as for `write_timeline_page`."""
    script, style = f"{bundle(MODULES)}{START}", "\n".join(page_text(name) for name in STYLES)
    assert "</style" not in style.lower(), "the styles would end before their end"
    shown, num_omitted = newest_passes(join_copies(events))
    zero = min(event.begin for event in shown)
    rows = [
        [one.lane, one.group, round(one.begin - zero, 7), round(one.end - zero, 7), one.nbytes, one.worker]
        for one in shown
    ]
    data = {"title": title, "plan": plan, "events": rows, "omitted_events": num_omitted}
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}form-action \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{style}</style>\n</head>\n"
        f'<body class="engine-file">\n<header><h1>{name}</h1></header>\n<main id="trace"></main>\n'
        f"<footer><p>graphcore {graphcore.__version__}. This file needs no server and no network.</p></footer>\n"
        f'<script type="application/json" id="data">{_as_data(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def bundle(names: Sequence[str]) -> str:
    """Concatenate modules of engine/ into one script; imports are dropped, so dependencies must come first."""
    texts: dict[str, str] = {}
    declared: dict[str, str] = {}
    for name in names:
        text = page_text(f"engine/{name}.js")
        for wanted, source in IMPORT.findall(text):
            missing = [one for one in wanted.split(", ") if declared.get(one) != source]
            assert not missing, f"{name}.js imports {missing} from {source}.js, which is not before it in the list"
        text = IMPORT.sub("", text)
        assert not re.search(r"^import\b", text, re.MULTILINE), f"{name}.js has an import that is no single line"
        assert "</script" not in text.lower(), f"{name}.js would end the script"
        for one in DECLARED.findall(text):
            assert one not in declared, f"{one} is declared by {declared[one]}.js and {name}.js"
            declared[one] = name
        texts[name] = text
    return "\n".join(texts.values())


def newest_passes(events: Sequence[Event], most: int = MOST_EVENTS) -> tuple[list[Event], int]:
    """Return the events of the last passes, as many whole ones as there is room for, and the number left out.

    If the last pass alone has too many, its newest events are returned.

    Args:
        events: at least one event, by begin.
        most: number of events that there is room for.
    """
    ends = sorted(event.end for event in events)
    for start in pass_starts(events):
        num_omitted = bisect_right(ends, start)
        if len(events) - num_omitted <= most:
            return [event for event in events if event.end > start], num_omitted
    return list(events[-most:]), len(events) - most


def _hash(text: str) -> str:
    """Return the source expression of an inline script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_data(data: Record) -> str:
    """Return JSON that no browser takes for markup: "<" escaped, and everything beyond ASCII (U+2028, U+2029), too."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
