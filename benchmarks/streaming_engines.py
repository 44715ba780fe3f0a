"""The engines that streaming_compare.py times, behind one interface: load, then tokens one after the other.

Run as `python streaming_engines.py NAME JOB`, JOB being JSON (see `Job`): prints a line of JSON when it has loaded and
another when it has run, then ends; with `new_tokens` 0 it only loads, which is how second copies of a model are written
and kernels compiled before anything is timed. What an engine itself prints goes to standard error. An engine may run
in an environment that has neither graphcore nor the other engines.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import LlamaCpp, prompt_ids
from reporting import installed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

OnToken = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        source: the model's folder; for llama.cpp its GGUF file.
        budget: bytes that the engine may keep weights in, where it can be told.
        scratch: a folder of the engine's own.
        overrides: settings of graphcore.
    """

    source: str
    threads: int
    prompt_tokens: int
    new_tokens: int
    budget: int | None
    scratch: str
    overrides: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens + 32


class StreamingEngine(ABC):
    """A loaded model that may be larger than memory.

    Attributes:
        packages: whose versions a report names.
        prepares: whether the first load writes something that later ones find.
    """

    packages: tuple[str, ...]
    prepares: bool = False

    @abstractmethod
    def __init__(self, job: Job) -> None:
        """Load the model."""

    @abstractmethod
    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        """Return that many tokens, each the likeliest; `on_token` is called as each is there."""


class Graphcore(StreamingEngine):
    packages = ("graphcore", "torch")
    prepares = True  # the compile cache
    policy = "off"

    def __init__(self, job: Job) -> None:
        from graphcore import Engine

        overrides = [f"threads={job.threads}", f"context_length={job.context}", *job.overrides]
        if job.budget is not None:
            overrides.append(f"streaming.memory_budget={job.budget}")
        self.engine = Engine.load(job.source, streaming=self.policy, overrides=overrides)
        self.engine.warm_up()

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        from graphcore.engine.sampler import SamplingParams

        run = self.engine.open_run([token_ids], new_tokens, (), SamplingParams(), end_ids=frozenset())
        chosen = []
        for event in run.events():
            on_token()
            chosen.append(event.token_id)
        return chosen


class GraphcoreOn(Graphcore):
    policy = "on"


class GraphcoreAuto(Graphcore):
    policy = "auto"


class MappedLlamaCpp(StreamingEngine):
    packages = ("llama-cpp-python",)

    def __init__(self, job: Job) -> None:
        self.engine = LlamaCpp(job.source, job.threads, job.context)  # maps the file unless told not to

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        chosen = [self.engine.prefill(token_ids)]
        on_token()
        while len(chosen) < new_tokens:
            chosen += self.engine.decode(chosen[-1], 1)
            on_token()
        return chosen


class DiskOffload(StreamingEngine):
    """accelerate's disk offload: layers are read from the mapped file before use and dropped after it."""

    packages = ("accelerate", "transformers", "torch")

    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job.threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            job.source, dtype=torch.bfloat16, offload_folder=job.scratch, **self.placement(job)
        )

    def placement(self, job: Job) -> dict[str, Any]:
        return {"device_map": {"": "disk"}}

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        return generate_by_transformers(self.model, token_ids, new_tokens, on_token)


class BudgetedDiskOffload(DiskOffload):
    """The same, but what fits the budget stays in memory."""

    def placement(self, job: Job) -> dict[str, Any]:
        return {"device_map": "auto", "max_memory": {"cpu": job.budget}}


class AirLLM(StreamingEngine):
    """AirLLM on the CPU; at its first load it writes a second copy of the model, one file per layer."""

    packages = ("airllm", "transformers", "torch")
    prepares = True

    def __init__(self, job: Job) -> None:
        import torch
        from airllm import AirLLMBaseModel

        class WithoutTokenizer(AirLLMBaseModel):
            def get_tokenizer(self, hf_token: str | None = None) -> None:
                """Return nothing: the runs are of token ids, and a random model has no tokenizer."""

        torch.set_num_threads(job.threads)
        streamed = WithoutTokenizer(
            job.source, device="cpu", dtype=torch.bfloat16, layer_shards_saving_path=job.scratch
        )
        self.model = streamed.model

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        return generate_by_transformers(self.model, token_ids, new_tokens, on_token)


def generate_by_transformers(
    model: "PreTrainedModel", token_ids: list[int], new_tokens: int, on_token: OnToken
) -> list[int]:
    """Return the likeliest tokens by `model.generate`, none of which ends the text."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Listener(BaseStreamer):
        has_prompt = False

        def put(self, value: "Tensor") -> None:
            if self.has_prompt:
                on_token()
            self.has_prompt = True  # the first call brings the prompt

        def end(self) -> None:
            pass

    prompt = torch.tensor([token_ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=Listener(),
    )
    return out[0, len(token_ids) :].tolist()


STREAMING_ENGINES: dict[str, type[StreamingEngine]] = {
    "graphcore-on": GraphcoreOn,
    "graphcore-auto": GraphcoreAuto,
    "graphcore-off": Graphcore,
    "airllm": AirLLM,
    "accelerate-disk": DiskOffload,
    "accelerate-auto": BudgetedDiskOffload,
    "llama.cpp": MappedLlamaCpp,
}


def timed_run(engine: StreamingEngine, job: Job) -> dict[str, object]:
    """Return the seconds until the first token and of each one after it, and the tokens."""
    times = [time.perf_counter()]
    tokens = engine.generate(prompt_ids(job.prompt_tokens), job.new_tokens, lambda: times.append(time.perf_counter()))
    seconds = [after - before for before, after in pairwise(times)]
    return {"first_token_seconds": seconds[0], "token_seconds": seconds[1:], "tokens": tokens}


def peak_resident_nbytes() -> int:
    """Return the most memory that this process had resident, mapped file pages included."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    name, text = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    job = Job(**json.loads(text))
    began = time.perf_counter()
    engine = STREAMING_ENGINES[name](job)
    versions = {package: installed(package) for package in engine.packages}
    loaded = {"load_seconds": time.perf_counter() - began, "versions": versions}
    print(json.dumps(loaded), file=answers, flush=True)
    if job.new_tokens:
        run = timed_run(engine, job)
        print(json.dumps({**run, "peak_resident_bytes": peak_resident_nbytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
