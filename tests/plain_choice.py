"""Sampling steps of a device in plain torch, for engines on `FakeCuda`: Triton's interpreter takes a second for a step.

That kernels choose what is chosen here: tests/unit/kernels/gpu/sampling.
"""

import pytest
import torch
from draws import draw_of
from torch import Tensor

from graphcore.kernels.ops.draw import Draw, choose_token
from graphcore.sampling_params import KERNEL_PARAMETERS, WHOLE_NUMBERS

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


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines choose in plain torch, from now on, where a GPU's kernels would."""
    ops, folder = torch.ops.graphcore_tests, "graphcore.kernels.gpu.sampling"
    monkeypatch.setattr(f"{folder}.likeliest.choose_likeliest", lambda *each: ops.likeliest.default(*each))
    monkeypatch.setattr(f"{folder}.drawn.choose_drawn", lambda *each: ops.drawn.default(*each))
