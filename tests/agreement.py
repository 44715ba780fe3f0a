"""When two ways of running one model agree: logits within a tolerance, and greedy tokens, but for ties.

Legend: T tokens, V vocab.
"""

from collections.abc import Sequence

import torch

from graphcore import Engine


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
