"""A streamed run whose memory is sampled, as a process of its own: prints what was planned and what was there.

python budget_process.py FOLDER POLICY BUDGET CONTEXT PROMPT_TOKENS NEW_TOKENS [SETTING ...]
"""

import json
import sys
import threading
from pathlib import Path

from graphcore import Engine

INTERVAL = 0.003  # seconds between two samples


def resident_nbytes() -> int:
    """Return the memory that is really there, without pages of files. Source: proc(5), /proc/pid/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


class Sampler:
    """The peak of the process's memory while the block runs."""

    def __enter__(self) -> "Sampler":
        self.peak, self._ended = resident_nbytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.peak = max(self.peak, resident_nbytes())


def main() -> None:
    folder, policy, budget, context, prompt_tokens, new_tokens, *more = sys.argv[1:]
    overrides = [f"streaming.memory_budget={budget}", f"context_length={context}", *more]
    prompt = [[(7 * index) % 90 + 3 for index in range(int(prompt_tokens))]]
    with Engine.load(folder, streaming=policy, device="cpu", overrides=overrides) as engine:
        engine.warm_up()
        baseline = resident_nbytes()
        with Sampler() as sampler:
            engine.generate(prompt, max_new_tokens=int(new_tokens), ignore_eos=True)
        plan = engine.plan
        held = plan.total_nbytes - plan.other.workspace_nbytes
        print(
            json.dumps(
                {
                    "held": held,
                    "growth": sampler.peak - baseline,
                    "peak": sampler.peak,
                    "offloaded": 0 if plan.offloaded_kv is None else plan.offloaded_kv.nbytes,
                    "workspace": plan.other.workspace_nbytes,
                    "budget": plan.budget,
                    "streamed": len(plan.groups.streamed),
                    "slots": plan.groups.slots_nbytes,
                }
            )
        )


if __name__ == "__main__":
    main()
