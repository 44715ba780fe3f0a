"""Which rank has which layers, and where the residual stream is handed over."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.config.settings import Keeps
from graphcore.errors import ConfigError
from graphcore.parallel import deal as dealing
from graphcore.parallel.deal import (
    Needs,
    Offer,
    Share,
    counts_with_lenders,
    described,
    holders_of,
    leveled,
    with_lenders,
)

LAYER = Needs(held_nbytes=10, read_nbytes=10)
NO_ENDS = Needs(0, 0)


def fair_counts(
    groups: int, offers: Sequence[Offer], layer: Needs, ends: Needs, keeps: Keeps = "most"
) -> Sequence[int]:
    """Return how many of a number of groups each rank gets."""
    return dealing.fair_counts(holders_of(range(groups), 1, offers), offers, layer, ends, keeps)


def split_counts(groups: int, split: Sequence[float], offers: Sequence[Offer] = ()) -> Sequence[int]:
    """Return how many of a number of groups each rank gets in the proportions of a split."""
    return dealing.split_counts(holders_of(range(groups), 1, offers or [Offer(0)] * len(split)), split)


def deal(
    layers: int, together: int, counts: Sequence[int], is_contiguous: bool, offers: Sequence[Offer] = ()
) -> Sequence[int]:
    """Return the rank of each layer, of ranks that have all files unless there are offers."""
    holders = holders_of(range(layers), together, offers or [Offer(0)] * len(counts))
    return dealing.deal(layers, together, holders, counts, is_contiguous)


def equal_counts(groups: int, ranks: int) -> Sequence[int]:
    """Return counts of ranks that are alike."""
    return fair_counts(groups, [Offer(0)] * ranks, LAYER, NO_ENDS)


@pytest.mark.parametrize(
    ("layers", "together", "counts", "is_contiguous", "expected"),
    [
        (8, 1, [4, 4], False, "01010101"),
        (8, 1, [4, 4], True, "00001111"),
        (8, 1, [3, 5], False, "01101101"),
        (8, 1, [3, 5], True, "00011111"),
        (5, 1, [2, 1, 1, 1], False, "01230"),
        (7, 2, [2, 2], False, "0011001"),
        (7, 2, [2, 1, 1], True, "0000112"),
        (10, 1, [1, 3, 3, 3], False, "0123123123"),
    ],
)
def test_layers_are_dealt_in_turn_or_as_neighbours(
    layers: int, together: int, counts: list[int], is_contiguous: bool, expected: str
) -> None:
    assert "".join(map(str, deal(layers, together, counts, is_contiguous))) == expected


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("counts", [[2, 2], [1, 4], [3, 1, 1], [9, 20, 25, 26], [1, 1, 1, 2]])
def test_the_stream_reaches_every_layer_and_comes_back_to_the_head(counts: list[int], is_contiguous: bool) -> None:
    layers, ranks = sum(counts), len(counts)
    owners = deal(layers, 1, counts, is_contiguous)
    shares = [Share(rank, owners) for rank in range(ranks)]
    assert sorted(layer for share in shares for layer in share.layers) == list(range(layers))
    assert [len(share.layers) for share in shares] == counts
    assert owners[0] == 0  # where the embedding is
    holder = 0
    for layer in range(layers):
        share = shares[owners[layer]]
        assert share.source(layer) == (None if holder == share.rank else holder)
        holder = share.rank
        target = share.target(layer)
        after = owners[layer + 1] if layer + 1 < layers else 0
        assert target == (None if after == holder else after)
    assert holder == shares[0].last_owner


def test_turns_are_spread_evenly() -> None:
    owners = deal(30, 1, [2, 10, 9, 9], is_contiguous=False)
    for rank in (1, 2, 3):
        places = [layer for layer, owner in enumerate(owners) if owner == rank]
        assert all(one - other in (3, 4) for other, one in pairwise(places))


def test_the_head_counts_as_what_rank_0_reads() -> None:
    ends = Needs(held_nbytes=80, read_nbytes=80)  # as much as 8 layers
    assert fair_counts(30, [Offer(0)] * 2, LAYER, ends) == [11, 19]
    assert fair_counts(30, [Offer(0)] * 4, LAYER, ends) == [2, 10, 9, 9]
    assert fair_counts(4, [Offer(0)] * 2, LAYER, ends) == [1, 3]  # each has one at least


def test_a_faster_disk_gets_more_layers_and_a_little_faster_one_does_not() -> None:
    assert fair_counts(12, [Offer(0, disk=3e9), Offer(0, disk=1e9)], LAYER, NO_ENDS) == [9, 3]
    assert fair_counts(12, [Offer(0, disk=1.1e9), Offer(0, disk=1e9)], LAYER, NO_ENDS) == [6, 6]
    assert fair_counts(12, [Offer(0, disk=3e9), Offer(0)], LAYER, NO_ENDS) == [6, 6]  # one is unknown


def test_layers_stay_where_there_is_room_and_stream_by_the_disks_rate() -> None:
    assert fair_counts(12, [Offer(1000), Offer(40)], LAYER, NO_ENDS) == [8, 4]  # all stay
    small, large = Offer(20, disk=1e9), Offer(60, disk=1e9)  # 2 and 6 layers stay; 4 of the other 8 stream on each
    assert fair_counts(16, [small, large], LAYER, NO_ENDS) == [6, 10]
    slow = Offer(60, disk=0.5e9)
    assert fair_counts(17, [small, slow], LAYER, NO_ENDS) == [8, 9]


def test_what_stays_is_dealt_by_the_rate_of_memory() -> None:
    assert fair_counts(12, [Offer(1000, memory=10e9), Offer(1000, memory=50e9)], LAYER, NO_ENDS) == [2, 10]


def test_the_rate_of_memory_does_not_change_what_streams() -> None:
    offers = [Offer(0, disk=1e9, memory=rate) for rate in (10e9, 50e9, 90e9)]
    assert fair_counts(10, offers, LAYER, NO_ENDS) == [4, 3, 3]


def test_rates_that_are_nearly_the_fastest_count_as_it() -> None:
    assert leveled([100.0, 90.0, 84.0]) == [100.0, 100.0, 84.0]
    assert leveled([2.0, None]) == [1.0, 1.0]


def test_a_split_gives_proportions_and_each_rank_a_layer() -> None:
    assert split_counts(8, [3, 1]) == [6, 2]
    assert split_counts(10, [1, 1, 1]) == [4, 3, 3]
    assert split_counts(4, [1000, 1, 1]) == [2, 1, 1]


def test_what_has_no_room_anywhere_streams_beside_caches_and_copies() -> None:
    layer = Needs(held_nbytes=14, read_nbytes=10, kept_nbytes=4, draft_nbytes=2)
    offer = Offer(room_nbytes=90, streaming_nbytes=20, least_nbytes=5)
    assert offer.without_room(layer.times(6), "most") == (0, 0)
    reads = 100 - (90 - 20 - 40 - 20) / (10 - 2) * 10  # of ten layers: what is left for weights in place of copies
    assert offer.without_room(layer.times(10), "most") == (0, pytest.approx(reads))
    assert offer.without_room(layer.times(16), "most") == (16 * 6 + 5 - 90, 160)
    assert offer.without_room(layer.times(6), "nothing") == (0, 60)
    assert offer.without_room(layer.times(7), "all") == (8, 0)


def test_caches_and_copies_count_before_the_disk() -> None:
    layer, quick, slow = Needs(14, 10, 4), Offer(20, disk=9e9), Offer(1000, disk=1e9)
    assert fair_counts(20, [quick, slow], layer, NO_ENDS, "nothing") == [5, 15]  # the caches of 5 layers fit
    assert fair_counts(20, [Offer(1000, disk=9e9), slow], layer, NO_ENDS, "nothing") == [18, 2]


@pytest.mark.parametrize("keeps", ["all", "most"])
def test_a_fast_memory_gets_no_more_than_its_room_while_another_has_room(keeps: Keeps) -> None:
    offers = [Offer(30, memory=90e9), Offer(1000, memory=10e9)]
    assert fair_counts(12, offers, LAYER, NO_ENDS, keeps) == [3, 9]
    assert fair_counts(12, [Offer(1000, memory=90e9), offers[1]], LAYER, NO_ENDS, keeps) == [11, 1]


def test_a_rate_of_0_is_the_slowest() -> None:
    assert fair_counts(12, [Offer(0, disk=0.0), Offer(0, disk=1e9)], LAYER, NO_ENDS) == [1, 11]
    assert fair_counts(12, [Offer(0, disk=0.0), Offer(0, disk=0.0)], LAYER, NO_ENDS) == [6, 6]


def test_a_rank_gets_only_layers_that_its_files_hold() -> None:
    offers = [Offer(0, layers=(0, 1, 2, 3)), Offer(0, layers=(2, 3, 4, 5)), Offer(0)]
    owners = deal(6, 1, [2, 2, 2], False, offers)
    assert owners[0] == 0
    assert all(offers[owner].may_have([layer]) for layer, owner in enumerate(owners))
    assert deal(6, 1, [3, 3], True, [Offer(0, layers=(0, 1, 2)), Offer(0, layers=(3, 4, 5))]) == (0, 0, 0, 1, 1, 1)
    assert split_counts(4, [1, 1], [Offer(0, layers=(0,)), Offer(0)]) == [1, 3]
    assert fair_counts(4, [Offer(0, layers=(0,)), Offer(0)], LAYER, NO_ENDS) == [1, 3]


def test_a_rank_with_few_files_gets_what_it_has_before_the_others() -> None:
    few = [Offer(0), Offer(0, layers=(1,)), Offer(0, layers=(1, 2))]
    for is_contiguous in (True, False):
        assert deal(4, 1, split_counts(4, [1, 1, 1], few), is_contiguous, few) == (0, 1, 2, 0)


def test_runs_go_on_as_long_as_files_allow() -> None:
    files = [Offer(0, layers=(0, 1, 4, 5)), Offer(0, layers=(2, 3, 4, 5))]
    assert deal(6, 1, [3, 3], True, files) == (0, 0, 1, 1, 1, 0)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_layers_are_dealt_whenever_files_allow_it(data: st.DataObject) -> None:
    together = data.draw(st.integers(1, 2))
    layers, ranks = data.draw(st.integers(together, 5 * together)), data.draw(st.integers(2, 4))
    held = st.sets(st.sampled_from(range(layers)), min_size=layers // 2)
    offers = [Offer(0, layers=data.draw(st.none() | held.map(sorted))) for _ in range(ranks)]
    groups = [range(first, min(layers, first + together)) for first in range(0, layers, together)]
    possible = [
        owners
        for owners in product(range(ranks), repeat=len(groups))
        if owners[0] == 0
        and {*owners} == {*range(ranks)}
        and all(offers[rank].may_have(group) for rank, group in zip(owners, groups, strict=True))
    ]
    if not possible:
        with pytest.raises(ConfigError, match=r"parallel=ring: .*(files|cannot be dealt to)"):
            holders_of(range(layers), together, offers)
        return
    holders = holders_of(range(layers), together, offers)
    split = data.draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    for counts in (dealing.fair_counts(holders, offers, LAYER, LAYER), dealing.split_counts(holders, split)):
        for is_contiguous in (True, False):
            dealt = dealing.deal(layers, together, holders, counts, is_contiguous)
            owners = dealt[::together]
            assert owners in possible
            assert dealt == tuple(rank for rank, group in zip(owners, groups, strict=True) for _ in group)
            assert [owners.count(rank) for rank in range(ranks)] == counts
    most = {max(owners.count(rank) for rank in range(ranks)) for owners in possible}
    assert max(dealing.split_counts(holders, [1] * ranks)) == min(most)


def test_a_layer_that_no_rank_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rank has the files of layer 2; put the files that hold them on one of"):
        holders_of(range(3), 1, [Offer(0, layers=(0, 1)), Offer(0, layers=(0, 1))])
    with pytest.raises(ConfigError, match="rank 0 has the files of layers 0 to 1; put the files"):
        holders_of(range(4), 2, [Offer(0, layers=(1, 2, 3)), Offer(0)])


@pytest.mark.parametrize(
    ("together", "files", "said"),
    [
        (1, [(), None], "rank 1 gets no layer, because its files hold no layer but the first, which rank 0 has; give"),
        (1, [(0,), None], "rank 1 gets no layer, because its files hold no layer but the first"),
        (2, [(1, 2), None], r"its files hold no whole group of 2 layers \(streaming.layer_group_size\) but the first"),
        (1, [(4, 5), (4,), (5,)], "rank 3 gets no layer, because the files of ranks 1, 2, 3 hold only layers 4-5 for"),
        (2, [(2, 3, 4), (2, 3)], "rank 2 gets no layer, because the files of ranks 1, 2 hold only layers 2-3 for them"),
    ],
)
def test_ranks_with_too_few_files_are_refused(together: int, files: Sequence[Sequence[int] | None], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        holders_of(range(8), together, [Offer(0), *(Offer(0, layers=layers) for layers in files)])


def test_neighbours_are_one_run_and_turns_are_many() -> None:
    assert Share(1, deal(6, 1, [3, 3], is_contiguous=True)).runs == [range(3, 6)]
    assert Share(1, deal(6, 1, [3, 3], is_contiguous=False)).runs == [range(1, 2), range(3, 4), range(5, 6)]
    assert Share(0, deal(7, 2, [2, 2], is_contiguous=False)).runs == [range(2), range(4, 6)]


def test_only_rank_0_has_embedding_and_head() -> None:
    assert [Share(rank, (0, 1, 2)).has_ends for rank in range(3)] == [True, False, False]


def test_more_ranks_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be dealt to 3 ranks; start 2 ranks at most"):
        equal_counts(2, 3)
    with pytest.raises(ConfigError, match="2 layers cannot be dealt to 3 ranks; start 2 ranks at most"):
        split_counts(2, [1, 1, 1])
    with pytest.raises(
        ConfigError, match=r"2 groups of 4 layers cannot be dealt to 3 ranks; start 2 .* or set a smaller"
    ):
        holders_of(range(8), 4, [Offer(0)] * 3)
    with pytest.raises(ConfigError, match="1 groups of 50 layers cannot be dealt to 2 ranks; leave parallel=ring out"):
        holders_of(range(8), 50, [Offer(0)] * 2)


def test_the_deal_is_said_in_a_few_words() -> None:
    turns, runs = (deal(5, 1, [3, 2], is_contiguous) for is_contiguous in (False, True))
    assert described(turns) == "2 ranks have 3, 2 layers, and a pass has 4 hand-overs"
    assert described(runs) == "2 ranks have 3, 2 layers, and a pass has 2 hand-overs"


LENT = (0, 1, 2, 3, 2, 3, 2, 2)  # layers 4 to 7 use the caches of layers 2 and 3


@pytest.mark.parametrize(
    ("owners", "expected"), [("01010101", "01010100"), ("00011111", "00010100"), ("00111111", "00111111")]
)
def test_a_layer_that_uses_another_ones_cache_is_on_its_rank(owners: str, expected: str) -> None:
    assert "".join(map(str, with_lenders([*map(int, owners)], LENT))) == expected


@pytest.mark.parametrize(
    ("counts", "together", "expected"),
    [
        ([4, 4], 1, [2, 6]),
        ([2, 6], 1, [2, 6]),
        ([1, 7], 1, [1, 7]),
        ([2, 3, 3], 1, [1, 1, 6]),
        ([2, 2], 2, [1, 3]),
        ([2, 2, 2, 2], 1, [2, 2, 2, 2]),  # too many ranks for the layers before the first that lends
    ],
)
def test_neighbouring_layers_from_the_first_that_lends_are_on_the_last_rank(
    counts: list[int], together: int, expected: list[int]
) -> None:
    assert counts_with_lenders(counts, LENT, together) == expected


def test_a_rank_has_the_files_of_a_layer_only_with_those_of_the_layers_that_use_its_cache() -> None:
    files = [Offer(0, layers=(0, 1, 2, 3, 5, 6)), Offer(0)]
    assert holders_of(LENT, 1, files) == [[0], [0, 1], [1], [0, 1], [1], [0, 1], [1], [1]]
    for counts in ([1, 7], [4, 4]):
        owners = dealing.deal(8, 1, holders_of(LENT, 1, files), counts, is_contiguous=False)
        assert with_lenders(owners, LENT)[2] == 1
    with pytest.raises(ConfigError, match="no rank has the files of layer 2"):
        holders_of(LENT, 1, [files[0], Offer(0, layers=(1, 2, 4))])


def test_the_others_keep_their_proportions() -> None:
    lent = [*range(20), *[12] * 8]
    assert counts_with_lenders([2, 14, 8, 4], lent, 1) == [1, 7, 4, 16]
    assert counts_with_lenders([7, 7, 7, 7], range(28), 1) == [7, 7, 7, 7]


def test_layers_with_own_caches_stay_where_they_are() -> None:
    assert with_lenders([0, 1, 1, 0], range(4)) == (0, 1, 1, 0)


def test_a_rank_that_lent_caches_leave_without_layers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 gets no layer, because others use the .* of layers 2, 3 and are on"):
        with_lenders([0, 0, 0, 0, 0, 1, 1, 1], LENT)
