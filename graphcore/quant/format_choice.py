"""Chooses the format of each weight when a model is packed, from its name, its shape and the format asked for.

    matrices and experts                     as asked; where a row is no multiple of the block, `narrower`
    the head, and an embedding it is tied to q6_k; q8_0 for q8_0 and mxfp4; dense types as asked
    an untied embedding                      as asked; q4_k for ternary formats, which are too coarse for tables
    norms, biases, routers, positions,       never packed
    short convolutions, shared experts' gates,
    low-rank factors
    rows that are no multiple of 32          never packed

These are the rules of llama.cpp's plain file types (Q4_0, Q8_0, Q4_K_S without its bonus layers, ...), so a file packed
here is laid out as one of `llama-quantize` is. Source: llama.cpp, src/llama-quant.cpp: tensor_allows_quantization,
tensor_type_fallback, llama_tensor_get_type_impl.
"""

from collections.abc import Sequence

from graphcore.errors import UnsupportedError
from graphcore.quant.format import Format
from graphcore.quant.registry import FORMATS
from graphcore.registry import lookup

STORED = "stored"
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
TABLE_OF_TERNARY = "q4_k"  # format of an embedding where matrices are ternary
NEVER_PACKED = (
    "norm.",
    "router.",
    "positions",
    "conv1d.",
    "shared_expert_gate.",
    ".lora_",
)  # parts of the names of weights that stay as stored


def choose_format(name: str, shape: Sequence[int], asked: str, is_tied: bool) -> str | None:
    """Return the name of the format that a weight is packed as, or None if it stays as it is stored.

    Args:
        name: name of the decoder's buffer, such as "layers.3.mlp.up_proj.weight".
        shape: torch order.
        asked: a packable format's name, or "stored".
        is_tied: True if the head reads the embedding's weight.

    Raises:
        UnsupportedError: `asked` is unknown, or graphcore does not pack it.
    """
    if asked == STORED:
        return None
    packed_as = packable(asked)
    if len(shape) < 2 or not name.endswith("weight") or any(part in name for part in NEVER_PACKED):
        return None
    wanted: str | None = asked
    if name == HEAD or (name == EMBEDDING and is_tied):
        wanted = packed_as.head
    elif name == EMBEDDING and packed_as.is_ternary:
        wanted = TABLE_OF_TERNARY
    while wanted is not None and shape[-1] % FORMATS[wanted].block_elements:
        wanted = FORMATS[wanted].narrower
    return wanted


def packable(name: str) -> Format:
    """Return the format of this name if dense weights can be packed as it.

    Raises:
        UnsupportedError: the name is unknown or the format is only read; the message lists the packable ones.
    """
    return lookup("packing format", name, {known: FORMATS[known] for known in packable_names()}, UnsupportedError)


def packable_names() -> tuple[str, ...]:
    """Return the names of the formats that dense weights can be packed as."""
    return tuple(sorted(name for name, known in FORMATS.items() if known.can_quantize))
