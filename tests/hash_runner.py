"""A runner without weights: keys are chains of hashes, and a token is a hash of all that the row's caches hold.

So a token is wrong as soon as one position did not run, ran twice, ran with other bits or is read from another page.

Legend: B rows, V vocab.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.model_runner import RunnerSizes
from graphcore.engine.programs import DecodeStep
from graphcore.kernels.backend import TorchBackend
from graphcore.kvcache.buffers import KVCache, RecurrentCache, allocate_cache
from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.streaming.policy import Policy, Resident
from graphcore.streaming.scheduler import StoppedError, never

NORM = NormSpec("rms", 1e-6)
WINDOW, PRIME, VOCAB, DRAFT_KIND = 8, 999_983, 29, 77
FULL = AttentionSpec(heads=1, kv_heads=1, head_dim=1, scale=1.0)
SLIDING = AttentionSpec(heads=1, kv_heads=1, head_dim=1, scale=1.0, window=WINDOW)
DELTA = DeltaSpec(key_heads=1, value_heads=1, key_dim=1, value_dim=1, width=2, eps=1e-6)
MODELS = {"full": (FULL,), "ring": (SLIDING,), "both": (FULL, SLIDING), "states": (FULL, DELTA), "recurrent": (DELTA,)}


def next_key(before: int, token: int, kind: int) -> int:
    """Return the key of a token after the key of the token before it."""
    return (before * 31 + token * 7 + kind * 1009 + 12_345) % PRIME


def token_of(keys: Mapping[int, int], state: int | None) -> int:
    """Return the token after the keys that a position sees, by position, and after the recurrent state, if any."""
    return (sum((at + 1) * key for at, key in keys.items()) + (state or 0) * 3) % VOCAB


@dataclass(eq=False)
class FakeProgram:
    """A program that runs tokens of some rows.

    Attributes:
        runs: row, tokens, first position and kind of each run.
    """

    runs: Sequence[tuple[int, Sequence[int], int, int]]
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    steps: Sequence["DraftStep"] = ()


class Moving(Policy):
    """A policy that says that weights move, so that passes can be aborted."""

    def acquire(self, group: int) -> None:
        """Do nothing."""

    def release(self, group: int) -> None:
        """Do nothing."""


class HashRunner:
    """A runner over real caches of one number for each position.

    Args:
        name: kinds of layers, one of MODELS.
        tokens: positions of the pool.
        has_kinds: True if the bits of a key depend on the length of its chunk, as on most devices.
    """

    def __init__(
        self, name: str, tokens: int, *, batch: int = 3, context: int = 32, chunk: int = 8, has_kinds: bool = True
    ) -> None:
        blocks = tuple(BlockSpec(8, NORM, attention, MLPSpec(8, "silu")) for attention in MODELS[name])
        spec, self.name = ModelSpec(8, VOCAB, blocks, NORM, context), name
        sizes = CacheSizes(batch, context, torch.float32, chunk, page=4, tokens=tokens, snapshots=2)
        self.caches = allocate_cache(spec, sizes, torch.device("cpu"))
        self.pages, self.chunks = PageAllocator(spec, self.caches), Chunks(chunk, 3)
        self.sizes = RunnerSizes(batch, chunk, VOCAB, context, context)
        self.device, self.backend = torch.device("cpu"), TorchBackend()
        self.prompt_tokens, self.has_kinds = chunk, has_kinds
        self.policy: Policy = Resident()
        self.programs = self
        self.finds_likeliest, self.most_together, self.most_rows = True, 4, batch + 4
        self.after_program: Callable[[], None] = do_nothing  # called inside passes; it may raise
        self.num_passes = 0
        self._tables = {id(cache): table for table in self.pages.tables for cache in table.caches}
        self._states = [cache.recurrent for cache in self.caches if isinstance(cache, RecurrentCache)]

    def kind(self, tokens: int) -> int:
        """Return the kind of the kernels that run so many tokens together: 0 for all that have the same bits."""
        return 0 if not self.has_kinds or tokens >= self.chunks.min_invariant else tokens

    def step(self, tokens: Mapping[int, tuple[Sequence[int], int]]) -> list[DecodeStep]:
        """Return programs of up to three tokens each, as `Programs.step`; a row's tokens may be in two of them."""
        each = [
            (row, [one], start + at, self.kind(1)) for row, (ids, start) in tokens.items() for at, one in enumerate(ids)
        ]
        steps = []
        for begin in range(0, len(each), 3):
            some = each[begin : begin + 3]
            rows = [row for row, *_ in some]
            places = {row: range(rows.index(row), rows.index(row) + rows.count(row)) for row in rows}
            steps.append(DecodeStep(FakeProgram(some), places))  # type: ignore[arg-type]
        return steps

    @contextmanager
    def forward_pass(
        self,
        decodes: Sequence[FakeProgram],
        chunks: Sequence[RowChunk],
        policy: Policy,
        is_stopped: Callable[[], bool] = never,
    ) -> Iterator[list[SimpleNamespace]]:
        """Run programs and chunks, as `ProgramRunner.forward_pass`."""
        self.num_passes += 1
        many = [FakeProgram([(one.row, one.ids, one.start, self.kind(len(one.ids)))]) for one in chunks]
        try:
            for program in (*decodes, *many):
                self._run(program)
                self.after_program()
                if is_stopped():
                    raise StoppedError
        except StoppedError:  # some layers have not run
            self._spoil([run for program in (*decodes, *many) for run in program.runs])
            raise
        except Exception:  # nobody knows what has been written
            for tensor in (tensor for cache in self.caches for tensor in cache.tensors):
                tensor.fill_(0.5)
            raise
        yield [program.state for program in many]

    def _spoil(self, runs: Sequence[tuple[int, Sequence[int], int, int]]) -> None:
        """Overwrite what the positions of some runs have written."""
        for row, ids, start, _ in runs:
            for table in self.pages.tables:
                for at in range(start, start + len(ids)):
                    for cache in table.caches:
                        cache.k[table.rows[row][at // 4], 0, at % 4] = 0.5
            for recurrent in self._states:
                recurrent[row] = 0.5

    def _run(self, program: FakeProgram) -> None:
        """Write a program's keys into the caches and choose the tokens after them."""
        chosen = [self._run_row(*one) for one in program.runs]
        program.state.logits = one_hot(chosen)
        program.state.chosen = torch.tensor(chosen)

    def _run_row(self, row: int, ids: Sequence[int], start: int, kind: int) -> int:
        """Run tokens of a row and return the next one."""
        assert 0 <= start <= start + len(ids) <= self.sizes.context
        seen: dict[int, int] = {}
        for layer, cache in enumerate(self.caches):
            if isinstance(cache, KVCache):
                table, entries = self._tables[id(cache)], cache.table[row].tolist()
                first = max(0, start - WINDOW + 1) if table.is_ring else 0
                keys = {at: self._key(cache, entries, at) for at in range(first, start)}
                for at, token in enumerate(ids, start):
                    page = entries[at // 4 % len(entries)]
                    assert page != 0, "a token is written to the null page"
                    assert sum(page in held.values() for held in table.rows) == 1, "another row reads this page"
                    keys[at] = next_key(keys.get(at - 1, 0), token, kind)
                    cache.k[page, 0, at % 4] = keys[at]
                    cache.v[page, 0, at % 4] = -keys[at]
                end = start + len(ids)
                visible = range(max(0, end - WINDOW) if table.is_ring else 0, end)
                seen |= {(layer + 1) * 100 + at: keys[at] for at in visible}
        state = None
        for recurrent in self._states:
            state = int(recurrent[row].item()) if start else 0
            for token in ids:
                state = next_key(state, token, kind)
            recurrent[row] = state
        return token_of(seen, state)

    def _key(self, cache: KVCache, entries: Sequence[int], at: int) -> int:
        page = entries[at // 4 % len(entries)]
        assert page != 0, "a token sees the null page"
        key = int(cache.k[page, 0, at % 4, 0].item())
        assert int(cache.v[page, 0, at % 4, 0].item()) == -key, "keys and values are of two sequences"
        return key

    def alone(self, prompt: Sequence[int], max_new_tokens: int, end_ids: frozenset[int]) -> tuple[list[int], str]:
        """Return a request's tokens and the reason of its end where no other request ever ran, from lists alone."""
        keys, answer, begin = list[int](), list[int](), 0
        while True:
            ids = [*prompt, *answer]
            end = self.chunks.end(begin, len(prompt)) if begin < len(prompt) else begin + 1
            for token in ids[begin:end]:
                keys.append(next_key(keys[-1] if keys else 0, token, self.kind(end - begin)))
            begin = end
            if begin < len(prompt):
                continue
            seen: dict[int, int] = {}
            for layer, attention in enumerate(MODELS[self.name]):
                if isinstance(attention, AttentionSpec):
                    first = max(0, end - attention.window) if attention.window else 0
                    seen |= {(layer + 1) * 100 + at: keys[at] for at in range(first, end)}
            answer.append(token_of(seen, keys[-1] if self._states else None))
            if answer[-1] in end_ids:
                return answer, "end"
            if len(answer) == max_new_tokens:
                return answer, "length"
            if len(prompt) + len(answer) > self.sizes.context:
                return answer, "context"

    def check_counts(self, tree_pages: Sequence[set[int]]) -> None:
        """Check that every page is free, or counted once for each row and once if the prefix cache has it.

        A page that only the prefix cache has is idle.

        Args:
            tree_pages: pages of the prefix cache, by table.
        """
        for table, in_tree in zip(self.pages.tables, tree_pages, strict=True):
            users: dict[int, int] = {}
            for page in [*in_tree, *(page for held in table.rows for page in held.values())]:
                users[page] = users.get(page, 0) + 1
            assert users == table._refs
            assert set(table.idle) == {page for page in in_tree if users[page] == 1}
            assert sorted([*users, *table._free]) == list(range(1, 1 + table.num_pages))


class DraftStep:
    """A step of a draft model: its keys have bits of their own."""

    def __init__(self, runner: HashRunner, program: FakeProgram) -> None:
        self._runner, self._program = runner, program

    def replay(self) -> None:
        """Write keys of the draft's kind into the caches."""
        self._runner._run(self._program)


class DraftPrograms:
    """Programs of a draft model over the caches of a runner."""

    def __init__(self, runner: HashRunner) -> None:
        self._runner, self.most_together, self.most_rows = runner, runner.most_together, runner.most_rows

    def step(self, tokens: Mapping[int, tuple[Sequence[int], int]]) -> list[DecodeStep]:
        """Return programs as `HashRunner.step`, whose keys are those of no program of the runner."""
        found = self._runner.step(tokens)
        for program, _ in found:
            fake: Any = program
            fake.runs = [(row, ids, start, DRAFT_KIND) for row, ids, start, _ in fake.runs]
            fake.steps = [DraftStep(self._runner, fake)]
        return found


def do_nothing() -> None:
    """Do nothing."""


def one_hot(tokens: Sequence[int]) -> Tensor:
    """Return logits [B, V] whose likeliest tokens are these."""
    logits = torch.zeros(len(tokens), VOCAB)
    logits[range(len(tokens)), tokens] = 5.0
    return logits
