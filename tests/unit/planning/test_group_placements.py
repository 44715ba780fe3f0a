"""Streamed groups lie evenly among those that stay, and every number is one that the hot loop knows."""

from hypothesis import given
from hypothesis import strategies as st

from graphcore.planning.placements import GroupPlacement, evenly_spaced, group_placements
from graphcore.planning.sizes import WeightSizes

SIZES = WeightSizes(
    embedding=1000, head=900, head_slices=(400, 400, 100), is_tied=False, groups=(300, 310, 320, 70), always=5
)


def unevenness(chosen: tuple[int, ...], of: int) -> int:
    """Return by how much the widest gap around the ring exceeds the narrowest."""
    gaps = [after - before for before, after in zip(chosen, (*chosen[1:], chosen[0] + of), strict=True)]
    return max(gaps) - min(gaps)


@given(st.integers(1, 200).flatmap(lambda of: st.tuples(st.integers(1, of), st.just(of))))
def test_gaps_between_streamed_groups_differ_by_one_at_most_around_the_ring(case: tuple[int, int]) -> None:
    count, of = case
    chosen = evenly_spaced(count, of)
    assert len(chosen) == len(set(chosen)) == count
    assert 0 <= min(chosen) <= max(chosen) < of
    assert unevenness(chosen, of) <= 1


def test_none_of_some_and_all_of_some() -> None:
    assert evenly_spaced(0, 5) == ()
    assert evenly_spaced(5, 5) == (0, 1, 2, 3, 4)
    assert evenly_spaced(4, 12) == (1, 4, 7, 10)


def test_off_streams_nothing_and_on_streams_all() -> None:
    assert [one.unit_nbytes(SIZES) for one in group_placements("all", SIZES)] == [[]]
    (on,) = group_placements("nothing", SIZES)
    assert on.unit_nbytes(SIZES) == [300, 310, 320, 70, 400, 400, 100]
    assert on.streamed_group_numbers(SIZES) == (1, 2, 3, 4, 5, 6, 7)
    assert (on.is_embedding_gathered, on.resident_nbytes(SIZES)) == (True, 0)


def test_auto_has_every_number_of_groups_with_and_without_head_and_table() -> None:
    cases = list(group_placements("most", SIZES))
    whole = [one for one in cases if not one.is_head_streamed and not one.is_embedding_gathered]
    assert len(set(cases)) == len(cases) == 4 * len(whole)
    assert {len(one.streamed_groups) for one in whole} == {0, 1, 2, 3, 4}
    assert GroupPlacement((), is_head_streamed=False, is_embedding_gathered=False) in cases
    assert GroupPlacement((0, 1, 2, 3), is_head_streamed=True, is_embedding_gathered=True) in cases


def test_a_tied_table_stays_and_streams_with_the_head() -> None:
    tied = WeightSizes(1000, 1000, (400, 400, 200), True, (300, 310), 5)
    cases = list(group_placements("most", tied))
    assert len(cases) == 3 * 2
    assert all(one.is_head_streamed == one.is_embedding_gathered for one in cases)
    whole = next(one for one in cases if not one.unit_nbytes(tied))
    assert whole.resident_nbytes(tied) == 1000 + 300 + 310


def test_resident_and_streamed_bytes_are_all_there_are() -> None:
    for one in group_placements("most", SIZES):
        table = 0 if one.is_embedding_gathered else 1000
        assert one.resident_nbytes(SIZES) - table + sum(one.unit_nbytes(SIZES)) == 300 + 310 + 320 + 70 + 900


@given(st.integers(2, 40))
def test_a_smaller_last_group_can_stay_whatever_the_number_that_streams(num_groups: int) -> None:
    sizes = WeightSizes(1000, 900, (400, 400, 100), False, (*[300] * (num_groups - 1), 70), 5)
    chosen = {one.streamed_groups for one in group_placements("most", sizes)}
    kept = [groups for groups in chosen if num_groups - 1 not in groups]
    assert {len(groups) for groups in kept} == set(range(num_groups))
    assert all(unevenness(groups, num_groups) <= 1 for groups in kept if groups)
