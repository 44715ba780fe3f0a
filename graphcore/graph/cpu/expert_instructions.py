"""The instructions of a native program for a mixture of experts: routing, and the chosen experts' products."""

import torch
from torch import Tensor

from graphcore.graph.cpu.operands import Routing
from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu.library import ROUNDINGS
from graphcore.kernels.cpu.program import NativeProgram
from graphcore.kernels.packing import GROUP_ROWS
from graphcore.nn.moe import Experts
from graphcore.nn.spec import Shares
from graphcore.routing import SCORES, ScoredRouting


def append_choice(
    program: NativeProgram,
    layer: int,
    scores: Tensor,
    weights: Tensor,
    shares: Shares | ScoredRouting,
    vectors: tuple[Tensor | None, Tensor | None],
    fetches: bool,
) -> Routing:
    """Append the routing instruction of a layer, and return its buffers.

    Args:
        scores: [B, X] float32.
        weights: [B, C] float32, filled with the chosen experts' shares.
        shares: scores in the softmax, or the rule of experts that have scores of their own.
        vectors: factors of the experts' shares in a softmax and selection biases, [X] float32 each, or None.
        fetches: True if experts are fetched, so that their slots are known only after routing.
    """
    rows, used = weights.shape
    chosen = program.zeros(rows, used, dtype=torch.int32)
    lists = [program.zeros(size, dtype=torch.int32) for size in (1, rows * used + 1, rows * used)]
    sharing = instructions.Sharing(*(program.address(one, torch.int32) for one in lists))
    is_last = program.zeros(1, dtype=torch.int32).fill_(1) if fetches else None
    places = program.zeros(rows, used, dtype=torch.int32) if fetches else chosen
    choice = Routing(layer, chosen, places, sharing, is_last, len(program.arguments) + 1)
    num_experts, (scales, bias) = scores.shape[1], map(program.address, vectors)
    found = program.per_row(scores), num_experts, used, program.address(chosen, torch.int32), program.address(weights)
    program.needs(row_floats=num_experts + 32)
    own: tuple[float | int | None, ...] = ()
    if isinstance(shares, ScoredRouting):
        own = (SCORES[shares.function], bias, *shares[1:])
        program.needs(row_floats=2 * num_experts + shares.groups + 32)
    program.add(instructions.Route(*found, shares == "all", scales, sharing, *own))
    return choice


def append_experts(
    program: NativeProgram,
    experts: Experts,
    norm: instructions.Norm,
    choice: Routing,
    x: Tensor,
    shares: Tensor,
    out: Tensor,
    puts: bool = False,
) -> None:
    """Append the two instructions of a layer's experts: gate and up, then down and the weighted sum.

    Args:
        norm: normalisation of `x`.
        x: [B, D] float32, the experts' input.
        shares: [B, C] float32, the chosen experts' shares.
        out: [B, D] float32, tensor that the weighted sum is added to, or that it overwrites if `puts`.
    """
    assert choice.begin == len(program.arguments), "experts come right behind their choice"
    parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
    gate, up, down = (program.matrix(part.weight[0], part.packing) for part in parts)  # the other experts follow
    biases = [program.address(None if part.bias is None else program.in_float32(part.bias)) for part in parts]
    rounding, (rows, used) = ROUNDINGS[experts.gate_proj.rounding], shares.shape
    where = [*(program.address(ids, torch.int32) for ids in (choice.chosen, choice.places)), choice.sharing]
    hidden = program.per_row(program.block_buffer(used * gate.rows))
    program.needs(rows=rows, columns=gate.columns)
    kept_floats = rows * used * instructions.DOWN_GROUPS * GROUP_ROWS
    program.needs(row_floats=kept_floats, rows=rows * used, columns=down.columns)
    given, gating = (program.per_row(x), norm, rounding), (experts.gating.number, *experts.gating[1:])
    program.add(instructions.ExpertsUp(*given, gate, up, *biases[:2], *where, hidden, used, *gating))
    answers = None
    if choice.is_last is not None:  # experts may be fetched in several batches (waves)
        answers = program.block_buffer(used * -(-down.rows // GROUP_ROWS) * GROUP_ROWS)
    waves = (program.address(answers), program.address(choice.is_last, torch.int32))
    answer = (program.address(shares), program.per_row(out), *waves, used, puts)
    program.add(instructions.ExpertsDown(hidden, rounding, down, biases[2], *where, *answer))
