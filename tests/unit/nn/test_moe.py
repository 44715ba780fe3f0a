"""The mixture of experts against transformers' own layer, and as one graph for any number of tokens."""

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from graphcore.activations import CLAMPED_SWIGLU, Gating
from graphcore.nn.moe import MoE, choose_experts, weighted_sum
from graphcore.nn.spec import MoESpec
from graphcore.routing import ScoredRouting

DIM, SPEC = 24, MoESpec(6, 3, 40, Gating(CLAMPED_SWIGLU, 0.7, 1.4), bias=True, router_bias=True)


def reference(seed: int = 0) -> GptOssMLP:
    config = GptOssConfig(
        hidden_size=DIM,
        intermediate_size=SPEC.hidden,
        num_local_experts=SPEC.experts,
        num_experts_per_tok=SPEC.top_k,
        swiglu_limit=SPEC.gating.limit,
        swiglu_alpha=SPEC.gating.alpha,
    )
    generator = torch.Generator().manual_seed(seed)
    mlp = GptOssMLP(config)
    mlp.experts.limit, mlp.experts.alpha = (
        SPEC.gating.limit,
        SPEC.gating.alpha,
    )  # transformers 5.17 reads neither from its config
    for parameter in mlp.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return mlp.requires_grad_(False)


def ours(theirs: GptOssMLP, dtype: torch.dtype = torch.float32) -> MoE:
    """Return our module with the same weights: theirs are [X, I, O], gate and up in alternating columns."""
    moe = MoE(SPEC, DIM, dtype)
    stored = theirs.experts
    moe.router.weight.copy_(theirs.router.weight)
    moe.router.bias.copy_(theirs.router.bias)
    for start, part in enumerate((moe.experts.gate_proj, moe.experts.up_proj)):
        part.weight.copy_(stored.gate_up_proj[:, :, start::2].mT)
        part.bias.copy_(stored.gate_up_proj_bias[:, start::2])
    moe.experts.down_proj.weight.copy_(stored.down_proj.mT)
    moe.experts.down_proj.bias.copy_(stored.down_proj_bias)
    return moe


@pytest.mark.thorough
@pytest.mark.parametrize("graph", ["eager", "compiled"])
def test_a_router_of_float32_scores_chooses_in_bf16_as_transformers_does(graph: str) -> None:
    """In bf16 many sigmoids of large products are equal; transformers multiplies in float32."""
    config = DeepseekV3Config(hidden_size=DIM, n_routed_experts=64, num_experts_per_tok=4, n_group=1, topk_group=1)
    theirs = DeepseekV3TopkRouter(config).bfloat16().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    theirs.weight.normal_(generator=generator)
    theirs.e_score_correction_bias = torch.zeros(64)
    x = 2 * torch.randn(300, 1, DIM, generator=generator).bfloat16()
    _, weights, expected = theirs(x.flatten(0, 1))
    routing = ScoredRouting("sigmoid", factor=config.routed_scaling_factor)
    agreeing = {}
    for in_float32 in (True, False):
        moe = MoE(MoESpec(64, 4, 8, shares=routing, scores_in_float32=in_float32), DIM, torch.bfloat16)
        moe.router.weight.copy_(theirs.weight)
        router = torch.compile(moe.router) if graph == "compiled" else moe.router
        chosen, shares = choose_experts(router(x), 4, routing)
        agreeing[in_float32] = (chosen[:, 0].sort().values == expected.sort().values).all(-1).float().mean().item()
        assert shares.dtype is (torch.float32 if in_float32 else torch.bfloat16)
        if in_float32:
            torch.testing.assert_close(shares[:, 0].sort().values, weights.sort().values, rtol=1e-5, atol=0)
    assert agreeing[True] == 1.0
    assert agreeing[False] < 0.99


def tokens_of(batch: int, tokens: int) -> Tensor:
    return torch.randn(batch, tokens, DIM, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (2, 9)])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_layer_of_transformers(batch: int, tokens: int, seed: int) -> None:
    theirs, x = reference(seed), tokens_of(batch, tokens)
    found = ours(theirs)(x)
    assert found.shape == x.shape
    torch.testing.assert_close(found, theirs(x)[0], rtol=0, atol=1e-5)  # sums of 40 float32 products


