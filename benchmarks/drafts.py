"""Times answers with draft tokens and without, by kind of prompt, and prints how many were accepted.

`python -m benchmarks.drafts MODEL [key=value ...]`, with a checkpoint as in `model.checkpoint`. Both engines are loaded
at once and answer in turn, so that a slow minute counts for both. Answers are compared: they must be equal. Each line
gives decode tokens/s without and with drafts (medians over rounds), the ratio (median of the rounds' ratios, least and
most), draft tokens accepted and checked, and new tokens for each decode step.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence

from graphcore import Engine
from graphcore.engine.output import Generation

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
    text = PROMPTS[kind]
    prompt = [{"role": "user", "content": text}] if engine.tokenizer.has_chat_template else text
    return engine.submit(prompt, max_new_tokens=new_tokens, ignore_eos=True).result()


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--kinds", nargs="*", choices=[*PROMPTS], default=[*PROMPTS])
    given = parser.parse_args()
    drafts = [*given.overrides, "speculation=lookup"]
    with (
        Engine.load(given.model, overrides=given.overrides) as plain,
        Engine.load(given.model, overrides=drafts) as engine,
    ):
        speculation = engine.batching.speculation
        assert speculation is not None, "this engine drafts"
        for kind in given.kinds:
            found: tuple[list[Generation], list[Generation]] = ([], [])
            for each in (plain, engine):  # the prompt is cached then
                answer(each, kind, 4)
            for _ in range(given.rounds):
                found[0].append(answer(plain, kind, given.new_tokens))
                before = speculation.steps
                found[1].append(answer(engine, kind, given.new_tokens))
                assert found[0][-1].token_ids == found[1][-1].token_ids, "drafts changed the answer"
            print(line(kind, *found, speculation.steps - before), flush=True)


if __name__ == "__main__":
    main()
