"""Both forms of a packed matrix: the kernels' order and the file's bytes; experts in either, against dense ones.

Legend: O rows (output features), I columns (input features), X experts.
"""

from collections.abc import Callable, Sequence
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from support.packed_matrices import (
    KERNEL_FORMATS,
    StoredMatrix,
    native_kernels,
    num_differing,
    relative_error,
    stored_matrix,
)
from torch import Tensor

from graphcore.activations import CLAMPED_SWIGLU, SILU, Gating
from graphcore.kernels.backend import Backend, NativeBackend, TorchBackend, TritonBackend
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.ops.experts import all_on_every, each_on_its_own
from graphcore.kernels.ops.gating import clamped_swiglu
from graphcore.kernels.ops.packed_experts import packed_experts
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.quant import FORMATS

FORMS = ("kernel", "stored")
EVERY = [(form, name) for form in FORMS for name in KERNEL_FORMATS] + [("stored", "tq1_0")]
EVERY += [("device", name) for name in DEVICE_LAYOUTS]
SWIGLU = Gating(CLAMPED_SWIGLU, 0.9, 1.3)  # with biases here, as in gpt-oss; SILU without, as in Qwen
ROUNDINGS = {"float": 1e-6, "wide": 1e-4, "block": 1e-2}  # bounds at float32


def packing_of(form: str, name: str, rows: int, columns: int) -> Packing:
    if form == "kernel":
        return KernelPacking(name, rows, columns, native_kernels())
    return (DevicePacking if form == "device" else StoredPacking)(name, rows, columns)


def matrix_of(name: str, rows: int = 37, is_tame: bool = False) -> StoredMatrix:
    if name != "tq1_0":
        return stored_matrix(name, rows, max(256, FORMATS[name].block_elements), is_tame=is_tame)
    one = FORMATS[name]
    raw = one.quantize(torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)))
    return StoredMatrix(name, *one.split_rows(raw, (rows, 256)), one.dequantize(raw, (rows, 256)))


def test_unpacked_matrices_and_gathered_rows_are_the_formats_weights() -> None:
    for form, name in EVERY:
        with in_case(form, name):
            matrix = matrix_of(name)
            packing = packing_of(form, name, *matrix.dense.shape)
            packed = packing.pack(matrix.rows, matrix.scale)
            assert (packed.dtype, packed.shape) == (torch.uint8, (packing.nbytes,))
            ids = torch.tensor([[[36], [0]], [[16], [36]]])
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                assert num_differing(packing.unpack(packed, dtype), matrix.dense.to(dtype)) == 0
                assert num_differing(packing.gather(ids, packed, dtype), matrix.dense[ids].to(dtype)) == 0


def test_products_are_those_of_float64() -> None:
    for form, name in EVERY:
        with in_case(form, name):
            matrix = matrix_of(name, is_tame=True)
            packing = packing_of(form, name, *matrix.dense.shape)
            packed = packing.pack(matrix.rows, matrix.scale)
            generator = torch.Generator().manual_seed(0)
            x, bias = torch.randn(2, 3, 256, generator=generator), torch.randn(37, generator=generator)
            expected = x.double() @ matrix.dense.double().T + bias.double()
            for rounding, bound in ROUNDINGS.items():
                y = packing.linear(x, packed, bias, rounding)
                assert y.shape == (2, 3, 37)
                assert relative_error(y, expected) < (
                    bound if form == "kernel" else 1e-6
                )  # what is unpacked is not rounded
            assert relative_error(packing.linear(x, packed, None, "float"), expected - bias.double()) < 1e-6


@pytest.mark.parametrize("form", [*FORMS, "device"])
@pytest.mark.parametrize("name", ["q4_k", "q8_0", "i2_s"])
def test_rows_may_lie_anywhere_in_memory(form: str, name: str) -> None:
    """Folds pick rows as views: every third, in another order."""
    matrix = matrix_of(name)
    packing = packing_of(form, name, 12, 256)
    packed = packing.pack(matrix.rows[1::3], matrix.scale)
    assert torch.equal(packing.unpack(packed, torch.float32), matrix.dense[1::3])


