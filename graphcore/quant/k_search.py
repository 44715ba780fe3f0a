"""Searches for scales when packing formats in which the scales of groups of weights are codes themselves.

Legend: n elements per group, G groups. Groups are columns, so that sums over a group add whole rows: x is [n, G].

    affine     y = s * q - m    0 <= q <= top, s >= 0, m >= 0    q2_k, q4_k, q5_k
    symmetric  y = s * q        low <= q <= -low - 1             q3_k, q6_k

For a guessed step the codes follow by rounding, and for those codes the best s and m follow by least squares, in closed
form; several steps are tried, and the one with the smallest sum of squared errors is kept. The codes' sums give that
error, too, so a try costs few passes over the weights. A second stage searches around the scales as stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.quant.bit_fields import extreme, inverse, through_fp16

TINIEST = torch.finfo(torch.float32).tiny
SUMMED = 16  # weights of a group that are added one after another; see `column_sums`


@dataclass(frozen=True)
class StoredScales:
    """One of a block's two kinds of scale as stored: a float16 times a code per group.

    Attributes:
        unit: [N, 1] float32, exactly a float16's value.
        codes: [N, groups] float32, integers.
    """

    unit: Tensor
    codes: Tensor

    @property
    def values(self) -> Tensor:
        """The scales that a reader computes: [N, groups] float32."""
        return self.unit * self.codes


def round_scales(values: Tensor, low: int, top: int) -> StoredScales:
    """Return scales rounded to codes; the extreme one has the code of largest magnitude.

    Args:
        values: [N, groups].
        low: smallest code; 0 if scales are not negative.
        top: largest code.
    """
    unit = through_fp16(extreme(values) / (low or top))
    return StoredScales(unit, (values * inverse(unit)).round().clamp(low, top))


def as_columns(dense: Tensor, num_groups: int) -> Tensor:
    """Return the groups of the blocks as columns: [N, E] -> [E / num_groups, N * num_groups], contiguous."""
    return dense.reshape(dense.shape[0] * num_groups, -1).T.contiguous()


def as_rows(codes: Tensor, num_blocks: int) -> Tensor:
    """Return codes in columns as blocks of bytes: [n, G] float32 -> [N, E] uint8."""
    return codes.to(torch.uint8).T.reshape(num_blocks, -1)


def column_sums(x: Tensor) -> Tensor:
    """Return the sum of each group: [n, G] -> [G]; sixteen rows are added in turn, then the sums of sixteen.

    `x.sum(0)` adds in this order too, but not in its last columns, whose number depends on the processor. C++ kernels
    (native/quantize.cpp) add in this order.
    """
    parts = x.view(-1, SUMMED, x.shape[1])
    totals = torch.zeros_like(parts[:, 0])
    for index in range(SUMMED):
        totals += parts[:, index]
    return totals[0] if len(totals) == 1 else totals[0] + totals[1]


def affine_codes(x: Tensor, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
    """Return the nearest codes: [n, G], [G], [G] -> [n, G] float32."""
    return (x + minimum).mul_(inverse(scale)).round_().clamp_(0, top)


def fit_affine(x: Tensor, top: int, stretches: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of each group: [n, G] -> [G], [G].

    Args:
        top: largest code.
        stretches: offsets to try: each divides the range of a group's values into `top + stretch` steps; codes above
            `top` are clamped.
    """
    floor = x.amin(0).clamp_(max=0)
    above = x - floor
    reach = above.amax(0)
    per_value = inverse(reach)
    scale, minimum, saved = torch.zeros_like(floor), torch.zeros_like(floor), torch.full_like(floor, -1)
    sum_x = column_sums(x)
    for stretch in stretches:
        codes = (above * ((top + stretch) * per_value)).round_().clamp_(max=top)
        scale, minimum, saved = _keep_better((scale, minimum, saved), _solve_affine(x, sum_x, codes))
    codes = affine_codes(x, scale, minimum, top)
    scale, minimum, _ = _keep_better((scale, minimum, saved), _solve_affine(x, sum_x, codes))
    return torch.where(reach.isinf(), reach, scale), minimum  # an infinite scale has the weights refused


