"""A row of a native decode program gives the same bits alone and beside any others: logits, caches, chosen tokens.

Every row has a sequence of its own, at a position of its own, anywhere in the caches.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import pytest
import torch
from block_specs import BLOCKS, WIDE, WIDE_EXPERTS, WIDE_PLAIN_EXPERTS, attending, feeding
from packed_decoder import pack_all
from support.engine_fakes import pages_of, shuffle_pages
from support.packed_matrices import native_backend, native_kernels
from support.tiny_models import ARCHITECTURES, TinyModel
from test_native_decode import KERNEL_PACKABLE
from tiny_graph import CONTEXT, CPU, FULL, SLIDING, VOCAB, filled_decoder, model_of
from torch import Tensor

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.program import Program
from graphcore.graph.step import FetchedExperts
from graphcore.kernels.cpu.instructions import MOST_ROWS
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.decoder import Decoder
from graphcore.weights.groups import split_layers

pytestmark = pytest.mark.thorough

PAGE = 3  # divides the rings of these tests, so that they have no more room than their windows ask for
SEQUENCES = MOST_ROWS + 2  # sequences in the caches: two never run
COUNTS = (1, 2, 3, 4, 5, 7, 8, 16)
OVERRIDES = ((), ("quant.format=q4_1",), ("quant.format=q8_0", "quant.activations=int8"))
TERNARY = feeding(attending(WIDE, sub_norm=WIDE.norm), sub_norm=WIDE.norm)


@dataclass(frozen=True)
class Row:
    """One token of a sequence."""

    token_id: int
    sequence: int
    position: int


def builder_of(decoder: Decoder, kv_dtype: torch.dtype = torch.float32, **sizes: int) -> GraphBuilder:
    """Return a builder over fresh caches in small pages. Args: sizes: fields of `CacheSizes`."""
    spec = decoder.spec
    caches = allocate_cache(spec, CacheSizes(SEQUENCES, CONTEXT, kv_dtype, **{"page": PAGE, **sizes}), CPU)
    groups = split_layers(len(spec.blocks), 1)
    return GraphBuilder(decoder, "captured", groups, caches, CONTEXT, CPU, backend=native_backend())


def run(program: Program, rows: Mapping[int, Row]) -> None:
    """Run one step with these rows; the program's other rows have no token."""
    state = program.state
    for number in range(len(state.token_ids)):
        row = rows.get(number, Row(0, 0, 0))
        state.token_ids[number], state.sequences[number] = row.token_id, row.sequence
        state.span.starts[number], state.span.counts[number] = row.position, int(number in rows)
    for step in program.steps:
        step.replay()


class Caches:
    """The caches of a builder, and a random state that they are put back to."""

    def __init__(self, builder: GraphBuilder) -> None:
        shuffle_pages(builder.caches)
        self._owners = [cache for cache in builder.caches for _ in cache.tensors]
        self.tensors = [tensor for cache in builder.caches for tensor in cache.tensors]
        generator = torch.Generator().manual_seed(1)
        for tensor in self.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self._kept = [tensor.clone() for tensor in self.tensors]

    def put_back(self) -> None:
        for tensor, kept in zip(self.tensors, self._kept, strict=True):
            tensor.copy_(kept)

    def of(self, sequence: int) -> list[Tensor]:
        pairs = zip(self.tensors, self._owners, strict=True)
        return [pages_of(tensor, owner, sequence).clone() for tensor, owner in pairs]

    def assert_changed(self, changed: Mapping[int, Sequence[Tensor]]) -> None:
        """Check that these sequences have these caches and that all others are as they were put back."""
        for index, (tensor, kept, owner) in enumerate(zip(self.tensors, self._kept, self._owners, strict=True)):
            found, expected = (pages_of(one, owner, slice(SEQUENCES)) for one in (tensor, kept.clone()))
            for sequence, right in changed.items():
                expected[sequence] = right[index]
            if not torch.equal(found, expected):
                wrong = [at for at in range(SEQUENCES) if not torch.equal(found[at], expected[at])]
                raise AssertionError(f"tensor {index} of sequences {wrong}")


def assert_rows_agree(builder: GraphBuilder, vocab: int = VOCAB, seed: int = 0, is_greedy: bool = False) -> None:
    """Check that rows have the bits that they have alone, whatever their number, places and neighbours."""
    draw = random.Random(seed)
    caches = Caches(builder)
    positions = [0, 1, *(draw.randrange(builder.context) for _ in range(MOST_ROWS - 2))]
    sequences = draw.sample(range(SEQUENCES), MOST_ROWS)
    token_ids = draw.sample(range(vocab), MOST_ROWS)
    rows = [Row(*one) for one in zip(token_ids, sequences, positions, strict=True)]
    alone, together = builder.decode(1, is_greedy), builder.decode(MOST_ROWS, is_greedy)
    logits, changed = {}, {}
    for row in rows:
        caches.put_back()
        run(alone, {0: row})
        logits[row], changed[row.sequence] = alone.state.logits[0].clone(), caches.of(row.sequence)
    assert len({tuple(one.tolist()) for one in logits.values()}) == MOST_ROWS, "rows differ"
    for count in COUNTS:
        chosen = dict(zip(draw.sample(range(MOST_ROWS), count), draw.sample(rows, count), strict=True))
        caches.put_back()
        run(together, chosen)
        for number, row in chosen.items():
            assert torch.equal(together.state.logits[number], logits[row]), f"row {number} of {count}"
            if is_greedy:
                assert together.state.chosen[number] == logits[row].argmax() == together.state.token_ids[number, 0]
                assert together.state.span.starts[number] == row.position + 1
        caches.assert_changed({row.sequence: changed[row.sequence] for row in chosen.values()})


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_block_runs_any_rows(name: str) -> None:
    assert_rows_agree(builder_of(filled_decoder(model_of(BLOCKS[name], BLOCKS[name]))))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["sandwich", "experts", "7_heads_a_key", "sliding_sinks", "delta_rule"])
