"""Times answers with draft tokens and without, by kind of prompt, and prints how many were accepted.

`python benchmarks/drafts.py MODEL [key=value ...]`, with a checkpoint as in `model.checkpoint`. Both engines are loaded
at once and answer in turn, so that a slow minute counts for both. Answers are compared: they must be equal. Each line
gives decode tokens/s without and with drafts (medians over rounds), the ratio (median of the rounds' ratios, least and
most), draft tokens accepted and checked, new tokens for each decode step, and milliseconds of a draft model's step and
of a step that checks drafts.

`--kind self` drafts with a copy of the model (`speculation.draft_format`). `--accepted 0.9` then imposes the share of
draft tokens that are right: the draft model's steps run, but their tokens are those of the answer without drafts, some
of them spoilt. With `--apart` the engines do not take turns, but one is loaded after the other, for a limit of memory
that has room for one. `GRAPHCORE_LIMIT_CPU=avx2` leaves AVX-512 unused (benchmarks/instruction_sets.py).
"""

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from instruction_sets import apply_limit

from graphcore import Engine
from graphcore.engine.output import Generation
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.draft_model import DraftModel
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.engine.speculation.self_speculation import SelfSpeculation
from graphcore.engine.speculation.speculation import Speculation, SpeculationTimes
from graphcore.graph.program import Program
from graphcore.kernels.ops.draw import Draw

CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
"""
ARTICLE = (
    "The lighthouse on Skarn was lit for the first time in 1871. Its keeper, Anna Holm, kept a diary for forty "
    "years. In it she wrote down the weather, the ships that passed, and the birds that rested on the rocks. In "
    "the winter of 1893 the sea froze as far as the outer islands, and for six weeks no ship could reach Skarn. "
    "Anna Holm and her two daughters lived on salted herring and on the flour that was left from the autumn. When "
    "the ice broke in March, the first boat brought the mail, a sack of coffee, and a letter from the harbour "
    "office that asked why the light had burned without a pause although there had been no ship to see it."
)
PROMPTS: Mapping[str, str] = {
    "chat": "What should I think about before I move to another city?",
    "code": "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "summary": f"Summarise this text in its own words, sentence by sentence:\n\n{ARTICLE}",
    "edit": f"Repeat this Python code exactly, but rename the variable total to result:\n\n{CODE}",
    "copy": f"Repeat this text word by word:\n\n{ARTICLE}",
}


def answer(engine: Engine, kind: str, new_tokens: int) -> Generation:
    """Return the answer to one kind of prompt; an answer that ends early goes on, so that all are equally long."""
    if not engine.has_tokenizer:
        prompt = [1 + at % 997 for at in range(64)]  # random weights
        return engine.submit(prompt, max_new_tokens=new_tokens, ignore_eos=True, temperature=0).result()
    text = PROMPTS[kind]
    asked = [{"role": "user", "content": text}] if engine.tokenizer.has_chat_template else text
    return engine.submit(asked, max_new_tokens=new_tokens, ignore_eos=True, temperature=0).result()


class ImposedModel(DraftModel):
    """A draft model whose steps run, but whose tokens are those of a known answer, a share of them wrong.

    Args:
        accepted: share of tokens that are right.
        answers: answers by the length of their prompt.
    """

    def __init__(
        self, runner: ProgramRunner, steps: DraftSteps, accepted: float, answers: Mapping[int, Sequence[int]]
    ) -> None:
        super().__init__(runner, steps)
        self._accepted, self._answers, self._random = accepted, answers, random.Random(1)

    def choose(self, request: Request, program: Program, at: int, draw: Draw) -> int | None:
        """Return the token at the draw's position of the answer, or a wrong one."""
        own = super().choose(request, program, at, draw)
        answer, place = self._answers.get(len(request.prompt_ids), ()), draw.position - len(request.prompt_ids)
        if place >= len(answer):
            return own
        return (answer[place] + (self._random.random() >= self._accepted)) % self._vocab


