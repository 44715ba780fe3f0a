"""Ternary models in transformers: its layers for ternary weights in place of the blocks' Linears.

from_pretrained would build the same model, but needs the accelerate package.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphcore.nn.spec import Int8Order
from graphcore.weights.loader import Loader
from graphcore.weights.matching import SCALE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_ternary_layers(blocks: nn.ModuleList, loader: Loader, order: Int8Order) -> None:
    """Replace every Linear of the blocks, whose weights are loaded, by transformers' layer for ternary weights.

    Args:
        blocks: blocks of a transformers model; their Linears have graphcore's names.
        loader: loader of the same weights, for their scales.
        order: order of the operations of a product.
    """
    for index, block in enumerate(blocks):
        for name, linear in list(block.named_modules()):
            if isinstance(linear, nn.Linear):
                scale_name = f"layers.{index}.{name}.weight{SCALE}"
                has_scale = scale_name in loader.sources
                scale = (
                    loader.dense(scale_name, torch.float32)
                    if has_scale
                    else torch.ones(1, dtype=torch.float32, device="cpu")
                )
                block.set_submodule(name, ternary_layer(linear, scale, order))


def ternary_layer(linear: nn.Linear, scale: Tensor, order: Int8Order) -> nn.Module:
    """Return transformers' layer with the weight and bias of `linear` and the scale [1]."""
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

    layer_class = BitLinear if order == "divided" else AutoBitLinear
    layer: nn.Module = layer_class(
        linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=linear.weight.dtype
    )
    weight = pack_weights(linear.weight.detach().to(torch.int8)) if order == "divided" else linear.weight.detach()
    stored = {"weight": weight, "weight_scale": scale}
    if linear.bias is not None:
        stored["bias"] = linear.bias.detach()
    layer.load_state_dict(stored)
    return layer


def cast_ternary_layers(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Cast to `dtype` what casting the model leaves out: scales, and the dtype that packed layers record."""
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear

    for module in model.modules():
        if isinstance(module, AutoBitLinear | BitLinear):
            module.weight_scale.data = module.weight_scale.data.to(dtype)
        if isinstance(module, BitLinear):
            module.dtype = dtype
