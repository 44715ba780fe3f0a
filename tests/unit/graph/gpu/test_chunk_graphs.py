"""Chunks of prompts as CUDA graphs give what the same blocks give uncaptured, to the bit, in every row and order."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.fake_cuda import FakeCuda, captured_engine, engine_of, fake_cuda
from support.golden_models import golden_ids, write_checkpoint

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import GraphError
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.capture import captured_steps
from graphcore.graph.gpu.chunk_graphs import chunk_sizes
from graphcore.graph.state import StepState
from graphcore.kernels.backend import TritonBackend
from graphcore.kvcache.buffers import KVCache, LayerCache, RecurrentCache

MODELS = ("dense", "window", "mixture", "recurrent", "latent")
CHUNK = 16
WHOLE = (40, 24, 8)  # tokens of rows that fill the captured sizes, 16 and 8: nothing is padded
ROUNDING = 3e-5  # a product of eight rows on a CPU adds up in another order than one of five
SIZES = (f"prefill_chunk={CHUNK}", "context_length=96", "batch_size=3")

Pair = tuple[ProgramRunner, ProgramRunner]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda(monkeypatch)


@pytest.fixture(scope="module")
def runners_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """A function to an eager runner and one that captures chunks, over the same weights, each with its own caches."""
    engines: dict[tuple[str, ...], Engine] = {}

    def runners(name: str, *overrides: str) -> Pair:
        if (name, *overrides) not in engines:
            folder = write_checkpoint(name, tmp_path_factory.mktemp(name))
            given = [*SIZES, *overrides]
            engines[name, *overrides] = Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=given)
        eager = engines[name, *overrides].runner
        assert isinstance(eager, ProgramRunner)
        own = eager.builder
        sizes = (own.layer_groups, [emptied(one) for one in own.caches], own.context, own.device)
        builder = GraphBuilder(
            own.decoder,
            "captured",
            *sizes,
            backend=TritonBackend(),
            head_parts=own.head_parts,
            streamed=own.streamed,
            fetched=own.functions.fetched,
            captured_chunk=CHUNK,
        )
        # Tables are those of the eager runner, whose pages both reserve.
        runner = ProgramRunner(builder, eager.policy, 3, eager.chunks, eager.prompt_tokens)
        return eager, runner

    yield runners
    for engine in engines.values():
        engine.close()


def emptied(cache: LayerCache) -> LayerCache:
    """Return a cache of the same sizes with nothing in it, and the same table."""
    tensors = [torch.full_like(one, float("nan")) for one in cache.tensors]
    return KVCache(*tensors, cache.table) if isinstance(cache, KVCache) else RecurrentCache(*tensors)


def rows_of(lengths: Sequence[int]) -> list[list[int]]:
    first, second = golden_ids().tolist()
    return [ids[:length] for ids, length in zip((first, second, first[5:]), lengths, strict=False)]


def outputs(runner: ProgramRunner, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after prompts and after one more chunk, which reads what they have written."""
    first = runner.extend(rows, [0] * len(rows))
    return first, runner.extend([row[:8] for row in rows], [len(row) for row in rows])


def test_sizes_are_few_and_end_with_the_chunk() -> None:
    assert chunk_sizes(512) == [8, 64, 128, 256, 512]
    assert chunk_sizes(500) == [8, 64, 128, 256, 500]
    assert chunk_sizes(64) == [8, 64]
    assert chunk_sizes(16) == [8, 16]
    assert chunk_sizes(2) == [2]


@pytest.mark.parametrize("streaming", ["off", "on"])
@pytest.mark.parametrize("name", MODELS)
def test_whole_chunks_are_the_uncaptured_ones_to_the_bit(
    name: str, streaming: str, cuda: FakeCuda, runners_of: Callable[..., Pair]
) -> None:
    """Streamed, chunks of three prompts take turns in one pass, group by group; resident, one after another."""
    overrides = ["streaming=on", "streaming.layer_group_size=1"] if streaming == "on" else []
    eager, captured = runners_of(name, *overrides)
    rows = rows_of(WHOLE)
    expected = outputs(eager, rows)
    for found, other in zip(outputs(captured, rows), expected, strict=True):
        assert torch.equal(found, other)
    for row, logits in zip(rows, expected[0], strict=True):  # alone, in row 0
        assert torch.equal(captured.extend([row], [0])[0], logits)
    if name != "mixture" or not overrides:  # where experts are fetched, the host reads which
        assert captured.builder.captures.num_graphs > 0


