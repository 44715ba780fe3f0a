"""A checkpoint with adapters: the factors of packed projections, and dense weights with the factors' products added.

    layers.0.mlp.up_proj.lora_A.weight   [R, I]   from the A's of all adapters
    layers.0.mlp.up_proj.lora_B.weight   [O, R]   from their scaled B's
    layers.0.mlp.up_proj.weight+lora     [O, I]   W + B A in float32, where W is dense

So resident and streamed weights are made in one way, from the files of the model and of the adapters together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.adapter import Adapter
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.nn.decoder import Decoder
from graphcore.weights.adapters import PlacedPair, decoder_linear, joined_factors
from graphcore.weights.loader import Loader

MERGED = "+lora"  # end of the name of a weight with the factors' product added
FACTORS = (".lora_A.weight", ".lora_B.weight")  # ends of the factors' names, in place of ".weight"
FLOAT32_NBYTES = 4


class AdaptedCheckpoint(Checkpoint):
    """A view of another checkpoint with the tensors that adapters add, in the decoder's form.

    Args:
        stored: loader of the weights without adapters.
        merged: factors of weights that are merged, by the weights' names.
        beside: factors that lie beside a weight, by the weights' names.
        shapes: shape [O, I] of these weights, by name.

    Attributes:
        adapters: adapters that change a weight.
    """

    def __init__(
        self,
        stored: Loader,
        merged: Mapping[str, Sequence[PlacedPair]],
        beside: Mapping[str, Sequence[PlacedPair]],
        shapes: Mapping[str, tuple[int, int]],
    ) -> None:
        under = stored.checkpoint
        self.source, self.layout, self.notes, self.faults = under.source, under.layout, under.notes, under.faults
        self._stored = stored
        self._merged = {f"{weight}{MERGED}": (weight, tuple(pairs)) for weight, pairs in merged.items()}
        self._factors = {
            weight.removesuffix(".weight") + end: (end, tuple(pairs))
            for weight, pairs in beside.items()
            for end in FACTORS
        }
        added = {name: shapes[weight] for name, (weight, _) in self._merged.items()}
        for weight, pairs in beside.items():
            (outputs, inputs), rank = shapes[weight], sum(one.pair.rank for one in pairs)
            a, b = (weight.removesuffix(".weight") + end for end in FACTORS)
            added |= {a: (rank, inputs), b: (outputs, rank)}
        self.tensors = MappingProxyType(
            {**under.tensors, **{name: _info(name, shape) for name, shape in added.items()}}
        )
        of_pairs = {id(one.adapter): one.adapter for pairs in (*merged.values(), *beside.values()) for one in pairs}
        self.adapters = tuple(of_pairs.values())
        files = {path: identity for adapter in self.adapters for path, identity in adapter.files.items()}
        self.files = MappingProxyType({**under.files, **files})

    @property
    def note(self) -> str:
        """Line about the adapters and the matrices that they change; empty if they change none."""
        named = ", ".join(f"{one.source} (weight {one.weight:g})" for one in self.adapters)
        counts = (len(self._merged), "merged into {} dense"), (len(self._factors) // 2, "beside {} packed")
        how = " and ".join(text.format(count) for count, text in counts if count)
        return f"adapter {named}: {how} matrices" if self.adapters else ""

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a tensor's bytes: those of the stored weight, if there is one, and of the factors."""
        if name in self._factors:
            end, pairs = self._factors[name]
            return tuple((one.pair.a if end == FACTORS[0] else one.pair.b).span() for one in pairs)
        if name not in self._merged:
            return self._stored.checkpoint.spans(name)
        weight, pairs = self._merged[name]
        factors = (info.span() for one in pairs for info in (one.pair.a, one.pair.b))
        return (*self._stored.checkpoint.spans(self._stored.sources[weight].name), *factors)

    def matrix_spans(self, name: str, index: int) -> tuple[FileSpan, ...]:
        """Return the spans of one matrix of a tensor [X, R, C], which no adapter changes."""
        return self._stored.checkpoint.matrix_spans(name, index)

    def has_row_runs(self, name: str) -> bool:
        """Return whether each of the tensor's rows is a run of bytes; an adapter's tensors are made of several."""
        is_plain = name not in self._merged and name not in self._factors
        return is_plain and self._stored.checkpoint.has_row_runs(name)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a stored tensor is a bias that changes nothing."""
        return name in self._stored.checkpoint.tensors and self._stored.checkpoint.is_zero_bias(name)

    def assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor from its spans' bytes; those that adapters add are float32."""
        if name in self._factors:
            end, pairs = self._factors[name]
            if end == FACTORS[0]:
                return torch.cat([one.a(raw) for one, raw in zip(pairs, parts, strict=True)])
            return torch.cat([one.b(raw) for one, raw in zip(pairs, parts, strict=True)], dim=1)
        if name not in self._merged:
            return self._stored.checkpoint.assemble(name, parts)
        weight, pairs = self._merged[name]
        under, source = self._stored.checkpoint, self._stored.sources[weight].name
        num_spans = len(under.spans(source))
        dense = self._stored.folded(weight, under.assemble(source, parts[:num_spans]), torch.float32).float()
        a, b = joined_factors(pairs, parts[num_spans:])
        return torch.addmm(dense, b, a)


