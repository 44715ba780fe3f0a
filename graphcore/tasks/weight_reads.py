"""What a decode step reads of the weights, in bytes: packed bytes where they are packed, and only rows in use."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from graphcore.nn.decoder import Decoder, Embedding
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.quant.packing import KernelPacking
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import formats_of


def step_nbytes(decoder: Decoder, batch: int) -> int:
    """Return the bytes of weights that a decode step reads once, whatever it reads twice from a cache.

    Of the embedding table and of learned positions it reads a row for each sequence; a head that is tied to the table
    reads it whole. Of a layer's experts it reads those that a token chooses, at most all of them; that several
    sequences may choose the same is not counted on.
    """
    return sum(_module_nbytes(module, batch) for module in decoder.modules())


def _module_nbytes(module: nn.Module, batch: int) -> int:
    """Return the bytes read of the buffers that are the module's own; an MoE answers for its experts."""
    match module:
        case Embedding():
            return embedding_nbytes(module, batch)
        case MoE():
            parts = [part for part in module.experts.children() if isinstance(part, ExpertLinear)]
            return sum(chosen_nbytes(part, module.top_k * batch) for part in parts)
        case ExpertLinear():
            return 0
    return sum(buffer.nbytes for buffer in module.buffers(recurse=False))


def embedding_nbytes(embedding: Embedding, batch: int) -> int:
    """Return the bytes of a row for each sequence, of the table and of learned positions."""
    packing, table = embedding.packing, embedding.weight
    row = table.nbytes // (len(table) if packing is None else packing.rows)
    positions = 0 if embedding.positions is None else embedding.positions[0].nbytes
    return batch * (row + positions)


def chosen_nbytes(part: ExpertLinear, choices: int) -> int:
    """Return the bytes of one projection of as many experts as there are choices, at most of all."""
    used = min(choices, len(part.bias))
    return used * (part.weight[0].nbytes + part.bias[0].nbytes)


def weight_formats(decoder: Decoder, is_tied: bool) -> list[dict[str, str | int]]:
    """Return format, tensors and bytes of all weights in memory, those with most bytes first."""
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for name, format_name, size in formats_of(decoder):
        if not (is_tied and name == HEAD):
            tensors[format_name] += 1
            nbytes[format_name] += size
    return [{"format": name, "tensors": tensors[name], "bytes": size} for name, size in nbytes.most_common()]


def prefill_roundings(decoder: Decoder) -> list[str]:
    """Return how activations are rounded before matrices when many tokens run together, each way once.

    Float and 16-bit activations then meet the unpacked matrix in the compute dtype (kernels/packed.py).
    """
    return sorted({"float" if rounding == "wide" else rounding for rounding in _roundings(decoder)})


def decode_roundings(decoder: Decoder) -> list[str]:
    """Return how activations are rounded before matrices in a decode step, each way once."""
    return sorted(set(_roundings(decoder)))


def _roundings(decoder: Decoder) -> Iterator[str]:
    for module in decoder.modules():
        if isinstance(module, Linear) and module.int8_order is not None:
            yield "token"
        elif isinstance(module, Linear | ExpertLinear):
            yield module.rounding if isinstance(module.packing, KernelPacking) else "float"