def test_any_number_of_threads_runs_any_rows(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_rows_agree(builder_of(filled_decoder(model_of(BLOCKS[name]))), seed=threads, is_greedy=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sandwich", "experts", "sliding"])
def test_narrow_weights_and_caches_are_read_for_all_rows(name: str, dtype: torch.dtype) -> None:
    assert_rows_agree(builder_of(filled_decoder(model_of(BLOCKS[name]), dtype), dtype))


@pytest.mark.parametrize(("name", "rounding"), zip(KERNEL_PACKABLE, cycle(["wide", "block", "float"]), strict=False))
def test_packed_matrices_multiply_any_rows(name: str, rounding: str) -> None:
    spec = model_of(WIDE, WIDE_EXPERTS)
    assert_rows_agree(builder_of(pack_all(filled_decoder(spec, torch.bfloat16), name, rounding)), seed=2)


@pytest.mark.parametrize("order", ["divided", "online"])
def test_ternary_matrices_multiply_any_rows(order: str) -> None:
    assert_rows_agree(
        builder_of(
            pack_all(
                filled_decoder(model_of(replace(TERNARY, int8_activations=order)), torch.bfloat16), "i2_s", "token"
            )
        )
    )


@pytest.mark.parametrize("packed", [None, "q8_0"])
@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_experts_of_many_rows_may_come_in_waves(packed: str | None, at_once: int) -> None:
    """Each wave has other experts, in places of their own; the other places hold NaN."""
    spec = model_of(WIDE_EXPERTS, WIDE, WIDE_PLAIN_EXPERTS)
    source, target = (
        filled_decoder(spec) if packed is None else pack_all(filled_decoder(spec), packed, "wide") for _ in "12"
    )
    resident, fetched = builder_of(source), builder_of(target)
    rows = {number: Row(7 * number % VOCAB, 17 - number, 3 * number) for number in (0, 2, 3, 9, 15)}
    found = []
    for builder, fetcher in ((resident, None), (fetched, Waves(source, target, at_once))):
        if fetcher is not None:
            builder.functions.fetched = FetchedExperts(fetcher, {})
        caches = Caches(builder)
        program = builder.decode(MOST_ROWS, is_greedy=False)
        for step in range(3):
            run(program, {number: Row(row.token_id, row.sequence, row.position + step) for number, row in rows.items()})
            found.append((program.state.logits[list(rows)].clone(), [tensor.clone() for tensor in caches.tensors]))
    for (logits, caches_alone), (theirs, caches_waves) in zip(found[:3], found[3:], strict=True):
        assert torch.equal(logits, theirs)
        assert all(torch.equal(one, other) for one, other in zip(caches_alone, caches_waves, strict=True))


@dataclass
class Waves:
    """Copies experts to changing places, a few at a time; a place that holds none is full of NaN."""

    source: Decoder
    target: Decoder
    at_once: int
    asked: int = field(default=0)

    def __post_init__(self) -> None:
        for index in (0, 2):
            for part in self.target.layers[index].mlp.experts.children():
                fill = 255 if part.weight.dtype is torch.uint8 else float("nan")
                part.weight = torch.full((9, *part.weight.shape[1:]), fill, dtype=part.weight.dtype)

    def waves(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        assert len(set(experts)) == len(experts), "an expert is asked for once"
        parts = [decoder.layers[layer].mlp.experts.children() for decoder in (self.source, self.target)]
        pairs = list(zip(*parts, strict=True))
        for first in range(0, len(experts), self.at_once):
            places = [-1] * 4
            for rank, expert in enumerate(experts[first : first + self.at_once]):
                self.asked += 1
                places[expert] = (self.asked + 4 * rank) % 9
            for theirs, ours in pairs:
                ours.weight.fill_(255 if ours.weight.dtype is torch.uint8 else float("nan"))
                for expert, place in enumerate(places):
                    if place >= 0:
                        ours.weight[place] = theirs.weight[expert]
            yield places


def test_a_step_without_a_token_changes_nothing() -> None:
    builder = builder_of(filled_decoder(model_of(FULL, SLIDING)))
    caches = Caches(builder)
    caches.put_back()
    program = builder.decode(3, is_greedy=True)
    run(program, {})
    caches.assert_changed({})
    assert program.state.span.starts.tolist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), zip(ARCHITECTURES, cycle(OVERRIDES), strict=False))
def test_every_family_runs_any_rows(
    tiny_model: Callable[[str], TinyModel], name: str, overrides: Sequence[str]
) -> None:
    native_kernels()
    sizes = ("context_length=64", f"batch_size={SEQUENCES}", *overrides)
    dtype = "bf16" if overrides else "fp32"
    with Engine.load(tiny_model(name).folder, dtype=dtype, device="cpu", graph="captured", overrides=sizes) as engine:
        assert isinstance(engine.runner, ProgramRunner)
        with torch.inference_mode():
            builder = builder_of(engine.runner.builder.decoder, torch.bfloat16 if overrides else torch.float32)
            assert_rows_agree(builder, vocab=engine.runner.sizes.vocab)
