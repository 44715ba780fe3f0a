"""`ScoredRouting`: the rule by which scores of their own choose experts, with a selection bias and groups (DeepSeek).

The mathematics is in nn/moe.py (torch), kernels/cpu/native/step.cpp (C++) and kernels/gpu/experts/router.py (Triton).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

SCORES: Mapping[str, int] = MappingProxyType({"softmax": 1, "sigmoid": 2})
"""Numbers of the score functions in the C++ kernels, and in GGUF's expert_gating_func."""


class ScoredRouting(NamedTuple):
    """A choice of experts by score plus selection bias, and shares that are the chosen experts' scores.

    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2; transformers, modeling_deepseek_v3, `DeepseekV3TopkRouter`.

    Attributes:
        function: function from the router's products to scores: "softmax" over all experts, or each one's "sigmoid".
        groups: number of equal groups that consecutive experts form.
        used_groups: number of groups that a token may choose from: those whose best experts, selection bias included,
            have the largest sums.
        normalises: True if the shares of a token's experts are divided by their sum.
        eps: number added to that sum.
        factor: factor of the shares, after they are normalised.
        ranked_by: number of a group's best experts in that sum: two, or one (DeepSeek V2).
    """

    function: str
    groups: int = 1
    used_groups: int = 1
    normalises: bool = True
    eps: float = 1e-20
    factor: float = 1.0
    ranked_by: int = 2
