"""Blocks with LoRA factors beside projections: every way to run them computes W x + B (A x).

The reference is the forward of the same blocks without factors, whose weights are W + B A.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from block_specs import ARCHITECTURES, BLOCKS
from cpu.test_native_decode import builder_of, run_all
from gpu.test_device_blocks import outputs
from support.cases import in_case
from support.gpu_kernels import let_programs_be_few
from tiny_graph import FULL, filled_decoder, model_of
from torch import Tensor

from graphcore.graph.cpu.native_decode import native_obstacle
from graphcore.graph.gpu.kernel_obstacles import device_obstacle
from graphcore.graph.lowering.operations import add_project, add_scaled, gate, project, scaled_sum
from graphcore.graph.lowering.targets import lower_to_instructions, lower_to_kernels
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.spec import BlockSpec

pytestmark = pytest.mark.thorough

CLOSE = 2e-5  # float32, numbers of order one; the order of a sum may differ
PARALLEL = "shared_expert"
NAMES = [name for name in ARCHITECTURES if name != "bitnet"] + [PARALLEL, "gated_attention", "one_expert"]
SPECS: Mapping[str, BlockSpec] = {**BLOCKS, **ARCHITECTURES}
LOWERED = (  # blocks whose projections are lowered differently: the others differ in attention
    *("llama", "qwen2", "gemma3", "gpt2", "gpt_oss", "qwen3_next", "qwen3_next_delta", "lfm2_conv", "granite"),
    *(PARALLEL, "gated_attention", "one_expert"),
)
RANKS = (3, 8, 1, 20)
IDS = [5, 1, 17, 30, 2, 9]


def projections(block: Block) -> dict[str, Linear]:
    return {name: one for name, one in block.named_modules() if isinstance(one, Linear)}


def adapted(spec: BlockSpec, only: Sequence[str] = ("",), dtype: torch.dtype = torch.float32) -> Decoder:
    """Return a decoder of two layers with factors beside projections of the first. Args: only: parts of their names."""
    decoder = filled_decoder(model_of(spec, spec), dtype)
    names = [name for name in projections(decoder.layers[0]) if any(part in name for part in only)]
    decoder.add_low_rank({0: {name: RANKS[index % len(RANKS)] for index, name in enumerate(names)}})
    generator = torch.Generator().manual_seed(7)
    for linear in projections(decoder.layers[0]).values():
        for factor in (linear.lora_A, linear.lora_B):
            if factor is not None:
                columns = factor.weight.shape[-1]
                factor.weight = torch.randn(factor.weight.shape, generator=generator).mul(columns**-0.5).to(dtype)
    return decoder


def merged(decoder: Decoder, spec: BlockSpec) -> Decoder:
    """Return a decoder without factors, with the sums of the weights and the factors' products."""
    plain = filled_decoder(model_of(spec, spec), decoder.layers[0].dtype)
    for name, linear in projections(decoder.layers[0]).items():
        if linear.lora_A is not None and linear.lora_B is not None:
            plain.layers[0].get_submodule(name).weight += linear.lora_B.weight @ linear.lora_A.weight
    return plain


def logits(decoder: Decoder, kind: str) -> Tensor:
    return run_all(builder_of(decoder.spec, kind, decoder=decoder).decode(1, is_greedy=False), IDS)


def test_native_programs_and_the_forward_add_the_factors_product() -> None:
    for name in NAMES:
        with in_case(name):
            decoder = adapted(SPECS[name])
            assert native_obstacle(decoder) is None
            expected = logits(merged(decoder, SPECS[name]), "eager")
            assert (logits(decoder, "eager") - expected).abs().max() < CLOSE
            assert (logits(decoder, "captured") - expected).abs().max() < CLOSE
            assert (logits(filled_decoder(model_of(SPECS[name], SPECS[name])), "eager") - expected).abs().max() > 0.1


