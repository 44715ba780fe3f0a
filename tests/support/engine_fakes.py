"""Parts of an engine that are simple, known or broken: runners, drafters, queues, samplers and caches."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcore import Engine
from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.model_runner import RunnerSizes
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.programs import DecodeStep
from graphcore.engine.queue import RequestQueue
from graphcore.engine.request import Request
from graphcore.engine.request_handle import RequestHandle
from graphcore.engine.speculation.draft_model import DraftModel
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.prompt_lookup import MATCHES, LookupSpeculation
from graphcore.engine.speculation.self_speculation import SelfSpeculation
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.graph.program import Program
from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.ops.draw import Draw, choose_token
from graphcore.kernels.ops.kv_formats import heads_of, kept_at
from graphcore.kvcache.buffers import KVCache, LayerCache, RecurrentCache, allocate_cache
from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.sampling_params import KERNEL_PARAMETERS, WHOLE_NUMBERS, SamplingParams
from graphcore.streaming.policy import Policy, Resident
from graphcore.streaming.scheduler import StoppedError, never

# A runner without weights: keys are chains of hashes, and a token is a hash of all that the row's caches hold.
#
# So a token is wrong as soon as one position did not run, ran twice, ran with other bits or is read from another page.
#
# Legend: B rows, V vocab.

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


# A queue without a thread: a test does its work, one pass or job at a time.


class SteppedQueue(RequestQueue):
    """A queue whose work is done by `step`."""

    def _start(self) -> None:
        """Start no thread."""

    @torch.inference_mode()
    def step(self) -> bool:
        """Do the next work as the thread does; return False if there is none."""
        self.end_overdue()
        with self.changes:
            work = self.next_work()
        if work is not None:
            work()
        return work is not None


# Speculation for tests: drafters that know the answer and draft it with errors, and steps that cost nothing.


class FreeSteps(StepCosts):
    """Steps that cost the same for any number of tokens, so that all drafts are checked, whatever a clock says."""

    def __init__(self, cost: float = 1.0) -> None:
        super().__init__(lambda tokens: cost)

    def record(self, tokens: int, seconds: float) -> None:
        """Record nothing."""


class FallibleDrafter(Drafter):
    """A drafter that knows an answer, and drafts some of its tokens wrong.

    Args:
        error_rate: share of tokens that are drafted wrong.
        vocab: number of tokens.
    """

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], error_rate: float, vocab: int) -> None:
        self.num_tokens = len(prompt)
        self._ids, self._draw = [*prompt, *answer], random.Random(len(prompt))
        self._error_rate, self._vocab = error_rate, vocab

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.num_tokens += len(token_ids)

    def propose(self, most: int) -> Draft:
        """Return the next tokens, some of them wrong."""
        ids = self._ids[self.num_tokens : self.num_tokens + most]
        wrong = [(one + (self._draw.random() < self._error_rate)) % self._vocab for one in ids]
        return Draft(wrong, [MATCHES.of(30)] * len(wrong))


class FallibleModel(DraftModel):
    """A draft model whose steps run, but whose tokens are those of a known answer, some of them wrong.

    Args:
        answer_of: function that returns what is known of a request's answer.
        error_rate: share of tokens that are drafted wrong.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        steps: DraftSteps,
        answer_of: Callable[[Request], Sequence[int]],
        error_rate: float,
    ) -> None:
        super().__init__(runner, steps)
        self._answer_of, self._error_rate, self._random = answer_of, error_rate, random.Random(1)

    def choose(self, request: Request, program: Program, at: int, draw: Draw) -> int | None:
        """Return the token at the draw's position of the answer, or a wrong one; the own choice where it is unknown."""
        answer, place = self._answer_of(request), draw.position - len(request.prompt_ids)
        token = answer[place] if place < len(answer) else super().choose(request, program, at, draw)
        return None if token is None else (token + (self._random.random() < self._error_rate)) % self._vocab


