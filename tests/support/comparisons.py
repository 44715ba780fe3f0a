"""Plain statements that results are compared with, and what tests count."""

import gc
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from graphcore import Engine
from graphcore.engine.masks import Allowed
from graphcore.tokenizer.grammar import GrammarTokens

# Which keys each query sees, as additive masks: the plain statement that tests hold attention to.
#
# Legend: T tokens.
#
# The engine itself builds no such mask: kernels/ops/attend.py compares positions (CUDA) or slices the live keys (CPU).
# These two say the same thing in the form that transformers and scaled_dot_product_attention take.


def causal_mask(seq_len: int) -> Tensor:
    """Return [1, 1, T, T] float32: 0 where query t sees key s (s <= t), -inf where it does not."""
    return _additive(_distances(seq_len) >= 0)


def sliding_window_causal_mask(seq_len: int, window_size: int) -> Tensor:
    """Return [1, 1, T, T] float32: 0 for the last `window_size` keys, the query's own included, and -inf for others."""
    distances = _distances(seq_len)
    return _additive((distances >= 0) & (distances < window_size))


def _distances(seq_len: int) -> Tensor:
    """Return how far each key lies behind each query: [T, T] int64."""
    positions = torch.arange(seq_len)
    return positions[:, None] - positions


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(1, 1, *visible.shape).masked_fill(~visible, float("-inf"))


# Slots that give way by age, for tests of graphcore's own: written once more, in Python's own words.


@dataclass
class OldestFirst:
    """Slots of one layer.

    Attributes:
        held: expert in each slot that is taken.
        asked: number of the last call for an expert.
        hits, loads, without: experts that were there, that were put into a slot, and that found none.
    """

    num_slots: int
    held: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    hits: int = 0
    loads: int = 0
    without: int = 0

    def ask(self, experts: Iterable[int]) -> None:
        """Ask for experts, -1 for none, as one call."""
        self.calls += 1
        wanted = sorted(set(experts) - {-1})
        new = [expert for expert in wanted if expert not in self.held.values()]
        self.hits += len(wanted) - len(new)
        for expert in new:
            empty = [slot for slot in range(self.num_slots) if slot not in self.held]
            idle = [slot for slot, holder in sorted(self.held.items()) if holder not in wanted]
            if not empty and not idle:
                self.without += 1
                continue
            slot = empty[0] if empty else min(idle, key=lambda one: self.asked[self.held[one]])
            self.held[slot] = expert
            self.loads += 1
        self.asked.update(dict.fromkeys(wanted, self.calls))

    @property
    def places(self) -> dict[int, int]:
        """The slots of the experts that have one."""
        return {expert: slot for slot, expert in self.held.items()}


# Passes of latent attention against a loop over positions in float64: rows of keys and values in one pool.

HEADS, ROTATED, LATENT, PAGE, PAGES = 3, 8, 20, 4, 12
SCALE = 0.3


