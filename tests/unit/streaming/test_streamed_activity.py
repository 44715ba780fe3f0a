"""What a policy says of its slots while groups are read, wait and compute."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphcore.streaming.policy import Activity, Resident, Ring, SlotUse, watched
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline


@dataclass(eq=False)
class Filling:
    group: int
    is_full: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_full


@dataclass
class ByHand:
    """A filler whose fillings are full when a test says so, or when they are waited for."""

    begun: list[Filling] = field(default_factory=list)

    def begin(self, group: int, _work: None, _after: Filling | None) -> Filling:
        self.begun.append(Filling(group))
        return self.begun[-1]

    def wait(self, filling: Filling) -> None:
        filling.is_full = True

    def release(self, _filling: Filling) -> None: ...

    def cancel(self, _fillings: Sequence[Filling]) -> None: ...


def test_slots_are_free_read_ready_and_computed_with() -> None:
    filler = ByHand()
    policy: Streamed[None, Filling] = Streamed(Ring(dict.fromkeys([1, 3, 4]), 2, True, filler, Timeline()))
    assert policy.activity() == Activity([SlotUse(None, "free")] * 2, None)
    policy.acquire(1)  # reads 3 and 4 ahead; 4 has the slot of 1, and waits for it
    assert policy.activity() == Activity([SlotUse(1, "computing"), SlotUse(3, "reading")], 1)
    filler.begun[1].is_full = True
    assert policy.activity() == Activity([SlotUse(1, "computing"), SlotUse(3, "ready")], 1)
    policy.release(1)
    assert policy.activity() == Activity([SlotUse(4, "reading"), SlotUse(3, "ready")], None)
    policy.acquire(2)  # resident
    assert policy.activity().computing == 2
    policy.release(2)
    policy.acquire(3)
    assert policy.activity().slots[1] == SlotUse(3, "computing")
    assert watched(policy, lambda *_: None, "generate", 0, 1).activity() == policy.activity()
    policy.reset()
    assert policy.activity().slots == [SlotUse(None, "free")] * 2


def test_nothing_moves_where_all_is_resident() -> None:
    assert Resident().activity() == Activity((), None)
