"""Which rank has which layers, and where the residual stream is handed over."""

import pytest

from graphcore.errors import ConfigError
from graphcore.parallel.deal import Share, deal, described


@pytest.mark.parametrize(
    ("layers", "ranks", "together", "is_contiguous", "expected"),
    [
        (8, 2, 1, False, "01010101"),
        (8, 2, 1, True, "00001111"),
        (5, 4, 1, False, "01230"),
        (5, 4, 1, True, "00123"),
        (7, 2, 2, False, "0011001"),
        (7, 3, 2, True, "0000112"),
        (3, 3, 1, True, "012"),
    ],
)
def test_layers_are_dealt_in_turn_or_as_neighbours(
    layers: int, ranks: int, together: int, is_contiguous: bool, expected: str
) -> None:
    assert "".join(map(str, deal(layers, ranks, together, is_contiguous))) == expected


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layers", [4, 5, 9, 80])
def test_the_stream_reaches_every_layer_and_comes_back_to_the_head(
    layers: int, ranks: int, is_contiguous: bool
) -> None:
    owners = deal(layers, ranks, 1, is_contiguous)
    shares = [Share(rank, owners) for rank in range(ranks)]
    assert sorted(layer for share in shares for layer in share.layers) == list(range(layers))
    holder = 0  # the embedding's rank
    for layer in range(layers):
        share = shares[owners[layer]]
        assert share.source(layer) == (None if holder == share.rank else holder)
        holder = share.rank
        target = share.target(layer)
        after = owners[layer + 1] if layer + 1 < layers else 0
        assert target == (None if after == holder else after)
    assert holder == shares[0].last_owner
    counts = [len(share.layers) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_neighbours_are_one_run_and_turns_are_many() -> None:
    assert Share(1, deal(6, 2, 1, is_contiguous=True)).runs == [range(3, 6)]
    assert Share(1, deal(6, 2, 1, is_contiguous=False)).runs == [range(1, 2), range(3, 4), range(5, 6)]
    assert Share(0, deal(7, 2, 2, is_contiguous=False)).runs == [range(2), range(4, 6)]


def test_only_rank_0_has_embedding_and_head() -> None:
    assert [Share(rank, (0, 1, 2)).has_ends for rank in range(3)] == [True, False, False]


def test_more_ranks_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 groups of layers cannot be dealt to 3 ranks; start 2 ranks at most"):
        deal(4, 3, 2, is_contiguous=False)


def test_the_deal_is_said_in_a_few_words() -> None:
    assert described(deal(5, 2, 1, is_contiguous=False)) == "2 ranks have 3, 2 layers, and a pass has 4 hand-overs"
    assert described(deal(5, 2, 1, is_contiguous=True)) == "2 ranks have 3, 2 layers, and a pass has 2 hand-overs"