def test_padding_changes_nothing_but_rounding(cuda: FakeCuda, runners_of: Callable[..., Pair]) -> None:
    for name in ("dense", "recurrent"):
        eager, captured = runners_of(name)
        rows = rows_of((37, 21, 7))
        found, again = outputs(captured, rows), outputs(captured, rows)
        for one, repeated, expected in zip(found, again, outputs(eager, rows), strict=True):
            assert torch.equal(one, repeated), "what an earlier chunk left in the buffers"
            assert (one - expected).abs().max() < ROUNDING


def test_all_rows_share_the_graphs_of_a_size(cuda: FakeCuda, runners_of: Callable[..., Pair]) -> None:
    _, captured = runners_of("dense")
    captured.extend(rows_of(WHOLE), [0, 0, 0])
    assert len(cuda.graphs) == len(chunk_sizes(CHUNK)) == 2
    assert [graph.num_replays for graph in cuda.graphs] == [3, 3]  # 16 + 16 + 8, 16 + 8, 8
    assert len({pool for pool, *_ in cuda.captures}) == 1


def test_streamed_chunks_take_turns_between_their_graphs(cuda: FakeCuda, runners_of: Callable[..., Pair]) -> None:
    _, captured = runners_of("dense", "streaming=on", "streaming.layer_group_size=1")
    for _ in range(2):  # captured in the first
        cuda.log.clear()
        captured.extend(rows_of((16, 16)), [0, 0])
    replays = [line for line in cuda.log if line.startswith("replay")]
    assert replays == [f"replay {graph}" for graph in range(len(cuda.graphs)) for _ in range(2)]


def test_what_looks_between_the_steps_runs_them_uncaptured(cuda: FakeCuda, runners_of: Callable[..., Pair]) -> None:
    eager, captured = runners_of("dense")
    rows = rows_of((24,))
    for found, expected in zip(captured.hidden_states(rows), eager.hidden_states(rows), strict=True):
        assert torch.equal(found, expected)
    assert not cuda.graphs
    logits = captured.logits(rows)
    assert torch.equal(logits, eager.logits(rows))
    assert len(cuda.graphs) == 2, "logits of all tokens read the hidden states of captured chunks"


def test_warming_up_captures_the_longest_chunk(cuda: FakeCuda, runners_of: Callable[..., Pair]) -> None:
    _, captured = runners_of("dense")
    captured.warm_up(1)
    program = captured.programs.chunk(CHUNK, 2)
    assert all(step.graph is not None for step in captured_steps(program.steps))
    assert all(step.graph is None for step in captured_steps(captured.programs.chunk(8, 2).steps))


def test_a_chunk_that_cannot_be_captured_names_the_setting(cuda: FakeCuda, runners_of: Callable[..., Pair]) -> None:
    _, captured = runners_of("dense")
    step = captured_steps(captured.programs.chunk(CHUNK, 0).steps)[0]
    step.steps = [ReadsBack(step.state)]
    with pytest.raises(GraphError, match=r"^a chunk of 16 tokens \(layer groups .*; use graph.prefill=compiled$"):
        step.prepare()


class ReadsBack:
    """A step that asks the device for a value."""

    group = 1

    def __init__(self, state: StepState) -> None:
        self.state = state

    def replay(self) -> None:
        float(self.state.span.starts[0])


def test_requests_are_answered_alike(cuda: FakeCuda, tmp_path: Path) -> None:
    """Through the engine, whose prompts and decode steps replay graphs of one pool in turn."""
    eager, captured = engine_of(), captured_engine()
    captured.runner.builder.captured_chunk = 16
    prompts = [[5, 17, 3, 88, 41, 7, 9, 12] * 3, [4] * 16, [9, 8, 7, 6, 5, 4, 3, 2]]
    found, expected = (one.generate(prompts, max_new_tokens=9, ignore_eos=True) for one in (captured, eager))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len(cuda.graphs) == 3, "two sizes of chunks, and one decode step"
    eager.close()
    captured.close()
