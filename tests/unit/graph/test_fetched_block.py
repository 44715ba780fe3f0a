"""A block between whose halves experts are fetched: the block's own bits, and nothing left open when it fails."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from tiny_graph import SLIDING, filled_decoder, model_of
from torch import Tensor

from graphcore.graph.step import FetchedBlock, RoutedBlock
from graphcore.nn.block import Block
from graphcore.nn.rope import rope_table
from graphcore.nn.span import Span
from graphcore.nn.spec import MoESpec

EXPERTS = replace(SLIDING, mlp=MoESpec(experts=5, top_k=2, hidden=20), sandwich=False)
HALVES = RoutedBlock(Block.route, Block.add_experts)


@dataclass
class AtHome:
    """Gives experts where they are, so many at a time."""

    at_a_time: int
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    num_open: int = 0

    def waves(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        self.asked.append((layer, list(experts)))
        self.num_open += 1
        try:
            for begin in range(0, len(experts), self.at_a_time):
                yield [e if e in experts[begin : begin + self.at_a_time] else -1 for e in range(5)]
        finally:
            self.num_open -= 1


def arguments(counts: Sequence[int]) -> tuple[Tensor, Tensor, Span, Tensor, Tensor, Tensor]:
    tokens = max(*counts, 1)
    span = Span(torch.zeros(len(counts), dtype=torch.int64), torch.tensor(counts))
    rope = rope_table(SLIDING.attention.rope, 8, tokens)[span.positions(tokens)]
    x = torch.randn(len(counts), tokens, 32, generator=torch.Generator().manual_seed(0))
    table = torch.arange(len(counts), dtype=torch.int32)[:, None]
    return x, rope, span, torch.zeros(len(counts), 2, 24, 8), torch.zeros(len(counts), 2, 24, 8), table


def test_waves_give_the_bits_of_the_whole_block() -> None:
    for at_a_time, counts in every_pair([1, 2, 5], [(1,), (9, 4), (1, 0), (0, 0)]):
        with in_case(at_a_time, counts):
            block = filled_decoder(model_of(EXPERTS)).layers[0]
            fetcher = AtHome(at_a_time)
            found = FetchedBlock(HALVES, 3, fetcher)(block, *arguments(counts))
            assert torch.equal(found, block(*arguments(counts)))
            ((layer, experts),) = fetcher.asked
            assert layer == 3
            assert experts == sorted(set(experts) & set(range(5)))
            assert bool(experts) == any(counts)


def test_what_fails_between_waves_leaves_no_wave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    block = filled_decoder(model_of(EXPERTS)).layers[0]
    fetcher = AtHome(1)

    def fail(*_: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(block.mlp.experts, "forward", fail)
    with pytest.raises(KeyboardInterrupt) as raised:
        FetchedBlock(HALVES, 0, fetcher)(block, *arguments((9,)))
    assert fetcher.num_open == 0, raised  # though its traceback is held
