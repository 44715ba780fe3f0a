"""Blocks in parts: each part needs its own matrices alone, and all together give the bits of the whole block."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from block_specs import BLOCKS
from support.cases import in_case
from support.packed_matrices import native_backend
from tiny_graph import CONTEXT, CPU, DIM, VOCAB, feed, filled_decoder, model_of
from torch import Tensor

from graphcore.errors import GraphError
from graphcore.graph.block_parts import PartStep, trace_parts
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.cpu.native_decode import NativeStep
from graphcore.graph.matrix_groups import matrix_groups
from graphcore.graph.program import Program
from graphcore.graph.step import BlocksStep, Step
from graphcore.kernels.backend import TorchBackend
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.decoder import Decoder, is_movable, movable_nbytes
from graphcore.nn.spec import ModelSpec
from graphcore.weights.groups import LayerGroup, movable_groups, split_layers
from graphcore.weights.layout import aligned

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

NAMES = tuple(BLOCKS)
ROWS = [[5, 1, 17, 30, 2, 2, 9], [3, 8]]


def builder_of(
    decoder: Decoder, kind: str, groups: list[LayerGroup], streamed: frozenset[int] | None = None
) -> GraphBuilder:
    """Return a builder over fresh caches. Args: streamed: groups that stream; None for all."""
    caches = allocate_cache(decoder.spec, CacheSizes(2, CONTEXT, torch.float32), CPU)
    backend = native_backend() if kind == "captured" else TorchBackend()
    moving = frozenset(range(1, len(groups) + 1)) if streamed is None else streamed
    given = decoder, kind, groups, caches, CONTEXT, CPU
    return GraphBuilder(*given, backend=backend, compiles=False, streamed=moving)


def native_decoder(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    decoder = filled_decoder(spec, dtype)
    decoder.use_backend(native_backend())
    return decoder


@contextmanager
def only_group(decoder: Decoder, groups: list[LayerGroup], number: int) -> Iterator[None]:
    """Set the matrices of all other layer groups to NaN."""
    kept: dict[Tensor, Tensor] = {}
    for at, group in enumerate(groups, start=1):
        for layer in group.layers:
            for name, tensor in decoder.layers[layer].named_buffers():
                if at != number and is_movable(name, tensor) and group.holds(name):
                    kept[tensor] = tensor.clone()
                    tensor.fill_(torch.nan)
    yield
    for tensor, values in kept.items():
        tensor.copy_(values)


def replay_alone(program: Program, decoder: Decoder, groups: list[LayerGroup]) -> None:
    """Run each step while no other layer group's matrices are there."""
    for step in program.steps:
        with only_group(decoder, groups, step.group):
            step.replay()


def groups_of(steps: list[Step]) -> list[int]:
    return [step.group for step in steps]


def test_parts_need_their_own_matrices_and_give_the_block_s_bits() -> None:
    for name, dtype in zip(NAMES, cycle([torch.float32, torch.bfloat16]), strict=False):
        with in_case(name, dtype):
            decoder = native_decoder(model_of(BLOCKS[name], BLOCKS[name]), dtype)
            groups = matrix_groups(decoder)
            whole = builder_of(decoder, "eager", split_layers(2, 1)).prefill(2)
            parts = builder_of(decoder, "eager", groups).prefill(2)
            assert groups_of([*parts.steps])[: len(groups) + 1] == [*range(len(groups) + 1)]
            assert sum(isinstance(step, PartStep) for step in parts.steps) == len(groups) > 2
            expected = feed(whole, ROWS, [0, 0])
            run = replace(parts, steps=[Alone(step, decoder, groups) for step in parts.steps])
            assert torch.equal(feed(run, ROWS, [0, 0]), expected)
            assert parts.state.carried == {}


class Alone:
    """A step that runs while no other layer group's matrices are there."""

    def __init__(self, step: Step, decoder: Decoder, groups: list[LayerGroup]) -> None:
        self.step, self.group, self._all = step, step.group, (decoder, groups)

    def replay(self) -> None:
        with only_group(*self._all, self.group):
            self.step.replay()


def test_native_steps_end_where_the_next_group_begins_with_the_same_bits() -> None:
    for name, dtype in zip(NAMES, cycle([torch.bfloat16, torch.float32]), strict=False):
        with in_case(name, dtype):
            decoder = filled_decoder(model_of(BLOCKS[name], BLOCKS[name]), dtype)
            groups = matrix_groups(decoder)
            whole = builder_of(decoder, "captured", split_layers(2, 1)).decode(2, is_greedy=True)
            parts = builder_of(decoder, "captured", groups).decode(2, is_greedy=True)
            moving = [step for step in parts.steps if 0 < step.group <= len(groups)]
            assert groups_of(moving) == [*range(1, len(groups) + 1)]
            assert all(isinstance(step, NativeStep) and step.count for step in moving)
            for position in range(5):
                for program in (whole, parts):
                    program.state.put_rows([[(3 * position) % VOCAB], [(5 * position) % VOCAB]], [position, position])
                for step in whole.steps:
                    step.replay()
                replay_alone(parts, decoder, groups)
                assert torch.equal(parts.state.logits, whole.state.logits)


