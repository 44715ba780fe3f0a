"""Ternary models in transformers: its own layers in place of Linears, filled with graphcore's unpacked weights.

from_pretrained would build the same model, but asks for the accelerate package; this does not.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphcore.nn.spec import Int8Order
from graphcore.weights.loader import Loader
from graphcore.weights.matching import SCALE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def unscaled(name: str, loader: Loader) -> Tensor:
    """Return the weight `name`, float32, times or over its scale if it has one beside it."""
    weight = loader.dense(name, torch.float32)
    if name + SCALE not in loader.sources:
        return weight
    source = loader.sources[name + SCALE]
    scale = loader.dense(name + SCALE, torch.float32)
    return weight
