"""A policy is one module: chosen by its name, it moves what the plan has move, and answers stay what they were."""

import re
from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = pytest.mark.thorough

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "llama3"
MODULE = '''"""streaming.policy=lazy: each group comes when it is asked for, and is fetched again for every use."""

import sys
from typing import Any

from graphcore.streaming.policy import RingPolicy, StreamingPolicy


class Lazy(RingPolicy[Any, Any]):
    """Brings one group at a time."""

    def acquire(self, group: int) -> None:
        """Fill the group's slot, and wait for that."""
        if group in self.ring.work:
            filling = self.ring.filler.begin(group, self.ring.work[group], None)
            self.ring.filler.wait(filling)
            self.ring.filler.release(filling)
            sys.stdout.write(f"lazy {group}\\n")

    def release(self, group: int) -> None:
        """Nothing is moved ahead, so nothing waits for it."""


LAZY = StreamingPolicy("lazy", Lazy)
'''
RUN = ("generate", f"model.checkpoint={TINY}", "prompt_ids=[1,2,3]", "device=cpu", "graph=eager", "max_new_tokens=4")
LAZY = (*RUN, "streaming.policy=lazy", "progress=false")


def test_a_policy_is_one_module(checkout: Checkout) -> None:
    refused = checkout.run(*LAZY)
    assert refused.status == 2, "there is such a policy before it is added"
    assert "streaming.policy=lazy is not one of auto, on, off" in refused.error
    checkout.add("graphcore/streaming/policies/lazy.py", MODULE)
    checkout.assert_follows("A policy")
    done, resident = checkout.run(*LAZY), checkout.run(*RUN)
    assert (done.status, resident.status) == (0, 0), done.error
    assert done.result is not None
    assert resident.result is not None
    assert done.result["streaming"]["policy"] == "lazy"
    ids = [result["token_ids"] for result in (done.result, resident.result)]
    assert ids[0] == ids[1]
    groups = re.findall(r"lazy \d+", done.out)
    passes = len(ids[0])  # the prompt's gives the first token
    assert len(groups) == passes * len(set(groups))
    assert len(set(groups)) > 1
    checkout.assert_common_tests_pass([("auto  off  on", "lazy  ")])


def test_what_a_policy_does_not_bring_is_not_there(checkout: Checkout) -> None:
    """The slots are filled by this policy alone: without its filling the answer is another one."""
    checkout.add("graphcore/streaming/policies/lazy.py", MODULE.replace("if group in self.ring.work", "if False"))
    done, resident = checkout.run(*LAZY), checkout.run(*RUN)
    assert done.result is not None
    assert resident.result is not None
    assert done.result.get("token_ids") != resident.result["token_ids"]
