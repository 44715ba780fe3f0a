"""Which blocks the GPU's own decode kernels can run (graph/device_block.py), and why others cannot.

Knows no kernel: this is asked where nothing of Triton may be there.
"""

import torch

from graphcore.kernels.device_layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.matrix import MOST_COLUMNS, MOST_TOKENS
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.nn.norm import LayerNorm
from graphcore.quant.device_packing import DevicePacking

MOST_HEAD_DIM = 256


def obstacle_of(block: Block, batch: int) -> str | None:
    """Return why a decode step of that many sequences cannot run through the block on a GPU's kernels, or None."""
    if batch > MOST_TOKENS:
        return f"batches of more than {MOST_TOKENS} have no decode kernels, this is {batch}"
    if block.sandwich and isinstance(block.mlp, MoE):
        return "experts between sandwich norms have no decode kernels"
    if block.sandwich and isinstance(block.post_attention_layernorm, LayerNorm):
        return "a LayerNorm behind a sublayer has no decode kernel"
    return _obstacle_of_attention(block) or _obstacle_of_matrices(block)


def first_obstacle(decoder: Decoder, batch: int) -> str | None:
    """Return the obstacle of the first block that has one, or of the head, or None: all of them run."""
    for index, block in enumerate(decoder.layers):
        assert isinstance(block, Block), f"layer {index} is {type(block).__name__}"
        obstacle = obstacle_of(block, batch)
        if obstacle is not None:
            return f"layer {index}: {obstacle}"
    return obstacle_of_head(decoder.head, batch)


def obstacle_of_head(head: Head, batch: int) -> str | None:
    """Return why a decode step's head cannot run on a GPU's kernels, or None."""
    if batch > MOST_TOKENS:
        return f"batches of more than {MOST_TOKENS} have no decode kernels, this is {batch}"
    return _obstacle_of_linear("lm_head", head.lm_head)


def _obstacle_of_attention(block: Block) -> str | None:
    spec = block.self_attn.spec
    if spec.head_dim % 2 or spec.head_dim > MOST_HEAD_DIM:
        return f"heads of {spec.head_dim} have no decode kernel, only even ones up to {MOST_HEAD_DIM}"
    if spec.qk_norm is not None and spec.qk_norm.kind != "rms":
        return "heads that a LayerNorm normalises have no decode kernel"
    return None


def _obstacle_of_matrices(block: Block) -> str | None:
    for name, module in block.named_modules():
        obstacle = _obstacle_of_linear(name, module) if isinstance(module, Linear | ExpertLinear) else None
        if obstacle is not None:
            return obstacle
    return None


def _obstacle_of_linear(name: str, linear: Linear | ExpertLinear) -> str | None:
    """Return why no decode kernel multiplies with the matrix `name`, or None."""
    packing = linear.packing
    if packing is not None and not (isinstance(packing, DevicePacking) and packing.format in DEVICE_LAYOUTS):
        return f"no GPU kernel multiplies {packing.format}, the format of {name}"
    if isinstance(linear, ExpertLinear):
        return None
    if linear.int8_order is not None and linear.dtype is torch.float32:
        return "float32 keeps to the reference's order of operations where activations are int8"
    if max(linear.inputs, linear.outputs) > MOST_COLUMNS and name != "lm_head":
        return f"rows of {max(linear.inputs, linear.outputs)}, the norm kernel holds {MOST_COLUMNS}"
    return None