@dataclass
class LatentSequences:
    """Sequences whose rows grow pass by pass in a shuffled pool.

    Attributes:
        rows: float64 rows of each sequence so far, [L, R + C].
    """

    batch: int
    dtype: torch.dtype
    widths: tuple[int, int] = (ROTATED, LATENT)
    heads: int = HEADS
    rows: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.batch)
        width = sum(self.widths)
        self.rows = [torch.zeros(0, width, dtype=torch.float64) for _ in range(self.batch)]
        self.table = torch.randperm(self.batch * PAGES, generator=self.generator).int().view(self.batch, PAGES)
        self.pool = torch.full((self.table.numel(), 1, PAGE, width), torch.nan, dtype=self.dtype)
        self.values = torch.empty(self.table.numel(), 1, PAGE, 0, dtype=self.dtype)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def error(self, attend: Callable[..., Tensor], counts: Sequence[int], tokens: int) -> float:
        """Run a pass of `tokens`, of which `counts` are real; return the largest error of outputs."""
        rotated, latent = self.widths
        query = self._random(self.batch, tokens, self.heads, rotated + latent)
        key, value = self._random(self.batch, tokens, 1, rotated), self._random(self.batch, tokens, 1, latent)
        starts = torch.tensor([len(one) for one in self.rows])
        spans = self.table, starts, torch.tensor(counts), 0, SCALE
        found = attend(query, key, value, self.pool, self.values, *spans, values_from=rotated)
        assert found.shape == (self.batch, tokens, self.heads, latent)
        worst = 0.0
        for at, count in enumerate(counts):
            new = torch.cat((key, value), -1)[at, :count, 0].double()
            self.rows[at] = torch.cat((self.rows[at], new))
            for token in range(count):
                seen = self.rows[at][: int(starts[at]) + token + 1]
                weights = (query[at, token].double() @ seen.T * SCALE).softmax(-1)
                worst = max(worst, (found[at, token] - weights @ seen[:, rotated:]).abs().max().item())
            positions = torch.arange(len(self.rows[at]))
            stored = self.pool[self.table[at, positions // PAGE].long(), 0, positions % PAGE]
            assert torch.equal(stored.double(), self.rows[at])
        return worst


# When two ways of running one model agree: logits within a tolerance, and greedy tokens, but for ties.
#
# Legend: T tokens, V vocab.


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite where one is not a number."""
    difference = (found.double() - expected.double()).abs()
    return difference.max().item() if bool(difference.isfinite().all()) else float("inf")


def error_of_most(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of the nine tenths of all positions whose errors are least, of logits [..., V].

    In half precision a mixture sends a few tokens to other experts, where two have nearly the same score.
    """
    errors = (found.double() - expected.double()).abs().amax(-1).flatten()
    return (
        errors.sort().values[: errors.numel() * 9 // 10].max().item() if bool(errors.isfinite().all()) else float("inf")
    )


def step_logits(engine: Engine, rows: Sequence[Sequence[int]], prompt: int) -> torch.Tensor:
    """Return the logits after the prompt and after each token behind it, one by one: [len(rows), T - prompt + 1, V]."""
    with torch.inference_mode():
        steps = [engine.runner.extend([row[:prompt] for row in rows], [0] * len(rows)).cpu()]
        for at in range(prompt, len(rows[0])):
            steps.append(engine.runner.extend([[row[at]] for row in rows], [at] * len(rows)).cpu())
    return torch.stack(steps, dim=1)


def assert_same_tokens(
    found: Sequence[int], expected: Sequence[int], prompt: Sequence[int], judge: Engine, tolerance: float
) -> None:
    """Return if the tokens are the same up to a tie: two tokens whose logits differ by less than twice the tolerance.

    After a tie the texts are different texts, so nothing is compared behind it.

    Args:
        judge: whose logits say what a tie is.
    """
    assert len(found) == len(expected)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one == other:
            continue
        logits = judge.logits([[*prompt, *expected[:at]]])
        assert isinstance(logits, torch.Tensor), "no hidden states were asked for"
        margin = abs(logits[0, -1, one] - logits[0, -1, other]).item()
        assert margin <= 2 * tolerance, f"token {at}: {one} instead of {other}, whose logits differ by {margin:.2e}"
        return


# Counts what torch's CPU allocator gives out.


def peak_nbytes(work: Callable[[], object], folder: Path) -> int:
    """Return the most bytes that torch's allocator had given out at once while the calling thread did some work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    held = [event["args"] for event in events if event["name"] == "[memory]"]
    before = held[0]["Total Allocated"] - held[0]["Bytes"]  # what earlier profiles have left in the counter
    return max(one["Total Allocated"] for one in held) - before


# Costs as counts, which no busy machine changes: bytecode instructions that a call runs, and tokens that it reads.


def steps_of(call: Callable[[], object]) -> int:
    """Return the number of bytecode instructions that a call runs, in all functions below it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what a collection calls, such as callbacks of Hypothesis, is not the call's
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


class CountedTokens(list[int]):
    """A list of tokens that counts how many of them its slices have copied."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 1
        return found


# Masks of tests: a small grammar over token ids, given in each form that `Engine.submit` takes.


def allowed_after(token_ids: Sequence[int], vocab: int) -> Tensor:
    """Return what a grammar allows: after a token t those that are t + 1, t + 2 or a multiple of 7, modulo V."""
    last = token_ids[-1] if token_ids else 3
    ids = torch.arange(vocab)
    return (ids == (last + 1) % vocab) | (ids == (last + 2) % vocab) | (ids % 7 == 0)


def words_of(allowed: Tensor) -> np.ndarray:
    """Return [V] bool as words of 32 tokens."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.uint8)
    padded[: len(allowed)] = allowed.numpy()
    return np.packbits(padded, bitorder="little").view(np.int32)


@dataclass
class Grammar:
    """The grammar as an object, which notes how it was called.

    Attributes:
        forced_after: tokens that follow a token without a choice.
        seconds: what each call takes.
    """

    vocab: int
    forced_after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def begin(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.calls.append("begin")
        time.sleep(self.seconds)

    def forced(self) -> Sequence[int]:
        self.calls.append("forced")
        return self.forced_after.get(self.token_ids[-1], ()) if self.token_ids else ()

    def take(self) -> Allowed:
        self.calls.append("take")
        return words_of(allowed_after(self.token_ids, self.vocab))

    def copy(self) -> "Grammar":
        return Grammar(self.vocab, self.forced_after, self.seconds, [*self.token_ids])


# A tokenizer whose tokens are the 256 bytes and one end token, as grammars take it.

END = 256


class Letters:
    """What `GrammarTokens` needs of a tokenizer."""

    tag_ids = ()

    def serialized(self) -> str:
        """Return the text of a tokenizer.json."""
        vocab = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|end|>"])
        return cast("str", tokenizer.to_str())


def letter_tokens() -> GrammarTokens:
    """Return the tokens."""
    return GrammarTokens(cast("Any", Letters()), END + 1, [END])


# Penalties of what a sequence repeats: the truth that engines and kernels are compared with.


def dry_penalties(
    ids: Sequence[int], breakers: Collection[int], multiplier: float, base: float, allowed: int, last: int
) -> dict[int, float]:
    """Return what each token's logit loses by DRY, from p-e-w's definition; without those that lose nothing.

    Args:
        last: number of tokens that are looked at; -1 for all.
    """
    seen = list(ids) if last < 0 else list(ids[-last:])
    found: dict[int, float] = {}
    for token in set(seen).difference(breakers):
        longest = 0
        for at in (place for place, one in enumerate(seen) if one == token):
            length = 0
            while length < at and seen[at - 1 - length] == seen[-1 - length] not in breakers:
                length += 1
            longest = max(longest, length)
        if multiplier and longest >= allowed:
            found[token] = multiplier * base ** (longest - allowed)
    return found
