"""The feed-forward layer against its formula in float64, activations written out from their definitions."""

import math
from collections.abc import Callable
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from torch import Tensor

from graphcore.activations import ACTIVATIONS
from graphcore.arch.config.refusals import known_activation
from graphcore.errors import UnsupportedError
from graphcore.kernels.ops.gating import FUNCTIONS
from graphcore.nn.mlp import MLP
from graphcore.nn.spec import MLPSpec, NormSpec

DIM, HIDDEN = 24, 40


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


DEFINITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


def filled_mlp(spec: MLPSpec, dtype: torch.dtype = torch.float32) -> MLP:
    generator = torch.Generator().manual_seed(1)
    mlp = MLP(spec, DIM, dtype)
    for buffer in mlp.buffers():
        buffer.normal_(0.0, 0.3, generator=generator)
    return mlp


def project(name: str, mlp: MLP, x: Tensor) -> Tensor:
    weights = {key: tensor.double() for key, tensor in mlp.named_buffers()}
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1))


def test_every_activation_has_a_definition_here() -> None:
    assert ACTIVATIONS.keys() == DEFINITIONS.keys()


def test_every_name_of_transformers_is_its_function_or_refused() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    functions = {name: FUNCTIONS[activation](x) for name, activation in ACTIVATIONS.items()}
    for name in ACT2FN:
        if name in ("prelu", "xielu"):  # these have weights
            with pytest.raises(UnsupportedError, match=f"activation '{name}' is not supported"):
                known_activation(name, "config.json")
            continue
        expected = ACT2FN[name](x)
        same = {ours for ours, found in functions.items() if (found - expected).abs().max() < 1e-9}
        if same:
            assert known_activation(name, "config.json") in same, name
        else:
            with pytest.raises(UnsupportedError, match=f"activation '{name}' is not supported"):
                known_activation(name, "config.json")


def test_mlp_is_down_of_activated_gate_times_up() -> None:
    for bias, gated, activation in every_pair([False, True], [False, True], ACTIVATIONS):
        with in_case(bias, gated, activation):
            mlp = filled_mlp(MLPSpec(HIDDEN, activation, gated, bias))
            x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
            act, wide = DEFINITIONS[activation], x.double()
            up = project("up_proj", mlp, wide)
            hidden = act(project("gate_proj", mlp, wide)) * up if gated else act(up)
            expected = project("down_proj", mlp, hidden)
            out = mlp(x)
            assert out.shape == (2, 5, DIM)
            assert out.dtype == torch.float32
            # sums of 40 products of values up to about 30 (relu2: 600), each float32 rounded
            assert (out.double() - expected).abs().max() < (2e-3 if activation == "relu2" else 1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_a_sub_norm_stands_before_the_down_projection(gated: bool) -> None:
    mlp = filled_mlp(MLPSpec(HIDDEN, "relu2", gated, sub_norm=NormSpec("rms", 1e-3)))
    x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
    act, wide = DEFINITIONS["relu2"], x.double()
    up = project("up_proj", mlp, wide)
    hidden = act(project("gate_proj", mlp, wide)) * up if gated else act(up)
    assert mlp.ffn_sub_norm is not None
    normed = hidden / torch.sqrt((hidden**2).mean(-1, keepdim=True) + 1e-3) * mlp.ffn_sub_norm.weight.double()
    assert (mlp(x).double() - project("down_proj", mlp, normed)).abs().max() < 1e-5


def test_squares_that_outgrow_float16_are_normalised_all_the_same() -> None:
    spec = MLPSpec(HIDDEN, "relu2", sub_norm=NormSpec("rms", 1e-5))
    narrow, wide = filled_mlp(spec, torch.float16), filled_mlp(spec)
    for one, other in zip(narrow.buffers(), wide.buffers(), strict=True):
        other.copy_(one)
    x = 100 * torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0)).half()
    out, expected = narrow(x), wide(x.float())
    assert out.isfinite().all()
    assert (out.float() - expected).abs().max() < 8 * torch.finfo(torch.float16).eps * expected.abs().max()


def test_names_are_hugging_face_leaf_names() -> None:
    gated = MLP(MLPSpec(HIDDEN, "silu", True, True), DIM, torch.float32)
    plain = MLP(MLPSpec(HIDDEN, "gelu_new", False, False), DIM, torch.float32)
    parts = ("gate_proj", "up_proj", "down_proj")
    assert {name for name, _ in gated.named_buffers()} == {f"{p}.{kind}" for p in parts for kind in ("weight", "bias")}
    assert {name for name, _ in plain.named_buffers()} == {"up_proj.weight", "down_proj.weight"}
    assert gated.down_proj.weight.shape == (DIM, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_narrow_and_near(dtype: torch.dtype) -> None:
    mlp, wide = filled_mlp(MLPSpec(HIDDEN, "silu"), dtype), filled_mlp(MLPSpec(HIDDEN, "silu"), torch.float32)
    for narrow, exact in zip(mlp.buffers(), wide.buffers(), strict=True):
        exact.copy_(narrow)
    x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = mlp(x)
    assert out.dtype == dtype
    scale = wide(x.float()).abs().max()
    assert (out.float() - wide(x.float())).abs().max() < scale * 4 * torch.finfo(dtype).eps  # four roundings
