"""Groups that passes leave out are not read ahead: the ring goes past them, and comes back when they are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from graphcore.streaming.policy import Ring
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline


@dataclass(eq=False)
class Filled:
    group: int
    is_done: bool = True


@dataclass
class AtOnce:
    """A filler that has every group there at once and remembers which were asked for."""

    begun: list[int] = field(default_factory=list)

    def begin(self, group: int, _work: None, _after: Filled | None) -> Filled:
        self.begun.append(group)
        return Filled(group)

    def wait(self, _filling: Filled) -> None: ...

    def release(self, _filling: Filled) -> None: ...

    def cancel(self, _fillings: Sequence[Filled]) -> None: ...


def run_pass(ring: "Streamed[None, Filled]", groups: Sequence[int]) -> None:
    for group in groups:
        ring.acquire(group)
        ring.release(group)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_group_that_is_left_out_is_never_fetched_and_no_other_twice(slots: int) -> None:
    filler = AtOnce()
    ring: Streamed[None, Filled] = Streamed(Ring(dict.fromkeys([1, 2, 3, 4, 5]), slots, True, filler, Timeline()))
    ring.skip([4, 5])
    for _ in range(3):
        run_pass(ring, [1, 2, 3])
    assert filler.begun[:9] == [1, 2, 3] * 3
    assert not {4, 5} & set(filler.begun)
    ring.skip([])
    run_pass(ring, [1, 2, 3, 4, 5])
    assert [filler.begun.count(group) for group in (4, 5)] == [1, 1]


def test_all_left_out_but_one_comes_round_to_itself() -> None:
    filler = AtOnce()
    ring: Streamed[None, Filled] = Streamed(Ring(dict.fromkeys([1, 2]), 1, True, filler, Timeline()))
    ring.skip([2])
    run_pass(ring, [1])
    assert filler.begun == [1, 1]