class KnownAnswers:
    """Speculation from known answers, a part of whose tokens is drafted wrong.

    Attributes:
        answers: answers by prompt; drafts of other prompts are all wrong, or a draft model's own.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}

    def patch(self, replace: Callable[[object, str, object], None]) -> None:
        """Replace both kinds of speculation, with a function such as `setattr`."""
        replace(LookupSpeculation, "of", self._lookup_of)
        replace(SelfSpeculation, "of", self._self_of)

    def _lookup_of(self, runner: ProgramRunner) -> LookupSpeculation:
        vocab = runner.sizes.vocab

        def drafter_of(request: Request) -> Drafter:
            answer = self.answers.get(tuple(request.prompt_ids), [2] * 20)
            return FallibleDrafter(request.prompt_ids, [*answer, *[1] * 20], 0.3, vocab)

        return LookupSpeculation(FreeSteps(), runner.draft_tokens, drafter_of)

    def _self_of(self, runner: ProgramRunner, steps: DraftSteps) -> SelfSpeculation:
        model = FallibleModel(runner, steps, lambda one: self.answers.get(tuple(one.prompt_ids), ()), 0.3)
        return SelfSpeculation(FreeSteps(), runner.draft_tokens, model, FreeSteps(0.0))


# Requests that come while others run: some together, some after a token of an earlier one, at any machine's pace.

TOGETHER = 4  # requests of a group: they share passes even if the whole group ends before the next one comes
TOKENS = (0, 1, 3)  # tokens of a group's last request that the next group waits for; 0 is none


def submit_staggered(
    engine: Engine, submits: Iterable[Callable[[], RequestHandle]], generator: random.Random
) -> list[RequestHandle]:
    """Return the handles of all requests, in order.

    Args:
        engine: engine that all of them run in.
        submits: functions that submit one request each and return its handle.
        generator: source of the choice how long each group waits for the one before.
    """
    handles: list[RequestHandle] = []
    waiting = list(submits)
    while waiting:
        with engine.holding_back():  # so that none of the group ends before the others are there
            handles += [submit() for submit in waiting[:TOGETHER]]
        del waiting[:TOGETHER]
        tokens = generator.choice(TOKENS)
        if tokens:
            handles[-1].event(tokens - 1)
    return handles


# Choices of one token, `Draw`, with their sampling parameters as keywords.

OWN = tuple(one.name for one in fields(Draw) if one.name != "params")


def draw_of(**values: Any) -> Draw:
    """Return a draw; the defaults take the likeliest token."""
    return changed(Draw(SamplingParams()), **values)


def changed(draw: Draw, **values: Any) -> Draw:
    """Return a draw with other values of its fields and of its sampling parameters."""
    own = {name: values.pop(name) for name in OWN if name in values}
    return replace(draw, params=replace(draw.params, **values), **own)


# Sampling steps of a device in plain torch, for engines on `FakeCuda`: Triton's interpreter takes a second for a step.
#
# That kernels choose what is chosen here: tests/unit/kernels/gpu/sampling.

FLOW = "Tensor(a!) token_ids, Tensor(b!) starts, Tensor(c!) counts, Tensor(d!) left, Tensor ends"
OUTPUTS = "Tensor(e!) chosen, Tensor(f!) report"
DRAWING = "Tensor numbers, Tensor seeds, Tensor(z!) seen, bool has_top_k_top_p"
LIBRARY = torch.library.Library("graphcore_tests", "DEF")
LIBRARY.define(f"likeliest(Tensor logits, {FLOW}, {OUTPUTS}) -> ()")
LIBRARY.define(f"drawn(Tensor logits, {DRAWING}, {FLOW}, {OUTPUTS}) -> ()")


def likeliest(logits: Tensor, *flow: Tensor) -> None:
    rows = range(len(logits))
    go_on(logits, [draw_of() for _ in rows], *flow)


def drawn(logits: Tensor, numbers: Tensor, seeds: Tensor, seen: Tensor, has_top_k_top_p: bool, *flow: Tensor) -> None:
    _, starts, counts, *_ = flow
    draws = [
        draw_of(seed=seed, position=start + count, seen=seen[row].clone(), **values_of(own))
        for row, (seed, start, count, own) in enumerate(
            zip(seeds.tolist(), starts.tolist(), counts.tolist(), numbers.tolist(), strict=True)
        )
    ]
    for row, count in enumerate(counts.tolist()):
        assert has_top_k_top_p or not count or (draws[row].params.top_k == 0 and draws[row].params.top_p == 1.0), (
            "this graph cuts no tokens"
        )
    for row, token in go_on(logits, draws, *flow):
        seen[row, token] = 1


def values_of(numbers: list[float]) -> dict[str, float | int]:
    """Return the sampling parameters of a row by name."""
    named = dict(zip(KERNEL_PARAMETERS, numbers, strict=True))
    return {name: int(value) if name in WHOLE_NUMBERS else value for name, value in named.items()}


def go_on(
    logits: Tensor,
    draws: list[Draw],
    token_ids: Tensor,
    starts: Tensor,
    counts: Tensor,
    left: Tensor,
    ends: Tensor,
    chosen: Tensor,
    report: Tensor,
) -> list[tuple[int, int]]:
    """Choose a token for each row that has one in this step; return the rows with their tokens."""
    has_token = counts.tolist()
    starts += counts
    made = []
    for row, draw in enumerate(draws):
        if not has_token[row]:
            report[row] = torch.tensor([-1.0, 0.0, 0.0])
            continue
        num_bad = int((~logits[row].isfinite()).sum())
        token = 0 if num_bad else choose_token(logits[row], draw)
        made.append((row, token))
        report[row] = torch.stack([torch.tensor(token), logits[row].log_softmax(-1)[token], torch.tensor(num_bad)])
        left[row] -= 1
        counts[row] = int(left[row] > 0 and token not in ends[row].tolist())
        token_ids[row], chosen[row] = token, token
    return made


LIBRARY.impl("likeliest", likeliest, "CompositeExplicitAutograd")
LIBRARY.impl("drawn", lambda *arguments: drawn(*arguments), "CompositeExplicitAutograd")


def choose_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines choose in plain torch, from now on, where a GPU's kernels would."""
    ops, folder = torch.ops.graphcore_tests, "graphcore.kernels.gpu.sampling"
    monkeypatch.setattr(f"{folder}.likeliest.choose_likeliest", lambda *each: ops.likeliest.default(*each))
    monkeypatch.setattr(f"{folder}.drawn.choose_drawn", lambda *each: ops.drawn.default(*each))


