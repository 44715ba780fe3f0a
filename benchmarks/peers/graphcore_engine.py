"""graphcore itself, with what is asked for and with other settings."""

import json
from collections.abc import Callable
from functools import partial

from peer import OnToken, Peer, PeerEngine, StreamedRun, StreamingEngine, StreamingPeer, WholeRuns


class Graphcore(PeerEngine):
    def __init__(self, source: str, threads: int, context: int, *overrides: str) -> None:
        from graphcore import Engine
        from graphcore.config.compose import compose_settings
        from graphcore.tasks.task_engine import own_runner

        own = f"context_length={context}", f"threads={threads}", "sampling=greedy"
        settings = [*json.loads(source), *own, *overrides]
        engine = Engine.from_settings(compose_settings(settings))
        engine.warm_up()
        self.engine, self.runner = engine, own_runner(engine, "bench")
        self.whole_runs = WholeRuns(partial(engine.generate, ignore_eos=True, temperature=0))

    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0, sequences: int = 1) -> dict[str, object]:
        if sequences == 1:
            return super().timed_run(prompt_tokens, new_tokens, depth)
        self.refuse(depth=depth)
        return self.whole_runs.rates(prompt_tokens, new_tokens, sequences)

    def weight_nbytes(self) -> int:
        from graphcore.tasks.measuring.weight_reads import step_nbytes

        return step_nbytes(self.runner.builder.decoder, 1)

    def prefill(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            self.length = len(token_ids)
            return int(self.runner.extend([token_ids], [0]).argmax())

    def extend(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            self.length += len(token_ids)
            return int(self.runner.extend([token_ids], [self.length - len(token_ids)]).argmax())

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        import torch

        from graphcore.streaming.scheduler import run_program

        with torch.inference_mode():
            program = self.runner.program("decode", 1, is_greedy=True)
            program.state.put_rows([[token_id]], [self.length])
            chosen = []
            for position in range(self.length, self.length + new_tokens):
                self.runner.reserve(0, position, position + 1)
                run_program(program, self.runner.policy)
                chosen.append(int(program.state.chosen))
            return chosen


class StreamedGraphcore(StreamingEngine):
    packages = ("graphcore", "torch")
    prepares = True  # the compile cache
    policy = "off"

    def __init__(self, run: StreamedRun) -> None:
        from graphcore import Engine

        overrides = [f"threads={run.threads}", f"context_length={run.context}", "sampling=greedy", *run.overrides]
        if run.budget is not None:
            overrides.append(f"streaming.memory_budget={run.budget}")
        self.engine = Engine.load(run.source, streaming=self.policy, overrides=overrides)
        self.engine.warm_up()

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        chosen = []
        for event in self.engine.submit(token_ids, new_tokens, ignore_eos=True, temperature=0):
            on_token()
            chosen.append(event.token_id)
        return chosen


class GraphcoreOn(StreamedGraphcore):
    policy = "on"


class GraphcoreAuto(StreamedGraphcore):
    policy = "auto"


def with_settings(*overrides: str) -> Callable[[str, int, int], Graphcore]:
    """Return how graphcore is loaded with settings of its own."""
    return lambda source, threads, context: Graphcore(source, threads, context, *overrides)


PLAIN = Peer("graphcore", Graphcore)
INT8 = Peer("graphcore-int8", with_settings("quant.activations=int8"))
FP32 = Peer("graphcore-fp32", with_settings("dtype=fp32"))
EAGER = Peer("graphcore-eager", with_settings("graph=eager"))
COMPILED = Peer("graphcore-compiled", with_settings("graph=compiled"))
STREAMED = StreamingPeer("graphcore-on", GraphcoreOn)
PARTLY_STREAMED = StreamingPeer("graphcore-auto", GraphcoreAuto)
RESIDENT = StreamingPeer("graphcore-off", StreamedGraphcore)
