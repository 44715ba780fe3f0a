"""The instructions of a native program for a mixture of experts: the choice, and the chosen experts."""

import torch
from torch import Tensor

from graphcore.graph.native_operands import Choice
from graphcore.kernels import instructions
from graphcore.kernels.kernel_packing import ROUNDINGS
from graphcore.kernels.native_program import NativeProgram
from graphcore.nn.moe import Experts


def append_choice(
    program: NativeProgram,
    layer: int,
    scores: Tensor,
    shares: Tensor,
    over_all: bool,
    scales: Tensor | None,
    fetches: bool,
) -> Choice:
    """Append the choice of a layer's experts, and return it.

    Args:
        scores: [X] float32.
        shares: [C] float32, filled with the chosen experts' shares.
        over_all: True if the softmax is over all scores.
        scales: [X] float32, factors of the experts' shares, or None.
        fetches: True if experts are fetched, so that their places are known only after the choice.
    """
    used = shares.numel()
    chosen = torch.zeros(used, dtype=torch.int32)
    choice = Choice(layer, chosen, torch.zeros_like(chosen) if fetches else chosen, len(program.arguments) + 1)
    program.needs(row_floats=scores.numel() + 32)
    given, picks, weights = program.address(scores), program.address(chosen, torch.int32), program.address(shares)
    how = over_all, program.address(scales)
    program.add(instructions.Route(given, scores.numel(), used, picks, weights, *how))
    return choice


def append_experts(
    program: NativeProgram,
    experts: Experts,
    norm: instructions.Norm,
    choice: Choice,
    x: Tensor,
    shares: Tensor,
    out: Tensor,
    puts: bool = False,
) -> None:
    """Append both instructions of experts.

    Args:
        norm: normalisation of `x`.
        x: [D] float32, the experts' input.
        shares: [C] float32, the chosen experts' shares.
        out: [D] float32, the sum that the answers are added to, or replace if `puts`.
    """
    assert choice.begin == len(program.arguments), "experts come right behind their choice"
    parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
    gate, up, down = (program.matrix(part.weight[0], part.packing) for part in parts)  # the other experts follow
    biases = [program.address(None if part.bias is None else part.bias.float()) for part in parts]
    rounding, used = ROUNDINGS[experts.gate_proj.rounding], shares.numel()
    where = [program.address(ids, torch.int32) for ids in (choice.chosen, choice.places)]
    hidden = program.address(program.buffer(used * gate.rows))
    program.needs(columns=gate.columns)
    program.needs(rows=used, columns=down.columns)
    given, gating = (program.address(x), norm, rounding), (experts.gating.number, *experts.gating[1:])
    program.add(instructions.ExpertsUp(*given, gate, up, *biases[:2], *where, hidden, used, *gating))
    answer = (program.address(shares), program.address(out), used, puts)
    program.add(instructions.ExpertsDown(hidden, rounding, down, biases[2], *where, *answer))
