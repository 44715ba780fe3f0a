"""The feed-forward network of a block as a mixture of experts: a router chooses some experts, and only those run.

Legend: B batch, T tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token.

    choose_experts: token -> C experts, shares  |  experts: token, experts -> outputs  |  weighted_sum: outputs -> token

The experts are one custom op (kernels/ops/experts.py), so that the routing is neither a shape nor a branch of the
compiled graph, and a decode step reads only the chosen experts. Experts' weights can be fetched between the routing and
the experts.
"""

import torch
from torch import Tensor, nn

from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu.matrix import DENSE
from graphcore.kernels.ops.expert_slots import ExpertSlots, cached_experts
from graphcore.kernels.ops.experts import Places, experts
from graphcore.kernels.ops.packed_experts import packed_experts
from graphcore.nn.linear import Float32Linear, Linear, StackedLinear
from graphcore.nn.mlp import MLP
from graphcore.nn.norm import build_norm
from graphcore.nn.span import Span
from graphcore.nn.spec import MLPSpec, MoESpec, NormSpec, Shares
from graphcore.routing import ScoredRouting


class ExpertLinear(StackedLinear):
    """One projection of every expert.

    Attributes:
        experts: number of experts; `weight` has another number of matrices if it is a set of slots.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(experts, inputs, outputs, bias, dtype)
        self.experts = experts

    @property
    def is_batch_invariant(self) -> bool:
        """Whether an expert's product of a token does not depend on how many others chose it: one job of C++ runs all.

        Unrounded x is multiplied expert by expert, by a library where enough tokens chose one.
        """
        return isinstance(self.packing, KernelPacking) and self.rounding != "float"


class Experts(nn.Module):
    """All experts of a layer, as one ExpertLinear per projection.

    Attributes:
        cached: cache of the experts in slots on the device; None if the weights are those of all experts, or if the
            host fetches them.
    """

    def __init__(self, spec: MoESpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gating = spec.gating
        self.hidden = spec.hidden
        self.cached: ExpertSlots | None = None
        self.gate_proj = ExpertLinear(spec.experts, dim, spec.hidden, spec.bias, dtype)
        self.up_proj = ExpertLinear(spec.experts, dim, spec.hidden, spec.bias, dtype)
        self.down_proj = ExpertLinear(spec.experts, spec.hidden, dim, spec.bias, dtype)

    @property
    def formats(self) -> list[str]:
        """Formats of gate, up and down, "dense" if they are not packed."""
        packings = (part.packing for part in (self.gate_proj, self.up_proj, self.down_proj))
        return [DENSE if packing is None else packing.format for packing in packings]

    def forward(self, x: Tensor, chosen: Tensor, places: Places = None) -> Tensor:
        """Return the chosen experts' outputs for their tokens: [B, T, C, D].

        Args:
            x: [B, T, D] compute dtype.
            chosen: [B, T, C] int64; -1 for no expert.
            places: places of the experts in the weights, as in kernels/ops/experts.py; None to look up those of cached
                experts.
        """
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        weights, biases = [part.weight for part in parts], [part.bias for part in parts if part.bias is not None]
        packings = [part.packing for part in parts if part.packing is not None]
        tokens, choices = x.flatten(0, 1), chosen.flatten(0, 1)  # [N, D], [N, C]
        if self.cached is not None and places is None:
            y = cached_experts(tokens, choices, self.cached, biases, self.hidden, self.gating, self.formats)
        elif not packings:
            y = experts(tokens, choices, weights, biases, self.gating, places)
        else:
            assert len(packings) == len(parts), "a layer's experts are packed together (weights/packed_weights.py)"
            rounding = self.gate_proj.rounding
            y = packed_experts(tokens, choices, weights, biases, places, self.gating, packings, rounding)
        return y.view(*chosen.shape, x.shape[-1])


class MoE(nn.Module):
    """A router, its experts, and the shared expert if the model has one.

    Attributes:
        expert_scales: [X] float32, factors of the experts' shares, or None.
        selection_bias: [X] float32, numbers added to the experts' scores for the choice, or None.
    """

    expert_scales: Tensor | None
    selection_bias: Tensor | None

    def __init__(self, spec: MoESpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.shares, has_shared = spec.top_k, spec.shares, spec.shared_hidden > 0
        is_wider = spec.scores_in_float32 and dtype is not torch.float32
        self.router = (Float32Linear if is_wider else Linear)(dim, spec.experts, bias=spec.router_bias, dtype=dtype)
        self.experts = Experts(spec, dim, dtype)
        scales = torch.empty(spec.experts, dtype=torch.float32) if spec.expert_scales else None
        self.register_buffer("expert_scales", scales)
        assert not spec.selection_bias or isinstance(spec.shares, ScoredRouting), "a softmax has no selection bias"
        bias = torch.empty(spec.experts, dtype=torch.float32) if spec.selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.shared_expert = (
            MLP(MLPSpec(spec.shared_hidden, spec.gating.activation), dim, dtype) if has_shared else None
        )
        self.shared_expert_gate = Linear(dim, 1, bias=False, dtype=dtype) if has_shared and spec.shared_gate else None

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's experts and their shares do not depend on its batch, given their products.

        torch's sigmoid computes the last numbers of a tensor, and of each thread's part, with other instructions. Its
        softmax goes row by row.
        """
        has_sigmoid = isinstance(self.shares, ScoredRouting) and self.shares.function == "sigmoid"
        return not has_sigmoid and self.shared_expert_gate is None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [B, T, D] to [B, T, D]."""
        how = self.shares, self.expert_scales, self.selection_bias
        chosen, shares = choose_experts(self.router(x), self.top_k, *how)
        answer = weighted_sum(self.experts(x, chosen), shares)
        if self.shared_expert is None:
            return answer
        if self.shared_expert_gate is None:
            return answer + self.shared_expert(x)  # type: ignore[no-any-return]  # Module.__call__
        return answer + scaled_by_gate(self.shared_expert_gate(x), self.shared_expert(x))


def scaled_by_gate(gate: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gate) * x, with one gate for each token: [..., 1] and [..., D] to [..., D]."""
    return gate.sigmoid() * x


