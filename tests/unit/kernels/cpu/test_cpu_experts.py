"""The job that runs many tokens through packed experts: each instruction set and rounding, against float64."""

import pytest
import torch
from support.packed_matrices import relative_error, stored_matrix
from torch import Tensor

from graphcore.activations import SILU
from graphcore.kernels.cpu.experts import run_experts
from graphcore.kernels.cpu.kernel_packing import KernelPacking

EXPERTS, DIM, HIDDEN, TOP_K, TOKENS = 5, 160, 96, 2, 43
PLACES = (2, 0, -1, 1, 3)  # expert 2 is missing
BOUNDS = {"wide": 3e-4, "block": 3e-2}  # two products in a row, and sums of both signs

every_rounding = pytest.mark.parametrize("rounding", BOUNDS)


class Mixture:
    """Random experts in q8_0, and tokens that chose them; token 7 chose one expert alone."""

    def __init__(self, library: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))
        self.packings = [KernelPacking("q8_0", *shape, library) for shape in shapes]
        stored = [
            [stored_matrix("q8_0", *shape, seed=10 * part + place) for place in range(4)]
            for part, shape in enumerate(shapes)
        ]
        self.dense = [[one.dense.double() for one in matrices] for matrices in stored]
        self.packed = [
            torch.stack([packing.pack(one.rows, one.scale) for one in matrices])
            for packing, matrices in zip(self.packings, stored, strict=True)
        ]
        self.x = torch.randn(TOKENS, DIM, generator=generator)
        self.chosen = torch.randn(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
        self.chosen[7, 1] = -1

    def answers(self, rounding: str, rows: slice = slice(None)) -> Tensor:
        """Return the answers [N, C, D] for some of the tokens."""
        x, chosen = self.x[rows], self.chosen[rows]
        return run_experts(x, chosen, self.packed, [], PLACES, SILU, self.packings, rounding)

    def expected(self) -> Tensor:
        """Return the answers, token by token, in float64; zeros for missing experts and for none."""
        out = torch.zeros(TOKENS, TOP_K, DIM, dtype=torch.float64)
        for token, x in enumerate(self.x.double()):
            for rank, expert in enumerate(self.chosen[token].tolist()):
                place = PLACES[expert] if expert >= 0 else -1
                if place >= 0:
                    gate, up, down = (matrices[place] for matrices in self.dense)
                    out[token, rank] = down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
        return out


@every_rounding
def test_answers_are_those_of_float64_and_zeros_for_missing_experts(library: str, rounding: str) -> None:
    mixture = Mixture(library)
    found, expected = mixture.answers(rounding), mixture.expected()
    is_missing = (mixture.chosen == 2) | (mixture.chosen < 0)
    assert 0 < is_missing.sum() < is_missing.numel()
    assert not found[is_missing].any()
    assert relative_error(found, expected) < BOUNDS[rounding]


@every_rounding
def test_an_answer_does_not_depend_on_the_other_tokens(library: str, rounding: str) -> None:
    mixture = Mixture(library)
    together = mixture.answers(rounding)
    for first, end in ((0, 1), (5, 9), (11, 28)):
        assert torch.equal(mixture.answers(rounding, slice(first, end)), together[first:end])


def test_tokens_without_experts_get_zeros(library: str) -> None:
    mixture = Mixture(library)
    mixture.chosen[:] = -1
    assert not mixture.answers("wide").any()
