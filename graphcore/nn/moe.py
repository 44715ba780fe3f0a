"""The feed-forward half of a block as a mixture of experts: a router chooses, the chosen ones run.

Legend: B batch, T tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token.

The experts are one custom op (kernels/experts.py), so that which ones were chosen never becomes a shape or a branch of
the compiled graph, and a decode step reads the chosen ones only.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from graphcore.kernels.experts import experts
from graphcore.nn.linear import Linear
from graphcore.nn.spec import MoESpec
from graphcore.quant.packed_experts import packed_experts
from graphcore.quant.packing import Packing


class ExpertLinear(nn.Module):
    """One projection of every expert: weight [X, O, I] and bias [X, O], with I input and O output features.

    A packed weight is [X, nbytes] uint8, and `packing` is that of one expert.
    """

    weight: Tensor
    bias: Tensor
    packing: Packing | None

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.packing = None
        self.rounding = "float"
        self.register_buffer("weight", torch.empty(experts, outputs, inputs, dtype=dtype))
        self.register_buffer("bias", torch.empty(experts, outputs, dtype=dtype))

    def pack(self, packing: Packing, rounding: str) -> None:
        """Hold every expert packed from now on, their bytes still to come; `rounding` as in kernels/packed.py."""
        self.packing, self.rounding = packing, rounding
        self.weight = torch.empty(len(self.weight), packing.nbytes, dtype=torch.uint8, device="meta")


class Experts(nn.Module):
    """All experts of a layer, projection by projection."""

    def __init__(self, spec: MoESpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.limit, self.alpha = spec.limit, spec.alpha
        self.gate_proj = ExpertLinear(spec.experts, dim, spec.hidden, dtype)
        self.up_proj = ExpertLinear(spec.experts, dim, spec.hidden, dtype)
        self.down_proj = ExpertLinear(spec.experts, spec.hidden, dim, dtype)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts: [N, D].

        Args:
            x: [N, D] compute dtype.
            chosen: [N, C] int64.
            shares: [N, C] compute dtype.
        """
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        weights, biases = [part.weight for part in parts], [part.bias for part in parts]
        packings = [part.packing for part in parts if part.packing is not None]
        if not packings:
            return experts(x, chosen, shares, weights, biases, self.limit, self.alpha)
        assert len(packings) == len(parts), "a layer's experts are packed together (weights/packed_weights.py)"
        clamp = (self.limit, self.alpha)
        return packed_experts(x, chosen, shares, weights, biases, clamp, packings, self.gate_proj.rounding)


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self, spec: MoESpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = spec.top_k
        self.router = Linear(dim, spec.experts, bias=True, dtype=dtype)
        self.experts = Experts(spec, dim, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [B, T, D] to [B, T, D]."""
        scores, chosen = self.router(x).topk(self.top_k, dim=-1)  # [B, T, C]
        shares = scores.softmax(dim=-1)
        tokens, chosen, shares = (rearrange(part, "b t ... -> (b t) ...") for part in (x, chosen, shares))
        return self.experts(tokens, chosen, shares).view_as(x)  # type: ignore[no-any-return]  # Module.__call__
