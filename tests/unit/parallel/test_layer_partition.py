"""Which rank has which layers, and where the residual stream is handed over."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.config.settings import Keeps
from graphcore.errors import ConfigError
from graphcore.parallel.capacity import RankCapacity, Requirement, leveled
from graphcore.parallel.layer_partition import partition_by_capacity, partition_by_split
from graphcore.parallel.layer_units import units_of
from graphcore.parallel.share import Share, described

LAYER = Requirement(held_nbytes=10, read_nbytes=10)
NO_ENDS = Requirement(0, 0)
LENT = (0, 1, 2, 3, 2, 3, 2, 2)  # layers 4 to 7 use the keys and values of layers 2 and 3


def by_capacity(
    cache_layers: Sequence[int],
    capacities: Sequence[RankCapacity],
    layer: Requirement = LAYER,
    ends: Requirement = NO_ENDS,
    keeps: Keeps = "most",
    group_size: int = 1,
    *,
    is_contiguous: bool = False,
) -> Sequence[int]:
    """Return the rank of each layer, of layers that are alike."""
    units = units_of(cache_layers, group_size, capacities)
    layers = [layer] * len(cache_layers)
    return partition_by_capacity(units, capacities, layers, ends, keeps, is_contiguous=is_contiguous)


def by_split(
    cache_layers: Sequence[int],
    split: Sequence[float],
    group_size: int = 1,
    capacities: Sequence[RankCapacity] = (),
    *,
    is_contiguous: bool = False,
) -> Sequence[int]:
    """Return the rank of each layer in the proportions of a split, of ranks that have all files unless given."""
    units = units_of(cache_layers, group_size, capacities or [RankCapacity(0)] * len(split))
    return partition_by_split(units, split, group_size, is_contiguous=is_contiguous)


def counts_of(owners: Sequence[int]) -> list[int]:
    """Return the number of layers of each rank."""
    return [owners.count(rank) for rank in range(max(owners) + 1)]


def fair_counts(
    layers: int, capacities: Sequence[RankCapacity], layer: Requirement, ends: Requirement, keeps: Keeps = "most"
) -> list[int]:
    """Return how many of a number of layers each rank gets."""
    return counts_of(by_capacity(range(layers), capacities, layer, ends, keeps))


def split_counts(layers: int, split: Sequence[float]) -> list[int]:
    """Return how many of a number of layers each rank gets in the proportions of a split."""
    return counts_of(by_split(range(layers), split))


@pytest.mark.parametrize(
    ("layers", "group_size", "split", "is_contiguous", "expected"),
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
def test_layers_are_interleaved_or_neighbours(
    layers: int, group_size: int, split: list[int], is_contiguous: bool, expected: str
) -> None:
    assert "".join(map(str, by_split(range(layers), split, group_size, is_contiguous=is_contiguous))) == expected


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("counts", [[2, 2], [1, 4], [3, 1, 1], [9, 20, 25, 26], [1, 1, 1, 2]])
def test_the_stream_reaches_every_layer_and_comes_back_to_the_head(counts: list[int], is_contiguous: bool) -> None:
    layers, ranks = sum(counts), len(counts)
    owners = tuple(by_split(range(layers), counts, is_contiguous=is_contiguous))
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
    owners = by_split(range(30), [2, 10, 9, 9])
    for rank in (1, 2, 3):
        places = [layer for layer, owner in enumerate(owners) if owner == rank]
        assert all(one - other in (3, 4) for other, one in pairwise(places))


def test_the_head_counts_as_what_rank_0_reads() -> None:
    ends = Requirement(held_nbytes=80, read_nbytes=80)  # as much as 8 layers
    assert fair_counts(30, [RankCapacity(0)] * 2, LAYER, ends) == [11, 19]
    assert fair_counts(30, [RankCapacity(0)] * 4, LAYER, ends) == [2, 10, 9, 9]
    assert fair_counts(4, [RankCapacity(0)] * 2, LAYER, ends) == [1, 3]  # each has one at least


def test_a_faster_disk_gets_more_layers_and_a_little_faster_one_does_not() -> None:
    assert fair_counts(12, [RankCapacity(0, disk=3e9), RankCapacity(0, disk=1e9)], LAYER, NO_ENDS) == [9, 3]
    assert fair_counts(12, [RankCapacity(0, disk=1.1e9), RankCapacity(0, disk=1e9)], LAYER, NO_ENDS) == [6, 6]
    assert fair_counts(12, [RankCapacity(0, disk=3e9), RankCapacity(0)], LAYER, NO_ENDS) == [6, 6]  # one is unknown


def test_layers_stay_where_there_is_room_and_stream_by_the_disks_rate() -> None:
    assert fair_counts(12, [RankCapacity(1000), RankCapacity(40)], LAYER, NO_ENDS) == [8, 4]  # all stay
    small, large = (
        RankCapacity(20, disk=1e9),
        RankCapacity(60, disk=1e9),
    )  # 2 and 6 layers stay; 4 of the other 8 stream on each
    assert fair_counts(16, [small, large], LAYER, NO_ENDS) == [6, 10]
    slow = RankCapacity(60, disk=0.5e9)
    assert fair_counts(17, [small, slow], LAYER, NO_ENDS) == [8, 9]


def test_what_stays_is_shared_by_the_rate_of_memory() -> None:
    assert fair_counts(12, [RankCapacity(1000, memory=10e9), RankCapacity(1000, memory=50e9)], LAYER, NO_ENDS) == [
        2,
        10,
    ]


def test_the_rate_of_memory_does_not_change_what_streams() -> None:
    capacities = [RankCapacity(0, disk=1e9, memory=rate) for rate in (10e9, 50e9, 90e9)]
    assert fair_counts(10, capacities, LAYER, NO_ENDS) == [4, 3, 3]


def test_rates_that_are_nearly_the_fastest_count_as_it() -> None:
    assert leveled([100.0, 90.0, 84.0]) == [100.0, 100.0, 84.0]
    assert leveled([2.0, None]) == [1.0, 1.0]


def test_a_split_gives_proportions_and_each_rank_a_layer() -> None:
    assert split_counts(8, [3, 1]) == [6, 2]
    assert split_counts(10, [1, 1, 1]) == [4, 3, 3]
    assert split_counts(4, [1000, 1, 1]) == [2, 1, 1]


def test_what_has_no_room_anywhere_streams_beside_caches_and_copies() -> None:
    layer = Requirement(held_nbytes=14, read_nbytes=10, kept_nbytes=4, draft_nbytes=2)
    capacity = RankCapacity(room_nbytes=90, streaming_nbytes=20, least_nbytes=5)
    assert capacity.without_room(layer.times(6), "most") == (0, 0)
    reads = 100 - (90 - 20 - 40 - 20) / (10 - 2) * 10  # of ten layers: what is left for weights in place of copies
    assert capacity.without_room(layer.times(10), "most") == (0, pytest.approx(reads))
    assert capacity.without_room(layer.times(16), "most") == (16 * 6 + 5 - 90, 160)
    assert capacity.without_room(layer.times(6), "nothing") == (0, 60)
    assert capacity.without_room(layer.times(7), "all") == (8, 0)


def test_caches_and_copies_count_before_the_disk() -> None:
    layer, quick, slow = Requirement(14, 10, 4), RankCapacity(20, disk=9e9), RankCapacity(1000, disk=1e9)
    assert fair_counts(20, [quick, slow], layer, NO_ENDS, "nothing") == [5, 15]  # the caches of 5 layers fit
    assert fair_counts(20, [RankCapacity(1000, disk=9e9), slow], layer, NO_ENDS, "nothing") == [18, 2]


@pytest.mark.parametrize("keeps", ["all", "most"])
def test_a_fast_memory_gets_no_more_than_its_room_while_another_has_room(keeps: Keeps) -> None:
    capacities = [RankCapacity(30, memory=90e9), RankCapacity(1000, memory=10e9)]
    assert fair_counts(12, capacities, LAYER, NO_ENDS, keeps) == [3, 9]
    assert fair_counts(12, [RankCapacity(1000, memory=90e9), capacities[1]], LAYER, NO_ENDS, keeps) == [11, 1]


def test_a_rate_of_0_is_the_slowest() -> None:
    assert fair_counts(12, [RankCapacity(0, disk=0.0), RankCapacity(0, disk=1e9)], LAYER, NO_ENDS) == [1, 11]
    assert fair_counts(12, [RankCapacity(0, disk=0.0), RankCapacity(0, disk=0.0)], LAYER, NO_ENDS) == [6, 6]


def test_a_rank_gets_only_layers_that_its_files_hold() -> None:
    capacities = [RankCapacity(0, layers=(0, 1, 2, 3)), RankCapacity(0, layers=(2, 3, 4, 5)), RankCapacity(0)]
    owners = by_split(range(6), [2, 2, 2], 1, capacities)
    assert owners[0] == 0
    assert all(capacities[owner].has_files_of([layer]) for layer, owner in enumerate(owners))
    halves = [RankCapacity(0, layers=(0, 1, 2)), RankCapacity(0, layers=(3, 4, 5))]
    assert by_split(range(6), [3, 3], 1, halves, is_contiguous=True) == (0, 0, 0, 1, 1, 1)
    assert fair_counts(4, [RankCapacity(0, layers=(0,)), RankCapacity(0)], LAYER, NO_ENDS) == [1, 3]


def test_a_split_that_files_do_not_allow_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=r"parallel\.split=\[1, 1\] cannot be kept, because ranks lack the files of some layers; the nearest that "
        r"can be is parallel\.split=\[1,3\]$",
    ):
        by_split(range(4), [1, 1], 1, [RankCapacity(0, layers=(0,)), RankCapacity(0)])


def test_a_rank_with_few_files_gets_what_it_has_before_the_others() -> None:
    few = [RankCapacity(0), RankCapacity(0, layers=(1,)), RankCapacity(0, layers=(1, 2))]
    for is_contiguous in (True, False):
        assert by_split(range(4), [1, 1, 1], 1, few, is_contiguous=is_contiguous) == (0, 1, 2, 0)


def test_runs_go_on_as_long_as_files_allow() -> None:
    files = [RankCapacity(0, layers=(0, 1, 4, 5)), RankCapacity(0, layers=(2, 3, 4, 5))]
    assert by_split(range(6), [3, 3], 1, files, is_contiguous=True) == (0, 0, 1, 1, 1, 0)


@st.composite
def lent_caches(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the layer whose keys and values each layer uses: the last layers may use those of up to two others."""
    layers = draw(st.integers(2, 7))
    own = draw(st.integers(1, layers))
    lenders = draw(st.lists(st.integers(0, own - 1), min_size=1, max_size=2))
    return *range(own), *(draw(st.sampled_from(lenders)) for _ in range(layers - own))