def adapter_facts(checkpoint: Checkpoint, files: Sequence[Path]) -> list[list[object]]:
    """Return, for each adapter, the indices of its files, its weight, and the scale of each module.

    Args:
        files: files of the adapters, and maybe of the model, in the order in which they are hashed.
    """
    return [
        [[files.index(path) for path in one.files], one.weight, {pair.module: pair.scale for pair in one.pairs}]
        for one in adapters_of(checkpoint)
    ]


def adapters_of(checkpoint: Checkpoint) -> tuple[Adapter, ...]:
    """Return the adapters of a checkpoint that change a weight, in the order of the settings."""
    return checkpoint.adapters if isinstance(checkpoint, AdaptedCheckpoint) else ()


def _info(name: str, shape: tuple[int, int]) -> TensorInfo:
    """Return the description of an added tensor; it has no file, because it is made of several tensors."""
    return TensorInfo(name, shape, "f32", None, 0, shape[0] * shape[1] * FLOAT32_NBYTES)


def with_adapters(loader: Loader, decoder: Decoder, placed: Mapping[str, Sequence[PlacedPair]]) -> Loader:
    """Return a loader of the decoder's weights with adapters; the decoder gets factors beside its packed projections.

    Args:
        loader: loader of the weights without adapters.
        decoder: decoder on the meta device, whose packed projections are known.
        placed: factors of each weight, from `place_pairs`.
    """
    linears = {weight: decoder_linear(decoder, weight) for weight in placed}
    beside = {weight: pairs for weight, pairs in placed.items() if linears[weight].packing is not None}
    merged = {weight: pairs for weight, pairs in placed.items() if weight not in beside}
    ranks: dict[int, dict[str, int]] = {}
    for weight, pairs in beside.items():
        _, layer, name = weight.removesuffix(".weight").split(".", 2)
        ranks.setdefault(int(layer), {})[name] = sum(one.pair.rank for one in pairs)
    with torch.device("meta"):
        decoder.add_low_rank(ranks)
    shapes = {weight: (linear.outputs, linear.inputs) for weight, linear in linears.items()}
    sources = {**loader.sources, **{weight: TensorSource(f"{weight}{MERGED}") for weight in merged}}
    names = [weight.removesuffix(".weight") + end for weight in beside for end in FACTORS]
    sources |= {name: TensorSource(name) for name in names}
    return replace(
        loader, checkpoint=AdaptedCheckpoint(loader, merged, beside, shapes), sources=sources, beneath=loader
    )
