"""Sampling parameters: how the next token is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

COLDEST = 1e-5  # temperatures below are greedy, as in vLLM
HOTTEST = 1e30  # all kept tokens are equally likely long before; products with it stay finite
MOST_KEPT = 1 << 30  # more than any vocabulary has, so that it keeps all


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; the defaults are greedy, without cuts and without penalty.

    Attributes:
        temperature: float, divisor of the logits; 0 is greedy.
        top_k: int, number of the likeliest tokens that are kept; 0 and -1 are off.
        top_p: float, total probability of the likeliest tokens that are kept; 1 is off, 0 is greedy.
        min_p: float, least probability of a token that is kept, as a share of the likeliest token's; 0 is off, 1 is
            greedy.
        repetition_penalty: float, divisor of positive logits, and factor of negative ones, of tokens that were seen;
            1 is off.
        seed: int, seed of the random draws, of which the lower 64 bits count; prompt number i of a call draws with
            seed + i.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken: no other is kept, and there is no repetition penalty."""
        return self.keeps_one and self.repetition_penalty == 1.0

    @property
    def keeps_one(self) -> bool:
        """Whether a setting is at the limit where only the likeliest token is left, after the penalty."""
        return self.temperature < COLDEST or self.top_p == 0.0 or self.min_p == 1.0

    @property
    def numbers(self) -> tuple[float, int, float, float, float]:
        """The settings in the order in which kernels take them, without the seed; limits in kernels' own terms."""
        if self.keeps_one:
            return 0.0, 0, 1.0, 0.0, self.repetition_penalty
        temperature, top_k = min(self.temperature, HOTTEST), min(max(self.top_k, 0), MOST_KEPT)
        return temperature, top_k, self.top_p, self.min_p, self.repetition_penalty


def sampling_phase(params: Sequence[SamplingParams]) -> str:
    """Return the phase of the decode program that samples with rows' parameters; "narrow" if any cut tokens."""
    if all(each.is_greedy for each in params):
        return "decode"
    numbers = [each.numbers for each in params]
    return "narrow" if any(top_k > 0 or top_p < 1.0 for _, top_k, top_p, *_ in numbers) else "sample"