def possible_owners(
    cache_layers: Sequence[int], group_size: int, capacities: Sequence[RankCapacity]
) -> list[tuple[int, ...]]:
    """Return all partitions of a model: groups of layers whole, but for those that use another one's cache."""
    ranks, layers = range(len(capacities)), range(len(cache_layers))
    groups = {lender // group_size for lender in cache_layers}
    found = []
    for of_groups in product(ranks, repeat=len(groups)):
        of_group = dict(zip(sorted(groups), of_groups, strict=True))
        owners = tuple(of_group[lender // group_size] for lender in cache_layers)
        held = all(capacities[owners[layer]].has_files_of([layer]) for layer in layers)
        if owners[0] == 0 and {*owners} == {*ranks} and held:
            found.append(owners)
    return found


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_layers_are_shared_whenever_files_and_lent_caches_allow_it_and_as_well_as_they_do(data: st.DataObject) -> None:
    cache_layers, group_size = data.draw(lent_caches()), data.draw(st.integers(1, 2))
    layers, ranks = len(cache_layers), data.draw(st.integers(2, 3))
    held = st.sets(st.sampled_from(range(layers)), min_size=layers // 2)
    rates = st.sampled_from([1.0, 2.0, 3.0])
    files = st.none() | held.map(sorted)
    capacities = [RankCapacity(0, disk=data.draw(rates), layers=data.draw(files)) for _ in range(ranks)]
    possible = possible_owners(cache_layers, group_size, capacities)
    is_contiguous = data.draw(st.booleans())
    if not possible:
        with pytest.raises(ConfigError, match=r"parallel=ring: .*(files|cannot be split among)"):
            units_of(cache_layers, group_size, capacities)
        return
    found = by_capacity(cache_layers, capacities, group_size=group_size, is_contiguous=is_contiguous)
    assert found in possible
    disks = leveled([one.disk for one in capacities])

    def load(owners: Sequence[int]) -> float:
        return max(owners.count(rank) / disks[rank] for rank in range(ranks))

    if group_size == 1:  # the last group of 2 may be of 1, and counts as 2
        assert load(found) == pytest.approx(min(load(owners) for owners in possible))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_split_is_kept_if_it_can_be_and_else_the_nearest_is_named(data: st.DataObject) -> None:
    cache_layers, group_size = data.draw(lent_caches()), data.draw(st.integers(1, 2))
    layers, ranks = len(cache_layers), data.draw(st.integers(2, 3))
    held = st.sets(st.sampled_from(range(layers)), min_size=layers // 2)
    capacities = [RankCapacity(0, layers=data.draw(st.none() | held.map(sorted))) for _ in range(ranks)]
    possible = possible_owners(cache_layers, group_size, capacities)
    if not possible:
        return
    split = data.draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    is_contiguous = data.draw(st.booleans())
    wanted, exact = counts_of(by_split(range(layers), split)), [layers * part / sum(split) for part in split]

    def is_kept(owners: Sequence[int]) -> bool:
        counts = [owners.count(rank) for rank in range(ranks)]
        return counts == wanted or all(abs(one - part) < 1 for one, part in zip(counts, exact, strict=True))

    try:
        found = by_split(cache_layers, split, group_size, capacities, is_contiguous=is_contiguous)
    except ConfigError as refused:
        assert group_size > 1 or not any(map(is_kept, possible))
        named = [int(count) for count in str(refused).rpartition("[")[2].rstrip("]").split(",")]
        again = by_split(cache_layers, named, group_size, capacities, is_contiguous=is_contiguous)
        assert counts_of(again) == named
        if group_size == 1:

            def load(owners: Sequence[int]) -> float:
                return max(owners.count(rank) / split[rank] for rank in range(ranks))

            assert load(again) == pytest.approx(min(load(owners) for owners in possible))
    else:
        assert found in possible
        assert all(abs(found.count(rank) - exact[rank]) < 2 * group_size for rank in range(ranks))


def test_a_layer_that_no_rank_has_is_refused() -> None:
    first = RankCapacity(0, layers=(0, 1))
    with pytest.raises(ConfigError, match="no rank has the files of layer 2; put the files that hold them on one of"):
        units_of(range(3), 1, [first, first])
    with pytest.raises(ConfigError, match="rank 0 has the files of layers 0-1; put the files"):
        units_of(range(4), 2, [RankCapacity(0, layers=(1, 2, 3)), RankCapacity(0)])
    with pytest.raises(ConfigError, match="no rank has the files of layers 2,4,6-7, of which some use keys and values"):
        units_of(LENT, 1, [RankCapacity(0, layers=(0, 1, 2, 3, 5, 6)), RankCapacity(0, layers=(1, 2, 4))])


@pytest.mark.parametrize(
    ("group_size", "files", "said"),
    [
        (1, [(), None], "rank 1 gets no layer, because its files hold no layer but the first, which rank 0 has; give"),
        (1, [(0,), None], "rank 1 gets no layer, because its files hold no layer but the first"),
        (2, [(1, 2), None], r"its files hold no whole group of 2 layers \(streaming.layer_group_size\) but the first"),
        (1, [(4, 5), (4,), (5,)], "rank 3 gets no layer, because the files of ranks 1, 2, 3 hold only layers 4-5 for"),
        (2, [(2, 3, 4), (2, 3)], "rank 2 gets no layer, because the files of ranks 1, 2 hold only layers 2-3 for them"),
    ],
)
def test_ranks_with_too_few_files_are_refused(
    group_size: int, files: Sequence[Sequence[int] | None], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        units_of(range(8), group_size, [RankCapacity(0), *(RankCapacity(0, layers=layers) for layers in files)])


def test_neighbours_are_one_run_and_interleaved_layers_are_many() -> None:
    runs, interleaved = (tuple(by_split(range(6), [3, 3], is_contiguous=one)) for one in (True, False))
    assert Share(1, runs).runs == [range(3, 6)]
    assert Share(1, interleaved).runs == [range(1, 2), range(3, 4), range(5, 6)]
    assert Share(0, tuple(by_split(range(7), [2, 2], 2))).runs == [range(2), range(4, 6)]


def test_only_rank_0_has_embedding_and_head() -> None:
    assert [Share(rank, (0, 1, 2)).has_ends for rank in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("cache_layers", "group_size", "ranks", "said"),
    [
        (range(2), 1, 3, "2 layers cannot be split among 3 ranks; start 2 ranks at most$"),
        (range(8), 4, 3, "2 groups of 4 layers cannot be split among 3 ranks; start 2 .*, or set a smaller streaming"),
        (range(8), 50, 2, "1 groups of 50 layers cannot be split among 2 ranks; leave parallel=ring out"),
        (LENT, 1, 5, "8 layers, of which some use keys and values of others and 4 can be apart, cannot be split among"),
    ],
)
def test_more_ranks_than_units_are_refused(cache_layers: Sequence[int], group_size: int, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        units_of(cache_layers, group_size, [RankCapacity(0)] * ranks)


def test_a_partition_is_said_in_a_few_words() -> None:
    interleaved, runs = (by_split(range(5), [3, 2], is_contiguous=is_contiguous) for is_contiguous in (False, True))
    assert described(interleaved) == "2 ranks have 3, 2 layers, and a pass has 4 hand-overs"
    assert described(runs) == "2 ranks have 3, 2 layers, and a pass has 2 hand-overs"


def test_layers_that_use_one_cache_are_weighed_together() -> None:
    alike = [RankCapacity(0, disk=1e9)] * 2
    assert counts_of(by_capacity(LENT, alike)) == [4, 4]
    assert counts_of(by_capacity(LENT, [RankCapacity(0, disk=5e9), RankCapacity(0, disk=1e9)])) == [7, 1]
    units = units_of(LENT, 1, alike)
    layers = [*[LAYER] * 4, *[LAYER.times(3)] * 4]  # as in Gemma 4 E2B, those without caches of their own are larger
    owners = partition_by_capacity(units, alike, layers, NO_ENDS, "most", is_contiguous=False)
    assert (owners[2], [owners.count(rank) for rank in range(2)]) in ((1, [4, 4]), (0, [4, 4]))
    assert sum(layers[layer].read_nbytes for layer in range(8) if owners[layer] == owners[2]) == 100


@pytest.mark.parametrize(
    ("capacities", "keeps", "expected"),
    [
        ([RankCapacity(1000)] * 2, "most", "00111111"),  # one run for each rank
        ([RankCapacity(1000)] * 3, "most", "01222222"),
        ([RankCapacity(1000, memory=9e9), RankCapacity(1000, memory=1e9)], "most", "01000000"),
        ([RankCapacity(50)] * 2, "all", "00101011"),  # the memory of a rank is too small for all that lend
        ([RankCapacity(50)] * 2, "most", "00101011"),  # so that nothing streams
        (
            [RankCapacity(1000, layers=(0, 1, 2, 4, 6, 7)), RankCapacity(1000, layers=(1, 3, 5))],
            "most",
            "01010100",  # files do not allow it
        ),
    ],
)
def test_neighbouring_layers_that_lend_are_on_one_rank_if_it_has_room(
    capacities: Sequence[RankCapacity], keeps: Keeps, expected: str
) -> None:
    assert "".join(map(str, by_capacity(LENT, capacities, keeps=keeps, is_contiguous=True))) == expected


@pytest.mark.parametrize(
    ("split", "is_contiguous", "expected"),
    [
        ([1, 3], True, "00111111"),
        ([1, 1], True, [4, 4]),
        ([1, 1], False, [4, 4]),
        ([1, 1, 2], False, [2, 2, 4]),
        ([7, 1], True, [7, 1]),
    ],
)
def test_a_split_is_kept_although_layers_use_one_cache(
    split: Sequence[float], is_contiguous: bool, expected: str | list[int]
) -> None:
    owners = by_split(LENT, split, is_contiguous=is_contiguous)
    assert expected in ("".join(map(str, owners)), counts_of(owners))
    assert all(owners[layer] == owners[lender] for layer, lender in enumerate(LENT))


@pytest.mark.parametrize(("group_size", "expected"), [(4, [20, 22]), (6, [18, 24])])
def test_a_split_is_kept_within_a_group_of_layers(group_size: int, expected: list[int]) -> None:
    """Gemma 4 E4B's layers: the last 18 use the keys and values of layers 22 and 23."""
    lent = [*range(24), *(23 if layer % 6 == 5 else 22 for layer in range(24, 42))]
    assert counts_of(by_split(lent, [1, 1], group_size)) == expected


def test_a_split_is_kept_although_another_partition_has_the_same_largest_load() -> None:
    assert counts_of(by_split((0, 1, 2, 3, 3, 1, 3), [2, 4, 3])) == [2, 3, 2]


def test_a_split_that_lent_caches_do_not_allow_is_refused_with_the_nearest() -> None:
    one_cache = (0, 1, 2, 2, 2, 2, 2, 2)
    with pytest.raises(ConfigError, match="because layers stay with those whose keys and values they use; the nearest"):
        by_split(one_cache, [1, 1])
    with pytest.raises(ConfigError, match=r"parallel\.split=\[2,6\]$"):
        by_split(one_cache, [1, 1], is_contiguous=True)


def test_the_others_keep_their_proportions() -> None:
    lent = [*range(20), *[12] * 8]
    assert counts_of(by_split(lent, [1, 7, 4, 16], is_contiguous=True)) == [1, 7, 4, 16]


def test_an_expert_cache_is_all_that_experts_have_of_the_memory() -> None:
    layer = Requirement(held_nbytes=110, read_nbytes=30, expert_nbytes=100, expert_read_nbytes=20)
    roomy = RankCapacity(room_nbytes=1000, expert_cache_nbytes=50)
    assert RankCapacity(room_nbytes=1000).without_room(layer, "most") == (0, 0)
    assert roomy.without_room(layer, "most") == (0, 10)  # half of the experts are missed
    assert RankCapacity(1000, expert_cache_nbytes=100).without_room(layer, "most") == (0, 0)
    assert RankCapacity(40, expert_cache_nbytes=50).without_room(layer, "nothing") == (10, 20)
    capacities = [RankCapacity(10000, disk=1e9, expert_cache_nbytes=cache) for cache in (0, 300)]
    assert fair_counts(12, [RankCapacity(10000, disk=1e9)] * 2, layer, NO_ENDS) == [6, 6]
    assert fair_counts(12, capacities, layer, NO_ENDS) == [5, 7]