@pytest.mark.parametrize("form", [*FORMS, "device"])
@pytest.mark.parametrize("scale", [0.375, -2.5, 1e-20])
def test_a_ternary_scale_is_in_the_bytes_and_in_every_product(form: str, scale: float) -> None:
    matrix = matrix_of("i2_s")
    packing = packing_of(form, "i2_s", *matrix.dense.shape)
    packed = packing.pack(matrix.rows, scale)
    dense = matrix.dense / matrix.scale * torch.tensor(scale)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(packing.unpack(packed, torch.float32), dense)
    assert torch.equal(packing.gather(torch.tensor([3, 36]), packed, torch.float32), dense[[3, 36]])
    assert relative_error(packing.linear(x, packed, None, "float"), x.double() @ dense.double().T) < 1e-6
    assert relative_error(packing.linear(x, packed, None, "wide"), x.double() @ dense.double().T) < 1e-4


@pytest.mark.parametrize(
    ("name", "columns", "backend", "expected"),
    [
        ("q4_k", 512, NativeBackend("kernels.so"), KernelPacking("q4_k", 8, 512, "kernels.so")),
        ("q4_k", 512, TorchBackend(), StoredPacking("q4_k", 8, 512)),
        ("tq1_0", 512, NativeBackend("kernels.so"), StoredPacking("tq1_0", 8, 512)),  # no kernel reads it
        ("q4_k", 288, NativeBackend("kernels.so"), None),  # a row is no whole number of blocks
        ("i2_s", 96, TorchBackend(), None),
    ],
)
def test_how_a_matrix_is_held_follows_from_format_shape_and_kernels(
    name: str, columns: int, backend: Backend, expected: Packing | None
) -> None:
    assert backend.choose_packing(name, 8, columns) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q4_k", DevicePacking("q4_k", 8, 512)),
        ("tq1_0", StoredPacking("tq1_0", 8, 512)),
        ("q1_0", StoredPacking("q1_0", 8, 512)),
    ],
)
def test_a_gpu_holds_planes_where_its_kernels_read_them(name: str, expected: Packing) -> None:
    assert TritonBackend().choose_packing(name, 8, 512) == expected
    assert TritonBackend().choose_packing(name, 8, 288) is None


def test_stored_bytes_are_the_files() -> None:
    for name in (*KERNEL_FORMATS, "tq1_0"):
        matrix = matrix_of(name)
        packing = StoredPacking(name, *matrix.dense.shape)
        raw = FORMATS[name].join_rows(matrix.rows, matrix.scale)
        assert torch.equal(packing.pack(matrix.rows, matrix.scale), raw)
        assert packing.nbytes == raw.numel()


EXPERTS, DIM, HIDDEN, TOP_K = 5, 256, 256, 2
Implementation = Callable[..., Tensor]


def experts_of(form: str, name: str) -> tuple[list[Packing], list[Tensor], list[Tensor], list[Tensor]]:
    """Return packings, packed and dense weights, and biases of gate, up and down."""
    packings, packed, dense, biases = [], [], [], []
    generator = torch.Generator().manual_seed(0)
    for part, (rows, columns) in enumerate(((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))):
        matrices = [stored_matrix(name, rows, columns, seed=10 * part + expert) for expert in range(EXPERTS)]
        packing = packing_of(form, name, rows, columns)
        packings.append(packing)
        packed.append(torch.stack([packing.pack(one.rows, one.scale) for one in matrices]))
        dense.append(torch.stack([one.dense for one in matrices]))
        biases.append(torch.randn(EXPERTS, rows, generator=generator))
    return packings, packed, dense, biases


