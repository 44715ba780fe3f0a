"""Answers with draft tokens are those without, to the bit, whatever is drafted.

A drafter that knows the answer drafts it with errors, so that a step accepts all of a draft, a part of it, or nothing.
Log probabilities show any other bit of the logits.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_fakes import KnownAnswers
from support.files.adapter_files import drawn, write_peft
from support.packed_matrices import native_kernels
from support.tiny_models import ARCHITECTURES, MIXTURES, VOCAB, TinyModel

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.draft_model import DraftModel
from graphcore.errors import ConfigError, PlanError
from graphcore.export.pack import Packer

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
Answer = tuple[Any, ...]
SECONDS, NEW, DEPTH = 120.0, 20, 5
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 5, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2, "temperature": 0.7},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    "cuts": {"temperature": 1.3, "seed": 5, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "least": {"min_tokens": 9, "logit_bias": {3: 2.0}},
    "top": {"top_logprobs": 3, "temperature": 0.9},
}

STREAMED = ("llama3", "gemma3", "gpt2", "gpt_oss", "qwen3_5", "qwen3_moe", "gemma4", "deepseek_v3", "lfm2")


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
def known(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Sequence[int]]:
    """Answers by prompt, from which drafts are made."""
    found = KnownAnswers()
    found.patch(monkeypatch.setattr)
    return found.answers


@pytest.fixture(autouse=True)
def _fallible_drafts(known: dict[tuple[int, ...], Sequence[int]]) -> None:
    """Draft from known answers in every test."""


@dataclass(frozen=True)
class Plain:
    """Answers without drafts.

    Attributes:
        extended: tokens after each prompt with one token more, that no cached prefix had a part in.
        answers: answers by the kind of sampling.
    """

    extended: list[Sequence[int]]
    answers: dict[str, list[Answer]]


def extended_answers(engine: Engine) -> list[Sequence[int]]:
    """Return the tokens that follow each prompt with one token more."""
    return [engine.generate([[*prompt, 5]], 6, ignore_eos=True)[0].token_ids for prompt in prompts()]


@pytest.fixture(scope="module")
def plain_of(tiny_model: Tiny) -> Callable[..., Plain]:
    """A function to what a resident model answers without drafts, by its name and more settings."""

    @cache
    def plain(name: str, *settings: str) -> Plain:
        with load(tiny_model(name), "off", *settings) as engine:
            extended = extended_answers(engine)  # first, while the prefix cache is empty
            return Plain(extended, {kind: answers(engine, SAMPLING[kind]) for kind in kinds_of(name)})

    return plain


def kinds_of(name: str) -> Sequence[str]:
    """Return the kinds of sampling that a model's answers are compared for."""
    return [*SAMPLING] if name == "llama3" else ["greedy", "drawn"]


Check = Callable[..., None]


@pytest.fixture
def check(known: dict[tuple[int, ...], Sequence[int]], tiny_model: Tiny, plain_of: Callable[..., Plain]) -> Check:
    """A function that checks that answers with drafts are those without, and that drafts were accepted and rejected."""

    def check_model(name: str, drafts: Sequence[str], *settings: str, streaming: str = "off") -> None:
        plain = plain_of(name, *settings)
        drafting = *drafts, f"speculation.num_speculative_tokens={DEPTH}"
        with load(tiny_model(name), streaming, *drafting, *settings) as engine:
            for kind, expected in plain.answers.items():
                known.update({tuple(prompt): one[0] for prompt, one in zip(prompts(), expected, strict=True)})
                assert answers(engine, SAMPLING[kind]) == expected, kind
            accepted, drafted = engine.totals.accepted_tokens, engine.totals.draft_tokens
            assert 10 < accepted < drafted - 10
            assert isinstance(engine.batching, ContinuousBatching)
            assert extended_answers(engine) == plain.extended

    return check_model


LOOKUP = ("speculation=lookup",)
SELF = "speculation=self", "speculation.draft_format=q4_0"
IN_CI = ("llama3", "gpt_oss", "gemma4")  # every kind of sampling, sinks, lent caches; others are in the engine matrix
DRAFTED = ("llama3", "gemma3", "qwen3_5", "gpt_oss", "gemma4", "deepseek_v3", "lfm2", "gpt2", "bitnet")


