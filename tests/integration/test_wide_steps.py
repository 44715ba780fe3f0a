"""More sequences than a native program has rows: each has the bits that it has alone, and no program runs idle."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.packed_matrices import native_kernels
from support.tiny_models import VOCAB, TinyModel

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request_handle import RequestHandle
from graphcore.graph.cpu.native_decode import NativeStep
from graphcore.graph.program import Program
from graphcore.kernels.cpu.program import rows_by_program, widths_of

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
SECONDS = 120.0
NEW = 3
MOST = 33


def load(tiny: TinyModel, streaming: str, most: int = MOST) -> Engine:
    native_kernels()
    limits = [f"batching.max_sequences={most}", "batching.max_tokens_per_step=1000"]  # all prompts begin in one pass
    sizes = [*limits, "context_length=48", "prefill_chunk=16"]
    return Engine.load(tiny.folder, dtype="fp32", device="cpu", streaming=streaming, overrides=sizes)


def prompts_of(count: int) -> list[list[int]]:
    """Return different prompts of one token, of less than a chunk, and of two chunks."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, VOCAB, ((1, 5, 20)[at % 3],), generator=generator).tolist() for at in range(count)]


def submit(engine: Engine, prompt: Sequence[int], at: int) -> RequestHandle:
    """Submit a request: every second one draws, and each has its own number of new tokens."""
    sampling: dict[str, Any] = {"temperature": 1.1, "seed": at} if at % 2 else {}
    return engine.submit(list(prompt), NEW + at % 4, ignore_eos=True, logprobs=True, **sampling)


def what(handle: RequestHandle) -> tuple[Any, ...]:
    """Return what an answer says, with its log probabilities, which show any other bit of the logits."""
    answer = handle.result(SECONDS)
    return answer.token_ids, answer.logprobs


def watch_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the numbers of rows of each decode step's programs."""
    assert isinstance(engine.runner, ProgramRunner)
    seen: list[list[int]] = []
    programs = engine.runner.programs
    step = programs.step

    def watched(*arguments: Any) -> Any:
        steps = step(*arguments)
        seen.append([int(program.state.span.counts.sum()) for program, _ in steps])
        assert all(
            isinstance(one, NativeStep) or is_of_host(program, one) for program, _ in steps for one in program.steps
        )
        return steps

    monkeypatch.setattr(programs, "step", watched)
    return seen


def is_of_host(program: Program, step: object) -> bool:
    """Return whether a step is the fetch of rows of a streamed table, which comes first."""
    return step is program.steps[0] and type(step).__name__ == "GatherStep"


@pytest.mark.parametrize(
    ("name", "streaming"),
    [
        *((name, "off") for name in ("llama3", "gemma3", "gpt_oss", "qwen3_5", "lfm2_moe", "gemma4")),
        *(pytest.param(name, "off", marks=pytest.mark.slow) for name in ("gpt2", "qwen3_moe")),
        pytest.param("llama3", "on", marks=pytest.mark.slow),
        ("qwen3_moe", "on"),
    ],
)
def test_an_answer_beside_many_is_the_answer_alone(
    name: str, streaming: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model(name), streaming) as engine:
        prompts = prompts_of(MOST)
        alone = [what(submit(engine, prompt, at)) for at, prompt in enumerate(prompts)]
        seen = watch_steps(engine, monkeypatch)
        for count in (17, 33):
            del seen[:]
            first = MOST - count  # other neighbours, and other rows of the caches
            with engine.holding_back():
                handles = {at: submit(engine, prompts[at], at) for at in range(first, MOST)}
            for at, handle in handles.items():
                assert what(handle) == alone[at], f"request {at} of {count}"
            assert tuple(max(seen, key=sum)) == rows_by_program(count)
            assert all(tuple(rows) == rows_by_program(sum(rows)) for rows in seen)


@pytest.mark.parametrize(
    ("sequences", "shares"),
    [(1, [1]), (16, [16]), (17, [9, 8]), (20, [10, 10]), (32, [16, 16]), (33, [11, 11, 11]), (40, [14, 13, 13])],
)
def test_programs_take_nearly_equal_shares_of_the_rows(sequences: int, shares: Sequence[int]) -> None:
    assert list(rows_by_program(sequences)) == shares


@pytest.mark.parametrize("most", [1, 3, 16, 17, 20, 32, 33, 64])
def test_programs_are_as_wide_as_any_step_needs_and_no_wider(most: int) -> None:
    widths, needed = widths_of(most), [rows_by_program(count) for count in range(1, most + 1)]
    for at, width in enumerate(widths):
        assert max(shares[at] for shares in needed if len(shares) > at) == width <= 16


def test_a_request_alone_in_an_engine_of_32_runs_one_program(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny_model("llama3"), "off", most=32) as engine:
        seen = watch_steps(engine, monkeypatch)
        engine.warm_up()
        engine.generate([[1, 2, 3]], 4, ignore_eos=True)
        assert seen == [[1], [1], [1], [1]]  # the first is the warm-up's
        assert len(engine.runner.programs._of_width) == 1
        engine.generate(prompts_of(32), NEW, ignore_eos=True)
        assert max(seen, key=sum) == [16, 16]
        assert len(engine.runner.programs._of_width) == 2


def test_weights_that_move_are_brought_once_for_all_programs(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny_model("llama3"), "on") as engine:
        acquired: list[int] = []
        acquire = engine.runner.policy.acquire
        seen = watch_steps(engine, monkeypatch)

        def noted(group: int) -> None:
            acquired.append(group)
            acquire(group)

        engine.generate(prompts_of(MOST)[::3], 1)  # prompts of one token
        monkeypatch.setattr(engine.runner.policy, "acquire", noted)
        steps, counts = [], []
        for count in (1, MOST):
            del acquired[:], seen[:]
            engine.generate([[5 + at] for at in range(count)], 3, ignore_eos=True)
            steps.append(list(acquired))
            counts.append(list(seen))
        assert counts == [[[1]] * 3, [[11, 11, 11]] * 3]
        assert steps[0] == steps[1]
