"""Which matrices of a decoder stay packed, decided from names, shapes and stored types before any byte is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.nn.decoder import Decoder, Embedding
from graphcore.nn.linear import Linear
from graphcore.quant import FORMATS
from graphcore.quant.packing import Packing, choose_packing
from graphcore.weights.matching import EMBEDDING, HEAD


@dataclass(frozen=True)
class PackingPolicy:
    """How weights are to be held.

    Attributes:
        library: of the kernels; None where there are none for the device or no compiler.
        rounding: of activations before packed matrices, as in kernels/packed.py: "float", "wide" or "block".
    """

    library: Path | None
    rounding: str


def packing_of(module: nn.Module, name: str) -> Packing | None:
    """Return how the buffer `name` ("mlp.up_proj.weight") of a layer group is packed; None is dense."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    return holder.packing if leaf == "weight" and isinstance(holder, Linear | Embedding) else None


def pack_decoder(
    decoder: Decoder, sources: Mapping[str, TensorSource], checkpoint: Checkpoint, policy: PackingPolicy
) -> None:
    """Have every matrix whose stored tensor is packed stay so; the decoder is on the meta device."""
    for prefix, group in decoder.groups():
        for path, holder in group.named_modules():
            name = prefix + (f"{path}." if path else "") + "weight"
            if not isinstance(holder, Linear | Embedding):
                continue
            encoding = checkpoint.tensors[sources[name].name].encoding
            if encoding not in FORMATS or FORMATS[encoding].block_elements == 1:
                continue
            rows, columns = holder.weight.shape
            packing = choose_packing(encoding, rows, columns, policy.library)
            if packing is None:
                continue
            if isinstance(holder, Linear):
                holder.pack(packing, policy.rounding)
            else:
                holder.pack(packing)


def is_tied(sources: Mapping[str, TensorSource]) -> bool:
    """Return whether the head reads the embedding's bytes."""
    return sources[HEAD] == sources[EMBEDDING]
