"""Inputs of the op gated_convolution, and what it should answer: token by token in float64.

Legend: B batch, T tokens, C channels, W width of the convolution.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphcore.kernels.ops.gated_convolution import ConvParts, gated_convolution

SHAPES = {
    "lfm2": (256, 3, False),
    "biased": (72, 4, True),
    "odd": (5, 2, True),
    "wide": (130, 8, False),
    "one": (8, 1, True),
}


@dataclass(frozen=True)
class ConvCase:
    """Arguments of `gated_convolution`, in its order."""

    mixed: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    convolution: Tensor
    starts: Tensor
    counts: Tensor

    def parts(self, library: str = "") -> ConvParts:
        return ConvParts(*vars(self).values(), library)

    def run(self, library: str = "") -> Tensor:
        """Run the op; the state changes in place."""
        return gated_convolution(*self.parts(library))

    def copied(self) -> "ConvCase":
        """Return the case with a state of its own."""
        return replace(self, convolution=self.convolution.clone())


def convolution_case(
    name: str, starts: list[int], counts: list[int], dtype: torch.dtype = torch.float32, tokens: int | None = None
) -> ConvCase:
    """Return a case of random tensors; padding holds NaN, and so do states of new sequences."""
    channels, width, has_bias = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    batch, tokens = len(starts), tokens or max(counts)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    case = ConvCase(
        randn(batch, tokens, 3 * channels).to(dtype),
        randn(channels, width),
        randn(channels) if has_bias else None,
        randn(batch, channels, width - 1),
        torch.tensor(starts),
        torch.tensor(counts),
    )
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        case.mixed[row, count:] = torch.nan
        if start == 0:
            case.convolution[row] = torch.nan
    return case


def assert_true(case: ConvCase, out: Tensor, before: ConvCase, atol: float, rtol: float = 0.0) -> None:
    """Compare answers and state of `case`, which the op has changed, with float64 on `before`."""
    channels = case.conv_weight.shape[0]
    for row, count in enumerate(before.counts.tolist()):
        window = before.convolution[row].double()
        if before.starts[row] == 0:
            window = torch.zeros_like(window)
        answers = torch.empty(count, channels, dtype=torch.float64)
        for t in range(count):
            b, c, x = before.mixed[row, t].double().split(channels)
            window = torch.cat((window, (b * x)[:, None]), dim=1)  # [C, W]
            answers[t] = (window * before.conv_weight.double()).sum(1)
            if before.conv_bias is not None:
                answers[t] += before.conv_bias.double()
            answers[t] *= c
            window = window[:, 1:]
        torch.testing.assert_close(out[row, :count].double().cpu(), answers, atol=atol, rtol=rtol)
        if count:
            torch.testing.assert_close(case.convolution[row].double().cpu(), window, atol=1e-5, rtol=1e-5)
