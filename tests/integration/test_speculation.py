"""Answers with draft tokens are those without, to the bit, whatever is drafted.

A drafter that knows the answer drafts it with errors, so that a step accepts all of a draft, a part of it, or nothing.
Log probabilities show any other bit of the logits.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from packed_matrices import native_kernels
from tiny_models import ARCHITECTURES, VOCAB, TinyModel

from graphcore import Engine
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.speculation import Speculation
from graphcore.engine.speculation.step_costs import StepCosts

Tiny = Callable[[str], TinyModel]
Answer = tuple[Any, ...]
SECONDS, NEW, DEPTH = 120.0, 20, 5
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 5, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2, "temperature": 0.7},
    "least": {"min_tokens": 9, "logit_bias": {3: 2.0}},
    "top": {"top_logprobs": 3, "temperature": 0.9},
}

STREAMED = ("llama3", "gemma3", "gpt2", "gpt_oss", "qwen3_5", "qwen3_moe", "gemma4", "deepseek_v3", "lfm2")


class FreeSteps(StepCosts):
    """Steps that cost the same for any number of tokens, so that every draft token is checked."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: 1.0)

    def record(self, tokens: int, seconds: float) -> None:
        """Record nothing."""


class FallibleDrafter(Drafter):
    """A drafter that knows an answer, and drafts every third token or so wrong."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.num_tokens = len(prompt)
        self._ids, self._draw = [*prompt, *answer, *[1] * NEW], random.Random(len(prompt))

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.num_tokens += len(token_ids)

    def propose(self, most: int) -> Draft:
        """Return the next tokens, some of them wrong."""
        ids = self._ids[self.num_tokens : self.num_tokens + most]
        return Draft([(one + (self._draw.random() < 0.3)) % VOCAB for one in ids], 30)


def load(tiny: TinyModel, streaming: str = "off", *overrides: str) -> Engine:
    native_kernels()
    sizes = ["batching.max_sequences=3", "context_length=64", "prefill_chunk=16", *overrides]
    return Engine.load(tiny.folder, dtype="fp32", device="cpu", streaming=streaming, overrides=sizes)


def prompts() -> list[list[int]]:
    """Return prompts of less than a chunk and of two chunks; some wrap the tiny models' windows around."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (3, 21, 30)]


def answers(engine: Engine, settings: Mapping[str, Any]) -> list[Answer]:
    """Return what each prompt's answer says, asked for together."""
    with engine.holding_back():
        handles = [
            engine.submit(prompt, NEW + at, **{"ignore_eos": True, "logprobs": True, **settings})
            for at, prompt in enumerate(prompts())
        ]
    found = [handle.result(SECONDS) for handle in handles]
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs, one.top_logprobs) for one in found]


@pytest.fixture
def known() -> dict[tuple[int, ...], Sequence[int]]:
    """Answers by prompt, from which drafts are made."""
    return {}


@pytest.fixture(autouse=True)
def _fallible_drafts(monkeypatch: pytest.MonkeyPatch, known: dict[tuple[int, ...], Sequence[int]]) -> None:
    def drafter_of(request: Request) -> Drafter:
        return FallibleDrafter(request.prompt_ids, known.get(tuple(request.prompt_ids), [2] * NEW))

    def speculation_of(runner: ProgramRunner) -> Speculation:
        return Speculation(FreeSteps(), runner.draft_tokens, drafter_of)

    monkeypatch.setattr(Speculation, "of", speculation_of)


def assert_equal_with_drafts(
    known: dict[tuple[int, ...], Sequence[int]], folder: TinyModel, streaming: str, kinds: Sequence[str], *more: str
) -> None:
    """Check that answers with drafts are those without, and that draft tokens were accepted and rejected."""
    with load(folder, streaming, *more) as plain:
        expected = {kind: answers(plain, SAMPLING[kind]) for kind in kinds}
    settings = "speculation=lookup", f"speculation.num_speculative_tokens={DEPTH}"
    with load(folder, streaming, *settings, *more) as engine:
        for kind in kinds:
            known |= {tuple(prompt): one[0] for prompt, one in zip(prompts(), expected[kind], strict=True)}
            assert answers(engine, SAMPLING[kind]) == expected[kind], kind
        accepted, drafted = engine.totals.accepted_tokens, engine.totals.draft_tokens
        assert 10 < accepted < drafted - 10
        batching = engine.batching
        assert isinstance(batching, ContinuousBatching)
        again = [engine.generate([[*prompt, 5]], 6, ignore_eos=True)[0].token_ids for prompt in prompts()]
    with load(folder, streaming, *more) as plain:  # whose prefix cache is empty
        assert again == [plain.generate([[*prompt, 5]], 6, ignore_eos=True)[0].token_ids for prompt in prompts()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_answers_with_drafts_are_those_without(
    name: str, tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    assert_equal_with_drafts(known, tiny_model(name), "off", [*SAMPLING] if name == "llama3" else ["greedy", "drawn"])


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_answers_with_drafts_are_those_without(
    name: str, tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    assert_equal_with_drafts(known, tiny_model(name), "on", ["drawn"])


@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0"])
def test_drafts_leave_no_trace_in_quantised_caches(
    kv_dtype: str, tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    assert_equal_with_drafts(known, tiny_model("mistral"), "off", ["drawn"], f"kv_dtype={kv_dtype}")
