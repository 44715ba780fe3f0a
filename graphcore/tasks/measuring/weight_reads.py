"""The bytes of weights that a decode step reads: packed bytes where they are packed, and only the rows in use."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from graphcore.engine.fallback.runner import TransformersRunner
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.nn.decoder import Decoder, Embedding, Table
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import formats_of


def runner_step_nbytes(runner: ModelRunner, batch: int) -> int:
    """Return the bytes of weights that a decode step of `batch` sequences reads: each program reads them for its rows.

    A transformers model reads one row of each table for each sequence, and everything else whole, all experts included.
    """
    if isinstance(runner, ProgramRunner):
        return sum(step_nbytes(runner.builder.decoder, rows) for rows in runner.programs.rows_of_step(batch))
    assert isinstance(runner, TransformersRunner), "there are two kinds of runners"
    model, weights = runner.skeleton.model, runner.skeleton.weights()
    tables = {name for name in weights if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)}
    return sum(batch * weight[0].nbytes if name in tables else weight.nbytes for name, weight in weights.items())


def step_nbytes(decoder: Decoder, batch: int) -> int:
    """Return the bytes of weights that a decode step reads; repeated reads from a processor's cache count once.

    The step reads one row of the embedding table and of learned positions for each sequence; a head that is tied to the
    table reads it whole. It reads the experts that each sequence's token is routed to, at most all of a layer;
    tokens of different sequences are assumed to be routed to different experts.
    """
    return sum(_module_nbytes(module, batch) for module in decoder.modules())


def _module_nbytes(module: nn.Module, batch: int) -> int:
    """Return the bytes read of a module's own buffers; for an MoE also those of its experts."""
    match module:
        case Embedding():
            return embedding_nbytes(module, batch)
        case Table():
            return batch * table_row_nbytes(module)
        case MoE():
            parts = [part for part in module.experts.children() if isinstance(part, ExpertLinear)]
            return sum(chosen_nbytes(part, module.top_k * batch) for part in parts)
        case ExpertLinear():
            return 0
    return sum(buffer.nbytes for buffer in module.buffers(recurse=False))


def embedding_nbytes(embedding: Embedding, batch: int) -> int:
    """Return the bytes of one row for each sequence in the table and in learned positions."""
    positions = 0 if embedding.positions is None else embedding.positions[0].nbytes
    return batch * (table_row_nbytes(embedding) + positions)


def table_row_nbytes(table: Table) -> int:
    """Return the bytes of one row of a table."""
    return table.weight.nbytes // (len(table.weight) if table.packing is None else table.packing.rows)


def chosen_nbytes(part: ExpertLinear, choices: int) -> int:
    """Return the bytes of one projection of `choices` distinct experts, or of all experts if there are fewer."""
    used = min(choices, part.experts)
    return used * (part.weight[0].nbytes + (0 if part.bias is None else part.bias[0].nbytes))


def weight_formats(decoder: Decoder, is_tied: bool) -> list[dict[str, str | int]]:
    """Return the formats of all weights in memory with tensors and bytes, those with most bytes first."""
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for name, format_name, size in formats_of(decoder):
        if not (is_tied and name == HEAD):
            tensors[format_name] += 1
            nbytes[format_name] += size
    return [{"format": name, "tensors": tensors[name], "bytes": size} for name, size in nbytes.most_common()]


def prefill_roundings(decoder: Decoder) -> list[str]:
    """Return the different roundings of activations before matrices when many tokens run together.

    A matrix that is then unpacked is multiplied with activations in the compute dtype (kernels/cpu/kernel_packing.py).
    """
    return sorted(set(_roundings(decoder, is_prefill=True)))


def decode_roundings(decoder: Decoder) -> list[str]:
    """Return the different roundings of activations before matrices in a decode step."""
    return sorted(set(_roundings(decoder)))


def _roundings(decoder: Decoder, is_prefill: bool = False) -> Iterator[str]:
    for module in decoder.modules():
        if isinstance(module, Linear) and module.int8_order is not None:
            yield "token"
        elif isinstance(module, Linear | StackedLinear):
            packing = module.packing
            unpacks = is_prefill and not isinstance(module, ExpertLinear)  # experts' kernels take all tokens
            is_packed = isinstance(packing, KernelPacking) and not (unpacks and packing.unpacks(module.rounding))
            yield module.rounding if is_packed else "float"
