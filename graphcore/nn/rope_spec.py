"""Frozen specs of rotary position embeddings: base, scaling of the frequencies, and rotated features."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (Gemma 3 global layers from 4B up)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, the band between interpolated (Llama 3.1 and later).

    Source: transformers, modeling_rope_utils, `_compute_llama3_parameters`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class DivisorScaling:
    """Each frequency divided by its own number: GGUF's `rope_freqs.weight`."""

    divisors: tuple[float, ...]


@dataclass(frozen=True)
class YarnScaling:
    """High frequencies kept, low ones divided by `factor`, a ramp in between; cosines and sines are scaled, too.

    Source: Peng et al. 2023 (YaRN), section 3.2 to 3.4; transformers, modeling_rope_utils, `_compute_yarn_parameters`.

    Attributes:
        beta_fast, beta_slow: turns over the original context at which the ramp begins and ends.
        attention_factor: factor of cosines and sines; scores are multiplied by its square.
        rounds_ramp: True if the ramp begins and ends at whole pairs; gpt-oss does not round.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds_ramp: bool = False


@dataclass(frozen=True)
class LongScaling:
    """Each frequency divided by its own number, of one list in short contexts and of another in long ones (LongRoPE).

    Source: Ding et al. 2024 (LongRoPE); transformers, modeling_rope_utils, `_compute_longrope_parameters`.

    Attributes:
        short, long: divisors of the frequencies, one for each pair: for contexts of up to `original_context` tokens,
            and for longer ones.
        attention_factor: factor of cosines and sines, the same for both.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float


@dataclass(frozen=True)
class ProportionalScaling:
    """The first pairs rotate with frequencies divided by `factor`, the others do not rotate (Gemma 4).

    Unlike with `RopeSpec.width`, exponents and pairs are those of the whole head.
    Source: transformers, modeling_rope_utils, `_compute_proportional_rope_parameters`.

    Attributes:
        share: share of the head's pairs that rotate.
    """

    share: float
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | DivisorScaling | YarnScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True)
class PositionScale:
    """A factor of queries that grows with their position p: 1 + beta * log(1 + floor(p / period)) (Ministral 3).

    Source: transformers, modeling_ministral3, `get_llama_4_attn_scale`.

    Attributes:
        period: number of positions with the same factor; the first ones have 1.
    """

    beta: float
    period: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, halves paired (x[i], x[i + width / 2]).

    Attributes:
        width: number of features of a head that rotate, from the first on; None for all.
    """

    theta: float
    scaling: Scaling | None = None
    width: int | None = None
