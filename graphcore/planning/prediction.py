"""A prediction of decode speed from two rates: of the link that weights move over, and of the device's memory.

copy     = bytes that move for a token / link  +  bytes read and written to expand them in slots / memory
compute  = bytes of weights that a token reads from the device's memory / memory
seconds  = max(copy, compute + copy x busy)    if groups are read ahead: two slots or more, async
           copy + compute                      otherwise, and always for fetched experts
           + offloaded keys and values / rate of their files, at the end of the context

On a CPU the same processors copy and compute. Copying from the page cache keeps most of them busy, reading a disk
directly hardly any: `busy` is that share of their time.

Several sequences share a step: its groups move once, and its weights are read once. Their experts differ: for n
sequences a layer needs X (1 - (1 - k / X)^n) of its X experts, if each token is routed to k of them independently.
"""

import math
from dataclasses import dataclass
from decimal import Decimal

from graphcore.kernels.cpu.instructions import MOST_ROWS
from graphcore.weights.plan import Plan, expected_bytes_per_token

# Share of one sequence's compute that each further sequence of a native program adds on the CPU: with 16 sequences 0.25
# to 0.40 of it were measured (docs/lab/batching.md, "Several sequences in one native step"). Each program reads all
# weights. A GPU's steps are taken as bound by its memory.
CPU_ROW_SHARE = 0.35


@dataclass(frozen=True)
class Rates:
    """The rates that a prediction is made from, in bytes per second.

    Attributes:
        link: rate at which streamed weights arrive on the device.
        memory: rate at which products read the device's memory.
        link_busy: share of the time of all processors that compute which moving weights at the link's rate takes; 0
            where a device copies by itself.
        offload: rate at which attention reads offloaded keys and values; none of them needs time where it is infinite.
    """

    link: float
    memory: float
    link_busy: float = 0.0
    offload: float = math.inf


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one decode step.

    Attributes:
        sequences: number of sequences that the step serves.
        copy_seconds: time to copy the groups and to expand them in their slots, which may overlap with compute.
        fetch_seconds: time to move experts, at the expected hit rate; it cannot overlap, because the router chooses
            them too late.
        compute_seconds: time of all products.
        busy_seconds: time that copying the groups takes from the processors that compute.
        is_overlapped: True if the next group is read while one computes.
        kv_seconds: time to read offloaded keys and values from their files at the end of the context, if the system's
            page cache holds none of them; it cannot overlap, because attention itself reads them.
    """

    sequences: int
    copy_seconds: float
    fetch_seconds: float
    compute_seconds: float
    busy_seconds: float
    is_overlapped: bool
    kv_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        if not self.is_overlapped:
            return self.fetch_seconds + self.kv_seconds + self.copy_seconds + self.compute_seconds
        return self.fetch_seconds + self.kv_seconds + max(self.copy_seconds, self.compute_seconds + self.busy_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of all sequences together."""
        return self.sequences / self.seconds


def predict(plan: Plan, rates: Rates, sequences: int = 1, seconds_ahead: float = 0.0) -> Prediction:
    """Predict the times of a decode step of some sequences under a plan, at the given rates.

    Args:
        sequences: sequences, or tokens of one sequence, that the step serves.
        seconds_ahead: time in which groups were copied before the step began, while something else was computed.
    """
    mapped = plan.experts.routed_nbytes if plan.experts is not None and plan.experts.reads_in_place else 0
    fetched = expected_bytes_per_token(plan) - plan.groups.streamed_nbytes
    programs, share = (-(-sequences // MOST_ROWS), CPU_ROW_SHARE) if plan.device == "cpu" else (1, 0.0)
    rows = programs + (sequences - programs) * share
    moved_seconds = plan.groups.streamed_nbytes / rates.link + plan.groups.expanded_nbytes / rates.memory
    copy_seconds = max(0.0, moved_seconds - seconds_ahead)
    return Prediction(
        sequences,
        copy_seconds,
        fetch_seconds=fetched * distinct_share(plan, sequences) / rates.link,
        compute_seconds=(plan.read_nbytes - mapped) / rates.memory * rows,
        busy_seconds=copy_seconds * rates.link_busy,
        is_overlapped=plan.groups.num_slots > 1 and plan.mode == "async",
        kv_seconds=0.0 if plan.offloaded_kv is None else plan.offloaded_kv.read_by(sequences) / rates.offload,
    )


def distinct_share(plan: Plan, sequences: int) -> float:
    """Return the expected number of distinct experts of a token of each sequence, relative to that of one token."""
    if plan.experts is None:
        return 1.0
    experts, routed = plan.experts.num_experts, plan.experts.num_routed
    return experts * (1 - (1 - routed / experts) ** sequences) / routed


def speed_in_words(tokens_per_second: float) -> str:
    """Return a predicted speed with three significant digits and no exponent: "0.498", "31.5", "3,440"."""
    return f"{Decimal(f'{tokens_per_second:.3g}'):,f}"