def test_runs_of_tokens_have_the_bits_of_native_steps_in_parts() -> None:
    decoder = filled_decoder(model_of(BLOCKS["plain"], BLOCKS["plain"]), torch.bfloat16)
    groups, found = matrix_groups(decoder), []
    for layer_groups in (split_layers(2, 1), groups):
        program = builder_of(decoder, "captured", layer_groups).decode(8, is_greedy=False)
        program.state.most_together = 4
        program.state.put_runs([[1, 2, 3, 4], [5, 6]], [0, 0])
        for step in program.steps:
            step.replay()
        found.append(program.state.logits[:6].clone())
    assert torch.equal(*found)


def test_resident_neighbours_are_one_step_and_a_resident_layer_is_whole() -> None:
    decoder = filled_decoder(model_of(BLOCKS["plain"], BLOCKS["plain"]))
    groups = matrix_groups(decoder)
    second = next(at for at, group in enumerate(groups, start=1) if group.layers.start == 1)
    streamed = frozenset({second + 1})
    native = builder_of(decoder, "captured", groups, streamed).decode(1, is_greedy=False)
    assert groups_of([*native.steps])[:2] == [second, second + 1]
    eager = builder_of(decoder, "eager", groups, streamed).prefill(1)
    assert isinstance(eager.steps[1], BlocksStep)
    parts = [step.group for step in eager.steps if isinstance(step, PartStep)]
    assert parts == [*range(second, len(groups) + 1)]


def test_a_part_that_was_broken_off_leaves_nothing_to_the_next_pass() -> None:
    decoder = filled_decoder(model_of(BLOCKS["plain"], BLOCKS["plain"]))
    program = builder_of(decoder, "eager", matrix_groups(decoder)).prefill(2)
    expected = feed(program, ROWS, [0, 0])
    for step in program.steps[:3]:
        step.replay()
    assert program.state.carried
    program.state.free_activations()
    assert program.state.carried == {}
    assert torch.equal(feed(program, ROWS, [0, 0]), expected)


def test_every_matrix_is_in_one_group_and_none_is_larger_than_the_largest_matrix() -> None:
    decoder = filled_decoder(model_of(*(block for block in BLOCKS.values() if block.dim == DIM)))
    groups = matrix_groups(decoder)
    parts = [decoder.head.part(rows) for rows in decoder.head_rows()]
    moving = movable_groups(decoder, groups, parts)[: len(groups)]
    matrices = {
        f"layers.{index}.{name}": tensor
        for index, layer in enumerate(decoder.layers)
        for name, tensor in layer.named_buffers()
        if is_movable(name, tensor)
    }
    assert sorted(weight.name for group in moving for weight in group.weights) == sorted(matrices)
    assert max(group.layout.nbytes for group in moving) <= aligned(max(one.nbytes for one in matrices.values()))


def test_a_block_that_cannot_be_traced_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_module: object) -> None:
        raise GraphError("no trace")

    decoder = filled_decoder(model_of(BLOCKS["plain"], BLOCKS["plain"]))
    monkeypatch.setattr("graphcore.graph.block_parts.trace_eager", refuse)
    assert matrix_groups(decoder) == split_layers(2, 1)


def test_parts_out_of_order_are_refused() -> None:
    block = filled_decoder(model_of(BLOCKS["plain"])).layers[0]
    with pytest.raises(GraphError, match=r"mlp\.gate_proj of part 0 reads a result of part 1"):
        trace_parts(block, [["mlp.gate_proj"], ["self_attn.o_proj"]])


def test_low_rank_factors_are_in_the_group_of_their_projection() -> None:
    with torch.device("meta"):
        decoder = Decoder(model_of(BLOCKS["plain"]), torch.float32)
        decoder.add_low_rank({0: {"self_attn.q_proj": 4, "mlp.up_proj": 4}})
    groups = matrix_groups(decoder)
    assert sum(group.holds("self_attn.q_proj.lora_A.weight") for group in groups) == 1
    of_q = next(group for group in groups if group.holds("self_attn.q_proj.weight"))
    assert of_q.holds("self_attn.q_proj.lora_B.weight")


def test_heads_are_split_into_parts_of_the_size_of_what_streams() -> None:
    decoder = filled_decoder(replace(model_of(BLOCKS["plain"]), vocab=4096))
    row = decoder.head.lm_head.weight[0].nbytes
    largest = max(one.nbytes for name, one in decoder.layers[0].named_buffers() if is_movable(name, one))
    assert largest < max(len(rows) for rows in decoder.head_rows()) * row <= movable_nbytes(decoder.layers[0])
    decoder.has_small_parts = True
    assert max(len(rows) for rows in decoder.head_rows()) * row <= largest
