"""Several tokens of one sequence in one native step get the bits that they get in one step after another.

That is: logits, chosen tokens, and all that the caches hold afterwards. Sequences are anywhere in the caches, at
positions of their own, with runs of different lengths beside each other.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from block_specs import BLOCKS, WIDE, WIDE_EXPERTS, attending
from packed_decoder import pack_all
from support.packed_matrices import native_kernels
from support.tiny_models import ARCHITECTURES, TinyModel
from test_native_lists import FEATURED, SHARING
from test_native_rows import PAGE, SEQUENCES, Caches, Row, builder_of, run
from tiny_graph import CONTEXT, CPU, FULL, SLIDING, VOCAB, filled_decoder, model_of
from torch import Tensor

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import GraphError
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.program import Program
from graphcore.kernels.cpu.instructions import MOST_ROWS
from graphcore.kvcache.buffers import KVCache, allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import ModelSpec, PerLayerSpec

pytestmark = pytest.mark.thorough

LENGTHS = ((2,), (1, 3), (5, 1, 4), (3, 2, 1, 4, 6), (16,))  # tokens of each sequence of a step
SHARED = replace(  # Gemma 4: the second layer attends the first one's ring
    model_of(FULL),
    blocks=(attending(FEATURED, window=24), attending(SHARING, window=24)),
    per_layer=PerLayerSpec(6, 2, VOCAB, FULL.norm),
)


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """Of one thread, each row would find the keys of the rows before it in the cache, as it takes rows in order."""
    torch.set_num_threads(2)


def builder_with_room(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> GraphBuilder:
    """Return a builder whose rings have room for whole runs, and no more."""
    return builder_of(filled_decoder(spec, dtype), dtype, chunk=1, together=MOST_ROWS)


def drawn_runs(draw: random.Random, lengths: Sequence[int], context: int, vocab: int) -> list[list[Row]]:
    """Return a run of tokens for each length; the first one begins its sequence."""
    sequences = draw.sample(range(SEQUENCES), len(lengths))
    starts = [0, *(draw.randrange(context - MOST_ROWS) for _ in lengths[1:])]
    return [
        [Row(draw.randrange(vocab), sequence, start + offset) for offset in range(length)]
        for sequence, start, length in zip(sequences, starts, lengths, strict=True)
    ]


def logits_one_by_one(alone: Program, rows: Sequence[Row]) -> list[Tensor]:
    """Return the logits of tokens that run in one step after another."""
    found = []
    for row in rows:
        run(alone, {0: row})
        found.append(alone.state.logits[0].clone())
    return found


def assert_runs_agree(builder: GraphBuilder, vocab: int = VOCAB, seed: int = 0, is_greedy: bool = False) -> None:
    """Check that runs in one step give what their tokens give one by one."""
    draw = random.Random(seed)
    caches = Caches(builder)
    alone, together = builder.decode(1, is_greedy), builder.decode(MOST_ROWS, is_greedy)
    for lengths in LENGTHS:
        runs = drawn_runs(draw, lengths, builder.context, vocab)
        rows = [row for one in runs for row in one]
        caches.put_back()
        expected = logits_one_by_one(alone, rows)
        changed = {one[0].sequence: caches.of(one[0].sequence) for one in runs}
        caches.put_back()
        numbers = sorted(draw.sample(range(MOST_ROWS), len(rows)))  # idle rows may lie between
        run(together, dict(zip(numbers, rows, strict=True)))
        for number, row, logits in zip(numbers, rows, expected, strict=True):
            assert torch.equal(together.state.logits[number], logits), f"{row} of runs of {lengths}"
            if is_greedy:
                assert together.state.chosen[number] == logits.argmax()
        caches.assert_changed(changed)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_block_runs_tokens_of_one_sequence_together(name: str) -> None:
    assert_runs_agree(builder_with_room(model_of(BLOCKS[name], BLOCKS[name])))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["sandwich", "experts", "7_heads_a_key", "sliding_sinks", "delta_rule"])
def test_any_number_of_threads_runs_them(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_runs_agree(builder_with_room(model_of(BLOCKS[name])), seed=threads, is_greedy=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sandwich", "sliding", "window_of_8", "delta_rule"])
def test_keys_of_the_same_step_are_rounded_as_in_the_cache(name: str, dtype: torch.dtype) -> None:
    assert_runs_agree(builder_with_room(model_of(BLOCKS[name]), dtype))


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_that_later_layers_attend_keeps_every_key(seed: int) -> None:
    assert_runs_agree(builder_with_room(SHARED), seed=seed)


def test_packed_matrices_multiply_tokens_of_one_sequence() -> None:
    decoder = pack_all(filled_decoder(model_of(WIDE, WIDE_EXPERTS), torch.bfloat16), "q4_k", "wide")
    assert_runs_agree(builder_of(decoder))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), zip(ARCHITECTURES, cycle([(), ("quant.format=q4_1",)]), strict=False))
def test_every_family_runs_tokens_of_one_sequence_together(
    tiny_model: Callable[[str], TinyModel], name: str, overrides: Sequence[str]
) -> None:
    native_kernels()
    sizes = ("context_length=64", f"batch_size={SEQUENCES}", *overrides)
    dtype = "bf16" if overrides else "fp32"
    with Engine.load(tiny_model(name).folder, dtype=dtype, device="cpu", graph="captured", overrides=sizes) as engine:
        assert isinstance(engine.runner, ProgramRunner)
        builder = engine.runner.builder
        kv_dtype = torch.bfloat16 if overrides else torch.float32
        spec = builder.decoder.spec
        builder.caches = allocate_cache(spec, CacheSizes(SEQUENCES, builder.context, kv_dtype, 1, MOST_ROWS, PAGE), CPU)
        with torch.inference_mode():
            assert_runs_agree(builder, vocab=engine.runner.sizes.vocab)


def test_runs_are_put_into_rows_in_order() -> None:
    state = builder_with_room(model_of(FULL, SLIDING)).decode(8, is_greedy=False).state
    addresses = [one.data_ptr() for one in (state.token_ids, *state.span, state.sequences)]
    rows = state.put_runs([[], [5, 6, 7], [], [9], [3, 4]], [0, 20, 0, 7, 0])
    assert [list(one) for one in rows] == [[], [0, 1, 2], [], [3], [4, 5]]
    assert state.token_ids[:, 0].tolist() == [5, 6, 7, 9, 3, 4, 0, 0]
    assert state.span.starts.tolist() == [20, 21, 22, 7, 0, 1, 0, 0]
    assert state.span.counts.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert state.sequences.tolist()[:6] == [1, 1, 1, 3, 4, 4]
    state.put_rows([[1], [], [2]], [4, 0, 9])
    assert state.sequences.tolist() == list(range(8))
    assert addresses == [one.data_ptr() for one in (state.token_ids, *state.span, state.sequences)]


def test_more_tokens_than_rows_or_than_a_ring_has_room_for_are_refused() -> None:
    """A window of 24 and four tokens lie in at most ten pages of three positions: there is room for one more."""
    decoder = filled_decoder(model_of(FULL, SLIDING))
    state = builder_of(decoder, chunk=1, together=4).decode(8, is_greedy=False).state
    assert state.most_together == 5
    state.put_runs([[1, 2, 3, 4], [5, 6, 7, 8]], [0, 0])
    with pytest.raises(GraphError, match="9 tokens for a decode step of 8 rows"):
        state.put_runs([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [0, 0, 0])
    with pytest.raises(GraphError, match="6 tokens of one sequence in a decode step, but its caches have room for 5"):
        state.put_runs([[1, 2, 3, 4, 5, 6]], [0])
    assert builder_of(decoder, chunk=1).decode(8, is_greedy=False).state.most_together == 2
    assert builder_of(filled_decoder(model_of(FULL))).decode(8, is_greedy=False).state.most_together == CONTEXT


@pytest.mark.parametrize("spec", [model_of(SLIDING), SHARED], ids=["own", "shared"])
def test_the_room_that_rings_have_is_enough_at_every_place_of_the_ring(spec: ModelSpec) -> None:
    """Rings have room for the window and three more tokens; runs of four tokens begin at each of their slots."""
    builder = builder_of(filled_decoder(spec), chunk=1, together=4)
    caches = Caches(builder)
    alone, together = builder.decode(1, is_greedy=False), builder.decode(4, is_greedy=False)
    slots = next(cache.slots for cache in builder.caches if isinstance(cache, KVCache))
    assert slots == 3 * 10  # the most pages of three positions in which 24 + 3 can lie
    for start in range(40, 40 + slots):
        rows = [Row(start + offset - 40, 5, start + offset) for offset in range(4)]
        caches.put_back()
        expected = logits_one_by_one(alone, rows)
        changed = {5: caches.of(5)}
        caches.put_back()
        run(together, dict(enumerate(rows)))
        assert torch.equal(together.state.logits, torch.stack(expected)), f"from position {start} on"
        caches.assert_changed(changed)
