"""Norms, rotations, gates and sums of many tokens in C++, for each instruction set, against float64."""

from collections.abc import Callable
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from support.packed_matrices import native_kernels
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.backend import Backend, NativeBackend, TorchBackend
from graphcore.kernels.cpu.token_rows import SHARED_ELEMENTS, TokenRows
from graphcore.kernels.ops.gating import FUNCTIONS
from graphcore.nn.norm import RMSNorm, UnitNorm
from graphcore.nn.rope import rotate
from graphcore.nn.spec import NormSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # relative error of a rounded number
SIZES = (
    (1, 1),
    (3, 15),
    (5, 64),
    (7, 577),
    (SHARED_ELEMENTS // 576 + 5, 576),
)  # rows, columns; the last on all threads


@pytest.fixture
def kernels(library: str) -> TokenRows:
    return TokenRows(library)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype, times: int = 1) -> None:
    """Check numbers that were rounded `times` times to a dtype."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * times * ROUNDING[dtype], atol=5e-6)


def test_a_row_is_divided_by_the_root_of_its_mean_square(kernels: TokenRows) -> None:
    for size, source, target in every_pair(SIZES, DTYPES, DTYPES):
        with in_case(size, source, target):
            x, weight = numbers(*size, dtype=source), numbers(size[1], seed=2)
            wide = x.double()
            unit = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            assert_rounded(kernels.rms_norm(x, None, 1e-5, target), unit, target)
            assert_rounded(kernels.rms_norm(x, weight, 1e-5, target), unit * weight.double(), target)
            rounded = unit.to(target).double() * weight.to(target).double()
            assert_rounded(kernels.rms_norm(x, weight, 1e-5, target, rounds_first=True), rounded, target, times=3)


def test_pairs_of_a_head_are_turned_and_the_rest_is_kept(kernels: TokenRows) -> None:
    for dtype, width in every_pair(DTYPES, [64, 32, 2]):
        with in_case(dtype, width):
            for tokens, heads in ((1, 1), (5, 3), (SHARED_ELEMENTS // 192 + 1, 3)):
                x, angles = numbers(1, tokens, heads, 64, dtype=dtype), numbers(1, tokens, width // 2, seed=2)
                rope = torch.stack((angles.cos(), angles.sin()), dim=2)
                found, whole = kernels.rotate(x, rope), x.double()
                cos, sin = rope.double()[:, :, 0, None], rope.double()[:, :, 1, None]
                first, second = whole[..., : width // 2], whole[..., width // 2 : width]
                exact = torch.cat((first * cos - second * sin, second * cos + first * sin, whole[..., width:]), dim=-1)
                torch.testing.assert_close(found.double(), exact, rtol=1.01 * ROUNDING[dtype], atol=5e-6)
                assert torch.equal(found[..., width:], x[..., width:])


def test_an_activated_gate_multiplies_the_other(kernels: TokenRows) -> None:
    for dtype, kind in every_pair(DTYPES, [Activation.NONE, *FUNCTIONS]):
        with in_case(dtype, kind):
            for size in (1, 17, 1024, 1040, SHARED_ELEMENTS + 3):
                gate, up = numbers(size, dtype=dtype), numbers(size, dtype=dtype, seed=2)
                activated = gate.double() if kind is Activation.NONE else FUNCTIONS[kind](gate.double())
                assert_rounded(kernels.gated(gate, up, kind), activated * up.double(), dtype, times=2)
                assert_rounded(kernels.activated(gate, kind), activated, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_that_of_torch_to_the_bit(kernels: TokenRows, dtype: torch.dtype) -> None:
    for size in (1, 17, 1024, 1040, SHARED_ELEMENTS + 3):
        x, added = numbers(size), numbers(size, dtype=dtype, seed=2)
        assert torch.equal(kernels.add(x, added), x + added)


def test_a_row_has_the_same_bits_alone_and_among_others(kernels: TokenRows) -> None:
    x, weight = numbers(200, 576, dtype=torch.bfloat16), numbers(576, seed=2)
    whole = kernels.rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert all(torch.equal(whole[row], kernels.rms_norm(x[row], weight, 1e-5, torch.bfloat16)) for row in (0, 99, 199))
    gated = kernels.gated(x, whole, Activation.SILU)
    assert torch.equal(gated[99], kernels.gated(x[99], whole[99], Activation.SILU))
    for kind in FUNCTIONS:  # torch's own GELU computes the last numbers of a tensor with other instructions
        for narrow in (x, numbers(200, 60), numbers(16, 12)):
            activated = kernels.activated(narrow, kind)
            assert torch.equal(activated[5:], kernels.activated(narrow[5:], kind)), (kind, narrow.shape)


def test_views_are_read_as_what_they_show(kernels: TokenRows) -> None:
    x = numbers(64, 10).T
    assert not x.is_contiguous()
    assert torch.equal(kernels.rms_norm(x, None, 1e-5, x.dtype), kernels.rms_norm(x.clone(), None, 1e-5, x.dtype))
    assert torch.equal(kernels.gated(x, x, Activation.SILU), kernels.gated(x.clone(), x.clone(), Activation.SILU))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_float32", [True, False])
def test_modules_round_where_they_do_in_torch(dtype: torch.dtype, in_float32: bool) -> None:
    norm, unit = RMSNorm(NormSpec("rms", 1e-5, scale_in_float32=in_float32), 577), UnitNorm(1e-5)
    norm.weight.copy_(numbers(577, seed=2))
    x = numbers(64, 577)

    def outputs(backend: Backend) -> list[Tensor]:
        norm.backend = unit.backend = backend
        return [norm(x, dtype), norm(x.to(dtype)), unit(x.to(dtype))]

    for plain, fast in zip(outputs(TorchBackend()), outputs(NativeBackend(native_kernels())), strict=True):
        assert plain.dtype == fast.dtype
        torch.testing.assert_close(fast.float(), plain.float(), rtol=2.02 * ROUNDING[dtype], atol=1e-6)
        assert dtype is torch.float32 or (fast == plain).float().mean() > 0.99  # sums end in other last bits, no more


def test_traces_and_compilations_see_plain_operations() -> None:
    backend = NativeBackend(native_kernels())
    x = numbers(4, 32)
    assert backend.token_rows(x) is not None
    assert backend.token_rows(x.to("meta")) is None
    assert backend.token_rows(x.double()) is None
    assert TorchBackend().token_rows(x) is None

    def compiled(function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.compile(function, backend="eager", fullgraph=True)(x)

    assert torch.equal(compiled(lambda x: x + (backend.token_rows(x) is None)), x + 1)
    assert rotate(x[None, :, None], torch.zeros(1, 4, 2, 16)).shape == (1, 4, 1, 32)
