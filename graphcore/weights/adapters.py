"""Adapters put on a decoder: which projections they change, and how.

    dense weight     W + sum of scale * B A, in float32, rounded once when it is loaded or streamed (merged)
    packed weight    stays as it is; y = W x + B (A x) with factors beside it, nn/linear.py

All adapters of a projection become one pair of factors: their A's one below the other, their scaled B's side by side.
Factors are brought into the decoder's form by the folds of the layout that their names are of, whatever layout the
model's own files have.

Legend: R rank, I input features, O output features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.arch.architecture import Architecture
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import Fold, GroupHeads, PickParts, PickRows, SplitPairs, Transpose
from graphcore.checkpoint.adapter import MERGE, Adapter, LowRankPair
from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES, as_stored
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.quant import FORMATS
from graphcore.weights.extra_tensors import is_of_other_part, layer_of, listed
from graphcore.weights.matching import HEAD

Targets = Mapping[str, Sequence[tuple[str, tuple[Fold, ...]]]]
"""Weights of the decoder that a stored matrix becomes, each with its folds, by the matrix's name without ".weight"."""


@dataclass(frozen=True)
class PlacedPair:
    """One adapter's factors of one projection, with the folds from their stored form to the decoder's.

    Attributes:
        adapter: adapter that the factors are from.
        pair: description of the stored factors.
        folds: folds of the matrix that the factors change.
    """

    adapter: Adapter
    pair: LowRankPair
    folds: tuple[Fold, ...]

    def a(self, raw: Tensor) -> Tensor:
        """Return A, [R, I] float32, from its stored bytes, uint8."""
        factor = self._read(self.pair.a, raw)
        for fold in self.folds:
            factor = fold.apply(factor) if _moves_columns(fold) else factor
        return factor

    def b(self, raw: Tensor) -> Tensor:
        """Return B times all scales, [O, R] float32, from its stored bytes, uint8."""
        scale = self.pair.scale * self.adapter.weight
        factor = self._read(self.pair.b, raw) * scale
        if not factor.isfinite().all():
            raise CheckpointError(
                f"{self.adapter.source}: {quoted(self.pair.module)} times {scale:g} is beyond float32; check "
                "lora_alpha and the adapter's weight"
            )
        for fold in self.folds:
            factor = fold.apply(factor) if _moves_rows(fold) else factor
        return factor

    def _read(self, info: TensorInfo, raw: Tensor) -> Tensor:
        if info.encoding in DENSE_DTYPES:
            factor = as_stored(raw, info.encoding, info.shape).float()
        else:
            factor = FORMATS[info.encoding].dequantize(raw, info.shape)
        if not factor.isfinite().all():
            raise CheckpointError(
                f"{info.file}: tensor {quoted(info.name)} holds NaN or infinity; save the adapter again"
            )
        return factor


def place_pairs(
    architecture: Architecture,
    config: ModelConfig,
    decoder: Decoder,
    adapters: Sequence[Adapter],
    stored_layers: int,
) -> dict[str, list[PlacedPair]]:
    """Return the factors of each weight that adapters change, by the weight's name, in the order of the adapters.

    Args:
        decoder: decoder on the meta device.
        stored_layers: number of layers in the checkpoint; factors of layers that do not run are left out, and those of
            parts that text generation does not use.

    Raises:
        UnsupportedError: an adapter is of another architecture, or changes what adapters cannot change.
        CheckpointError: an adapter changes a matrix that the model does not have, or has another shape.
    """
    placed: dict[str, list[PlacedPair]] = {}
    for adapter in adapters:
        if adapter.architecture and adapter.architecture not in architecture.gguf_names:
            raise UnsupportedError(
                f"{adapter.source}: is an adapter of a {quoted(adapter.architecture)} model, and this one is "
                f"{config.model_type} ({', '.join(architecture.gguf_names)}); choose the adapter's base model"
            )
        targets = _targets(architecture, config, decoder, adapter.layout)
        for pair in adapter.pairs:
            is_cut = layer_of(pair.module) in range(config.num_hidden_layers, stored_layers)
            if is_cut or _is_unused(architecture, config, pair, stored_layers):
                continue
            if pair.module not in targets:
                raise _no_target(adapter, pair.module, config.model_type)
            _check_shapes(adapter, pair, [decoder_linear(decoder, name) for name, _ in targets[pair.module]])
            for name, folds in targets[pair.module]:
                _check_target(adapter, pair.module, name, decoder_linear(decoder, name), folds)
                if any(one.adapter is adapter for one in placed.get(name, ())):
                    raise CheckpointError(
                        f"{adapter.source}: changes {quoted(pair.module)} twice, under two names; save it again"
                    )
                placed.setdefault(name, []).append(PlacedPair(adapter, pair, folds))
    return placed


def notes_on_unused_pairs(
    architecture: Architecture, config: ModelConfig, adapters: Sequence[Adapter], stored_layers: int
) -> Iterator[str]:
    """Yield a note for each adapter that also changes parts of the model that text generation does not use."""
    for adapter in adapters:
        unused = [pair.module for pair in adapter.pairs if _is_unused(architecture, config, pair, stored_layers)]
        if unused:
            yield (
                f"left out of adapter {adapter.source}: {len(unused)} of {len(adapter.pairs)} matrices, which text "
                f"generation does not use: {listed(sorted(unused))}"
            )