def expected_of(x: Tensor, chosen: Tensor, dense: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Return what the chosen experts answer, token by token: [N, C, D] float64; clamped if there are biases."""
    out = torch.zeros(*chosen.shape, DIM, dtype=torch.float64)
    gate_w, up_w, down_w = (weight.double() for weight in dense)
    gate_b, up_b, down_b = (bias.double() for bias in biases or [torch.zeros(EXPERTS, 1)] * 3)
    for token, values in enumerate(x.double()):
        for rank, expert in enumerate(chosen[token].tolist()):
            gate, up = gate_w[expert] @ values + gate_b[expert], up_w[expert] @ values + up_b[expert]
            if biases:
                gate, up = gate.clamp(max=SWIGLU.limit), up.clamp(-SWIGLU.limit, SWIGLU.limit)
                hidden = (up + 1) * gate / (1 + torch.exp(-SWIGLU.alpha * gate))
            else:
                hidden = up * gate / (1 + torch.exp(-gate))
            out[token, rank] = down_w[expert] @ hidden + down_b[expert]
    return out


def test_packed_experts_are_the_dense_ones_in_float64() -> None:
    for form, name, gating in every_pair(FORMS, ["mxfp4", "q4_0", "q4_k", "q6_k", "i2_s"], [SWIGLU, SILU]):
        with in_case(form, name, gating):
            packings, packed, dense, biases = experts_of(form, name)
            biases = biases if gating == SWIGLU else []
            for tokens in (1, 5, 40):
                generator = torch.Generator().manual_seed(tokens)
                x = torch.randn(tokens, DIM, generator=generator) / (dense[0].std() * DIM**0.5)  # products of about one
                chosen = torch.randn(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
                expected = expected_of(x, chosen, dense, biases)
                for rounding, bound in ROUNDINGS.items():
                    y = packed_experts(x, chosen, packed, biases, None, gating, packings, rounding)
                    assert (y.shape, y.dtype) == (expected.shape, x.dtype)
                    # two products in a row, and sums of both signs
                    assert relative_error(y, expected) < (3 * bound if form == "kernel" else 3e-6), (tokens, rounding)


def test_packed_experts_give_the_same_bits_wherever_they_lie_and_however_few_at_a_time() -> None:
    for form, name, tokens in every_pair(FORMS, ["mxfp4", "q4_0", "q6_k"], [1, 40]):
        with in_case(form, name, tokens):
            packings, packed, _, biases = experts_of(form, name)
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, DIM, generator=generator)
            chosen = torch.randn(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
            expected = packed_experts(x, chosen, packed, biases, None, SWIGLU, packings, "wide")
            found = torch.zeros_like(expected)
            for wave in ([4, 1], [0, 3], [2]):
                slots = [torch.stack([one[expert] for expert in (0, *wave)]) for one in packed]
                places = [wave.index(expert) + 1 if expert in wave else -1 for expert in range(EXPERTS)]
                answers = packed_experts(x, chosen, slots, biases, places, SWIGLU, packings, "wide")
                is_here = torch.isin(chosen, torch.tensor(wave))
                assert not answers[~is_here].any()
                found[is_here] = answers[is_here]
            assert torch.equal(found, expected)


def test_experts_that_may_not_be_looked_at_all_run_and_only_the_chosen_count() -> None:
    """The implementation for devices where nothing is read back gives what the loop gives."""
    packings, packed, dense, biases = experts_of("stored", "q4_0")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, DIM, generator=generator) / 4
    chosen = torch.randn(7, EXPERTS, generator=generator).topk(TOP_K).indices

    def run(tokens: Tensor, expert: int, place: int) -> Tensor:
        def project(values: Tensor, part: int) -> Tensor:
            return packings[part].linear(values, packed[part][place], biases[part][expert], "float")

        return project(clamped_swiglu(project(tokens, 0), project(tokens, 1), *SWIGLU[1:]), 2)

    expected = expected_of(x, chosen, dense, biases)
    for implementation in (each_on_its_own, all_on_every):
        y = implementation(x, chosen, EXPERTS, None, run)
        assert relative_error(y, expected) < 3e-6


@pytest.mark.parametrize("form", FORMS)
def test_torch_knows_the_experts_shape_without_running_them(form: str) -> None:
    packings, packed, _, biases = experts_of(form, "mxfp4")
    x, chosen = torch.randn(3, DIM), torch.tensor([[0, 1], [2, 3], [4, 0]])
    library = native_kernels() if form == "kernel" else ""
    formats = [one.format for one in packings]
    arguments = (x, chosen, packed, biases, None, HIDDEN, *SWIGLU, formats, library, "float")
    operation = torch.ops.graphcore.packed_experts.default
    torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))
