"""Replays of routing: hits counted by hand, the optimum against all possible evictions, and the plan's figures."""

import gzip
import random
import sys
from itertools import combinations
from pathlib import Path

import pytest
from support.comparisons import OldestFirst

from graphcore.weights.plan import EXPERT_HITS

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))

from expert_routes import (  # noqa: E402
    POLICIES,
    SHAPES,
    Request,
    Trace,
    hit_rate,
    layer_slots_hit_rate,
    lowest,
    main,
    read_trace,
    table,
)

QWEN = SHAPES[1]


def trace_of(*requests: tuple[int, list[int]], prompt: int = 0) -> Trace:
    """Return a trace of layers and their experts; the first `prompt` requests are not counted."""
    made = [Request(layer, tuple(experts), number >= prompt) for number, (layer, experts) in enumerate(requests)]
    return Trace(QWEN, layers=1 + max(layer for layer, _ in requests), experts=8, routed=1, requests=made)


# Three slots. What is held after each request that evicts:
#   request      1  1    2  3  4      1      2      3
#   LRU             hit        4 3 2  1 4 3  2 1 4  3 2 1
#   count           hit        1 4 3  hit    1 2 4  1 3 2    1 was asked for twice
#   optimum         hit        4 1 2  hit    hit    any      3 is needed last
SINGLES = trace_of(*[(0, [expert]) for expert in (1, 1, 2, 3, 4, 1, 2, 3)])


@pytest.mark.parametrize(("policy", "hits"), [("LRU", 1), ("graphcore", 2), ("optimum", 3)])
def test_hits_of_single_experts_are_those_counted_by_hand(policy: str, hits: int) -> None:
    assert hit_rate(SINGLES, 3, policy) == hits / 8


def test_the_use_of_an_expert_that_is_held_counts_for_lru() -> None:
    first_again = trace_of(*[(0, [expert]) for expert in (1, 2, 1, 3, 1)])
    assert hit_rate(first_again, 2, "LRU") == 2 / 5  # first in, first out would evict 1


# Three slots, two layers a and b. Evicted at each request (of equals, the one that came first), and what is hit:
#   request      a1 a2   b1 b2   a1 a3           b1 b2          a1 a2
#   LRU          -       a1      a2 b1           a1; b2 hit     a3 b2
#   count        -       a1      a2 b1           a3; b2 hit     b1 or b2; a1 hit
#   optimum      -       a2      b1; a1 hit      a3; b2 hit     b1 or b2; a1 hit
PAIRS = trace_of((0, [1, 2]), (1, [1, 2]), (0, [1, 3]), (1, [1, 2]), (0, [1, 2]))


@pytest.mark.parametrize(("policy", "hits"), [("LRU", 1), ("graphcore", 2), ("optimum", 3)])
def test_hits_of_pairs_in_two_layers_are_those_counted_by_hand(policy: str, hits: int) -> None:
    assert hit_rate(PAIRS, 3, policy) == hits / 10


def test_a_layer_is_full_of_its_own_experts_only() -> None:
    same = trace_of((0, [1]), (1, [1]), (0, [1]), (1, [1]))
    assert [hit_rate(same, 2, policy) for policy in POLICIES] == [0.5] * 3
    assert [hit_rate(same, 1, policy) for policy in POLICIES] == [0.0] * 3


def test_a_prompt_fills_the_cache_and_is_not_counted() -> None:
    filled = trace_of((0, [1, 2, 3]), (0, [3, 5]), prompt=1)
    assert [hit_rate(filled, 4, policy) for policy in POLICIES] == [0.5] * 3


def best_rate(trace: Trace, num_slots: int) -> float:
    """Return the highest hit rate that any choice of evictions can reach, by trying all of them."""
    states = {frozenset[tuple[int, int]](): 0}  # hits so far, by what the slots hold
    for request in trace.requests:
        asked = frozenset((request.layer, expert) for expert in request.experts)
        after: dict[frozenset[tuple[int, int]], int] = {}
        for held, hits in states.items():
            others, room = held - asked, num_slots - len(asked)
            for kept in combinations(sorted(others), min(len(others), room)):
                state = asked | frozenset(kept)
                after[state] = max(after.get(state, 0), hits + len(asked & held))
        states = after
    return max(states.values()) / sum(len(request.experts) for request in trace.requests)


def test_the_optimum_is_the_best_of_all_evictions_and_no_policy_beats_it() -> None:
    rng = random.Random(3)
    for _ in range(60):
        drawn = [(number % 2, rng.sample(range(4), rng.randint(1, 2))) for number in range(12)]
        trace, num_slots = trace_of(*drawn), rng.randint(2, 5)
        best = best_rate(trace, num_slots)
        assert hit_rate(trace, num_slots, "optimum") == pytest.approx(best)
        assert max(hit_rate(trace, num_slots, policy) for policy in POLICIES) <= best + 1e-9


