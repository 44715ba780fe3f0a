"""The op delta_heads: plain torch and the C++ kernels against float64; schema, fake, a compiled caller."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from delta_cases import QWEN, SHAPES, SMALL, DeltaShape, assert_true, delta_case
from support.cases import in_case

from graphcore.kernels.cpu.program import NativeProgram, append_delta_heads

SPANS = [([0, 5], [1, 1]), ([9, 0], [2, 16]), ([7, 0, 3], [20, 65, 0]), ([0], [150])]
CASES = [  # each in float32 and in one narrow dtype
    (*span, dtype)
    for span, narrow in zip(SPANS, cycle([torch.bfloat16, torch.float16]), strict=False)
    for dtype in (torch.float32, narrow)
]
OP = torch.ops.graphcore.delta_heads.default


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("starts", "counts"), [([0, 5], [1, 1]), ([7, 0, 3], [20, 70, 0])])
def test_plain_torch_computes_the_layer(shape: DeltaShape, starts: list[int], counts: list[int]) -> None:
    case = delta_case(shape, starts, counts)
    before = case.copied()
    out = case.run()
    assert_true(case, out, before, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("starts", "counts", "dtype"), CASES)
def test_kernels_compute_the_layer(
    library: str, shape: DeltaShape, starts: list[int], counts: list[int], dtype: torch.dtype
) -> None:
    case = delta_case(shape, starts, counts, dtype)
    before = case.copied()
    out = case.run(library)
    assert not out.isnan().any(), "padding is 0"
    if dtype is torch.float32:
        return assert_true(case, out, before, atol=2e-5, rtol=1e-5)
    return assert_true(case, out, before, atol=1e-3, rtol=torch.finfo(dtype).eps)


def test_kernels_keep_the_state_apart_from_the_number_of_threads(library: str) -> None:
    """Each head is computed by one thread, so that the bits do not depend on who computes it."""
    case = delta_case(QWEN, [0, 4], [70, 31])
    other = case.copied()
    alone = case.run(library)
    torch.set_num_threads(3)
    together = other.run(library)
    torch.set_num_threads(1)
    assert torch.equal(alone, together)
    assert torch.equal(case.recurrent, other.recurrent)


def test_kernels_carry_the_states_from_one_chunk_to_the_next(library: str) -> None:
    case = delta_case(SMALL, [0], [100])
    before = case.copied()
    outs = []
    for first, end in ((0, 66), (66, 68), (68, 100)):
        inputs = {name: getattr(case, name)[:, first:end].contiguous() for name in ("mixed", "z", "a", "b")}
        part = replace(case, **inputs, starts=torch.tensor([first]), counts=torch.tensor([end - first]))
        outs.append(part.run(library))
    assert_true(case, torch.cat(outs, dim=1), before, atol=2e-5, rtol=1e-5)


def test_a_native_program_runs_the_layer_token_by_token(library: str) -> None:
    for shape in SHAPES.values():
        with in_case(shape):
            case = delta_case(shape, [0], [5])
            before = case.copied()
            one = {name: torch.empty_like(getattr(case, name)[:, :1]) for name in ("mixed", "z", "a", "b")}
            step = replace(case, **one, starts=torch.tensor([0]), counts=torch.tensor([1]))
            program = NativeProgram(library, 2)
            answer, outs = append_delta_heads(program, step.parts()), []
            for token in range(5):
                for name, tensor in one.items():
                    tensor.copy_(getattr(case, name)[:, token : token + 1])
                step.starts.fill_(token)
                program.run()
                outs.append(answer.clone())
            assert_true(case, torch.stack(outs, dim=1), before, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_sequence_without_tokens_keeps_its_states(library: str, tokens: int) -> None:
    for used in ("", library):
        case = delta_case(SMALL, [4, 0, 9], [0, 0, tokens])
        before = case.copied()
        case.run(used)
        for state, old in ((case.convolution, before.convolution), (case.recurrent, before.recurrent)):
            torch.testing.assert_close(state[:2], old[:2], rtol=0, atol=0, equal_nan=True)  # a new sequence's holds NaN


def test_schema_says_that_both_states_are_written_and_nothing_else() -> None:
    written = [arg.name for arg in OP._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    assert written == ["parts_convolution", "parts_recurrent"]
    assert [result.alias_info for result in OP._schema.returns] == [None]


@pytest.mark.parametrize("tokens", [1, 12])
def test_opcheck_finds_schema_and_fake_true_to_the_op(tokens: int) -> None:
    case = delta_case(SMALL, [2, 3], [tokens, tokens])
    torch.library.opcheck(OP, tuple(case.parts()), test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_caller_changes_the_states_as_an_eager_one() -> None:
    case = delta_case(SMALL, [0, 3], [12, 9], torch.bfloat16)
    other = case.copied()
    compiled = torch.compile(lambda: other.run() + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled()[0], (case.run() + 1)[0])
    assert torch.equal(other.recurrent, case.recurrent)
    assert torch.equal(other.convolution, case.convolution)
