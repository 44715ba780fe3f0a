"""Penalties of what a sequence repeats, in plain Python: the truth that engines and kernels are compared with."""

from collections.abc import Collection, Sequence


def dry_penalties(
    ids: Sequence[int], breakers: Collection[int], multiplier: float, base: float, allowed: int, last: int
) -> dict[int, float]:
    """Return what each token's logit loses by DRY, from p-e-w's definition; without those that lose nothing.

    Args:
        last: number of tokens that are looked at; -1 for all.
    """
    seen = list(ids) if last < 0 else list(ids[-last:])
    found: dict[int, float] = {}
    for token in set(seen).difference(breakers):
        longest = 0
        for at in (place for place, one in enumerate(seen) if one == token):
            length = 0
            while length < at and seen[at - 1 - length] == seen[-1 - length] not in breakers:
                length += 1
            longest = max(longest, length)
        if multiplier and longest >= allowed:
            found[token] = multiplier * base ** (longest - allowed)
    return found
