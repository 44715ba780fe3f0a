"""Mixtures of experts for the tests of their GPU kernels, and what they answer in float64."""

from dataclasses import dataclass, replace

import torch
from support.packed_matrices import SCALE_NBYTES, stored_matrix
from torch import Tensor

from graphcore.activations import ACTIVATIONS, CLAMPED_SWIGLU, Gating
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.experts.operands import MixtureOperands, mixture_of
from graphcore.kernels.ops.gating import FUNCTIONS
from graphcore.quant.registry import FORMATS

SWIGLU = Gating(CLAMPED_SWIGLU, 0.9, 1.3)
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Some tokens, who was chosen for them, and the experts.

    Attributes:
        dense: the three matrices of each expert, float64.
        weights: the same as the kernels take them.
        formats: of the three.
    """

    x: Tensor
    chosen: Tensor
    dense: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]
    formats: tuple[str, str, str]
    gating: Gating = SWIGLU

    @property
    def hidden(self) -> int:
        return self.dense[0].shape[1]

    def without_biases(self, activation: str = "silu") -> "Case":
        """Return the case with another activation and no biases, as of Qwen's experts."""
        return replace(self, biases=[], gating=Gating(activation))

    def mixture(self, places: list[int] | None = None) -> MixtureOperands:
        return mixture_of(self.weights, self.biases, places, self.hidden, self.gating, self.formats)

    def choosing(self, chosen: list[list[int]]) -> "Case":
        return replace(self, chosen=torch.tensor(chosen))


def dense_case(
    tokens: int, dtype: torch.dtype, dim: int = 24, hidden: int = 12, experts: int = 6, top_k: int = 3, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    shapes = (hidden, dim), (hidden, dim), (dim, hidden)
    weights = [randn(experts, *shape) / 4 for shape in shapes]
    biases = [randn(experts, rows) for rows, _ in shapes]
    chosen = randn(tokens, experts).topk(top_k).indices
    dense = [weight.double() for weight in weights]
    return Case(randn(tokens, dim), chosen, dense, weights, biases, ("dense",) * 3)


def packed_case(
    form: str, tokens: int, dtype: torch.dtype, dim: int, hidden: int, experts: int = 4, top_k: int = 2
) -> Case:
    """Return a case whose weights are packed for a device: random ones, rounded to a format by quant/ itself.

    Weights of a format that nothing is rounded to are random bytes.
    """
    case = dense_case(tokens, dtype, dim, hidden, experts, top_k)
    one, dense, weights = FORMATS[form], [], []
    for part, matrix in enumerate(case.weights):
        packing = DevicePacking(form, *matrix.shape[1:])
        if one.can_quantize:
            raw = [one.quantize(expert.float()) for expert in matrix]
        else:
            raw = [random_bytes(form, *expert.shape, seed=experts * part + at) for at, expert in enumerate(matrix)]
        dense.append(
            torch.stack(
                [one.dequantize(each, expert.shape, torch.float32) for each, expert in zip(raw, matrix, strict=True)]
            ).double()
        )
        packed = [packing.pack(*one.split_rows(each, tuple(matrix.shape[1:]))) for each in raw]
        weights.append(torch.stack(packed))
    return replace(case, dense=dense, weights=weights, formats=(form,) * 3)


def random_bytes(form: str, rows: int, columns: int, seed: int) -> Tensor:
    """Return random bytes of a matrix, [nbytes] uint8; float32 scales are such that weights are of about 1/4."""
    one, stored = FORMATS[form], stored_matrix(form, rows, columns, seed)
    blocks = stored.rows.reshape(-1, one.block_nbytes)
    if SCALE_NBYTES.get(form) == 4:
        end = 8 if form == "nvfp4_f32" else 4
        scales = blocks[:, :end].clone().view(torch.float32)
        blocks[:, :end] = (scales / (4 * stored.dense.std())).view(torch.uint8)
    return one.join_rows(blocks.view(rows, -1), stored.scale)


def answers_of(case: Case) -> Tensor:
    """Return what the chosen experts answer, token by token: [N, C, D] float64; zeros for nobody."""
    gate_w, up_w, down_w = case.dense
    gate_b, up_b, down_b = (bias.double() for bias in case.biases or [torch.zeros(len(gate_w), 1)] * 3)
    out = torch.zeros(*case.chosen.shape, down_w.shape[1], dtype=torch.float64)
    for token, x in enumerate(case.x.double()):
        for rank, expert in enumerate(case.chosen[token].tolist()):
            if expert < 0:
                continue
            gate, up = gate_w[expert] @ x + gate_b[expert], up_w[expert] @ x + up_b[expert]
            if case.gating == SWIGLU:
                gate, up = gate.clamp(max=SWIGLU.limit), up.clamp(-SWIGLU.limit, SWIGLU.limit)
                hidden = (up + 1) * gate / (1 + torch.exp(-SWIGLU.alpha * gate))
            else:
                hidden = FUNCTIONS[ACTIVATIONS[case.gating.activation]](gate) * up
            out[token, rank] = down_w[expert] @ hidden + down_b[expert]
    return out


def poisoned(case: Case, others_than: set[int]) -> Case:
    """Return the case with NaN, or bytes that stand for none, in every expert but these."""
    weights, biases = [one.clone() for one in case.weights], [one.clone() for one in case.biases]
    for expert in set(range(len(case.weights[0]))) - others_than:
        for one in (*weights, *biases):
            one[expert] = NAN if one.is_floating_point() else 255
    return replace(case, weights=weights, biases=biases)
