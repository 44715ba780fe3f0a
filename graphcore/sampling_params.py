"""Sampling parameters: how the next token is chosen. One table, the fields of `SamplingParams`; plain data, no torch.

A new parameter is added as a field here; these are derived from the fields (CONTRIBUTING.md, "A sampling parameter"):

    keywords, lines of a file, /set            engine/arguments.py, tasks/
    the struct of a row in C++                 kernels/cpu/native/sampling_params.h (native_header.py writes it)
    columns of the rows on a GPU               kernels/gpu/sampling/kept_tokens.py, graph/gpu/sampling.py

Parameters that change logits before a token is drawn (logit_bias, penalties of new tokens, DRY) or hide tokens
(min_tokens, top-n-sigma, XTC) are not in kernels: the host applies them (kernels/ops/draw.py), also to logits that a
GPU has computed.

`SamplingSettings` (config/settings.py) has the same fields for Hydra; a test compares them with this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

from graphcore.errors import ConfigError

COLDEST = 1e-5  # temperatures below are greedy, as in vLLM
HOTTEST = 1e30  # at far lower temperatures all kept tokens are equally likely already; products with it stay finite
MOST_BIAS = 100  # as in OpenAI's interface
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's (common/common.h)
MOST_BREAKERS = 64  # texts
LONGEST_BREAKER = 40  # characters; llama.cpp cuts longer ones (src/llama-sampler.cpp, MAX_CHAR_LEN)
MOST_KEPT = 1 << 30  # more than any vocabulary has, so that it keeps all


@dataclass(frozen=True)
class SamplingBounds:
    """The values that a sampling parameter may have.

    Attributes:
        allowed: the values in words, for messages.
        least: smallest value.
        most: largest value; infinity itself is no value.
        beside_greedy: values allowed with a temperature of 0, because they are off or also greedy; None if all are
            allowed. Only the parameters that truncate the distribution (top-k, top-p, min-p, top-n-sigma, XTC) have
            such values.
        in_kernels: smallest and largest value that kernels take; clamping to them does not change the result.
        is_by_host: True if the host applies the parameter before kernels draw.
    """

    allowed: str
    least: float
    most: float = inf
    beside_greedy: tuple[float, ...] | None = None
    in_kernels: tuple[float, float] | None = None
    is_by_host: bool = False


def _parameter(neutral: float, *bounds: Any, **more: Any) -> Any:
    """Return a field of `SamplingParams`, whose annotation, float or int, is also its type in kernels."""
    return field(default=neutral, metadata={"bounds": SamplingBounds(*bounds, **more)})


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; the defaults are neutral: greedy, without truncation and without penalty.

    Order: logit_bias, repetition_penalty, frequency_penalty, presence_penalty, DRY, top_n_sigma, top_k, temperature,
    top_p, min_p, XTC. That of the first four and what they do is vLLM's (v1/sample/sampler.py), that of the others
    llama.cpp's (common/common.h), which applies the temperature last.

    Attributes:
        temperature: float, divisor of the logits; 0 is greedy.
        top_k: int, number of the likeliest tokens that are kept; 0 and -1 are off.
        top_p: float, total probability of the likeliest tokens that are kept; 1 is off, 0 is greedy.
        min_p: float, least probability of a token that is kept, as a share of the likeliest token's; 0 is off, 1 is
            greedy.
        repetition_penalty: float, divisor of positive logits, and factor of negative ones, of tokens that were seen;
            1 is off.
        presence_penalty: float, subtracted from the logits of tokens that the answer has already; 0 is off.
        frequency_penalty: float, subtracted from the logit of a token as often as the answer has it; 0 is off.
        dry_multiplier: float, what a token's logit loses if it would continue a repetition of `dry_allowed_length`
            tokens (DRY, `graphcore.kernels.ops.dry`); 0 is off.
        dry_base: float, factor of that for each further token of the repetition; below 1 DRY is off.
        dry_allowed_length: int, number of tokens whose repetition may not be continued without a penalty.
        dry_penalty_last_n: int, number of tokens of prompt and answer in which repetitions are looked for; -1 is all, 0
            is off.
        top_n_sigma: float, number of standard deviations of the logits; tokens whose logit is further below the highest
            are dropped; 0 and -1 are off. The deviation is that of the model's own logits, before bias and penalties
            (in llama.cpp: after them).
        xtc_probability: float, share of the tokens that are drawn with XTC; 0 is off. XTC ("exclude top choices") drops
            all tokens of at least `xtc_threshold` but the least likely of these.
        xtc_threshold: float, probability of tokens that XTC may drop, among those that the other parameters keep, and
            at a temperature of 1; above 0.5 XTC is off.
        min_tokens: int, number of tokens before which no end token or stop token is sampled, and no stop string is
            looked for; a mask that allows nothing but an end, or forces one, has precedence.
        logit_bias: pairs of a token id and a number that is added to its logit, from -100 to 100; a mapping is taken,
            too.
        stop_token_ids: token ids that end the answer, besides the model's own end tokens.
        dry_sequence_breakers: texts that no repetition of DRY reaches beyond: each token that contains one is a
            breaker. Empty for none.
        seed: int, seed of the random draws, of which the lower 64 bits count; prompt number i of a call draws with
            seed + i.
    """

    temperature: float = _parameter(0.0, "0 (greedy) or more", 0, in_kernels=(0.0, HOTTEST))
    top_k: int = _parameter(0, "0 or -1 (off), or more", -1, beside_greedy=(-1, 0, 1), in_kernels=(0, MOST_KEPT))
    top_p: float = _parameter(1.0, "0 (greedy) to 1 (off)", 0, 1, beside_greedy=(0, 1))
    min_p: float = _parameter(0.0, "0 (off) to 1 (greedy)", 0, 1, beside_greedy=(0, 1))
    repetition_penalty: float = _parameter(1.0, "0.01 to 100; 1 is off", 0.01, 100)
    presence_penalty: float = _parameter(0.0, "-2 to 2; 0 is off", -2, 2, is_by_host=True)
    frequency_penalty: float = _parameter(0.0, "-2 to 2; 0 is off", -2, 2, is_by_host=True)
    dry_multiplier: float = _parameter(0.0, "0 (off) or more", 0, is_by_host=True)
    dry_base: float = _parameter(1.75, "0 or more; below 1 DRY is off", 0, is_by_host=True)
    dry_allowed_length: int = _parameter(2, "0 or more", 0, is_by_host=True)
    dry_penalty_last_n: int = _parameter(-1, "-1 (all), 0 (off), or more", -1, is_by_host=True)
    top_n_sigma: float = _parameter(0.0, "0 or -1 (off), or more", -1, beside_greedy=(-1, 0), is_by_host=True)
    xtc_probability: float = _parameter(0.0, "0 (off) to 1", 0, 1, beside_greedy=(0,), is_by_host=True)
    xtc_threshold: float = _parameter(0.1, "0 to 1; above 0.5 XTC is off", 0, 1, is_by_host=True)
    min_tokens: int = _parameter(0, "0 (off) or more", 0, is_by_host=True)
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    seed: int = 0  # a setting of its own on the command line, and of 64 bits in kernels: none of PARAMETERS

    def __post_init__(self) -> None:
        """Sort the pairs of `logit_bias` and make lists tuples, so that equal parameters are equal."""
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "dry_sequence_breakers", tuple(self.dry_sequence_breakers))

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken: no other is kept, and no logit is changed."""
        return self.keeps_one and self.repetition_penalty == 1.0 and not self.changes_logits

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often the answer has each token."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_dry(self) -> bool:
        """Whether a penalty depends on what the sequence repeats."""
        return self.dry_multiplier > 0.0 and self.dry_base >= 1.0 and self.dry_penalty_last_n != 0

    @property
    def truncates_by_host(self) -> bool:
        """Whether top-n-sigma or XTC may drop tokens."""
        return not self.keeps_one and (self.top_n_sigma > 0.0 or self.xtc_probability > 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether the host changes logits, or drops tokens, before a token is drawn."""
        return self.counts_tokens or bool(self.logit_bias) or self.has_dry or self.truncates_by_host

    @property
    def keeps_one(self) -> bool:
        """Whether temperature, top_p or min_p keeps only the likeliest token, after the penalty (top_k=1: False)."""
        return self.temperature < COLDEST or self.top_p == 0.0 or self.min_p == 1.0

    @property
    def has_top_k_top_p(self) -> bool:
        """Whether tokens are drawn from those that top-k or top-p keep."""
        return not self.keeps_one and (self.top_k > 0 or self.top_p < 1.0)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of KERNEL_PARAMETERS, in their order; kernels take those of `for_kernels`."""
        values: tuple[float, ...] = _values_of(self)
        return values

    def without_truncation(self) -> "SamplingParams":
        """Return the parameters without those that truncate: top-k, top-p, min-p, top-n-sigma and XTC."""
        return replace(self, **{name: NEUTRAL[name] for name in TRUNCATING})

    def for_kernels(self) -> "SamplingParams":
        """Return the parameters in the form for kernels: clamped, and greedy ones as a temperature of 0 alone."""
        if self.keeps_one:
            return replace(self.without_truncation(), temperature=0.0)
        ranges = {name: each.in_kernels for name, each in PARAMETERS.items() if each.in_kernels}
        values = vars(self)
        return replace(self, **{name: min(max(values[name], low), high) for name, (low, high) in ranges.items()})


PARAMETERS: Mapping[str, SamplingBounds] = {
    one.name: one.metadata["bounds"] for one in fields(SamplingParams) if one.metadata
}
"""The bounds of each parameter that is a number, but the seed."""

KERNEL_PARAMETERS = tuple(name for name, bounds in PARAMETERS.items() if not bounds.is_by_host)
"""The parameters that kernels take, in the order in which they take their values."""

TRUNCATING = tuple(name for name, bounds in PARAMETERS.items() if bounds.beside_greedy is not None)
NEUTRAL: Mapping[str, Any] = vars(SamplingParams())
WHOLE_NUMBERS = tuple(one.name for one in fields(SamplingParams) if one.type is int)  # those that are whole numbers

_values_of = attrgetter(*KERNEL_PARAMETERS)


def check_sampling(values: Mapping[str, Any]) -> None:
    """Check that each sampling parameter is in its bounds.

    Limits are allowed, because clients send them: top_p=0 and min_p=1 keep only the likeliest token.

    Raises:
        ConfigError: a value gives no distribution; the message says which values may be given.
    """
    for key, bounds in PARAMETERS.items():
        value = values[key]
        if not bounds.least <= value <= bounds.most or value == inf:
            raise ConfigError(f"sampling.{key}={value} must be {bounds.allowed}")
    for token_id, bias in dict(values["logit_bias"]).items():
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ConfigError(
                f"sampling.logit_bias of token {token_id} is {bias}; it must be -{MOST_BIAS} to {MOST_BIAS} "
                f"(-{MOST_BIAS} practically forbids a token)"
            )
    breakers = values["dry_sequence_breakers"]
    if len(breakers) > MOST_BREAKERS:
        raise ConfigError(
            f"sampling.dry_sequence_breakers has {len(breakers)} texts; {MOST_BREAKERS} are the most, leave some out"
        )
    for text in breakers:
        if not 0 < len(text) <= LONGEST_BREAKER:
            raise ConfigError(
                f"sampling.dry_sequence_breakers has a text of {len(text)} characters; give texts of 1 to "
                f"{LONGEST_BREAKER}, or an empty list for no breakers"
            )


def check_truncation(values: Mapping[str, Any]) -> None:
    """Refuse top_k, top_p and other cuts beside temperature=0, where they would have no effect.

    Raises:
        ConfigError: a value has no effect.
    """
    idle = [key for key in TRUNCATING if values[key] not in (PARAMETERS[key].beside_greedy or ())]
    if values["temperature"] == 0 and idle:
        raise ConfigError(
            f"sampling.{idle[0]}={values[idle[0]]} has no effect with sampling.temperature=0 (greedy); "
            "raise the temperature or leave it out"
        )
