"""The op gated_convolution: plain torch and the C++ kernel against float64; schema, fake, a compiled caller."""

from dataclasses import replace
from itertools import product as every_pair

import pytest
import torch
from convolution_cases import SHAPES, assert_true, convolution_case
from support.cases import in_case

from graphcore.kernels.cpu.program import NativeProgram, append_gated_convolution

OP = torch.ops.graphcore.gated_convolution.default
PASSES = [([0, 5], [1, 1]), ([9, 0], [2, 16]), ([7, 0, 3], [20, 70, 0])]


def test_plain_torch_computes_the_layer() -> None:
    for name, (starts, counts) in every_pair(SHAPES, PASSES):
        with in_case(name, starts, counts):
            case = convolution_case(name, starts, counts)
            before = case.copied()
            assert_true(case, case.run(), before, atol=1e-5, rtol=1e-5)


def test_the_kernel_computes_the_layer(library: str) -> None:
    for dtype, name, (starts, counts) in every_pair([torch.float32, torch.bfloat16, torch.float16], SHAPES, PASSES):
        with in_case(dtype, name, starts, counts):
            case = convolution_case(name, starts, counts, dtype)
            before = case.copied()
            out = case.run(library)
            assert not out.isnan().any(), "padding is 0"
            assert_true(case, out, before, atol=1e-5, rtol=1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps)


def test_a_state_carries_from_one_pass_to_the_next_to_the_bit(library: str) -> None:
    for name in SHAPES:
        with in_case(name):
            for used in ("", library):
                case = convolution_case(name, [0], [100])
                whole = case.copied()
                expected, outs = whole.run(used), []
                for first, end in ((0, 66), (66, 67), (67, 69), (69, 100)):
                    part = replace(
                        case,
                        mixed=case.mixed[:, first:end].contiguous(),
                        starts=torch.tensor([first]),
                        counts=torch.tensor([end - first]),
                    )
                    outs.append(part.run(used))
                assert torch.equal(torch.cat(outs, dim=1), expected)
                assert torch.equal(case.convolution, whole.convolution)


def test_a_native_program_runs_the_layer_token_by_token_with_the_bits_of_one_pass(library: str) -> None:
    for name in SHAPES:
        with in_case(name):
            case = convolution_case(name, [0], [5])
            whole = case.copied()
            expected = whole.run(library)
            one = torch.empty_like(case.mixed[:, :1])
            step = replace(case, mixed=one, starts=torch.tensor([0]), counts=torch.tensor([1]))
            program = NativeProgram(library, 2)
            answer, outs = append_gated_convolution(program, step.parts()), []
            for token in range(5):
                one.copy_(case.mixed[:, token : token + 1])
                step.starts.fill_(token)
                program.run()
                outs.append(answer.clone())
            assert torch.equal(torch.stack(outs, dim=1), expected)
            assert torch.equal(case.convolution, whole.convolution)


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_sequence_without_tokens_keeps_its_state(library: str, tokens: int) -> None:
    for used in ("", library):
        case = convolution_case("biased", [4, 0, 9], [0, 0, tokens])
        before = case.copied()
        case.run(used)
        torch.testing.assert_close(case.convolution[:2], before.convolution[:2], rtol=0, atol=0, equal_nan=True)


def test_more_taps_than_the_kernel_has_are_computed_in_torch(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "wider", (8, 9, False))
    case = convolution_case("wider", [3], [12])
    before = case.copied()
    assert_true(case, case.run(library), before, atol=1e-5, rtol=1e-5)


def test_schema_says_that_the_state_is_written_and_nothing_else() -> None:
    written = [arg.name for arg in OP._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    assert written == ["parts_convolution"]
    assert [result.alias_info for result in OP._schema.returns] == [None]


@pytest.mark.parametrize("tokens", [1, 12])
def test_opcheck_finds_schema_and_fake_true_to_the_op(tokens: int) -> None:
    case = convolution_case("biased", [2, 3], [tokens, tokens])
    torch.library.opcheck(OP, tuple(case.parts()), test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_caller_changes_the_state_as_an_eager_one() -> None:
    case = convolution_case("lfm2", [0, 3], [12, 9], torch.bfloat16)
    other = case.copied()
    compiled = torch.compile(lambda: other.run() + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled()[0], (case.run() + 1)[0])
    assert torch.equal(other.convolution, case.convolution)
