"""The bytes that are planned for native decode programs are those that the programs allocate."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from block_specs import BLOCKS, WIDE, WIDE_EXPERTS
from packed_decoder import pack_all
from support.packed_matrices import native_backend, native_kernels
from support.tiny_models import ARCHITECTURES, TinyModel
from test_native_lists import WHOLE
from test_native_rows import SEQUENCES, builder_of
from tiny_graph import filled_decoder, model_of
from torch import Tensor

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.cpu.memory import ProgramSizes, programs_nbytes
from graphcore.graph.matrix_groups import matrix_groups
from graphcore.graph.program import Program
from graphcore.kvcache.sizes import PAGE
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]


def living() -> dict[int, Tensor]:
    """Return one tensor of each storage in RAM that Python code holds, by address."""
    gc.collect()
    found = (one for one in gc.get_objects() if type(one) is Tensor and one.device.type == "cpu")
    return {one.untyped_storage().data_ptr(): one for one in found}


def allocated_nbytes(make: Callable[[], Sequence[Program]], planned: int) -> int:
    """Return the bytes that programs allocate; a second trial is made if other threads may have allocated, too."""
    found = new_nbytes(make)
    return found if found <= planned else min(found, new_nbytes(make))


def new_nbytes(make: Callable[[], Sequence[Program]]) -> int:
    """Return the bytes of all new tensors that are alive after programs were made and ran once, without a token."""
    before = living()  # they stay alive, so that nothing new has their addresses
    programs = make()
    for program in programs:
        for step in program.steps:
            step.replay()
    new = {address: one for address, one in living().items() if address not in before}
    return sum(one.untyped_storage().nbytes() for one in new.values())


def all_programs(builder: GraphBuilder, widths: Sequence[int]) -> list[Program]:
    return [builder.decode(width, is_greedy=True) for width in widths]


def sizes_of(widths: Sequence[int]) -> ProgramSizes:
    return ProgramSizes(widths, max(widths), torch.float32, 0, native_backend(), fetches_experts=False)


def without_memory(spec: ModelSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(spec, torch.bfloat16)


@pytest.mark.parametrize("name", [*BLOCKS, *WHOLE])
def test_each_kind_of_block_takes_what_is_planned(name: str) -> None:
    spec = WHOLE[name] if name in WHOLE else model_of(BLOCKS[name], BLOCKS[name])
    builder = builder_of(filled_decoder(spec, torch.bfloat16), page=PAGE)
    planned = programs_nbytes(without_memory(spec), sizes_of([1, 16]), builder.context)
    assert allocated_nbytes(lambda: all_programs(builder, [1, 16]), planned) == planned


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_steps_in_parts_take_what_is_planned(name: str) -> None:
    spec = model_of(BLOCKS[name], BLOCKS[name])
    builder = builder_of(filled_decoder(spec, torch.bfloat16), page=PAGE)
    builder.layer_groups = matrix_groups(builder.decoder)
    builder.streamed = range(1, len(builder.layer_groups) + 1)
    sizes = replace(sizes_of([5]), layer_groups=tuple(builder.layer_groups))
    planned = programs_nbytes(without_memory(spec), sizes, builder.context)
    assert allocated_nbytes(lambda: all_programs(builder, [5]), planned) == planned


@pytest.mark.parametrize("context", [64, 4096])
def test_scratch_follows_the_context_and_the_threads(context: int) -> None:
    spec, found = model_of(BLOCKS["plain"]), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(programs_nbytes(without_memory(spec), sizes_of([1]), context))
    torch.set_num_threads(1)
    assert found[1] - found[0] > 2 * 4 * 4 * context  # two more threads, four heads' scores


def test_layers_share_their_buffers() -> None:
    few, many = (
        programs_nbytes(without_memory(model_of(*[BLOCKS["plain"]] * count)), sizes_of([16]), 64) for count in (2, 9)
    )
    assert few == many


@pytest.mark.parametrize("rounding", ["wide", "float"])
def test_packed_matrices_take_the_scratch_that_is_planned(rounding: str) -> None:
    decoder = pack_all(filled_decoder(model_of(WIDE, WIDE_EXPERTS), torch.bfloat16), "q4_k", rounding)
    builder = builder_of(decoder, page=PAGE)
    planned = programs_nbytes(decoder, sizes_of([1, 5]), builder.context)
    assert allocated_nbytes(lambda: all_programs(builder, [1, 5]), planned) == planned


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), zip(ARCHITECTURES, cycle([(), ("quant.format=q8_0",)]), strict=False))
def test_a_plan_has_the_bytes_of_its_programs(
    tiny_model: Callable[[str], TinyModel], name: str, overrides: Sequence[str]
) -> None:
    native_kernels()
    sizes = ("context_length=64", f"batch_size={SEQUENCES - 5}", *overrides)
    dtype = "bf16" if overrides else "fp32"
    with Engine.load(tiny_model(name).folder, dtype=dtype, device="cpu", graph="captured", overrides=sizes) as engine:
        planned = engine.plan.other.program_nbytes
        found = allocated_nbytes(lambda: programs_of_a_full_step(engine), planned)
        assert found == planned
        assert engine.plan.total_nbytes >= engine.plan.weight_nbytes + engine.plan.kv_nbytes + found


@pytest.mark.parametrize(("batch", "widths"), [(1, [1]), (16, [16]), (17, [16, 8]), (32, [16, 16]), (33, [16, 16, 11])])
def test_a_plan_has_the_bytes_of_as_many_programs_as_a_step_needs(
    tiny_model: Callable[[str], TinyModel], batch: int, widths: Sequence[int]
) -> None:
    native_kernels()
    sizes = ("context_length=64", f"batch_size={batch}")
    folder = tiny_model("llama3").folder
    with Engine.load(folder, dtype="fp32", device="cpu", graph="captured", overrides=sizes) as engine:
        planned = engine.plan.other.program_nbytes
        found = allocated_nbytes(lambda: programs_of_a_full_step(engine), planned)
        assert found == planned
        programs = programs_of_a_full_step(engine)
        for running in range(1, batch + 1):
            assert isinstance(engine.runner, ProgramRunner)
            taken = engine.runner.programs.step(dict.fromkeys(range(running), ([1], 0)))
            assert all(any(step.program is one for one in programs) for step in taken)
        assert [len(program.state.token_ids) for program in programs] == widths


def programs_of_a_full_step(engine: Engine) -> list[Program]:
    """Return new programs of a step in which all sequences run, then without a token."""
    assert isinstance(engine.runner, ProgramRunner)
    engine.runner.programs.clear()
    steps = engine.runner.programs.step(dict.fromkeys(range(engine.runner.sizes.batch_size), ([1], 0)))
    for program, _ in steps:
        program.state.put_tokens([], [], [])
    return [program for program, _ in steps]


@pytest.mark.parametrize("name", ["gemma4", "gpt_oss"])
def test_a_plan_of_a_streamed_model_has_room_for_its_programs(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    native_kernels()
    how = {"dtype": "fp32", "device": "cpu", "graph": "captured", "streaming": "on"}
    sizes = ["context_length=64", "batch_size=3", "streaming.source=disk"]
    with Engine.load(tiny_model(name).folder, overrides=sizes, **how) as engine:  # type: ignore[arg-type]
        planned = engine.plan.other.program_nbytes
        found = allocated_nbytes(lambda: programs_of_a_full_step(engine), planned)
        assert found <= planned <= 1.1 * found


@pytest.mark.parametrize("graph", ["eager", "compiled"])
def test_a_plan_without_native_programs_has_none(tiny_model: Callable[[str], TinyModel], graph: str) -> None:
    with Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", graph=graph) as engine:
        assert engine.plan.other.program_nbytes == 0