def test_half_precision_is_as_near_to_float64_as_transformers() -> None:
    theirs, x = reference(), tokens_of(4, 40).bfloat16()
    narrow = reference().bfloat16()
    moe = ours(narrow, torch.bfloat16)
    exact = reference()
    for wide, parameter in zip(exact.parameters(), narrow.parameters(), strict=True):
        wide.data = parameter.data.double()
    expected = exact(x.double())[0]
    errors = [(out.double() - expected).abs().median() for out in (moe(x), narrow(x)[0])]
    assert moe(x).dtype == torch.bfloat16
    assert 0 < errors[0] <= 1.1 * errors[1]
    assert (theirs(x.float())[0] - expected).abs().median() < 0.1  # the weights differ by their rounding alone


def test_shares_are_the_softmax_over_the_chosen_alone() -> None:
    moe = ours(reference())
    for part in (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj):
        part.weight.zero_()
        part.bias.zero_()
    moe.experts.down_proj.bias.copy_(torch.eye(SPEC.experts, DIM))  # expert i answers the i-th unit vector
    x = tokens_of(1, 5)
    logits = x @ moe.router.weight.T + moe.router.bias
    chosen = logits.topk(SPEC.top_k).indices
    expected = torch.zeros(1, 5, DIM).scatter(2, chosen, logits.gather(2, chosen).softmax(-1))
    torch.testing.assert_close(moe(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "used", "normalises", "factor"), [(1, 1, True, 1.0), (4, 2, True, 2.5), (4, 1, False, 0.5)]
)
def test_experts_are_chosen_as_by_the_router_of_transformers(
    groups: int, used: int, normalises: bool, factor: float
) -> None:
    config = DeepseekV3Config(
        hidden_size=DIM,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=groups,
        topk_group=used,
        norm_topk_prob=normalises,
        routed_scaling_factor=factor,
    )
    router, generator = DeepseekV3TopkRouter(config), torch.Generator().manual_seed(groups)
    weight, bias = torch.randn(12, DIM, generator=generator), torch.randn(12, generator=generator)
    router.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    x = tokens_of(1, 40)[0]
    with torch.no_grad():
        _, weights, indices = router(x)
    routing = ScoredRouting("sigmoid", groups, used, normalises, factor=factor)
    chosen, shares = choose_experts(x @ weight.T, 3, routing, None, bias)
    expected, found = (torch.zeros(40, 12).scatter(1, *one) for one in ((indices, weights), (chosen, shares)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    ranked = ((x @ weight.T).sigmoid() + bias).gather(1, chosen)
    assert (ranked.diff(dim=1) <= 0).all()  # best first


@pytest.mark.thorough
def test_any_number_of_tokens_is_one_graph_without_a_break() -> None:
    moe = ours(reference())
    compiled = torch.compile(MoE.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    one = tokens_of(1, 1)
    torch.testing.assert_close(compiled(moe, one), moe(one), rtol=0, atol=1e-6)
    chunk = tokens_of(1, 16)
    torch._dynamo.mark_dynamic(chunk, 1)
    compiled(moe, chunk)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (2, 3, 40):
            x = tokens_of(1, tokens)
            torch.testing.assert_close(compiled(moe, x), moe(x), rtol=0, atol=1e-6)


def test_answers_are_added_best_first_whoever_they_are_of() -> None:
    """1e8 swallows a 1: each order of these three gives a sum of its own."""
    answers = torch.tensor([[1e8, 1.0, -1e8], [1.0, 1e8, -1e8], [1e8, -1e8, 1.0]])[..., None]
    found = weighted_sum(answers, torch.ones(3, 3))
    assert found.flatten().tolist() == [0.0, 0.0, 1.0]
    half = weighted_sum(torch.tensor([[[3.0]], [[5.0]]]).bfloat16(), torch.tensor([[0.5], [0.25]]).bfloat16())
    assert half.tolist() == [[1.5], [1.25]]
    assert half.dtype == torch.bfloat16