def _solve_affine(x: Tensor, sum_x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best scale and minimum for these codes, and how much of the sum of squares they explain: [G] each."""
    num = x.shape[0]
    sum_q, sum_qq, sum_xq = codes.sum(0), (codes * codes).sum(0), column_sums(x * codes)
    determinant = num * sum_qq - sum_q * sum_q
    scale = (num * sum_xq - sum_x * sum_q) / determinant.clamp(min=TINIEST)
    minimum = (scale * sum_q - sum_x) / num
    is_free = (minimum >= 0) & (determinant > 0)
    scale = torch.where(is_free, scale, sum_xq / sum_qq.clamp(min=TINIEST)).clamp_(min=0)
    minimum = torch.where(is_free, minimum, torch.where(sum_q == 0, -sum_x / num, 0).clamp_(min=0))
    return scale, minimum, scale * sum_xq - minimum * sum_x


def _keep_better(
    best: tuple[Tensor, Tensor, Tensor], new: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, group by group, the fit that explains more (its third tensor)."""
    is_better = new[2] > best[2]
    scale, minimum, saved = (torch.where(is_better, one, other) for one, other in zip(new, best, strict=True))
    return scale, minimum, saved


def refine_affine(x: Tensor, scales: StoredScales, minimums: StoredScales, top: int, top_scale: int) -> Tensor:
    """Change each group's stored scale and minimum by a code where that lowers the error; return the codes, [n, G].

    Args:
        x: [n, N * groups].
        scales, minimums: stored scales, whose `codes` are changed in place.
        top: largest code of a weight.
        top_scale: largest code of a scale and of a minimum.
    """
    unit = scales.unit.expand_as(scales.codes).flatten()  # [G]
    low_unit = minimums.unit.expand_as(minimums.codes).flatten()
    first_scale, first_low = scales.codes.flatten(), minimums.codes.flatten()
    best_codes = affine_codes(x, unit * first_scale, low_unit * first_low, top)
    best_scale, best_low = first_scale, first_low
    best_error = _affine_error(x, best_codes, unit * first_scale, low_unit * first_low)
    mean = column_sums(x) / len(x)
    for shift in (-1, 0, 1):
        scale = (first_scale + shift).clamp_(0, top_scale)
        mean_low = (unit * scale * best_codes.mean(0) - mean) * inverse(low_unit)
        for low in (mean_low.round().clamp_(0, top_scale), first_low):
            codes = affine_codes(x, unit * scale, low_unit * low, top)
            error = _affine_error(x, codes, unit * scale, low_unit * low)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_scale, best_low = torch.where(is_better, scale, best_scale), torch.where(is_better, low, best_low)
            best_codes = torch.where(is_better, codes, best_codes)
    scales.codes.copy_(best_scale.view_as(scales.codes))
    minimums.codes.copy_(best_low.view_as(minimums.codes))
    return best_codes


def _affine_error(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the sum of squared errors of each group: [G]."""
    return column_sums((codes * scale).sub_(minimum).sub_(x).square_())


def symmetric_codes(x: Tensor, scale: Tensor, low: int) -> Tensor:
    """Return the nearest codes: [n, G], [G] -> [n, G] float32."""
    return (x * inverse(scale)).round_().clamp_(low, -low - 1)


def fit_symmetric(x: Tensor, low: int, stretches: tuple[float, ...]) -> Tensor:
    """Return the scale of each group, which may be negative: [n, G] -> [G].

    Args:
        low: smallest code.
        stretches: values for which the value of largest magnitude gets the code `low - stretch`, before clamping.
    """
    per_value = inverse(extreme(x.T).squeeze(1))
    scale, saved = torch.zeros_like(per_value), torch.full_like(per_value, -1)
    for stretch in (*stretches, None):
        steps = inverse(scale) if stretch is None else (low - stretch) * per_value  # None: around the best so far
        codes = (x * steps).round_().clamp_(low, -low - 1)
        sum_xq, sum_qq = column_sums(x * codes), (codes * codes).sum(0).clamp_(min=TINIEST)
        new = sum_xq / sum_qq
        is_better = new * sum_xq > saved
        saved, scale = torch.where(is_better, new * sum_xq, saved), torch.where(is_better, new, scale)
    return scale


def refine_symmetric(x: Tensor, scales: StoredScales, low: int, low_scale: int) -> Tensor:
    """Change each group's stored scale by a code where that lowers the error; return the codes, [n, G].

    Args:
        x: [n, N * groups].
        scales: stored scales, whose `codes` are changed in place.
        low: smallest code of a weight.
        low_scale: smallest code of a scale; the largest is -low_scale - 1.
    """
    unit, first = scales.unit.expand_as(scales.codes).flatten(), scales.codes.flatten()  # [G]
    best_codes, best_scale, best_error = x, first, torch.full_like(first, torch.inf)
    for shift in (0, -1, 1):
        scale = (first + shift).clamp_(low_scale, -low_scale - 1)
        codes = symmetric_codes(x, unit * scale, low)
        error = column_sums((codes * (unit * scale)).sub_(x).square_())
        is_better = error < best_error
        best_error, best_scale = torch.where(is_better, error, best_error), torch.where(is_better, scale, best_scale)
        best_codes = torch.where(is_better, codes, best_codes)
    scales.codes.copy_(best_scale.view_as(scales.codes))
    return best_codes
