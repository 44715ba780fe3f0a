"""A watched policy reports each group before it waits for it."""

from graphcore.streaming.policy import Resident, watched


class Recording:
    """A policy that writes down what it is asked."""

    def __init__(self, calls: list[object]) -> None:
        self.calls = calls

    def acquire(self, group: int) -> None:
        self.calls.append(("acquire", group))

    def release(self, group: int) -> None:
        self.calls.append(("release", group))


def test_a_group_is_reported_before_it_is_acquired() -> None:
    calls: list[object] = []
    policy = watched(Recording(calls), lambda *report: calls.append(report), "generate", 3, 128)
    for group in (0, 1):
        policy.acquire(group)
        policy.release(group)
    assert calls == [
        ("generate", 0, 3, 128),
        ("acquire", 0),
        ("release", 0),
        ("generate", 1, 3, 128),
        ("acquire", 1),
        ("release", 1),
    ]


def test_resident_weights_are_not_watched() -> None:
    policy = Resident()
    assert watched(policy, lambda *report: None, "generate", 0, 1) is policy
