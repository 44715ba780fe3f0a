"""GET /status and GET /plan: what an engine does, and plans for other budgets, against the engine and its planner."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.serving import SECONDS, Running, running_server
from support.streaming import SIZES, load, smallest_budget
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.engine.loading import prepared_decoder
from graphcore.engine.what_if import WhatIf
from graphcore.errors import ConfigError
from graphcore.planning import tier
from graphcore.serving.app import NUM_THREADS
from graphcore.serving.engine_status import MOST_EVENTS, first_token_record
from graphcore.weights.plan import Plan

ARCHITECTURES = ("llama3", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_next", "gemma4_moe")


@pytest.fixture(scope="module")
def no_buffers() -> Iterator[None]:
    """Plan with small read buffers: those of the true size outweigh a tiny model, so that it would not stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "BUFFER_NBYTES", 4096)
        patch.setattr(tier, "CONVERSION_NBYTES", 4096)
        patch.setattr(tier, "ROOM", 0)
        yield


@pytest.fixture(scope="module")
def streamed(tiny_model: Callable[[str], TinyModel], no_buffers: None) -> Iterator[Engine]:
    folder = tiny_model("llama3").folder
    budget = smallest_budget(folder, streaming="auto")
    with load(folder, f"streaming.memory_budget={budget}", streaming="auto") as engine:
        assert engine.plan.is_streaming
        yield engine


@pytest.fixture(scope="module")
def running(streamed: Engine) -> Iterator[Running]:
    with running_server(lambda: streamed) as running:
        yield running