def in_ci(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", in_ci(ARCHITECTURES))
def test_answers_with_drafts_are_those_without(name: str, check: Check) -> None:
    check(name, LOOKUP)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_ci(STREAMED))
def test_streamed_answers_with_drafts_are_those_without(name: str, check: Check) -> None:
    check(name, LOOKUP, streaming="on")


@pytest.mark.parametrize("name", in_ci(DRAFTED))
def test_answers_with_a_draft_model_are_those_without(name: str, check: Check) -> None:
    check(name, SELF)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_ci(name for name in STREAMED if name not in MIXTURES))
def test_streamed_answers_with_a_draft_model_are_those_without(name: str, check: Check) -> None:
    check(name, SELF, streaming="on")


@pytest.mark.parametrize("drafts", [LOOKUP, SELF], ids=["lookup", "self"])
@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0"])
def test_drafts_leave_no_trace_in_quantised_caches(kv_dtype: str, drafts: Sequence[str], check: Check) -> None:
    check("mistral", drafts, f"kv_dtype={kv_dtype}")


class EveryThird:
    """A mask that forces two tokens after every third one, and forbids low ones elsewhere."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)

    def forced(self) -> Sequence[int]:
        return (11, 12) if len(self._ids) % 5 == 3 else ()

    def take(self) -> torch.Tensor:
        return torch.arange(VOCAB) > 6

    def copy(self) -> "EveryThird":
        return EveryThird()


def test_masks_and_forced_tokens_beside_drafts(tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]) -> None:
    def ask(engine: Engine, prompt: Sequence[int], **more: Any) -> Answer:
        handle = engine.submit(list(prompt), NEW, mask=EveryThird(), ignore_eos=True, temperature=0.8, seed=2, **more)
        found = handle.result(SECONDS)
        return found.token_ids, found.finish_reason

    with load(tiny_model("llama3")) as plain:
        expected = [ask(plain, prompt) for prompt in prompts()]
    with load(tiny_model("llama3"), "off", "speculation=lookup") as engine:
        known |= {tuple(prompt): answer[0] for prompt, answer in zip(prompts(), expected, strict=True)}
        assert [ask(engine, prompt) for prompt in prompts()] == expected
        assert engine.totals.accepted_tokens > 0
        before = engine.totals.draft_tokens
        assert [ask(engine, prompt, speculation="off") for prompt in prompts()] == expected
        assert engine.totals.draft_tokens == before


def test_tokens_that_end_an_answer_inside_a_draft_end_it(
    tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    (prompt,) = prompts()[:1]
    with load(tiny_model("llama3"), "off", "speculation=lookup") as engine:
        known[tuple(prompt)] = whole = engine.generate([prompt], NEW, ignore_eos=True)[0].token_ids
        stop = next(token for at, token in enumerate(whole) if at > 3 and token not in whole[:at])
        found = engine.submit(prompt, NEW, stop_token_ids=[stop], ignore_eos=True).result(SECONDS)
        assert (found.token_ids, found.finish_reason) == (whole[: whole.index(stop) + 1], "stop")
        for most in (1, 2, 5):
            found = engine.submit(prompt, most, ignore_eos=True).result(SECONDS)
            assert (found.token_ids, found.finish_reason) == (whole[:most], "length")
        row = [*prompt, *whole, *whole]
        found = engine.submit(row, -1, ignore_eos=True).result(SECONDS)
        assert (len(found.token_ids), found.finish_reason) == (64 - len(row) + 1, "context")


def test_a_draft_longer_than_one_native_program_runs_as_several(
    tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    (prompt,) = prompts()[:1]
    settings = "speculation=lookup", "speculation.num_speculative_tokens=40", "batching.max_sequences=1"
    with load(tiny_model("gemma3")) as plain:
        expected = plain.generate([prompt], 50, ignore_eos=True)[0].token_ids
    known[tuple(prompt)] = expected
    with load(tiny_model("gemma3"), "off", *settings) as engine:
        assert isinstance(engine.runner, ProgramRunner)
        assert engine.runner.programs.most_rows == 41
        assert engine.generate([prompt], 50, ignore_eos=True)[0].token_ids == expected
        speculation = engine.batching.speculation
        assert speculation is not None
        assert len(speculation.acceptance.drafted) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("graph=eager",),
            "needs decode steps as native programs on the CPU .graph=captured there., and they run eager",
        ),
        (("graph=compiled",), "and they run compiled on cpu; use speculation=off"),
        (("model.fallback=transformers", "graph=eager"), "transformers' caches cannot take draft tokens back"),
    ],
)
def test_what_runs_one_token_of_a_sequence_refuses_drafts(
    settings: Sequence[str], message: str, tiny_model: Tiny
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.load(
            tiny_model("llama3").folder, dtype="fp32", device="cpu", overrides=[*settings, "speculation=lookup"]
        )


def test_an_engine_without_drafts_refuses_a_request_for_them(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3")) as engine:
        with pytest.raises(ConfigError, match="load the engine with speculation=lookup"):
            engine.submit([1, 2], speculation="lookup")
        assert engine.submit([1, 2], 2, speculation="off").result(SECONDS).timings.draft_tokens == 0


def test_a_draft_model_is_refused_by_name_where_experts_stream(tiny_model: Tiny) -> None:
    with pytest.raises(PlanError, match=r"not possible while experts stream: .* drafts lose; use speculation=off"):
        load(tiny_model("qwen3_moe"), "on", *SELF)


def test_a_draft_model_is_refused_where_no_native_program_runs(tiny_model: Tiny) -> None:
    native_kernels()
    for graph in ("eager", "compiled"):
        with pytest.raises(ConfigError, match="speculation=self needs decode steps as native programs on the CPU"):
            load(tiny_model("llama3"), "off", *SELF, f"graph={graph}")
    with pytest.raises(ConfigError, match=r"speculation\.draft_format=iq1_s is not one of null, q4_0, "):
        load(tiny_model("llama3"), "off", "speculation=self", "speculation.draft_format=iq1_s")


def test_a_draft_model_is_part_of_the_plan_and_of_the_smallest_budget(tiny_model: Tiny) -> None:
    with pytest.raises(PlanError) as plain:
        load(tiny_model("llama3"), "on", "streaming.memory_budget=1KiB")
    with pytest.raises(PlanError) as drafting:
        load(tiny_model("llama3"), "on", *SELF, "streaming.memory_budget=1KiB")
    found = [re.search(r"(\d+) bytes;", str(one.value)) for one in (plain, drafting)]
    less, more = (int(one[1]) for one in found if one is not None)
    with load(tiny_model("llama3"), "on", *SELF, f"streaming.memory_budget={more}") as engine:
        plan = engine.plan
        assert plan.total_nbytes == more == plan.budget
        assert plan.draft_nbytes > 10_000
        assert less + plan.draft_nbytes < more  # the draft model's programs have buffers of their own
        speculation = engine.batching.speculation
        assert speculation is not None
        assert engine.generate([prompts()[1]], 12, ignore_eos=True)
        assert speculation.times.draft_steps > 0 < speculation.times.check_steps
        assert speculation.times.draft_seconds > 0 < speculation.times.check_seconds


def test_a_model_that_is_as_small_as_its_draft_drafts_nothing_and_says_so(tiny_model: Tiny) -> None:
    with load(tiny_model("llama3"), "off", *SELF, "quant=q4_0") as engine:
        assert any("speculation=self drafts nothing: " in note for note in engine.notes)
        assert engine.submit([1, 2], 3, speculation="self", ignore_eos=True).result(SECONDS).timings.draft_tokens == 0


def test_groups_of_the_next_pass_are_read_while_a_draft_model_drafts(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[set[str]] = []
    step = DraftModel.step

    def slow_step(model: DraftModel, requests: Sequence[Request]) -> dict[Request, Any]:
        policy = engine.loaded.weight_stream.policy
        until = time.perf_counter() + SECONDS
        while any(slot.state == "reading" for slot in policy.activity().slots) and time.perf_counter() < until:
            time.sleep(0.001)
        states.append({slot.state for slot in policy.activity().slots})
        return step(model, requests)

    monkeypatch.setattr(DraftModel, "step", slow_step)
    with load(tiny_model("llama3"), "on", *SELF) as engine:
        engine.generate([prompts()[1]], 8, ignore_eos=True)
        stream = engine.loaded.weight_stream
        assert {"draft", "stall", "copy"} <= {event.lane for event in stream.timeline.since(0.0)}
        assert stream.totals.now().hidden_by_drafts_seconds <= stream.totals.now().hidden_seconds
    assert states
    assert all(found == {"ready"} for found in states)


@pytest.mark.parametrize("name", ["llama3", "qwen3_5"])
def test_requests_with_and_without_a_draft_model_run_beside_each_other(
    name: str, tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    with load(tiny_model(name)) as plain:
        expected = [one.token_ids for one in plain.generate(prompts(), NEW, ignore_eos=True, temperature=0.9, seed=4)]
    with load(tiny_model(name), "off", *SELF) as engine:
        known |= {tuple(prompt): ids for prompt, ids in zip(prompts(), expected, strict=True)}
        for kinds in (("self", "off", None), ("off", "self", "off")):
            with engine.holding_back():
                handles = [
                    engine.submit(prompt, NEW, ignore_eos=True, temperature=0.9, seed=4 + at, speculation=kind)
                    for at, (prompt, kind) in enumerate(zip(prompts(), kinds, strict=True))
                ]
            found = [handle.result(SECONDS) for handle in handles]
            assert [one.token_ids for one in found] == expected
            assert [one.timings.draft_tokens > 0 for one in found] == [kind != "off" for kind in kinds]


def test_an_ended_or_cancelled_draft_leaves_a_prefix_that_others_continue_from(
    tiny_model: Tiny, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    prompt = prompts()[2]
    with load(tiny_model("gemma3")) as plain:
        expected = plain.generate([[*prompt, 7]], 8, ignore_eos=True)[0].token_ids
        whole = plain.generate([prompt], NEW, ignore_eos=True)[0].token_ids
    known[tuple(prompt)] = whole
    with load(tiny_model("gemma3"), "off", *SELF) as engine:
        stop = next(token for at, token in enumerate(whole) if at > 3 and token not in whole[:at])
        found = engine.submit(prompt, NEW, stop_token_ids=[stop], ignore_eos=True).result(SECONDS)
        assert (found.token_ids, found.finish_reason) == (whole[: whole.index(stop) + 1], "stop")
        stream = iter(engine.submit(prompt, NEW, ignore_eos=True))
        next(stream)
        del stream
        assert engine.generate([[*prompt, 7]], 8, ignore_eos=True)[0].token_ids == expected


@pytest.mark.parametrize(
    ("quant", "has_adapter", "settings"),
    [
        ("q8_0", False, ("streaming=off",)),
        ("q8_0", True, ("streaming=on",)),
        ("q4_0", False, ("streaming=on", "streaming.source=host")),
    ],
)
def test_a_draft_model_copies_packed_and_adapted_matrices(
    quant: str,
    has_adapter: bool,
    settings: Sequence[str],
    tiny_model: Tiny,
    known: dict[tuple[int, ...], Sequence[int]],
    tmp_path: Path,
) -> None:
    asked = compose_settings([f"model.checkpoint={tiny_model('llama3').folder}"])
    model, path = open_model(asked.model, 0, tmp_path / "cache", lambda *_: None), tmp_path / "packed.gguf"
    assert list(Packer(model, quant).pack(path, lambda *_: None))
    shapes = {f"model.layers.{layer}.mlp.up_proj": (112, 64) for layer in range(2)}
    adapter = write_peft(tmp_path / "adapter", drawn(shapes)) if has_adapter else "null"
    sizes = ["batching.max_sequences=3", "context_length=64", "prefill_chunk=16", f"model.adapter={adapter}", *settings]
    with Engine.load(path, dtype="bf16", device="cpu", overrides=sizes) as plain:
        expected = answers(plain, SAMPLING["drawn"])
    known |= {tuple(prompt): one[0] for prompt, one in zip(prompts(), expected, strict=True)}
    with Engine.load(path, dtype="bf16", device="cpu", overrides=[*sizes, *SELF]) as engine:
        assert answers(engine, SAMPLING["drawn"]) == expected
        assert engine.totals.accepted_tokens > 5
        assert not engine.loaded.loader.errors, "the draft's errors are not the model's"
        own, copied = engine.plan.groups.streamed_nbytes or engine.plan.weight_nbytes, engine.plan.draft_nbytes
        assert copied == own if quant == "q4_0" else 0 < copied < own
