"""A prediction of decode speed from two rates: of the link that weights move over, and of the device's memory.

copy     = bytes that move for a token / link
compute  = bytes of weights that a token reads from the device's memory / memory
seconds  = max(copy, compute)    if groups are read ahead: two slots or more, async
           copy + compute        otherwise, and always for fetched experts
"""

from dataclasses import dataclass

from graphcore.weights.planning.plan import Plan, expected_bytes_per_token


@dataclass(frozen=True)
class Rates:
    """The rates that a prediction is made from, in bytes per second.

    Attributes:
        link: rate at which streamed weights arrive on the device.
        memory: rate at which products read the device's memory.
    """

    link: float
    memory: float


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one decode step of one sequence.

    Attributes:
        copy_seconds: time to copy the groups, which may overlap with compute.
        fetch_seconds: time to move experts, at the expected hit rate; it cannot overlap, because the router chooses
            them too late.
        compute_seconds: time of all products.
        is_overlapped: True if the next group is read while one computes.
    """

    copy_seconds: float
    fetch_seconds: float
    compute_seconds: float
    is_overlapped: bool

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        both = (self.copy_seconds, self.compute_seconds)
        return self.fetch_seconds + (max(both) if self.is_overlapped else sum(both))

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of one sequence."""
        return 1.0 / self.seconds


def predict(plan: Plan, rates: Rates) -> Prediction:
    """Predict the times of a decode step under a plan, at the given rates."""
    mapped = plan.experts.routed_nbytes if plan.experts is not None and plan.experts.are_mapped else 0
    return Prediction(
        copy_seconds=plan.groups.streamed_nbytes / rates.link,
        fetch_seconds=(expected_bytes_per_token(plan) - plan.groups.streamed_nbytes) / rates.link,
        compute_seconds=(plan.read_nbytes - mapped) / rates.memory,
        is_overlapped=plan.groups.num_slots > 1 and plan.mode == "async",
    )
