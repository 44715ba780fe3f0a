"""A peer is one module: both comparisons find it, the one for models that fit runs it beside the others."""

import json
from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "llama3"
MODULE = '''"""A peer that counts upwards, in one speed and in another."""

import time

from peer import GeneratingEngine, OnToken, Peer, PeerEngine, StreamedRun, StreamingEngine, StreamingPeer


class Counting(PeerEngine):
    """Says the next number; `seconds` are slept for each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def weight_nbytes(self) -> int:
        return 1000

    def prefill(self, token_ids: list[int]) -> int:
        time.sleep(self.seconds)
        return token_ids[-1] + 1

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        time.sleep(self.seconds * new_tokens)
        return list(range(token_id + 1, token_id + 1 + new_tokens))


class Together(GeneratingEngine):
    """Sleeps for 0.1 s, and 0.02 s for each new token of all sequences together; no two prompts begin alike."""

    def __init__(self) -> None:
        self.first_tokens = set()

    def weight_nbytes(self) -> int:
        return 1000

    def run_together(self, prompts: list[list[int]], new_tokens: int) -> None:
        first = {prompt[0] for prompt in prompts}
        assert len(first) == len(prompts)
        assert not first & self.first_tokens
        self.first_tokens |= first
        time.sleep(0.08 + 0.02 * new_tokens)


class StreamedCounting(StreamingEngine):
    packages = ()

    def __init__(self, run: StreamedRun) -> None:
        self.run = run

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        for _ in range(new_tokens):
            on_token()
        return list(range(new_tokens))


COUNTING = Peer("counting", lambda source, threads, context: Counting(0.001))
SLOW = Peer("counting-slowly", lambda source, threads, context: Counting(0.1))
TOGETHER = Peer("counting-together", lambda source, threads, context: Together())
STREAMED = StreamingPeer("counting", StreamedCounting)
'''


def test_a_peer_is_one_module(checkout: Checkout) -> None:
    sizes = ["--prompt-tokens", "4", "--new-tokens", "5", "--repeats", "2", "--threads", "1"]
    where = ["--model", str(TINY), "--output", str(checkout.root / "out")]
    command = ["benchmarks/compare.py", "--engines", "counting", "counting-slowly", "--baseline", "counting-slowly"]
    assert "invalid choice: 'counting'" in checkout.script(*command).error
    checkout.add("benchmarks/peers/counting.py", MODULE)
    checkout.assert_follows("A peer")
    done = checkout.script(*command, *sizes, *where)
    assert done.status == 0, done.error
    assert "| counting |" in done.out
    report = json.loads((checkout.root / "out" / "llama3-4-5-native-1.json").read_text(encoding="utf-8"))
    assert report["runs"].keys() == {"counting", "counting-slowly"}
    assert [len(runs) for runs in report["runs"].values()] == [2, 2]
    assert report["runs"]["counting"][0]["tokens"] == [123, 124, 125, 126, 127]  # after the prompt's last, 121, and 122
    assert report["summary"]["counting"]["decode"]["ratio"] > 2
    assert report["summary"]["counting-slowly"]["decode"]["median"] < 11  # tokens/s
    checkout.assert_linter_passes()


def test_sequences_together_are_timed_by_whole_runs(checkout: Checkout) -> None:
    checkout.add("benchmarks/peers/counting.py", MODULE)
    sizes = ["--prompt-tokens", "4", "--new-tokens", "5", "--repeats", "1", "--threads", "1", "--sequences", "3"]
    where = ["--model", str(TINY), "--output", str(checkout.root / "out")]
    command = ["benchmarks/compare.py", "--engines"]
    done = checkout.script(*command, "counting-together", *sizes, *where)
    assert done.status == 0, done.error
    report = json.loads((checkout.root / "out" / "llama3-4-5-3-together-native-1.json").read_text(encoding="utf-8"))
    (run,) = report["runs"]["counting-together"]
    assert 80 < run["prefill"] < 120.1  # 3 x 4 tokens in 0.1 s
    assert 100 < run["decode"] < 200  # 3 x 5 tokens in 0.1 s, which is the difference of two runs
    done = checkout.script(*command, "counting", *sizes, *where)
    assert "Counting is compared with one sequence only; leave it out, or --sequences" in done.error


def test_a_streaming_peer_is_started_as_the_comparison_starts_it(checkout: Checkout) -> None:
    checkout.add("benchmarks/peers/counting.py", MODULE)
    assert "counting" in checkout.script("benchmarks/streaming_compare.py", "--help").out
    asked = {"source": "", "threads": 1, "prompt_tokens": 4, "new_tokens": 3, "budget": None, "scratch": ""}
    done = checkout.script("benchmarks/streaming/peer_process.py", "counting", json.dumps(asked))
    assert done.status == 0, done.error
    loaded, run = map(json.loads, done.out.splitlines())
    assert loaded["versions"] == {}
    assert run["tokens"] == [0, 1, 2]
    assert len(run["token_seconds"]) == 2
