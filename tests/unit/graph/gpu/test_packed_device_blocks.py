"""Blocks with packed matrices through a GPU's decode kernels, in the interpreter, against the same weights dense."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from block_specs import ARCHITECTURES, PLAIN, attending, feeding
from support.gpu_kernels import let_programs_be_few
from test_device_blocks import inputs_of, outputs
from tiny_graph import filled_decoder, model_of

from graphcore.graph.gpu.kernel_decode import run_head
from graphcore.graph.gpu.kernel_obstacles import device_obstacle
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP
from graphcore.nn.moe import ExpertLinear
from graphcore.nn.spec import BlockSpec, MLPSpec
from graphcore.quant import FORMATS

pytestmark = pytest.mark.thorough

CLOSE = 1e-4  # float32, numbers of order one; packed products may be rounded to 16 bits nowhere
LLAMA = replace(PLAIN, mlp=MLPSpec(64, "silu"))
SPECS: Mapping[str, BlockSpec] = {
    "llama": LLAMA,
    "gpt2": replace(ARCHITECTURES["gpt2"], mlp=MLPSpec(64, "gelu_new", gated=False, bias=True)),
    "gpt_oss": replace(ARCHITECTURES["gpt_oss"], mlp=replace(ARCHITECTURES["gpt_oss"].mlp, hidden=32)),
    "qwen3_moe": replace(ARCHITECTURES["qwen3_moe"], mlp=replace(ARCHITECTURES["qwen3_moe"].mlp, hidden=32)),
}
MIXED = {"q_proj": "q4_0", "k_proj": "q4_0", "v_proj": "q8_0", "up_proj": "q8_0", "gate_proj": "q5_0"}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


def packed_and_dense(spec: BlockSpec, choose: Callable[[str], str], dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """Return a decoder with packed matrices and one with what packing leaves of them."""
    packed, dense = filled_decoder(model_of(spec), dtype), filled_decoder(model_of(spec), dtype)
    for (name, module), other in zip(packed.named_modules(), dense.modules(), strict=True):
        if not isinstance(module, Linear | ExpertLinear):
            continue
        assert isinstance(other, Linear | ExpertLinear)
        one, weight = FORMATS[choose(name.rpartition(".")[2])], module.weight.float()
        stored = one.quantize(weight)
        other.weight.copy_(one.dequantize(stored, weight.shape))
        packing = DevicePacking(one.name, *weight.shape[-2:])
        rows, scale = one.split_rows(stored, weight.shape)
        parts = [packing.pack(part, scale) for part in (rows if weight.dim() == 3 else rows[None])]
        module.pack(packing, "float")
        module.weight = torch.stack(parts) if weight.dim() == 3 else parts[0]
    return packed, dense


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("form", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow), "mixed"])
def test_a_packed_block_gives_what_it_gives_dense(name: str, form: str) -> None:
    """Mixed: queries and keys share a launch, values have one of their own; gate and up are multiplied apart."""
    if form == "mixed" and name in ("gpt_oss", "qwen3_moe"):
        pytest.skip("a layer's experts are packed together")
    spec = SPECS[name]
    choose = (lambda name: MIXED.get(name, "q4_0")) if form == "mixed" else (lambda name: form)
    packed, dense = packed_and_dense(spec, choose, torch.float32)
    assert device_obstacle(packed, 3) is None
    (found, _), (expected, _) = outputs(packed, spec, is_device=True), outputs(dense, spec, is_device=False)
    assert (found - expected)[:2].abs().max() < CLOSE


def test_a_packed_head_gives_the_dense_logits() -> None:
    packed, dense = packed_and_dense(LLAMA, lambda name: "q8_0", torch.bfloat16)
    x = inputs_of(LLAMA, torch.bfloat16)[0][:, 0]
    expected = (
        dense.head.norm(x, torch.float32) @ dense.head.lm_head.weight.float().T
    )  # in bf16 they are q8_0's, nearly
    assert (run_head(packed.head, x) - expected).abs().max() < 0.02


@pytest.mark.parametrize("order", ["divided", "multiplied", "online"])
def test_ternary_matrices_follow_their_order(order: str) -> None:
    """Sums of codes times -1, 0 and 1 are exact; what is left is the step of a code here and there."""
    bitnet = attending(ARCHITECTURES["bitnet"], head_dim=32, scale=32**-0.5)
    spec = replace(feeding(bitnet, hidden=128), dim=128, int8_activations=order)  # i2_s has blocks of 128
    decoders = [filled_decoder(model_of(spec), torch.bfloat16) for _ in range(2)]
    generator = torch.Generator().manual_seed(6)
    for module, other in zip(*(decoder.layers.modules() for decoder in decoders), strict=True):
        if not isinstance(module, Linear) or not isinstance(other, Linear):
            continue
        ternary = torch.randint(-1, 2, module.weight.shape, generator=generator).float()
        scale = module.inputs**-0.5 * 1.2 if order == "online" else 1.0  # which the packed weight holds itself
        one, packing = FORMATS["i2_s"], DevicePacking("i2_s", *ternary.shape)
        rows, _ = one.split_rows(one.quantize(ternary), ternary.shape)
        module.pack(packing, "token")
        module.weight = packing.pack(rows, scale)
        other.weight.copy_(ternary * scale)
        for one_of_both in (module, other):
            if one_of_both.weight_scale is not None:
                given = module.inputs**-0.5 * 1.2
                one_of_both.weight_scale.fill_(1 / given if order == "divided" else given)
    assert isinstance(decoders[0].layers[0].mlp, MLP)
    (found, _), (expected, _) = (
        outputs(d, spec, is_device) for d, is_device in zip(decoders, (True, False), strict=True)
    )
    assert (found - expected)[:2].pow(2).mean().sqrt() < 0.02 * expected[:2].std()
