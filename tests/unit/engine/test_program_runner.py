"""The runner: what looks between steps must not get a captured program."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from graphcore import Engine
from graphcore.device import find_cpp_compiler
from graphcore.engine.loading.prepared_decoder import further_nbytes
from graphcore.engine.programs import Programs
from graphcore.graph import compile as compiling
from graphcore.graph.block_parts import PartStep
from graphcore.graph.cpu.native_decode import NativeStep
from graphcore.graph.gpu.capture import CapturedStep
from graphcore.graph.state import StepState
from graphcore.graph.step import BlocksStep
from graphcore.kernels.backend import TorchBackend, TritonBackend
from graphcore.nn.decoder import Decoder
from graphcore.planning.workspace import attention_nbytes, carried_nbytes, waiting_nbytes, workspace_nbytes

TINY = Path(__file__).parents[2] / "golden" / "tiny"
IDS = [5, 17, 3, 88, 41, 7, 9]  # one more than a multiple of the chunk: the last piece is one token
KINDS = [
    CapturedStep,
    pytest.param(NativeStep, marks=pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler")),
]


def engine_of() -> Engine:
    return Engine.load(
        TINY / "qwen3", dtype="fp32", graph="eager", device="cpu", overrides=["prefill_chunk=3", "batch_size=2"]
    )


def captured_engine(step: type[object], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine that captures decode: as on CUDA, or as a native program. Nothing is compiled."""
    engine = engine_of()
    monkeypatch.setattr(compiling, "compile_whole", lambda function, name, is_guarded=True: function)
    engine.runner.builder.kind = "captured"
    if step is CapturedStep:
        engine.runner.builder.backend = TritonBackend()
    assert [type(each) for each in engine.runner.program("decode", 1).steps] == [step]
    return engine


@pytest.mark.parametrize("step", KINDS)
def test_logits_and_hidden_states_run_every_step_where_decode_is_captured(
    step: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, layers = engine_of().logits([IDS], output_hidden_states=True)
    engine = captured_engine(step, monkeypatch)
    found, seen = engine.logits([IDS], output_hidden_states=True)
    assert torch.equal(found, expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, layers, strict=True))
    assert torch.equal(engine.forward(layers[0]), layers[-1])


@pytest.mark.parametrize("step", KINDS)
def test_a_cuda_graph_takes_any_batch_and_a_native_program_16_of_it(
    step: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = captured_engine(step, monkeypatch)
    tokens = dict.fromkeys((3, 21, *range(30, 45)), ([5], 0))
    widths = {CapturedStep: [45], NativeStep: [9, 8]}[step]
    steps = Programs(engine.runner.builder, 45).step(tokens)
    assert [type(each) for program, _ in steps for each in program.steps] == [step] * len(widths)
    assert [int(program.state.span.counts.count_nonzero()) for program, _ in steps] == (
        [17] if len(widths) == 1 else widths
    )


@pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("prompts", [[IDS], [IDS, IDS[2:]]])
def test_native_programs_choose_the_tokens_that_blocks_choose(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine_of().generate(prompts, max_new_tokens=12)
    engine = captured_engine(NativeStep, monkeypatch)
    found = engine.generate(prompts, max_new_tokens=12)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def small_engine(name: str, *overrides: str) -> Engine:
    sizes = ["prefill_chunk=8", "context_length=64", "batch_size=3", *overrides]
    return Engine.load(TINY / name, dtype="fp32", graph="eager", device="cpu", overrides=sizes)


LAYERS = "streaming.layer_group_size=1"


@pytest.mark.parametrize("overrides", [(), ("streaming=on", LAYERS), ("batching.max_tokens_per_step=16",)])
def test_chunks_that_wait_for_each_other_take_what_is_planned(
    overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a pass, and nothing is left after it."""
    with small_engine("qwen3", *overrides) as engine:
        runner, seen, states = engine.runner, list[int](), list[StepState]()
        steps = BlocksStep.replay

        def watched(self: BlocksStep) -> None:
            steps(self)
            states.append(self.state)
            living = {id(one): one for one in states if one.hidden.numel()}.values()
            seen.append(sum(tensor.nbytes for one in living for tensor in (one.token_ids, one.hidden, *one.ropes)))

        monkeypatch.setattr(BlocksStep, "replay", watched)
        with torch.inference_mode():
            runner.extend([[1] * 8] * 3, [0] * 3)
        engine.generate([[1] * 8, [2] * 8, [3] * 8], 1)
        engine.logits([[1] * 8] * 3)
        chunks = {(): 1, ("streaming=on", LAYERS): 3, ("batching.max_tokens_per_step=16",): 2}[tuple(overrides)]
        spec = runner.builder.decoder.spec
        assert max(seen) == waiting_nbytes(spec, 8 * chunks)
        assert not any(one.hidden.numel() for one in states)
        one = workspace_nbytes(spec, 3, 8, torch.float32, is_eager=True)
        threads = torch.get_num_threads() if engine.choices.backend != TorchBackend() else None
        one += attention_nbytes(spec, engine.choices.context_length, 8, torch.float32, threads)
        assert engine.plan.other.workspace_nbytes == one + waiting_nbytes(spec, 8 * (chunks - 1))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gptoss"])
def test_what_chunks_carry_between_parts_of_a_block_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "least_part_nbytes", 0)
    with small_engine(name, "streaming=on") as engine:
        builder, carried, replay = engine.runner.builder, list[int](), PartStep.replay
        caches = {one.untyped_storage().data_ptr() for cache in builder.caches for one in cache.tensors}

        def watched(self: PartStep) -> None:
            replay(self)
            inputs = {self.state.hidden, *self.state.ropes}
            values = {one for one in self.state.carried.values() if isinstance(one, torch.Tensor)} - inputs
            sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in values}
            carried.append(sum(nbytes for address, nbytes in sizes.items() if address not in caches))

        monkeypatch.setattr(PartStep, "replay", watched)
        with torch.inference_mode():
            engine.runner.extend([[1] * 8] * 3, [0] * 3)
        assert 0 < max(carried) <= 8 * carried_nbytes(builder.decoder, torch.float32)
        moving = further_nbytes(engine.settings, builder.decoder.spec, 8, is_streaming=True)
        more = engine.plan.other.workspace_nbytes - moving - 16 * carried_nbytes(builder.decoder, torch.float32)
        with small_engine(name, "streaming=on", LAYERS) as whole:
            assert more == whole.plan.other.workspace_nbytes - moving


@pytest.mark.parametrize("overrides", [(), ("streaming=on",)])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gptoss"])
def test_rows_of_one_call_have_the_bits_that_they_have_alone(name: str, overrides: Sequence[str]) -> None:
    rows = [[at + 7 * row for at in range(length)] for row, length in enumerate((21, 9, 5))]
    same = [row[:5] for row in rows]
    with small_engine(name, *overrides) as engine, torch.inference_mode():
        together, forced = engine.runner.extend(rows, [0] * 3), engine.logits(same)
        for at, row in enumerate(rows):
            assert torch.equal(engine.runner.extend([row], [0])[0], together[at])
            assert torch.equal(engine.logits([row[:5]])[0], forced[at])
