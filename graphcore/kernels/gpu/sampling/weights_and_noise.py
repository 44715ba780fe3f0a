"""The weight and the noise of tokens on the device: the same float32 operations as in kernels/ops/draw.py, to the bit.

Kernels that use these are launched with enable_fp_fusion=False.
"""

import triton
import triton.language as tl

MOST_FLOAT = tl.constexpr(3.4028234663852886e38)
FIXED_POINT_ONE = tl.constexpr(1073741824.0)  # 2^30


@triton.jit
def factor_of(temperature):
    """Return the factor of the logits at a temperature; 0 counts as 1."""
    return tl.minimum(tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature)), MOST_FLOAT)


@triton.jit
def sampling_weight(x):
    """Return exp(x) for x <= 0, and 0 below -87."""
    low = tl.maximum(x, -87.0)
    power = (low * 1.44269504 + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to a whole number
    rest = low - power * 0.693359375
    rest = rest - power * -2.12194440e-4
    value = rest * (1 / 720) + (1 / 120)
    value = value * rest + (1 / 24)
    value = value * rest + (1 / 6)
    value = value * rest + 0.5
    value = value * rest + 1.0
    value = value * rest + 1.0
    value = value * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, value)


@triton.jit
def to_fixed_point(weights):
    """Return weights as fixed-point numbers of 30 fractional bits, int64, rounded down; top-p orders and adds them."""
    return (weights * FIXED_POINT_ONE).to(tl.int32).to(tl.int64)


@triton.jit
def noise_of(seed, position, tokens):
    """Return the noise of tokens: int32 ids; the seed and the position are int64."""
    counter = ((tokens >> 6) << 4) + (tokens & 15)
    nothing = tokens * 0
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    first, second, third, fourth = tl.philox(
        seed, counter, low.to(tl.int32, bitcast=True) + nothing, high.to(tl.int32, bitcast=True) + nothing, nothing
    )
    word = (tokens >> 4) & 3
    chosen = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
    u = ((chosen >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-7  # 2^-23
    bits = u.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23  # u = fraction * 2^power, fraction from sqrt(1/2) to sqrt(2)
    x = (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0
    square, scale = x * x, power.to(tl.float32)
    y = x * 7.0376836292e-2 + -1.1514610310e-1
    y = y * x + 1.1676998740e-1
    y = y * x + -1.2420140846e-1
    y = y * x + 1.4249322787e-1
    y = y * x + -1.6668057665e-1
    y = y * x + 2.0000714765e-1
    y = y * x + -2.4999993993e-1
    y = y * x + 3.3333331174e-1
    y = y * (x * square)
    y = y + scale * -2.12194440e-4
    y = y - square * 0.5
    return -((x + y) + scale * 0.693359375)
