"""Computes the memory of native decode programs before they are allocated.

The code that records real programs records one over tensors on torch's meta device, which have no memory. So the bytes
are right whatever the model's operations are.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from graphcore.graph.cpu.native_decode import NativeStep, Recorder
from graphcore.graph.state import StepState
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.decoder import Decoder
from graphcore.weights.groups import LayerGroup

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class ProgramSizes:
    """The sizes and settings that determine the memory of decode programs.

    Attributes:
        widths: number of rows of each program.
        sequences: number of rows of the caches.
        kv_dtype: storage type of the KV cache.
        chunk: largest number of tokens of a sequence in one pass.
        backend: C++ kernels that run the program.
        fetches_experts: True if experts may be fetched between a layer's instructions.
        layer_groups: layer groups, all of which may stream; none if all weights of all layers are resident.
    """

    widths: Sequence[int]
    sequences: int
    kv_dtype: KVTypes
    chunk: int
    backend: NativeBackend
    fetches_experts: bool
    layer_groups: tuple[LayerGroup, ...] = ()


class _Nowhere:
    """A stand-in for the expert fetcher of programs that never run."""

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Raise: a program without memory cannot run."""
        raise AssertionError(f"layer {layer} asks for {len(experts)} experts in a program that only has sizes")


def programs_nbytes(decoder: Decoder, sizes: ProgramSizes, context: int) -> int:
    """Return the bytes that greedy decode programs allocate: inputs, buffers, logits, and each thread's scratch.

    Args:
        decoder: decoder on the meta device.
        context: tokens of KV cache for each sequence.
    """
    spec, heads = decoder.spec, [(range(decoder.spec.vocab), decoder.head)] if decoder.has_ends else []
    tables = decoder.rope_tables(1, CPU)
    with META:
        kept = CacheSizes(sizes.sequences, context, sizes.kv_dtype, sizes.chunk, tokens=context)  # any size will do
        caches = allocate_cache(spec, kept, META)
        recorder = Recorder(
            decoder,
            sizes.layer_groups or [LayerGroup(range(len(spec.blocks)))],
            heads,
            caches,
            tables,
            sizes.backend,
            streamed=range(1, len(sizes.layer_groups) + 1),
            fetcher=_Nowhere() if sizes.fetches_experts else None,
        )
        return sum(_program_nbytes(recorder, rows) for rows in sizes.widths)


def _program_nbytes(recorder: Recorder, rows: int) -> int:
    state = StepState.empty(rows, 1, CPU)  # not on the meta device, whose arange would import sympy first
    inputs = (state.token_ids, *state.span, state.chosen, state.sequences)
    step = recorder.record(state, is_greedy=True)[-1]
    assert isinstance(step, NativeStep), f"{type(step).__name__} is no part of a native program"
    return sum(one.nbytes for one in inputs) + step.program.nbytes + step.program.scratch_nbytes
