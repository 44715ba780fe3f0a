"""The engines of test_engine_matrix.py: one for each kind of block and each way to run it, loaded once in a worker.

       captured   streamed   eager
dense     *          *         *        each with the answers that it gives when nothing runs beside them
window    *          *         *        and nothing is cached
...
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphcore import Engine
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle
from graphcore.nn.decoder import Decoder
from support.golden_models import VOCAB, write_checkpoint

SECONDS = 120.0
CHUNK, CONTEXT, SEQUENCES = 16, 96, 6
POOL = 128  # tokens that the caches hold: less than a fourth of what all sequences could have
GRAPHS: Mapping[str, Sequence[str]] = {  # results do not depend on the number of threads
    "captured": ("graph=auto",),
    # Keys and values of both layers, of the window kinds' first or second, are read from files.
    "streamed": ("graph=auto", "streaming=on", "streaming.kv_memory_budget=48kB", "threads=1"),
    "eager": ("graph=eager", "threads=1"),
}


def words(seed: int, count: int) -> list[int]:
    """Return random token ids."""
    return (np.random.PCG64(seed).random_raw(count) % np.uint64(VOCAB)).tolist()


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, and settings of `Engine.submit`."""

    prompt: Sequence[int]
    new: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def submit(self, engine: Engine, **more: Any) -> RequestHandle:
        asked = {"ignore_eos": True, "logprobs": True, **self.settings, **more}
        return engine.submit(list(self.prompt), self.new, **asked)


def what(answer: Generation) -> tuple[Any, ...]:
    """Return what an answer says, with its log probabilities, which show any other bit of the logits."""
    return answer.token_ids, answer.finish_reason, answer.logprobs


DRAWN = {"temperature": 1.3, "seed": 5, "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.02}
PENALISED = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.2,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 1,
}
REQUESTS = (  # less than a chunk, a chunk, more than one, more than the tiny models' window of 8
    Asked(words(1, 1), 9),
    Asked(words(2, 5), 7, DRAWN),
    Asked(words(3, 16), 6),
    Asked(words(4, 17), 10, {"temperature": 0.9, "seed": 1 << 40, "top_k": 20, "top_n_sigma": 1.5}),
    Asked(words(5, 33), 5),
    Asked(words(6, 50), 8, {**PENALISED, "temperature": 0.7, "seed": 7}),
    Asked(words(7, 20), 4, {"min_tokens": 3, "logit_bias": {3: 2.0}}),
    Asked(words(8, 2), 12, PENALISED),
)


class MatrixEngine:
    """An engine of the matrix."""

    def __init__(self, kind: str, graph: str, engine: Engine) -> None:
        self.kind, self.graph, self.engine = kind, graph, engine

    @property
    def tolerance(self) -> tuple[float, float]:
        """Largest error of a logit, and mean error of many, at logits of order one.

        Float32 rounds by up to 1e-5. A sum that ends on the other side of a rounding moves an int8 code of a ternary
        block's input by one; in half precision many do.
        """
        if self.kind != "ternary":
            return 3e-5, 3e-5
        return (0.1, 2e-3) if self.graph == "eager" else (0.8, 0.06)

    @property
    def admission(self) -> Any:
        assert isinstance(self.engine.batching, ContinuousBatching)
        return self.engine.batching._admission

    def forget(self) -> None:
        """Empty the prefix cache, as a new engine's is, once nothing runs."""
        with self.engine.while_idle(), torch.inference_mode():
            self.admission.clear_prefix_cache()

    def answer(self, asked: Asked, **more: Any) -> tuple[Any, ...]:
        """Return what a request is answered when nothing was computed before it and nothing runs beside it."""
        self.forget()
        return what(asked.submit(self.engine, **more).result(SECONDS))

    @cached_property
    def alone(self) -> Sequence[tuple[Any, ...]]:
        """The answers to `REQUESTS`, one at a time, each with an empty prefix cache."""
        return [self.answer(asked) for asked in REQUESTS]

    def check_idle(self) -> None:
        """Check that nothing runs, and that all pages are free once the prefix cache has forgotten everything."""
        self.forget()
        assert self.engine.status() == []
        tables = self.admission.pages.tables
        assert not any(held for table in tables for held in table.rows), "a row has pages that nobody uses"
        assert [table.num_free for table in tables] == [table.num_pages for table in tables], "pages are lost"
        prefixes = self.admission._prefixes
        rows = self.admission.pages.snapshot_rows(SEQUENCES)
        assert sorted(prefixes._free_snapshots) == list(rows), "rows of snapshots are lost"


class EngineMatrix:
    """Loads the engines at their first use and keeps them.

    Args:
        folder: empty folder for checkpoints and what tests write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folders: dict[str, Path] = {}
        self._engines: dict[tuple[str, ...], MatrixEngine] = {}

    def __call__(self, kind: str, graph: str, *settings: str) -> MatrixEngine:
        """Return the engine of a kind of block and a way to run it, with more settings than those of all engines."""
        key = (kind, graph, *settings)
        if key not in self._engines:
            self._engines[key] = MatrixEngine(kind, graph, self._load(*key))
        return self._engines[key]

    def _load(self, kind: str, graph: str, *settings: str) -> Engine:
        if kind not in self._folders:
            self._folders[kind] = write_checkpoint(kind, self.folder / kind)
        sizes = (f"batching.max_sequences={SEQUENCES}", f"context_length={CONTEXT}", f"prefill_chunk={CHUNK}")
        pool = f"batching.cache_tokens={POOL}"
        given = [*sizes, pool, *GRAPHS[graph], *settings]
        # Kernels take ternary blocks in half precision: in float32 these keep to the reference's order of operations.
        dtype = "fp16" if kind == "ternary" and graph != "eager" else "fp32"
        with replaced(Decoder, "least_part_nbytes", 0):  # parts are single matrices, as those of large models are
            engine = Engine.load(self._folders[kind], dtype=dtype, device="cpu", overrides=given)
        assert engine.choices.graph == {"streamed": "captured"}.get(graph, graph), engine.notes
        return engine

    def close(self) -> None:
        for one in self._engines.values():
            one.engine.close()


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute inside the block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
