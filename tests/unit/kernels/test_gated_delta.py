"""The op delta_heads: plain torch against float64, and as torch sees it: schema, fake, a compiled caller."""

import pytest
import torch
from delta_cases import SHAPES, SMALL, assert_true, delta_case

OP = torch.ops.graphcore.delta_heads.default


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("starts", "counts"), [([0, 5], [1, 1]), ([7, 0, 3], [20, 70, 0])])
def test_plain_torch_computes_the_layer(shape: object, starts: list[int], counts: list[int]) -> None:
    case = delta_case(shape, starts, counts)  # type: ignore[arg-type]
    before = case.copied()
    out = case.run()
    assert_true(case, out, before, atol=1e-4)


def test_a_sequence_without_tokens_keeps_its_states() -> None:
    case = delta_case(SMALL, [4, 9], [0, 12])
    before = case.copied()
    case.run()
    assert torch.equal(case.convolution[0], before.convolution[0])
    assert torch.equal(case.recurrent[0], before.recurrent[0])


def test_schema_says_that_both_states_are_written_and_nothing_else() -> None:
    written = [arg.name for arg in OP._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    assert written == ["convolution", "recurrent"]
    assert [result.alias_info for result in OP._schema.returns] == [None]


@pytest.mark.parametrize("tokens", [1, 12])
def test_opcheck_finds_schema_and_fake_true_to_the_op(tokens: int) -> None:
    case = delta_case(SMALL, [2, 3], [tokens, tokens])
    weights = (case.conv_weight, None, case.rate, case.dt_bias, case.norm_weight)
    states = (case.convolution, case.recurrent, case.starts, case.counts, SMALL.key_heads, 1e-6)
    parts = (case.mixed, case.z, case.a, case.b, *weights, *states)
    torch.library.opcheck(OP, parts, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_caller_changes_the_states_as_an_eager_one() -> None:
    case = delta_case(SMALL, [0, 3], [12, 9], torch.bfloat16)
    other = case.copied()
    compiled = torch.compile(lambda: other.run() + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled()[0], (case.run() + 1)[0])
    assert torch.equal(other.recurrent, case.recurrent)
    assert torch.equal(other.convolution, case.convolution)