# Caches whose pages lie in another order than the engine gives them, and copies of what they hold.

Snapshot = list[tuple[Tensor, Tensor]]


def shuffle_pages(caches: Sequence[LayerCache], seed: int = 0) -> None:
    """Give every sequence pages in random order, the same in all layers of one table; what the pages hold stays."""
    tables = {id(cache.table): cache.table for cache in caches if isinstance(cache, KVCache)}
    generator = torch.Generator().manual_seed(seed)
    for table in tables.values():
        order = 1 + torch.randperm(table.numel(), generator=generator)
        table.copy_(order.view_as(table))


def give_in_random_order(pages: PageAllocator, seed: int = 0) -> None:
    """Let free pages be given in random order."""
    for table in pages.tables:
        random.Random(seed).shuffle(table._free)


def snapshot(caches: Sequence[LayerCache], row: int) -> Snapshot:
    """Return a copy of what layers keep of a row: all pages that the tables name, or its states."""
    return [
        cache.copy_out(cache.table[row] if isinstance(cache, KVCache) else row)  # type: ignore[arg-type,attr-defined]
        for cache in {id(cache): cache for cache in caches}.values()
    ]


def same(one: Snapshot, other: Snapshot) -> bool:
    """Return whether two copies are equal to the bit."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def pages_of(tensor: Tensor, cache: LayerCache, row: int | slice) -> Tensor:
    """Return what a cache's tensor holds of a sequence, or of several: its pages [N, K, G, E], or its state."""
    return tensor[cache.table[row]] if isinstance(cache, KVCache) else tensor[row]


def heads_at(pool: Tensor, pages: list[int]) -> Tensor:
    """Return what pages hold, [n, K, G, E]; codes as the numbers that they mean."""
    kept = kept_at(pool, torch.tensor(pages))
    return kept if pool.dtype != torch.uint8 else heads_of(kept, torch.float32)


@torch.inference_mode()
def seen_by_next(runner: ProgramRunner, row: int, tokens: int) -> list[Tensor]:
    """Return what the caches hold of a row for its next token: keys and values [K, L, E] in order, and states."""
    found: list[Tensor] = []
    tables = {id(cache): table for table in runner.pages.tables for cache in table.caches}
    layers = zip(runner.builder.caches, runner.builder.decoder.spec.blocks, strict=True)
    for cache, block in {id(cache): (cache, block) for cache, block in layers}.values():
        if isinstance(cache, RecurrentCache):
            found += cache.copy_out(row)
            continue
        table = tables[id(cache)]
        numbers = table.numbers(tokens, tokens)
        held = [heads_at(each, [table.rows[row][number] for number in numbers]) for each in cache.tensors]
        window = getattr(block.attention, "window", 0) or 0  # layers with as many pages share a table
        first = max(0, tokens - window + 1) if window else 0
        begin = numbers.start * table.page
        found += [each.transpose(0, 1).flatten(1, 2)[:, first - begin : tokens - begin] for each in held]
    return found
