"""From the losses of a text's tokens to its perplexity with a confidence interval.

    m = sum of losses / tokens          perplexity = exp(m)          bits per token = m / ln 2

The interval takes each window as one draw, because tokens of one passage are not independent: with L_i the sum of the
losses of window i, n_i its tokens, N all tokens and k windows, the standard error of the ratio m is

    se = sqrt(k / (k - 1) * sum((L_i - m * n_i) ** 2)) / N

(Cochran, Sampling Techniques, 3rd ed., section 2.11; for windows of one size the familiar std / sqrt(k)), and 95 % of a
normal distribution lie within 1.96 of them. The interval is about other texts of this kind, not about the precision of
the arithmetic: two runs over one text differ far less than their intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL = 0.95
DEVIATIONS = 1.959963984540054  # standard errors on either side that hold 95 % of a normal distribution


@dataclass(frozen=True)
class Likelihood:
    """The mean loss of a text, with its standard error.

    Attributes:
        nll_mean: mean negative log likelihood, in nats per token.
        standard_error: standard error of nll_mean, in nats; None for one window.
        tokens: number of scored tokens.
    """

    nll_mean: float
    standard_error: float | None
    tokens: int

    @classmethod
    def of(cls, losses: Sequence[Tensor]) -> "Likelihood":
        """Return the likelihood of a text from each window's losses, [tokens of the window] float64 in nats."""
        sums = torch.stack([window.sum() for window in losses])
        sizes = torch.tensor([len(window) for window in losses], dtype=torch.float64, device="cpu")
        tokens, mean, count = sizes.sum(), sums.sum() / sizes.sum(), len(losses)
        if count < 2:
            return cls(mean.item(), None, int(tokens))
        squares = (sums - mean * sizes).square().sum()
        return cls(mean.item(), ((count / (count - 1) * squares).sqrt() / tokens).item(), int(tokens))

    @property
    def perplexity(self) -> float:
        """The perplexity, e to the power of nll_mean; infinite where that exceeds a float."""
        return exponential(self.nll_mean)

    @property
    def bits_per_token(self) -> float:
        """The mean loss in bits per token."""
        return self.nll_mean / math.log(2)

    @property
    def nll_interval(self) -> tuple[float, float] | None:
        """Both ends of the 95 % confidence interval of nll_mean; None for one window."""
        if self.standard_error is None:
            return None
        reach = DEVIATIONS * self.standard_error
        return self.nll_mean - reach, self.nll_mean + reach


def exponential(value: float) -> float:
    """Return e to the power of value, infinite where that exceeds a float."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").exp().item()