@pytest.mark.parametrize("num_slots", [2, 5, 8, 11])
def test_slots_of_each_layer_hit_what_slots_by_age_hit(num_slots: int) -> None:
    rng = random.Random(num_slots)
    drawn = [(number % 2, rng.sample(range(8), rng.randint(1, 4))) for number in range(80)]
    models = [OldestFirst(-(-num_slots // 2)), OldestFirst(num_slots // 2)]
    for layer, experts in drawn:
        models[layer].ask(experts)
    asked = sum(len(experts) for _, experts in drawn)
    assert layer_slots_hit_rate(trace_of(*drawn), num_slots) == sum(model.hits for model in models) / asked
    filled = trace_of((0, [1, 2, 3, 4, 5, 6]), (0, [6, 1]), prompt=1)
    assert layer_slots_hit_rate(filled, 3) == 0.5  # of two waves the second stays


def written(folder: Path, model: str = "/x/qwen3-30b-a3b-Q4_K_M.gguf") -> Path:
    """Write a trace of two layers: a prompt of two tokens in one, and in the other the last token's only, then one."""
    path = folder / "small.route.csv.gz"
    rows = ["0,0,0,0,0,79", "0,0,0,0,1,5", "0,0,1,0,0,5", "0,0,1,0,1,7", "0,0,1,1,0,2", "0,0,1,1,1,3"]
    rows += ["0,1,2,1,0,2", "0,1,2,1,1,9", "0,1,2,0,0,7", "0,1,2,0,1,8"]
    facts = f"# model={model} arch=a n_layer=2 n_expert=128 n_expert_used=2"
    lines = ["# route_trace v1", facts, "# layer=0 expert_bytes=1", "turn,phase,step,layer,slot,expert", *rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_a_trace_is_read_as_one_request_a_layer_for_the_prompt_and_for_each_token(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path))
    assert (trace.shape, trace.layers, trace.experts, trace.routed, trace.num_tokens) == (QWEN, 2, 128, 2, 1)
    assert list(trace.requests) == [
        Request(0, (79, 5, 7), is_counted=False),
        Request(1, (2, 3), is_counted=False),
        Request(0, (7, 8)),
        Request(1, (2, 9)),
    ]


def test_fewer_choices_are_the_first_ones(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path), most=1)
    assert (trace.routed, [request.experts for request in trace.requests]) == (1, [(79, 5), (2,), (7,), (2,)])
    assert read_trace(written(tmp_path), most=3) == read_trace(written(tmp_path))


def test_a_trace_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Qwen3-30B-A3B"):
        read_trace(written(tmp_path, model="/x/other.gguf"))


def test_experts_have_the_bytes_of_published_files() -> None:
    """Sources: the same experts' bytes in Q4_K_M files, as recorded with the traces."""
    assert {shape.name: shape.expert_nbytes for shape in SHAPES} == {
        "gpt-oss-120b": 13219200,
        "Qwen3-30B-A3B": 2654208,
        "Gemma-4-26B-A4B": 3593216,
    }


def test_a_table_has_the_bytes_that_are_not_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replayed = [{"LRU": 0.0, "graphcore": 0.5, "optimum": 1.0}] * 7
    rows = list(table(read_trace(written(tmp_path)), replayed))
    assert rows[4] == "| 3 % | 0.5 GB | 0.0 %, 1019 MB | 50.0 %, 510 MB | 100.0 %, 0 MB | 3.0 %, 989 MB |"
    main([str(tmp_path)])
    # 13 slots are more than all experts of the trace: a decoded token finds 7 of layer 0 and 2 of layer 1
    assert "| 5 % | 0.8 GB | 50.0 %, 510 MB | 50.0 %, 510 MB | 50.0 %, 510 MB |" in capsys.readouterr().out


def test_the_lowest_rate_of_all_traces_counts() -> None:
    first, second = [{"graphcore": 0.5}] * 7, [{"graphcore": 0.25}] * 3 + [{"graphcore": 0.75}] * 4
    assert list(lowest([first, second]))[-1] == f"| lowest |{' 25.0 % |' * 3}{' 50.0 % |' * 4}"


def test_the_plan_knows_the_documented_rates() -> None:
    page = (ROOT / "docs" / "streaming.md").read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(page) if text.startswith("| lowest |"))
    shares, rates = ([float(cell.strip(" %")) / 100 for cell in page[at].split("|")[2:-1]] for at in (line - 2, line))
    assert [share for share, _ in EXPERT_HITS] == pytest.approx([0, *shares, 1])
    assert [rate for _, rate in EXPERT_HITS] == pytest.approx([0, *rates, 1])
