"""Timelines as a ring of slots makes them, without any clock: made for tests of reports and pictures."""

from graphcore.streaming.timeline import Event


def ring_events(
    num_passes: int,
    num_groups: int,
    streamed: frozenset[int],
    copy_seconds: float = 0.030,
    compute_seconds: float = 0.012,
    num_workers: int = 3,
    jobs: int = 6,
    nbytes: int = 60_000_000,
) -> list[Event]:
    """Return the events of passes over groups of which some are streamed through two slots, one read ahead.

    Args:
        copy_seconds: of a whole group, over all workers; it is read in `jobs` equal jobs.
        nbytes: of a group.
    """
    order = [group for _ in range(num_passes) for group in range(num_groups)]
    uses = [position for position, group in enumerate(order) if group in streamed]
    events: list[Event] = []
    ready: dict[int, float] = {}  # by position
    freed: list[float] = []
    link, now, at = 100.0, 100.0, 0

    def copy(use: int) -> None:
        nonlocal link
        begin = max(link, freed[use - 2] if use >= 2 else 0.0)
        each = copy_seconds / jobs
        for job in range(jobs):
            start = begin + job * each  # a job lasts as long as there are workers, so the link is shared
            end = min(start + each * num_workers, begin + copy_seconds)
            events.append(Event("copy", order[uses[use]], start, end, nbytes // jobs, job % num_workers))
        link = begin + copy_seconds
        ready[uses[use]] = link

    copy(0)
    for position, group in enumerate(order):
        if group in streamed and ready[position] > now:
            events.append(Event("stall", group, now, ready[position]))
            now = ready[position]
        if group in streamed and at + 1 < len(uses):
            copy(at + 1)
        events.append(Event("compute", group, now, now + compute_seconds))
        now += compute_seconds
        if group in streamed:
            freed.append(now)
            at += 1
    return events
