"""Slots that give way by age, for tests of graphcore's own: written once more, in Python's own words."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class OldestFirst:
    """Slots of one layer.

    Attributes:
        held: expert in each slot that is taken.
        asked: number of the last call for an expert.
        hits, loads, without: experts that were there, that were put into a slot, and that found none.
    """

    num_slots: int
    held: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    hits: int = 0
    loads: int = 0
    without: int = 0

    def ask(self, experts: Iterable[int]) -> None:
        """Ask for experts, -1 for none, as one call."""
        self.calls += 1
        wanted = sorted(set(experts) - {-1})
        new = [expert for expert in wanted if expert not in self.held.values()]
        self.hits += len(wanted) - len(new)
        for expert in new:
            empty = [slot for slot in range(self.num_slots) if slot not in self.held]
            idle = [slot for slot, holder in sorted(self.held.items()) if holder not in wanted]
            if not empty and not idle:
                self.without += 1
                continue
            slot = empty[0] if empty else min(idle, key=lambda one: self.asked[self.held[one]])
            self.held[slot] = expert
            self.loads += 1
        self.asked.update(dict.fromkeys(wanted, self.calls))

    @property
    def places(self) -> dict[int, int]:
        """The slots of the experts that have one."""
        return {expert: slot for slot, expert in self.held.items()}
