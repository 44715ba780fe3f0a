"""Chains of layers whose residual adds prepare norms have the bits of layers alone, whoever runs between them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from block_specs import ARCHITECTURES, ORDERED
from support.gpu_kernels import kernels_of, let_programs_be_few
from tiny_graph import CPU, FULL, builder_of, filled_decoder, model_of
from torch import Tensor

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.graph.program import Program
from graphcore.graph.step import BlocksStep
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.block import Block
from graphcore.nn.linear import Linear
from graphcore.nn.spec import BlockSpec
from graphcore.weights.groups import split_layers

pytestmark = pytest.mark.thorough

SPECS = {
    **{name: ARCHITECTURES[name] for name in ("llama", "gemma3", "gpt_oss", "qwen3_moe", "gpt2")},
    **{name: ORDERED[name] for name in ("ordered", "ordered_sandwich", "ordered_in_part")},
    "full": FULL,
}
LAYERS, CONTEXT = 3, 64


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


def builder_through_kernels(spec: BlockSpec, dtype: torch.dtype, batch: int, moving: tuple[int, ...]) -> GraphBuilder:
    """Return a builder of three layers, each a group; `moving` are groups, counted from 1."""
    model = model_of(*[spec] * LAYERS)
    caches = allocate_cache(model, CacheSizes(batch, CONTEXT, dtype), CPU)
    groups = split_layers(LAYERS, 1)
    given = filled_decoder(model, dtype), "eager", groups, caches, CONTEXT, CPU
    return GraphBuilder(*given, streamed=moving, decode_kernels=DeviceBlocks.allocate(caches, CPU))


def program_of(spec: BlockSpec, dtype: torch.dtype, batch: int = 2, moving: tuple[int, ...] = ()) -> Program:
    """Return a decode program through decode kernels."""
    program = builder_through_kernels(spec, dtype, batch, moving).token(batch)
    program.state.token_ids = torch.arange(batch)[:, None]
    program.state.span.counts.fill_(1)
    return program


def run(program: Program, is_alone: bool = False) -> Tensor:
    """Return the stream behind the last layer; alone, no layer has a layer to its neighbours."""
    for step in program.without_head().steps:
        if isinstance(step, BlocksStep) and is_alone:
            blocks = [replace(bound, run=unfused(bound.run)) for bound in step.blocks]
            step = replace(step, blocks=blocks)
        step.replay()
    return program.state.hidden.clone()


def unfused(function: object) -> object:
    assert isinstance(function, partial), "a layer between others has a layer"
    return function.func


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("full", torch.float32),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.slow if at % 4 else ())
            for at, name in enumerate(SPECS)
        ),
    ],
)
def test_a_chain_has_the_bits_of_layers_alone(name: str, dtype: torch.dtype) -> None:
    alone = run(program_of(SPECS[name], dtype), is_alone=True)
    chained = program_of(SPECS[name], dtype)
    assert torch.equal(run(chained), alone)


@pytest.mark.parametrize("moving", [(2,), (1, 2, 3)])
def test_a_chain_goes_on_where_matrices_move(moving: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms never move; the matrices of a layer that moves are NaN until its own step."""
    expected = run(program_of(SPECS["llama"], torch.bfloat16))
    program = program_of(SPECS["llama"], torch.bfloat16, moving=moving)
    steps = [step for step in program.steps if isinstance(step, BlocksStep)]
    matrices = {
        step.group: [(one, one.weight.clone()) for one in step.blocks[0].block.modules() if isinstance(one, Linear)]
        for step in steps
        if step.group in moving
    }
    for linear, _ in (one for linears in matrices.values() for one in linears):
        linear.weight.fill_(float("nan"))
    program.steps[0].replay()
    launched = []
    for step in steps:
        for linear, weight in matrices.get(step.group, []):
            linear.weight.copy_(weight)
        launched.append(kernels_of(step.replay, monkeypatch))
        for linear, _ in matrices.get(step.group, []):
            linear.weight.fill_(float("nan"))
    assert torch.equal(program.state.hidden, expected)
    assert [launches[:2] == ["aten zero_", "residual_norm"] for launches in launched] == [True, False, False]
    assert [len(launches) for launches in launched] == [7, 5, 5]


def test_programs_that_take_turns_at_each_layer_keep_their_own_rows() -> None:
    spec = SPECS["llama"]
    builder = builder_through_kernels(spec, torch.bfloat16, 4, ())
    programs = [builder.token(2, first=first) for first in (0, 2)]
    alone = []
    for at, program in enumerate(programs):
        program.state.token_ids = torch.tensor([[at], [at + 7]])
        program.state.span.counts.fill_(1)
        alone.append(run(program))
    for steps in zip(*(program.without_head().steps for program in programs), strict=True):
        for step in steps:
            step.replay()
    for program, expected in zip(programs, alone, strict=True):
        assert torch.equal(program.state.hidden, expected)


def test_a_step_that_was_broken_off_leaves_nothing_to_the_next() -> None:
    program = program_of(SPECS["llama"], torch.bfloat16)
    expected = run(program)
    for step in program.steps[:3]:
        step.replay()
    assert torch.equal(run(program), expected)


def test_layers_that_run_otherwise_have_no_part_in_the_fusion() -> None:
    """The first layer has heads that no kernel takes: the second begins a fusion."""
    odd = replace(SPECS["llama"], attention=replace(SPECS["llama"].attention, qk_norm=None, head_dim=7, rope=None))
    builder = builder_of(model_of(odd, SPECS["llama"], SPECS["llama"]), "eager")
    kernels = DeviceBlocks.allocate(builder.caches, CPU)
    given = builder.decoder, "eager", builder.layer_groups, builder.caches, builder.context, CPU
    program = GraphBuilder(*given, decode_kernels=kernels).token(1)
    functions = [step.blocks[0].run for step in program.steps if isinstance(step, BlocksStep)]
    assert functions[0] == Block.forward
    layers = [function.keywords["fused_layer"] for function in functions[1:] if isinstance(function, partial)]
    found = [(layer.is_first, layer.first_norm_is_prepared, layer.next_layer_norm is not None) for layer in layers]
    assert found == [(True, False, True), (False, True, False)]