@pytest.mark.parametrize("only", [["q_proj"], ["o_proj"], ["gate_proj"], ["up_proj"], ["down_proj"], ["k_proj", "mlp"]])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_factors_beside_some_projections_only(name: str, only: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = adapted(SPECS[name], only)
    if decoder.spec.blocks[0] == SPECS[name]:
        return  # this MLP has no gate
    assert decoder.spec.blocks[0] != decoder.spec.blocks[1] == SPECS[name]
    expected = logits(merged(decoder, SPECS[name]), "eager")
    assert (logits(decoder, "captured") - expected).abs().max() < CLOSE
    let_programs_be_few(monkeypatch)
    (found, _), (reference, _) = (
        outputs(decoder, SPECS[name], True),
        outputs(merged(decoder, SPECS[name]), SPECS[name], False),
    )
    assert (found - reference)[:2].abs().max() < CLOSE


@pytest.mark.parametrize(
    "name", [name if name in LOWERED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_gpus_kernels_add_the_factors_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)
    decoder = adapted(SPECS[name])
    assert device_obstacle(decoder, 3) is None
    (found, cache), (expected, expected_cache) = (
        outputs(decoder, SPECS[name], True),
        outputs(merged(decoder, SPECS[name]), SPECS[name], False),
    )
    assert (found - expected)[:2].abs().max() < CLOSE
    for one, other in zip(cache.tensors, expected_cache.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=CLOSE, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float16), *((name, torch.bfloat16) for name in ("llama", "gemma3", "gpt2", "qwen3_next"))],
)
def test_a_gpus_kernels_err_no_more_than_the_forward_in_16_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_programs_be_few(monkeypatch)
    narrow, wide = adapted(SPECS[name], dtype=dtype), adapted(SPECS[name])
    wide.load_state_dict({key: tensor.float() for key, tensor in narrow.state_dict().items()})
    truth, _ = outputs(wide, SPECS[name], False)
    errors = [(outputs(narrow, SPECS[name], device)[0] - truth)[:2].pow(2).mean().sqrt() for device in (True, False)]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.slow  # test_adapted_models.py compiles factors beside packed matrices
def test_compiled_blocks_add_the_factors_product() -> None:
    decoder = adapted(SPECS["llama"], ["q_proj", "gate_proj", "down_proj"])
    expected = logits(merged(decoder, SPECS["llama"]), "eager")
    builder = builder_of(decoder.spec, "compiled", decoder=decoder)
    assert (run_all(builder.decode(1, is_greedy=False), IDS) - expected).abs().max() < CLOSE
    assert len(builder.functions.compiled) == 3, "the layer with factors is another kind than the one without"


@pytest.mark.parametrize("lower", [lower_to_instructions, lower_to_kernels])
@pytest.mark.parametrize("spec", [SPECS["llama"], FULL], ids=["pre-norm", "sandwich"])
def test_the_factors_products_are_added_by_products(lower: object, spec: BlockSpec) -> None:
    """A sum of its own, over all features, would read and write both summands once more."""
    traced = lower(adapted(spec, ["q_proj", "o_proj", "down_proj"]).layers[0])
    targets = [node.target for node in traced.nodes()]
    assert targets.count(add_project) == (3 if spec.sandwich else 5)
    assert not {add_scaled, scaled_sum} & set(targets)
    assert gate not in targets
    plain = [node.target for node in lower(filled_decoder(model_of(spec)).layers[0]).nodes()]
    assert targets.count(project) >= plain.count(project) + 3


def test_blocks_with_the_same_factors_are_one_kind_and_others_are_not() -> None:
    first, second = adapted(SPECS["llama"]), adapted(SPECS["llama"])
    assert first.spec == second.spec
    second.add_low_rank({0: {"self_attn.q_proj": 5}})
    assert first.spec != second.spec
    assert repr(first.spec.blocks[0]) == repr(replace(first.spec.blocks[0], low_rank=()))