class ParallelMLP(nn.Module):
    """A dense MLP in parallel to a block's experts, with norms before and after each of the two (Gemma 4).

    Attributes:
        router_norm: norm of the stream for the router.
        mlp_norm, experts_norm: norms of the stream for the MLP and for the experts.
        mlp_answer_norm, experts_answer_norm: norms of their outputs.
    """

    def __init__(self, spec: MLPSpec, norm: NormSpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.mlp = MLP(spec, dim, dtype)
        self.router_norm, self.mlp_norm, self.experts_norm = (build_norm(norm, dim) for _ in range(3))
        self.mlp_answer_norm, self.experts_answer_norm = (build_norm(norm, dim) for _ in range(2))

    def add(self, x: Tensor, answer: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of both normalised outputs: [B, T, D] float32.

        Args:
            x: [B, T, D] float32 residual stream.
            answer: [B, T, D] weighted sum of the experts' outputs.
            dtype: compute dtype.
        """
        fed = self.mlp_answer_norm(self.mlp(self.mlp_norm(x, dtype)), torch.float32)
        return fed + self.experts_answer_norm(answer, torch.float32)  # type: ignore[no-any-return]  # Module.__call__


def choose_experts(
    scores: Tensor,
    top_k: int,
    shares: Shares | ScoredRouting = "chosen",
    scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts with the highest scores [..., X], best first, and their shares (weights): [..., C] each.

    Args:
        scores: [..., X] compute dtype or float32, products of the router; shares have the same dtype.
        scales: [X] float32, factors of the experts' shares in a softmax; None for none.
        bias: [X] float32, numbers added to scores of a `ScoredRouting` for the choice; None for none.
    """
    if isinstance(shares, ScoredRouting):
        return _choose_by_own_scores(scores, top_k, shares, bias)
    best, chosen = scores.topk(top_k, dim=-1)
    if shares == "chosen":
        found = best.softmax(dim=-1)
    else:
        found = (best.float() - scores.float().logsumexp(dim=-1, keepdim=True)).exp().to(scores.dtype)
    return chosen, found if scales is None else (found.float() * scales[chosen]).to(found.dtype)


def _choose_by_own_scores(
    products: Tensor, top_k: int, routing: ScoredRouting, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the experts with the highest scores plus bias, best first, and their shares: [..., C] each."""
    wide = products.float()
    scores = wide.sigmoid() if routing.function == "sigmoid" else wide.softmax(dim=-1)
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        ranked = _within_best_groups(ranked, routing)
    chosen = ranked.topk(top_k, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if routing.normalises:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + routing.eps)
    return chosen, (shares * routing.factor).to(products.dtype)


def _within_best_groups(ranked: Tensor, routing: ScoredRouting) -> Tensor:
    """Return scores [..., X] that are -inf outside the groups whose best scores have the largest sums."""
    grouped = ranked.unflatten(-1, (routing.groups, -1))  # type: ignore[no-untyped-call]  # [..., G, X / G]
    sums = grouped.topk(routing.ranked_by, dim=-1).values.sum(dim=-1)  # [..., G]
    used = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, sums.topk(routing.used_groups, dim=-1).indices, True)
    kept: Tensor = grouped.masked_fill(~used[..., None], -torch.inf).flatten(-2)
    return kept


def without_padding(chosen: Tensor, span: Span) -> Tensor:
    """Return the chosen experts [B, T, C], set to -1 (no expert) where a token is padding."""
    return chosen.masked_fill(~span.is_real(chosen.shape[1])[..., None], -1)


def weighted_sum(y: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum of experts' outputs, best expert first: [..., C, D] and [..., C] to [..., D]."""
    total = y[..., 0, :].float() * shares[..., 0, None].float()
    for rank in range(1, y.shape[-2]):
        total = total + y[..., rank, :].float() * shares[..., rank, None].float()
    return total.to(y.dtype)
