"""Sampling of a token from logits: the reference in plain torch, and a faster C++ kernel with the same results.

Legend: B rows, V vocab.

    bias -> penalties -> DRY -> mask -> top-n-sigma -> top-k -> temperature -> top-p -> min-p -> XTC -> exponential race

Bias, DRY, top-n-sigma and XTC, and penalties beside them, are applied here also where a kernel draws. If XTC is to drop
tokens at a position, all cuts of that row are made here, because XTC comes after them.

Each token that the filters keep has a weight w = exp((logit - highest) / temperature) and noise e = -log(u) from the
exponential distribution; the token with the largest w / e is chosen (the Gumbel-max trick), which is a draw from the
softmax (Yellott 1977).
The noise is a function of the row's seed, the token's position in its sequence and the token's id. So a sequence's
tokens depend neither on the batch, nor on the sequence's row, nor on earlier computations.

    u       (upper 23 bits of a word + 1/2) / 2^23
    word    Philox4x32-10, key: seed, counter: (c, position, position >> 32, 0)

Whether XTC is applied at a position is one more such draw, u < xtc_probability, from the first word of the counter (0,
position, position >> 32, 1).

    token   0 .. 15   16 .. 31   32 .. 47   48 .. 63   64 .. 79  ...
    c       0 .. 15    0 .. 15    0 .. 15    0 .. 15   16 .. 31             one counter for each lane of a vector
    word       0          1          2          3         0

Exponential and logarithm are float32 polynomials without fused multiply-adds, and top-p adds weights in fixed point, so
that the order of summation does not matter: C++ (native/draw.cpp), Triton (gpu/sampling) and this module choose the
same tokens. Noise is at least 6e-8, as u has 23 bits, so that tokens with a probability below about 1e-7 are drawn too
rarely; for top-p, tokens below 1e-9 of the likeliest weigh nothing.
"""

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphcore.device import on_device
from graphcore.errors import GraphError
from graphcore.kernels.cpu.library import open_library
from graphcore.kernels.ops.dry import DryHistory
from graphcore.sampling_params import KERNEL_PARAMETERS, WHOLE_NUMBERS, SamplingParams

HIDDEN = float("-inf")
LANES, WORDS = 16, 4
LOW = 0xFFFFFFFF
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of Philox4x32
# Source: Cephes, logf.
LOGARITHM = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXPONENTIAL = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
LN_2 = (0.693359375, -2.12194440e-4)  # their sum; few bits of the first, so that small multiples of it are exact
SQRT_HALF_BITS = 0x3F3504F3
MOST_FLOAT = torch.finfo(torch.float32).max
FIXED_POINT_ONE = 2.0**30


