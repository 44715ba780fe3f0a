"""The handshake: before any weight is read, ranks compare what the bits of their results depend on.

versions, settings     are compared first: how often ranks exchange something while they load depends on them
files, kernels, plan   are compared when all ranks have planned; a file on the ranks that have it
processor              may differ; a note says that results then are no single machine's

If anything but the processor differs all ranks refuse, each saying which rank differs and in what.
"""

from collections.abc import Mapping, Sequence

from graphcore.errors import ParallelError

Facts = Mapping[str, str]
"""What a rank has: a value by the name of each fact."""

PROCESSOR = "processor"
DEVICE = "device"
FILE = "file "  # begins the name of a fact about a file, which ranks without the layers in it may lack
ADAPTERS = "adapters"
GRAPH = "graphs"
KERNELS = "kernels"  # their build, which differs between instruction sets
ADVICE = {
    "graphcore": "install the same version on all machines",
    "torch": "install the same version on all machines",
    "files": "copy the same model to all machines",
    ADAPTERS: "give all ranks the same adapters, in one order and with the same weights",
    KERNELS: "install graphcore from the same wheel on all machines",
    DEVICE: "set device=cpu, or device=cuda, on all ranks",
    GRAPH: "install a C++ compiler, or the wheel with kernels, where there are none",
    "context_length": "set context_length, which is halved where memory is little",
}
OTHERWISE = "start all ranks with the same settings"


def compare_ranks(facts: Sequence[Facts]) -> tuple[str, ...]:
    """Return notes about what differs between ranks and may.

    Args:
        facts: facts of each rank, in order.

    Raises:
        ParallelError: something differs that may not; the message says which rank, in what, and what to do.
    """
    _compare_files(facts)
    first = facts[0]
    for rank, other in enumerate(facts):
        for name in [name for name in {**first, **other} if not name.startswith(FILE)]:
            here, there = first.get(name, "nothing"), other.get(name, "nothing")
            is_other_build = name == KERNELS and first.get(PROCESSOR) != other.get(PROCESSOR)
            if name != PROCESSOR and not is_other_build and here != there:
                raise ParallelError(
                    f"rank {rank} has other {name} than rank 0: {there}, not {here}; {ADVICE.get(name, OTHERWISE)}"
                )
    kinds: dict[str, list[str]] = {}
    for rank, one in enumerate(facts):
        kinds.setdefault(one.get(PROCESSOR, ""), []).append(str(rank))
    if len(kinds) == 1:
        return ()
    each = ", ".join(
        f"{kind} on {'rank' if len(ranks) == 1 else 'ranks'} {' and '.join(ranks)}" for kind, ranks in kinds.items()
    )
    return (
        f"ranks have different processors ({each}): results have other last bits than on one machine, and change "
        "if ranks change places",
    )


def _compare_files(facts: Sequence[Facts]) -> None:
    holders: dict[str, int] = {}
    for rank, other in enumerate(facts):
        for name in [name for name in other if name.startswith(FILE)]:
            holder = holders.setdefault(name, rank)
            if other[name] != facts[holder][name]:
                raise ParallelError(
                    f"rank {rank} has other files than rank {holder}: {name.removeprefix(FILE)} differs; copy the same "
                    "model to all machines"
                )


def refuse_any(errors: Sequence[str | None], rank: int) -> None:
    """Check that no other rank has an error.

    Args:
        errors: error of each rank; None where there is none.
        rank: number of this rank, which raises its own error itself.

    Raises:
        ParallelError: another rank has one.
    """
    for other, error in enumerate(errors):
        if error is not None and other != rank:
            raise ParallelError(f"rank {other} cannot run its share: {error}")
