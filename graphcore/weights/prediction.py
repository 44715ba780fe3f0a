"""How fast a plan will decode, from two rates: the link that weights come over, and the memory that products read.

copy     = bytes that move for a token / link
compute  = bytes of weights that a token reads, but for experts that it reads over the link / memory
seconds  = max(copy, compute)    where groups are read ahead: two slots or more, async
           copy + compute        where they are not; fetched experts never are
"""

from dataclasses import dataclass

from graphcore.weights.plan import Plan


@dataclass(frozen=True)
class Rates:
    """Bytes per second, of this machine.

    Attributes:
        link: from where streamed weights wait to the device.
        memory: from the device's memory to what multiplies.
    """

    link: float
    memory: float


@dataclass(frozen=True)
class Prediction:
    """One decode step of one sequence.

    Attributes:
        copy_seconds: of groups, which may be hidden behind compute.
        fetch_seconds: of experts, which are known too late for that; all are routed equally often.
        compute_seconds: of all products.
        is_overlapped: whether the next group is read while one computes.
    """

    copy_seconds: float
    fetch_seconds: float
    compute_seconds: float
    is_overlapped: bool

    @property
    def seconds(self) -> float:
        """Of the step."""
        both = (self.copy_seconds, self.compute_seconds)
        return self.fetch_seconds + (max(both) if self.is_overlapped else sum(both))

    @property
    def tokens_per_second(self) -> float:
        """Of one sequence."""
        return 1.0 / self.seconds


def predict(plan: Plan, rates: Rates) -> Prediction:
    """Return what the plan's decode step takes at these rates."""
    mapped = plan.experts.routed_nbytes if plan.experts is not None and plan.experts.are_mapped else 0
    return Prediction(
        copy_seconds=plan.streamed_nbytes / rates.link,
        fetch_seconds=(plan.expected_bytes_per_token - plan.streamed_nbytes) / rates.link,
        compute_seconds=(plan.read_nbytes - mapped) / rates.memory,
        is_overlapped=plan.num_slots > 1 and plan.mode == "async",
    )