def _is_unused(architecture: Architecture, config: ModelConfig, pair: LowRankPair, stored_layers: int) -> bool:
    """Return whether factors are of a part that is left out of checkpoints, too: vision, multi-token prediction."""
    predicts = layer_of(pair.module) in range(stored_layers, stored_layers + config.num_predicting_layers)
    return predicts or is_of_other_part(architecture, config, f"{pair.module}.weight")


def decoder_linear(decoder: Decoder, weight: str) -> Linear:
    """Return the projection whose weight has this name, such as "layers.0.self_attn.q_proj.weight"."""
    module = weight.removesuffix(".weight")
    found = decoder.get_submodule(f"head.{module}" if weight == HEAD else module)
    assert isinstance(found, Linear), f"{weight} is no projection's"
    return found


def _targets(architecture: Architecture, config: ModelConfig, decoder: Decoder, layout: str) -> Targets:
    """Return the weights that each stored matrix becomes."""
    found: dict[str, list[tuple[str, tuple[Fold, ...]]]] = {}
    for prefix, group in decoder.groups():
        for path, module in group.named_modules():
            if not isinstance(module, Linear):
                continue
            name = f"{prefix}{path}.weight"
            for stored, folds in dict(_stored_forms(architecture, config, name, layout)).items():
                found.setdefault(stored, []).append((name, folds))
    return found


def _stored_forms(
    architecture: Architecture, config: ModelConfig, name: str, layout: str
) -> Iterator[tuple[str, tuple[Fold, ...]]]:
    """Yield the names without ".weight" under which files of a layout may have a weight's matrix, and the folds."""
    is_hf = layout == "hf"
    sources = (architecture.hf_sources if is_hf else architecture.gguf_sources)(name, config)
    prefixes = dict.fromkeys((*architecture.hf_prefixes, "model.", "", *LANGUAGE_MODEL)) if is_hf else ("",)
    for source in sources:
        if source.name.endswith(".weight"):
            for prefix in prefixes:
                yield prefix + source.name.removesuffix(".weight"), source.folds


LANGUAGE_MODEL = ("model.language_model.", "language_model.model.", "language_model.")
"""Prefixes of a language model inside a multimodal one."""


def _no_target(adapter: Adapter, module: str, model_type: str) -> CheckpointError:
    """Return the error for a module that is no projection of the decoder."""
    if module.endswith(("embed_tokens", "wte", "wpe", "token_embd", "position_embd")):
        return UnsupportedError(
            f"{adapter.source}: changes the embedding ({quoted(module)}), which adapters here cannot; {MERGE}"
        )
    return CheckpointError(
        f"{adapter.source}: changes {quoted(module)}, which this {model_type} model does not have; choose the "
        "adapter's base model"
    )


def _check_target(adapter: Adapter, module: str, name: str, linear: Linear, folds: Sequence[Fold]) -> None:
    """Refuse factors of a projection that adapters cannot change."""
    where = f"{adapter.source}: changes {quoted(module)}"
    if name == HEAD:
        raise UnsupportedError(f"{where}, the head, which adapters here cannot; {MERGE}")
    if linear.int8_order is not None:
        raise UnsupportedError(f"{where}, which rounds its input to int8 (BitNet); adapters of it are not supported")
    is_known = all(isinstance(fold, Transpose) or _moves_rows(fold) or _moves_columns(fold) for fold in folds)
    if not is_known or not name.startswith("layers."):
        raise UnsupportedError(f"{where}, whose form here has no low-rank factors; {MERGE}")


def _check_shapes(adapter: Adapter, pair: LowRankPair, linears: Sequence[Linear]) -> None:
    inputs, outputs = linears[0].inputs, sum(linear.outputs for linear in linears)
    if (pair.b.shape[0], pair.a.shape[1]) != (outputs, inputs):
        raise CheckpointError(
            f"{adapter.source}: the product of B {list(pair.b.shape)} and A {list(pair.a.shape)} of "
            f"{quoted(pair.module)} does not fit the model's matrix [{outputs}, {inputs}]; choose the adapter's base "
            "model"
        )


def _moves_columns(fold: Fold) -> bool:
    return isinstance(fold, GroupHeads) and fold.of_columns


def _moves_rows(fold: Fold) -> bool:
    if isinstance(fold, PickRows):
        return fold.axis == 0
    return isinstance(fold, PickParts | SplitPairs) or (isinstance(fold, GroupHeads) and not fold.of_columns)


def joined_factors(pairs: Sequence[PlacedPair], parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors of all adapters of a projection together: A [R, I] and B [O, R], float32.

    Args:
        parts: stored bytes of each pair's A and B, in turn.
    """
    both = list(zip(pairs, parts[::2], parts[1::2], strict=True))
    return torch.cat([one.a(raw) for one, raw, _ in both]), torch.cat([one.b(raw) for one, _, raw in both], dim=1)