def complete(running: Running, **fields: Any) -> None:
    with running.client() as http:
        body = {"prompt": [1, 2, 3, 4], "max_tokens": 8, "ignore_eos": True, **fields}
        assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.thorough
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_loaded_model_is_planned_as_it_was_before_loading(
    name: str, tiny_model: Callable[[str], TinyModel], no_buffers: None
) -> None:
    folder = tiny_model(name).folder
    smallest = smallest_budget(folder, streaming="auto")
    plans: dict[int | str, Plan] = {}
    for budget in (smallest, smallest * 5 // 4, "auto"):
        with load(folder, f"streaming.memory_budget={budget}", streaming="auto") as engine:
            plans[budget] = engine.plan
    for streaming in ("off", "on"):
        with load(folder, streaming=streaming) as engine:
            what_if = WhatIf(engine)
            assert what_if.smallest_nbytes() == smallest
            assert what_if.plan(smallest).plan.is_streaming
            for budget, expected in plans.items():
                planned = what_if.plan(budget)
                assert planned.error is None
                assert planned.plan.groups == expected.groups
                assert planned.plan.experts == expected.experts
                assert planned.plan.total_nbytes == expected.total_nbytes
            refused = what_if.plan(smallest - 1)
            assert str(smallest) in (refused.error or "")
            assert what_if.predict(refused) is None


def test_a_plan_for_another_budget_has_its_speed_and_changes_nothing(running: Running, streamed: Engine) -> None:
    before = streamed.plan
    with running.client() as http:
        now = http.get("/plan").json()
        assert now["fits"]
        assert now["memory"]["total_bytes"] == streamed.plan.total_nbytes == now["smallest_budget_bytes"]
        parts = [name for name in now["memory"] if name not in ("weight_bytes", "total_bytes", "load_peak_bytes")]
        assert sum(now["memory"][name] for name in parts) == now["memory"]["total_bytes"]
        assert now["link_bytes_per_second"] > 0
        assert {number for one in now["groups"] for number in one["numbers"]} >= set(streamed.plan.groups.streamed)
        more = http.get("/plan", params={"memory_budget": f"{2 * now['budget_bytes']}"}).json()
        assert more["fits"]
        assert more["streaming"]["bytes_per_token"] < now["streaming"]["bytes_per_token"]
        assert more["predicted"]["tokens_per_second"] > 0
        less = http.get("/plan", params={"memory_budget": f"{now['budget_bytes'] - 1}"}).json()
        assert not less["fits"]
        assert str(now["smallest_budget_bytes"]) in less["error"]
        assert less["predicted"] is None
        most = http.get("/plan", params={"memory_budget": "1000TB"}).json()
        assert not most["fits"]
        assert http.get("/plan", params={"memory_budget": "1000 elephants"}).status_code == 400
        ignored = http.get("/plan", params={"budget": "1GB"})
        assert ignored.headers["x-ignored-fields"] == "budget"
    assert streamed.plan is before
    complete(running)


def test_a_plan_for_other_sizes_is_that_of_an_engine_with_them(
    running: Running, tiny_model: Callable[[str], TinyModel], no_buffers: None
) -> None:
    folder, sizes = tiny_model("llama3").folder, ("context_length=128", "batching.max_sequences=5")
    smallest = smallest_budget(folder, *sizes, streaming="auto")
    with load(folder, f"streaming.memory_budget={smallest}", *sizes, streaming="auto") as other:
        expected = other.plan
    asked = {"memory_budget": str(smallest), "context_length": "128", "max_sequences": "5"}
    with running.client() as http:
        found = http.get("/plan", params=asked).json()
        less = http.get("/plan", params=asked | {"memory_budget": str(smallest - 1)}).json()
        assert found["fits"]
        assert not less["fits"]
        assert found["memory"]["total_bytes"] == expected.total_nbytes
        assert found["kv_bytes"] == expected.kv_nbytes
        assert found["smallest_budget_bytes"] == smallest
        assert (found["context_length"], found["max_sequences"]) == (128, 5)
        assert http.get("/plan").json()["context_length"] == 256
        for wrong in ({"context_length": "100000000"}, {"context_length": "x"}, {"max_sequences": "0"}):
            assert http.get("/plan", params=wrong).status_code == 400


def test_a_plan_records_no_program_of_a_loaded_model_again(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", overrides=SIZES) as engine:
        assert engine.choices.graph != "eager", "there are programs to record"
        WhatIf(engine).plan("2GB")  # records steps that are cut for streaming, which take other buffers
        monkeypatch.setattr(prepared_decoder, "programs_nbytes", None)
        assert WhatIf(engine).plan("1GB").plan.total_nbytes > 0


def test_plans_that_wait_for_a_pass_do_not_keep_others_waiting(
    running: Running, streamed: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, asked = threading.Event(), threading.Event()

    def hold(*_: Any) -> Any:
        asked.set()
        assert go_on.wait(SECONDS)
        raise ConfigError("held")

    monkeypatch.setattr(WhatIf, "plan", hold)
    with running.client() as http:
        ask = partial(http.get, "/plan", params={"memory_budget": "1GB"})
        with ThreadPoolExecutor(NUM_THREADS + 1) as threads:
            answers = [threads.submit(ask) for _ in range(NUM_THREADS + 1)]
            try:
                assert asked.wait(SECONDS)
                running.wait_for(lambda: running.server.server_state.connections.__len__() > NUM_THREADS)
                assert http.get("/status", timeout=10).status_code == 200
                assert http.post("/detokenize", json={"tokens": [1]}, timeout=10).status_code in (200, 400)
            finally:
                go_on.set()
        assert {answer.result().status_code for answer in answers} == {400}


def all_pages_are_free(status: dict[str, Any]) -> bool:
    (pool,) = status["kv_cache"]
    return bool(pool["pages"] == pool["free"] + pool["prefix_only"])


def test_status_counts_what_the_engine_has_done(running: Running, streamed: Engine) -> None:
    with running.client() as http:
        before = http.get("/status").json()
        complete(running, prompt=[7, 3, 5, 1, 2], max_tokens=6)
        complete(running, prompt=[7, 3, 5, 1, 2], max_tokens=6, echo=True)
        running.wait_for(lambda: all_pages_are_free(http.get("/status").json()))  # a moment after the answer
        after = http.get("/status", params={"events": 50}).json()
    made = {name: after["totals"][name] - before["totals"][name] for name in after["totals"]}
    assert (made["requests"], made["new_tokens"]) == (2, 12)
    assert made["prompt_tokens"] + made["cached_tokens"] == 10
    assert after["state"] == "ready"
    assert after["requests"] == []
    assert after["first_token_seconds"] is None or after["first_token_seconds"]["count"] > 0
    moved, passes = after["streaming"]["bytes"] - before["streaming"]["bytes"], 12
    assert moved >= passes * streamed.plan.groups.streamed_nbytes
    assert len(after["streaming"]["events"]) == 50
    assert {event[0] for event in after["streaming"]["events"]} == {"copy", "compute", "stall"}
    assert [slot["slot"] for slot in after["streaming"]["slots"]] == list(range(streamed.plan.groups.num_slots))


def test_status_shows_requests_while_they_run(running: Running, streamed: Engine) -> None:
    prompt = list(range(1, 70))
    asked = {"prompt": prompt, "max_tokens": 24, "stream": True}
    threads = [threading.Thread(target=complete, args=(running,), kwargs=asked) for _ in range(4)]
    found: list[dict[str, Any]] = []
    with running.client() as http:
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        while any(thread.is_alive() for thread in threads):
            assert time.monotonic() < end
            found.append(http.get("/status").json())
            time.sleep(0.004)  # a step of the engine takes longer
    states = {one["state"] for status in found for one in status["requests"]}
    assert {"waiting", "decode"} <= states  # the engine has three rows
    full = max(found, key=lambda status: sum(one["shared_pages"] for one in status["requests"]))
    (pool,) = full["kv_cache"]
    assert pool["shared"] == max(one["shared_pages"] for one in full["requests"]) > 0
    own = sum(one["pages"] - one["shared_pages"] for one in full["requests"])
    assert pool["pages"] >= pool["free"] + pool["shared"] + own
    uses = [slot["state"] for status in found for slot in status["streaming"]["slots"]]
    assert "computing" in uses or any(status["streaming"]["computing_group"] for status in found)
    assert "ready" in uses or "reading" in uses
    assert any(status["first_token_seconds"] for status in found)


def test_events_are_bounded_and_checked(running: Running) -> None:
    with running.client() as http:
        assert len(http.get("/status", params={"events": 10**8}).json()["streaming"]["events"]) <= MOST_EVENTS
        assert http.get("/status", params={"events": "-1"}).json()["error"]["param"] == "events"
        assert http.get("/status").json()["streaming"]["events"] == []


def test_a_resident_model_has_no_stream_and_a_loading_one_little(tiny_model: Callable[[str], TinyModel]) -> None:
    go_on = threading.Event()
    with load(tiny_model("llama3").folder, streaming="off") as engine:

        def wait_and_load() -> Engine:
            assert go_on.wait(SECONDS)
            return engine

        with running_server(wait_and_load, waits=False) as own, own.client() as http:
            loading = http.get("/status").json()
            assert loading.keys() == {"model", "state", "version", "uptime_seconds", "time"}
            assert loading["state"] == "loading"
            assert http.get("/plan").status_code == 503
            go_on.set()
            own.wait_for(lambda: own.served.state.value == "ready")
            assert http.get("/status").json()["streaming"] is None
            plan = http.get("/plan").json()
            assert plan["streaming"]["bytes_per_token"] == 0
            assert plan["link_bytes_per_second"] is None
            assert {one["place"] for one in plan["groups"]} == {"resident"}


def test_a_model_of_transformers_has_one_plan(tiny_model: Callable[[str], TinyModel]) -> None:
    overrides = [*SIZES, "model.fallback=transformers"]
    with Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", overrides=overrides) as engine:
        with pytest.raises(ConfigError, match=r"model\.fallback"):
            WhatIf(engine).plan("1GB")
        with running_server(lambda: engine) as own, own.client() as http:
            assert http.get("/plan").json()["fits"]
            assert http.get("/plan", params={"memory_budget": "1GB"}).status_code == 400
            complete(own)
            status = http.get("/status").json()
            assert (status["kv_cache"], status["totals"]["new_tokens"]) == ([], 8)
            assert status["speculation"] is None


def test_draft_tokens_are_counted(tiny_model: Callable[[str], TinyModel]) -> None:
    overrides = [*SIZES, "speculation=auto"]
    with (
        Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", overrides=overrides) as engine,
        running_server(lambda: engine) as own,
        own.client() as http,
    ):
        engine.generate([[1, 2, 3, 1, 2, 3, 1, 2]], 24, ignore_eos=True)
        found = http.get("/status").json()["speculation"]
        assert (found["kind"], found["draft_steps"]) == ("lookup", 0)
        assert found["draft_tokens"] == engine.totals.draft_tokens
        assert found["steps"] >= 24 - found["accepted_tokens"] - 1


def test_times_to_the_first_token_are_ranked() -> None:
    assert first_token_record([]) is None
    assert first_token_record([3.0]) == {"count": 1, "median": 3.0, "p95": 3.0}
    assert first_token_record([float(value) for value in range(100)]) == {"count": 100, "median": 49.5, "p95": 95.0}


def test_the_page_is_open_and_what_it_asks_needs_the_key(streamed: Engine) -> None:
    with running_server(lambda: streamed, api_key="secret") as own, own.client() as http:
        page = http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert http.head("/").status_code == 200
        assert http.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
        assert http.get("/page/vendor/marked.esm.js").headers["content-type"].startswith("text/javascript")
        for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/vendor/"):
            assert http.get(path).status_code in (401, 404)
        for path in ("/status", "/plan", "/v1/models"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200
        assert http.get("/", headers={"Host": "elsewhere.example"}).status_code == 403


def test_the_parser_of_markdown_is_the_published_file() -> None:
    folder = Path(__file__).parents[2] / "graphcore" / "serving" / "page" / "vendor"
    published = json.loads((folder / "published.json").read_text("utf-8"))
    assert published
    import hashlib

    for name, facts in published.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"]
        assert facts["version"] in (folder / name).read_text("utf-8")[:200]
