"""Inputs of the op delta_heads, and what it should answer: Gated DeltaNet token by token in float64, written out again.

Legend: B batch, T tokens, C channels, W width of the convolution, G key heads, H value heads, N key dim, M value dim.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphcore.kernels.ops.gated_delta import DeltaParts, delta_heads


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a case."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    tiled: bool = False
    has_bias: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


QWEN = DeltaShape(2, 4, 128, 128)
SMALL = DeltaShape(2, 6, 16, 32)
SHAPES = {
    "qwen": QWEN,
    "tiled": DeltaShape(2, 6, 32, 32, tiled=True),
    "odd": DeltaShape(3, 3, 24, 40, width=3, has_bias=True),
    "tiny": DeltaShape(1, 2, 8, 8, width=2),
    "wide": DeltaShape(1, 1, 160, 24),
}


@dataclass(frozen=True)
class DeltaCase:
    """Arguments of `delta_heads`, in its order."""

    shape: DeltaShape
    mixed: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    rate: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    convolution: Tensor
    recurrent: Tensor
    starts: Tensor
    counts: Tensor
    eps: float = 1e-6

    def parts(self, library: str = "") -> DeltaParts:
        tensors = (getattr(self, name) for name in DeltaParts._fields[:13])
        return DeltaParts(*tensors, self.shape.key_heads, self.eps, self.shape.tiled, library)

    def run(self, library: str = "") -> Tensor:
        """Run the op; both states change in place."""
        return delta_heads(*self.parts(library))

    def to(self, device: str) -> "DeltaCase":
        """Return the case on a device."""
        tensors = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **tensors)

    def copied(self) -> "DeltaCase":
        """Return the case with states of its own."""
        return replace(self, convolution=self.convolution.clone(), recurrent=self.recurrent.clone())


def delta_case(
    shape: DeltaShape,
    starts: list[int],
    counts: list[int],
    dtype: torch.dtype = torch.float32,
    tokens: int | None = None,
    seed: int = 0,
) -> DeltaCase:
    """Return a case of random tensors as a model has them; padding holds NaN, and so do states of new sequences."""
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, heads = len(starts), tokens or max(counts), shape.heads

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    case = DeltaCase(
        shape,
        randn(batch, tokens, shape.channels).to(dtype),
        randn(batch, tokens, heads * shape.value_dim).to(dtype),
        randn(batch, tokens, heads).to(dtype),
        randn(batch, tokens, heads).to(dtype),
        randn(shape.channels, shape.width),
        randn(shape.channels) if shape.has_bias else None,
        -torch.logspace(-2, 0.5, heads),
        randn(heads),
        1 + 0.3 * randn(shape.value_dim),
        randn(batch, shape.channels, shape.width - 1).to(dtype),
        randn(batch, heads, shape.key_dim, shape.value_dim),
        torch.tensor(starts),
        torch.tensor(counts),
    )
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for part in (case.mixed, case.z, case.a, case.b):
            part[row, count:] = torch.nan
        if start == 0:
            case.convolution[row], case.recurrent[row] = torch.nan, torch.nan
    return case


def expected_of(case: DeltaCase) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return each sequence's answers [count, H M], convolution [C, W-1] and state [H, N, M], in float64."""
    results = [_sequence(case, row) for row in range(len(case.starts))]
    return [one[0] for one in results], [one[1] for one in results], [one[2] for one in results]


def _sequence(case: DeltaCase, row: int) -> tuple[Tensor, Tensor, Tensor]:
    shape, is_new = case.shape, case.starts[row] == 0
    window, state = case.convolution[row].double(), case.recurrent[row].double()
    if is_new:
        window, state = torch.zeros_like(window), torch.zeros_like(state)
    answers = torch.zeros(int(case.counts[row]), shape.heads * shape.value_dim, dtype=torch.float64)
    for t in range(len(answers)):
        window = torch.cat((window, case.mixed[row, t].double()[:, None]), dim=1)  # [C, W]
        inputs = (window * case.conv_weight.double()).sum(1)
        if case.conv_bias is not None:
            inputs = inputs + case.conv_bias.double()
        inputs, window = inputs * inputs.sigmoid(), window[:, 1:]
        for head in range(shape.heads):
            answers[t, head * shape.value_dim :][: shape.value_dim] = _head(case, row, t, head, inputs, state[head])
    return answers, window, state


def _head(case: DeltaCase, row: int, t: int, head: int, inputs: Tensor, state: Tensor) -> Tensor:
    """Return one head's answer [M]; its state [N, M] changes in place."""
    shape = case.shape
    key_head = head % shape.key_heads if shape.tiled else head // (shape.heads // shape.key_heads)
    keys = shape.key_heads * shape.key_dim
    q = inputs[key_head * shape.key_dim :][: shape.key_dim]
    k = inputs[keys + key_head * shape.key_dim :][: shape.key_dim]
    v = inputs[2 * keys + head * shape.value_dim :][: shape.value_dim]
    q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
    step = torch.log1p((case.a[row, t, head].double() + case.dt_bias[head].double()).exp())
    state *= (case.rate[head].double() * step).exp()
    state += torch.outer(k, case.b[row, t, head].double().sigmoid() * (v - k @ state))
    out = q / shape.key_dim**0.5 @ state
    z = case.z[row, t, head * shape.value_dim :][: shape.value_dim].double()
    return out / (out.square().mean() + case.eps).sqrt() * case.norm_weight.double() * z * z.sigmoid()


def assert_true(case: DeltaCase, out: Tensor, before: DeltaCase, atol: float, rtol: float = 0.0) -> None:
    """Compare answers and both states of `case`, which the op has changed, with float64 on `before`."""
    answers, windows, states = expected_of(before)
    for row, count in enumerate(before.counts.tolist()):
        torch.testing.assert_close(out[row, :count].double().cpu(), answers[row], atol=atol, rtol=rtol)
        if count:
            assert torch.equal(case.convolution[row].double().cpu(), windows[row]), "inputs are kept as they are"
            torch.testing.assert_close(case.recurrent[row].double().cpu(), states[row], atol=atol, rtol=rtol)