def impose(engine: Engine, accepted: float, answers: Mapping[int, Sequence[int]]) -> None:
    """Make a share of the draft tokens right, those of answers by the length of their prompt, and all others wrong."""
    speculation, runner = engine.batching.speculation, engine.runner
    assert isinstance(speculation, SelfSpeculation), "only a draft model's steps take time"
    assert isinstance(runner, ProgramRunner), "draft models are programs"
    assert runner.draft_programs is not None, "this engine has a draft model"
    speculation.model = ImposedModel(runner, DraftSteps(runner, runner.draft_programs), accepted, answers)


def step_times(speculation: Speculation, before: SpeculationTimes) -> str:
    """Return the milliseconds of a draft step and of a check since the times before."""
    now = speculation.times
    drafting, checking = now.draft_seconds - before.draft_seconds, now.check_seconds - before.check_seconds
    drafts, checks = now.draft_steps - before.draft_steps, now.check_steps - before.check_steps
    each = [("draft step", drafting, drafts), ("check", checking, checks)]  # what is looked up has no draft steps
    return ", ".join(f"{name} {1e3 * seconds / count:.1f} ms" for name, seconds, count in each if count)


def line(kind: str, plain: Sequence[Generation], drafted: Sequence[Generation], steps: int) -> str:
    """Return the line of one kind of prompt."""
    before, after = ([one.timings.decode_tokens_per_second for one in each] for each in (plain, drafted))
    ratios = sorted(new / old for old, new in zip(before, after, strict=True))
    last = drafted[-1].timings
    return (
        f"{kind:8} {statistics.median(before):8.2f} {statistics.median(after):8.2f} tokens/s  "
        f"{statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  "
        f"{last.accepted_tokens:4} of {last.draft_tokens:4} accepted  "
        f"{last.new_tokens / max(steps, 1):5.2f} tokens a step"
    )


def main() -> None:
    """Print a line for each kind of prompt."""
    apply_limit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--prompts", default=",".join(PROMPTS), help="of these, separated by commas")
    parser.add_argument("--kind", choices=["lookup", "self"], default="lookup")
    parser.add_argument("--accepted", type=float)
    parser.add_argument("--apart", action="store_true", help="load one engine after the other: memory is short")
    given = parser.parse_intermixed_args()
    kinds = given.prompts.split(",")
    if unknown := [kind for kind in kinds if kind not in PROMPTS]:
        parser.error(f"--prompts {unknown[0]}: one of {', '.join(PROMPTS)}")
    drafts = [*given.overrides, f"speculation={given.kind}"]
    without = [one for one in given.overrides if not one.startswith("speculation.")]
    found: dict[str, tuple[list[Generation], list[Generation]]] = {kind: ([], []) for kind in kinds}
    with ExitStack() as loaded:
        plain = loaded.enter_context(Engine.load(given.model, overrides=without))
        if given.apart:
            for kind in kinds:
                answer(plain, kind, 4)  # the prompt is cached then
                found[kind][0].extend(answer(plain, kind, given.new_tokens) for _ in range(given.rounds))
            loaded.close()
        engine = loaded.enter_context(Engine.load(given.model, overrides=drafts))
        speculation = engine.batching.speculation
        assert speculation is not None, "this engine drafts"
        answers: dict[int, Sequence[int]] = {}
        if given.accepted is not None:
            impose(engine, given.accepted, answers)
        for kind in kinds:
            before, after = found[kind]
            times = replace(speculation.times)
            for each in (engine,) if given.apart else (plain, engine):
                answer(each, kind, 4)
            for at in range(given.rounds):
                if not given.apart:
                    before.append(answer(plain, kind, given.new_tokens))
                answers[before[at].timings.prompt_tokens] = before[at].token_ids
                steps = speculation.steps
                after.append(answer(engine, kind, given.new_tokens))
                assert before[at].token_ids == after[at].token_ids, "drafts changed the answer"
            print(line(kind, before, after, speculation.steps - steps), step_times(speculation, times), sep="  ")


if __name__ == "__main__":
    main()
