"""Packed experts on a GPU, in Triton's interpreter: against float64 over what the formats say the bytes mean."""

from collections.abc import Callable

import pytest
import torch
from mixture_cases import SWIGLU, answers_of, packed_case, poisoned
from torch import Tensor

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.experts import few_tokens
from graphcore.kernels.gpu.experts.few_tokens import launch_few
from graphcore.kernels.gpu.experts.grouped import launch_many
from graphcore.kernels.gpu.experts.launch import add_expert_answers
from graphcore.kernels.gpu.experts.operands import MixtureOperands
from graphcore.kernels.ops.packed_experts import packed_experts
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.quant.registry import FORMATS

pytestmark = pytest.mark.thorough

Launch = Callable[[Tensor, Tensor, MixtureOperands], Tensor]
LAUNCHES = {"few": launch_few, "many": launch_many}
# (format, D, F): one group of rows and more than one; a row must be whole blocks
SMALL = [("mxfp4", 64, 32), ("q4_0", 64, 32), ("q8_0", 32, 64)]
SMALL += [
    ("affine4", 96, 32),
    ("affine8", 32, 96),
    ("fp8", 96, 32),
    ("nf4", 96, 32),
    ("fp4", 32, 96),
    ("nvfp4_f32", 96, 32),
]
LARGE = [("mxfp4", 96, 160), ("q5_0", 64, 32)]
CASES = [(launch, *case) for launch in LAUNCHES for case in SMALL] + [("many", *case) for case in LARGE]
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.1}  # narrow ones round hidden features and answers as large as 12

either = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)


@pytest.fixture(autouse=True)
def tall_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fewer programs, which is what the interpreter takes its time for."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(few_tokens, "rows_of", lambda *_: 16)


@pytest.mark.parametrize(("launch", "form", "dim", "hidden"), CASES)
def test_packed_experts_answer_as_their_dense_weights_do(launch: str, form: str, dim: int, hidden: int) -> None:
    case = packed_case(form, 1, torch.float32, dim, hidden)
    for one in (case, case.without_biases()) if form == "mxfp4" else (case,):
        found = LAUNCHES[launch](one.x, one.chosen, one.mixture())
        assert (found.double() - answers_of(one)).abs().max() < CLOSE[torch.float32]


@either
def test_bfloat16_tokens_and_odd_choices(launch: Launch) -> None:
    case = packed_case("mxfp4", 2, torch.bfloat16, 64, 32).choosing([[3, 1], [-1, 3]])
    expected = answers_of(case)
    found = launch(case.x, case.chosen, poisoned(case, {1, 3}).mixture())
    assert (found.double() - expected).abs().max() < CLOSE[torch.bfloat16]
    assert not found[1, 0].any()


def test_the_stream_takes_packed_answers() -> None:
    case = packed_case("mxfp4", 1, torch.float32, 64, 32)
    shares, stream = torch.tensor([[0.75, 0.25]]), torch.ones(1, 64)
    add_expert_answers(stream, case.x, case.chosen, shares, case.weights, case.biases, None, 32, SWIGLU, case.formats)
    expected = 1 + (answers_of(case) * shares.double()[..., None]).sum(1)
    assert (stream.double() - expected).abs().max() < CLOSE[torch.float32]


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_op_takes_experts_packed_for_a_device_wherever_they_lie(tokens: int) -> None:
    case = packed_case("mxfp4", tokens, torch.float32, 64, 32)
    packings = [DevicePacking("mxfp4", 32, 64)] * 2 + [DevicePacking("mxfp4", 64, 32)]
    found = packed_experts(case.x, case.chosen, case.weights, case.biases, None, SWIGLU, packings, "wide")
    assert (found.double() - answers_of(case)).abs().max() < CLOSE[torch.float32]
    moved = [torch.cat((weight[2:3], weight[:1])) for weight in case.weights]
    some = packed_experts(case.x, case.chosen, moved, case.biases, [1, -1, 0, -1], SWIGLU, packings, "wide")
    is_here = (case.chosen == 0) | (case.chosen == 2)
    assert torch.equal(some, torch.where(is_here[..., None], found, 0))


def test_golden_blocks_of_openai_answer_as_transformers_unpacks_them() -> None:
    """Bytes that no packer of ours made: every code and many exponents."""
    generator = torch.Generator().manual_seed(5)
    case = packed_case("mxfp4", 1, torch.float32, 64, 32)
    weights, dense = [], []
    for matrix in case.dense:
        experts, rows, columns = matrix.shape
        raw = torch.randint(0, 256, (experts, rows, columns // 32, 17), generator=generator, dtype=torch.uint8)
        raw[..., 0] = raw[..., 0] % 8 + 120  # exponents around 1
        packing, stored = DevicePacking("mxfp4", rows, columns), StoredPacking("mxfp4", rows, columns)
        weights.append(torch.stack([packing.pack(one.flatten(1), 1.0) for one in raw]))
        dense.append(torch.stack([stored.unpack(one.flatten(), torch.float32) for one in raw]).double())
    random = type(case)(case.x, case.chosen, dense, weights, case.biases, case.formats)
    found = launch_few(random.x, random.chosen, random.mixture())
    expected = answers_of(random)
    assert (found.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    assert FORMATS["mxfp4"].block_nbytes == 17
