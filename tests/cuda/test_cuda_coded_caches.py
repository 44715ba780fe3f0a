"""Keys and values in codes on a GPU, and pages that leave it: near transformers', captured as eager, whole again.

Tolerances of logits are those of tests/integration/test_coded_caches.py, whose docstring has their reasons.
"""

import pytest
import torch
from support.tiny_models import TinyModel
from torch import Tensor

from graphcore import Engine

NEAR = {"q8_0": 4e-2, "q4_0": 0.5, "q8_0,q4_0": 0.5}  # of transformers' logits: rms of the error over that of logits
SAME = {"q8_0": 3e-3, "q4_0": 2e-2, "q8_0,q4_0": 2e-2}  # the same between two ways to run
NAMES = ("qwen3", "mistral")  # heads of whole blocks: full attention, and a window
SECONDS = 120.0


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu() - expected.cpu()).norm() / expected.cpu().norm())


@pytest.mark.parametrize("kv", NEAR)
@pytest.mark.parametrize("name", NAMES)
def test_logits_over_codes_stay_near_transformers_and_ways_to_run_agree(
    name: str, kv: str, tiny_model, load_on
) -> None:
    tiny: TinyModel = tiny_model(name)
    eager, captured = (load_on(tiny.folder, f"kv_dtype='{kv}'", graph=graph) for graph in ("eager", "captured"))
    found = [engine.logits(tiny.ids, by_token=by_token) for engine in (eager, captured) for by_token in (False, True)]
    for logits in found:
        assert relative(logits, tiny.logits) < NEAR[kv]
        assert relative(logits, found[0]) < SAME[kv]


@pytest.mark.parametrize("kv", ["auto", "q8_0"])
def test_sequences_and_states_that_leave_the_device_come_back_whole(kv: str, tiny_model, load_on) -> None:
    """Three sequences share the pages of one and a half, beside a forward state that is swapped out, too."""
    tiny: TinyModel = tiny_model("qwen3")
    small = "context_length=64", "batching.max_sequences=3", "batching.cache_tokens=96"
    engine: Engine = load_on(tiny.folder, *small, f"kv_dtype={kv}")
    prompts = [tiny.ids[0, at : at + 20].tolist() for at in (0, 7, 15)]
    alone = [engine.generate([one], max_new_tokens=40, ignore_eos=True)[0].token_ids for one in prompts]
    ids = tiny.ids[:1, :30]
    whole = engine.logits(ids)
    swapped: list[int] = []
    leave = engine.runner.pages.copy_out
    engine.runner.pages.copy_out = lambda row, tokens: swapped.append(tokens) or leave(row, tokens)
    with engine.holding_back():
        handles = [engine.submit(one, 40, ignore_eos=True) for one in prompts]
    assert torch.equal(engine.logits(ids), whole), "a call that borrows the cache of those that run"
    assert [one.result(SECONDS).token_ids for one in handles] == alone
    assert swapped, "nobody was swapped out"
