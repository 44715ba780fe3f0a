"""The engines that compare.py times, behind one interface: load, then timed runs of prefill and greedy decode.

Run as `python engines.py NAME SOURCE THREADS CONTEXT`: says that it is ready with a line of JSON, then answers each
line "prompt_tokens new_tokens" on standard input with another. What an engine itself prints goes to standard error.
SOURCE is a model file or folder; for graphcore a JSON list of its settings.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class PeerEngine(ABC):
    """One loaded engine with an empty cache."""

    @abstractmethod
    def weight_nbytes(self) -> int:
        """Return the bytes of weights that a decode step reads: of an embedding table that is no head's nothing."""

    @abstractmethod
    def prefill(self, token_ids: list[int]) -> int:
        """Empty the cache, run the tokens, return the likeliest next token."""

    @abstractmethod
    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        """Return that many tokens, each the likeliest after the one before; the first run is of `token_id`."""


class Graphcore(PeerEngine):
    def __init__(self, source: str, threads: int, context: int, *overrides: str) -> None:
        from graphcore import Engine
        from graphcore.config.compose import compose_settings

        settings = [*json.loads(source), f"context_length={context}", f"threads={threads}", *overrides]
        self.engine = Engine.from_settings(compose_settings(settings))
        self.engine.warm_up()

    def weight_nbytes(self) -> int:
        from graphcore.tasks.weight_reads import step_nbytes

        return step_nbytes(self.engine.runner.builder.decoder, 1)

    def prefill(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            self.length = len(token_ids)
            return int(self.engine.runner.feed([token_ids], [0]).argmax())

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        import torch

        from graphcore.engine.passes import set_inputs
        from graphcore.streaming.scheduler import run_program

        with torch.inference_mode():
            program = self.engine.runner.program("decode", 1, is_greedy=True)
            set_inputs(program.state, [[token_id]], [self.length], 1, 1)
            chosen = []
            for _ in range(new_tokens):
                run_program(program, self.engine.runner.policy)
                chosen.append(int(program.state.chosen))
            return chosen


class LlamaCpp(PeerEngine):
    def __init__(self, path: str, threads: int, context: int) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(
            path, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False
        )
        self.vocab = self.llama.n_vocab()
        self.path = path

    def weight_nbytes(self) -> int:
        from gguf import GGUFReader

        tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(self.path).tensors}
        if "output.weight" in tensors:
            del tensors["token_embd.weight"]
        return sum(tensors.values())

    def prefill(self, token_ids: list[int]) -> int:
        self.llama.reset()
        self.llama.eval(token_ids)
        return self._likeliest()

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        chosen = []
        for _ in range(new_tokens):
            self.llama.eval([token_id])
            token_id = self._likeliest()
            chosen.append(token_id)
        return chosen

    def _likeliest(self) -> int:
        logits = self.llama._ctx.get_logits()
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


class Transformers(PeerEngine):
    def __init__(self, path: str, threads: int, context: int, compiles: bool = False) -> None:
        import torch
        from transformers import DynamicCache, StaticCache

        torch.set_num_threads(threads)
        self.model = transformers_model(path)
        self.new_cache: Callable[[], Cache] = DynamicCache
        self.step = self.model.forward
        if compiles:
            self.cache = StaticCache(config=self.model.config, max_cache_len=context)
            self.new_cache = self._emptied_cache
            self.step = torch.compile(self.model.forward, fullgraph=True, dynamic=False)

    def weight_nbytes(self) -> int:
        parameters = {parameter.data_ptr(): parameter.nbytes for parameter in self.model.parameters()}
        table = self.model.get_input_embeddings().weight
        is_tied = table.data_ptr() == self.model.get_output_embeddings().weight.data_ptr()
        return sum(parameters.values()) - (0 if is_tied else table.nbytes)

    def _emptied_cache(self) -> "Cache":
        self.cache.reset()
        return self.cache

    def prefill(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            self.cache = self.new_cache()
            self.length = len(token_ids)
            positions = torch.arange(self.length)
            out = self.model.forward(
                torch.tensor([token_ids]), past_key_values=self.cache, position_ids=positions[None], logits_to_keep=1
            )
            return int(out.logits[0, -1].argmax())

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        import torch

        chosen = []
        with torch.inference_mode():
            for index in range(new_tokens):
                positions = torch.tensor([[self.length + index]])
                out = self.step(torch.tensor([[token_id]]), past_key_values=self.cache, position_ids=positions)
                token_id = int(out.logits[0, -1].argmax())
                chosen.append(token_id)
        return chosen


def transformers_model(path: str) -> "PreTrainedModel":
    """Return transformers' model of a checkpoint in bf16; of a GGUF file it gets graphcore's unpacked weights."""
    import torch

    from graphcore.config.compose import compose_settings
    from graphcore.engine.assembly import match_model
    from graphcore.engine.model import open_model
    from graphcore.tasks.reference import load_reference

    settings = compose_settings([f"model.checkpoint={path}"])
    model = open_model(settings.model, 0, settings.cache_folder, lambda *_: None)
    _, loader = match_model(model, torch.float32)
    reference = load_reference(model, loader)
    reference.cast(torch.bfloat16)
    return reference.model.eval()


def transformers_compiled(path: str, threads: int, context: int) -> Transformers:
    return Transformers(path, threads, context, compiles=True)


def graphcore_int8(source: str, threads: int, context: int) -> Graphcore:
    return Graphcore(source, threads, context, "quant.activations=int8")


def graphcore_eager(source: str, threads: int, context: int) -> Graphcore:
    return Graphcore(source, threads, context, "graph=eager")


def graphcore_compiled(source: str, threads: int, context: int) -> Graphcore:
    return Graphcore(source, threads, context, "graph=compiled")


def graphcore_fp32(path: str, threads: int, context: int) -> Graphcore:
    return Graphcore(path, threads, context, "dtype=fp32")


ENGINES: dict[str, Callable[[str, int, int], PeerEngine]] = {
    "graphcore": Graphcore,
    "graphcore-int8": graphcore_int8,
    "graphcore-fp32": graphcore_fp32,
    "graphcore-eager": graphcore_eager,
    "graphcore-compiled": graphcore_compiled,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
    "transformers-compiled": transformers_compiled,
}


def prompt_ids(num_tokens: int) -> list[int]:
    """Return the prompt that every engine runs."""
    return [(7 * index) % 1000 + 100 for index in range(num_tokens)]


def timed_run(engine: PeerEngine, prompt_tokens: int, new_tokens: int) -> dict[str, object]:
    """Return tokens per second of a prefill and of a decode after it, and the tokens."""
    prompt = prompt_ids(prompt_tokens)
    began = time.perf_counter()
    token_id = engine.prefill(prompt)
    middle = time.perf_counter()
    chosen = engine.decode(token_id, new_tokens)
    ended = time.perf_counter()
    return {
        "prefill": prompt_tokens / (middle - began),
        "decode": new_tokens / (ended - middle),
        "tokens": chosen[:16],
    }


def main() -> None:
    name, path, threads, context = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    engine = ENGINES[name](path, int(threads), int(context))
    print(json.dumps({"weight_bytes": engine.weight_nbytes()}), file=answers, flush=True)
    for line in sys.stdin:
        prompt_tokens, new_tokens = map(int, line.split())
        print(json.dumps(timed_run(engine, prompt_tokens, new_tokens)), file=answers, flush=True)


if __name__ == "__main__":
    main()