@dataclass
class Draw:
    """The settings for sampling one sequence's next token.

    Attributes:
        params: sampling parameters as kernels use them, with the sequence's own seed; kernels round them to float32.
        position: int, number of tokens before this one. Seed and position, modulo 2^64, are key and counter of the
            random numbers.
        seen: [V] bool or uint8, tokens that the repetition penalty applies to; None without one.
        mask: [V] bool, tokens that may be chosen; None for all. It is applied before all other filters.
        counts: [V] float32, how often the answer has each token; None without a presence or frequency penalty.
        bias: token ids, int64, and what is added to their logits, float32; None for nothing.
        dry: tokens of the sequence, in which DRY looks for repetitions; None without DRY.
    """

    params: SamplingParams
    position: int = 0
    seen: Tensor | None = None
    mask: Tensor | None = None
    counts: Tensor | None = None
    bias: tuple[Tensor, Tensor] | None = None
    dry: DryHistory | None = None

    @classmethod
    def after(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        vocab: int,
        device: torch.device,
        answer: Sequence[int] = (),
        dry_breakers: Collection[int] = (),
    ) -> "Draw":
        """Return the settings for the token that follows a prompt and the tokens of its answer so far."""
        draw = cls(params.for_kernels(), len(prompt))
        if params.repetition_penalty != 1.0:
            draw.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            draw.seen[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        if params.counts_tokens:
            draw.counts = torch.zeros(vocab, dtype=torch.float32, device=device)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            draw.bias = on_device(ids, device), on_device(values, device, torch.float32)
        for token_id in answer:
            draw.append(token_id)
        if params.has_dry:
            draw.dry = DryHistory.of([*prompt, *answer], dry_breakers)
        return draw

    def copy(self) -> "Draw":
        """Return the same settings, to which tokens can be appended apart from these."""
        seen, counts = (None if one is None else one.clone() for one in (self.seen, self.counts))
        return replace(self, seen=seen, counts=counts, dry=None if self.dry is None else replace(self.dry))

    def append(self, token_id: int) -> None:
        """Append a token to the sequence, and advance to the next position."""
        self.position += 1
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None:
            self.counts[token_id] += 1
        if self.dry is not None:
            self.dry.append(token_id)

    @property
    def changes_logits(self) -> bool:
        """Whether the host changes or masks logits before a kernel samples; repetition_penalty is in the kernel."""
        has_changes = self.counts is not None or self.bias is not None or self.dry is not None
        return has_changes or self.params.truncates_by_host


class _Params(ctypes.Structure):
    """The C++ struct of native/sampling_params.h."""

    _fields_ = tuple((name, ctypes.c_int32 if name in WHOLE_NUMBERS else ctypes.c_float) for name in KERNEL_PARAMETERS)


class _Row(ctypes.Structure):
    """One row to sample; the fields mirror `Draw` of native/draw.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("params", _Params),
        ("num_bad", ctypes.c_int32),
        ("token", ctypes.c_int64),
    )


class DrawKernel:
    """The C++ sampling kernel with its scratch memory, which is reused.

    Args:
        library: file of the C++ kernels.
        threads: number of threads for several rows.
    """

    def __init__(self, library: str, threads: int) -> None:
        self._library, self._threads = open_library(library), threads
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def choose(self, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[int]:
        """Return each row's token, as `choose_tokens` does; logits: [V] float32 of each row, contiguous, on the CPU."""
        count, vocab = len(draws), len(logits[0])
        pairs = [changed_by_host(*pair) if pair[1].changes_logits else pair for pair in zip(logits, draws, strict=True)]
        threads = 1 if count == 1 else self._threads
        nbytes = threads * self._library.graphcore_draw_nbytes(vocab)
        if len(self._scratch) < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # torch aligns to 64 bytes
        rows = (_Row * count)(*(_row(*pair) for pair in pairs))
        self._library.graphcore_draw(threads, ctypes.byref(rows), count, vocab, self._scratch.data_ptr())
        if any(row.num_bad for row in rows):
            raise not_finite()
        if any(row.token < 0 for row in rows):
            raise nothing_allowed()
        return [row.token for row in rows]


def _row(logits: Tensor, draw: Draw) -> _Row:
    assert logits.dtype is torch.float32, f"logits of {logits.dtype}"
    assert logits.is_cpu, f"logits on {logits.device}"
    assert logits.is_contiguous(), "the logits of a row are one run of memory"
    own = draw.seen, draw.mask
    for one in own:
        assert one is None or (one.is_contiguous() and one.shape == logits.shape and one.element_size() == 1)
    seen, mask = (None if one is None else one.data_ptr() for one in own)
    params = draw.params
    return _Row(logits.data_ptr(), seen, mask, params.seed, draw.position, _Params(*params.numbers))


def choose_tokens(logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[int]:
    """Return each row's token.

    Args:
        logits: [V] float32 of each row; not changed.
        draws: settings of each row.

    Raises:
        GraphError: a logit is NaN or infinite, or a mask allows no token.
    """
    for row in logits:
        check_finite(row)
    return [choose_token(row, draw) for row, draw in zip(logits, draws, strict=True)]


def choose_token(logits: Tensor, draw: Draw) -> int:
    """Return the token that `draw` chooses from finite logits, [V] float32."""
    logits, draw = changed_by_host(logits, draw)
    if draw.mask is not None:
        logits = logits.masked_fill(~draw.mask, HIDDEN)
        if not bool(draw.mask.any()):
            raise nothing_allowed()
    if draw.params.temperature == 0.0:
        return int(logits.argmax())
    return int(
        (kept_weights(logits, draw) / noise(draw.params.seed, draw.position, len(logits), logits.device)).argmax()
    )


def changed_by_host(logits: Tensor, draw: Draw) -> tuple[Tensor, Draw]:
    """Return logits with the bias and the penalties of a row, [V] float32, and what is left to do to draw from them."""
    if draw.seen is None and not draw.changes_logits:
        return logits, draw
    changed, row = _penalised(logits, draw), replace(draw, seen=None, counts=None, bias=None, dry=None)
    if not row.params.truncates_by_host:
        return changed, row
    mask = torch.ones_like(changed, dtype=torch.bool) if row.mask is None else row.mask
    if row.params.top_n_sigma > 0.0:
        # In float64, whose sums differ by far less than two logits where another order of summation differs.
        margin = row.params.top_n_sigma * logits.double().std(correction=0)
        mask = mask & (changed.double() >= changed.masked_fill(~mask, HIDDEN).max().double() - margin)
    if not is_xtc_applied(row):
        return changed, replace(row, mask=mask)
    mask = mask & (kept_weights(changed.masked_fill(~mask, HIDDEN), row) > 0.0)
    probabilities = changed.double().masked_fill(~mask, HIDDEN).softmax(0)
    likely = (mask & (probabilities >= row.params.xtc_threshold)).nonzero().flatten()
    if len(likely) > 1:
        order = probabilities[likely].sort(descending=True, stable=True).indices  # ties: lower ids first
        mask = mask.index_fill(0, likely[order[:-1]], False)
    return changed, replace(row, mask=mask, params=row.params.without_truncation())


def is_xtc_applied(draw: Draw) -> bool:
    """Return whether XTC is applied at a row's position: a draw that is independent of the tokens' noise."""
    if draw.params.xtc_probability == 0.0:
        return False
    words = (0, draw.position & LOW, draw.position >> 32 & LOW, 1)
    first, second, third, fourth = (torch.tensor([word], dtype=torch.int64, device="cpu") for word in words)
    word = int(philox(draw.params.seed, (first, second, third, fourth))[0])
    return ((word >> 9) + 0.5) * 2.0**-23 < draw.params.xtc_probability


def _penalised(logits: Tensor, draw: Draw) -> Tensor:
    """Return logits with logit_bias and all penalties applied, in the order of vLLM's sampler, and DRY last."""
    if draw.bias is not None:
        logits = logits.index_add(0, *draw.bias)
    if draw.seen is not None:
        logits = torch.where(draw.seen != 0, penalise(logits, draw.params.repetition_penalty), logits)
    if draw.counts is not None:
        logits = logits - _rounded(draw.params.frequency_penalty, logits) * draw.counts
        logits = logits - _rounded(draw.params.presence_penalty, logits) * (draw.counts > 0)
    if draw.dry is not None:
        losses = draw.dry.penalties(draw.params)
        ids, values = on_device([*losses], logits.device), on_device([*losses.values()], logits.device, torch.float32)
        logits = logits.index_add(0, ids, values, alpha=-1)
    return logits


def penalise(logits: Tensor, penalty: float) -> Tensor:
    """Return logits with the repetition penalty applied to all tokens. Source: Keskar et al. 2019, section 4.1."""
    divisor = _rounded(penalty, logits)
    return torch.where(logits > 0, (logits / divisor).clamp(max=MOST_FLOAT), logits * divisor)


def kept_weights(logits: Tensor, draw: Draw) -> Tensor:
    """Return the weights of all tokens, [V] float32, 0 where top-k, top-p or min-p drop them; one is always kept."""
    factor = (1.0 / _rounded(draw.params.temperature, logits)).clamp(max=MOST_FLOAT)
    weights = weight_of((logits - logits.max()) * factor)
    if 0 < draw.params.top_k < len(logits):
        weights = weights.masked_fill(logits < logits.topk(draw.params.top_k).values[-1], 0.0)
    share = _rounded(draw.params.top_p, logits)
    if share < 1.0:
        ordered, order = fixed_point(weights).sort(descending=True, stable=True)  # ties: lower ids first
        before = ordered.cumsum(0) - ordered
        wanted = (share.double() * ordered.sum().double()).ceil().clamp(min=1)
        weights = weights.index_fill(0, order[before >= wanted], 0.0)
    return weights.masked_fill(weights < _rounded(draw.params.min_p, logits), 0.0)


def _rounded(number: float, logits: Tensor) -> Tensor:
    """Return a setting rounded to float32, as in the kernels, on the logits' device."""
    return torch.tensor(number, dtype=torch.float32, device=logits.device)


def fixed_point(weights: Tensor) -> Tensor:
    """Return weights as fixed-point numbers of 30 fractional bits, int64, rounded down; top-p orders and adds them."""
    return (weights * FIXED_POINT_ONE).to(torch.int64)


def weight_of(x: Tensor) -> Tensor:
    """Return exp(x) for x <= 0 in float32, and 0 below -87."""
    low = x.clamp(min=-87.0)
    power = (low * 1.44269504 + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to a whole number
    rest = low - power * LN_2[0]
    rest = rest - power * LN_2[1]
    value = torch.full_like(rest, EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        value = value * rest + coefficient
    value = value * ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    return value.masked_fill(x < -87.0, 0.0)


def noise(seed: int, position: int, vocab: int, device: torch.device | None = None) -> Tensor:
    """Return the noise of all tokens, [V] float32."""
    blocks = -(-vocab // (LANES * WORDS))
    counters = torch.arange(blocks * LANES, device=device, dtype=torch.int64)
    zeros = torch.zeros_like(counters)
    words = philox(seed, (counters, zeros + (position & LOW), zeros + (position >> 32 & LOW), zeros))
    in_order = torch.stack([word.view(blocks, LANES) for word in words], dim=1)  # [blocks, WORDS, LANES]
    return exponential_of(in_order.flatten()[:vocab])


def philox(key: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox4x32-10 for each counter, words as int64.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2.
    """
    first, second, third, fourth = counter
    keys = [key & LOW, key >> 32 & LOW]
    for _ in range(10):
        low, high = first * MULTIPLIERS[0], third * MULTIPLIERS[1]  # unsigned 64-bit products, held in int64
        first, second = high >> 32 & LOW ^ second ^ keys[0], high & LOW
        third, fourth = low >> 32 & LOW ^ fourth ^ keys[1], low & LOW
        keys = [(one + step) & LOW for one, step in zip(keys, WEYL, strict=True)]
    return first, second, third, fourth


def exponential_of(words: Tensor) -> Tensor:
    """Return exponential noise made from random words, float32: -log of a number between 0 and 1."""
    u = ((words >> 9).float() + 0.5) * 2.0**-23
    bits = u.view(torch.int32)
    power = (bits - SQRT_HALF_BITS) >> 23  # u = fraction * 2^power, fraction from sqrt(1/2) to sqrt(2)
    x = (bits - (power << 23)).view(torch.float32) - 1.0
    square, scale = x * x, power.float()
    y = torch.full_like(x, LOGARITHM[0])
    for coefficient in LOGARITHM[1:]:
        y = y * x + coefficient
    y = y * (x * square)
    y = y + scale * LN_2[1]
    y = y - square * 0.5
    return -((x + y) + scale * LN_2[0])


def check_finite(logits: Tensor) -> None:
    """Check that no logit is NaN or infinite.

    Raises:
        GraphError: a logit is NaN or infinite.
    """
    if not bool(logits.isfinite().all()):
        raise not_finite()


def not_finite() -> GraphError:
    """Return the error for logits that are NaN or infinite."""
    return GraphError(
        "the model's logits are not finite (NaN or infinity): its weights are damaged, or the dtype is too narrow "
        "for it; try dtype=bf16 or dtype=fp32"
    )


def nothing_allowed() -> GraphError:
    """Return the error for a mask that allows no token."""
    return GraphError("the mask of a request allows no token; let it allow an end token at least")
