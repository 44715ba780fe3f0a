"""A LoRA adapter: pairs of low-rank factors that change matrices of a model, W + scale * B A.

Legend: R rank, I input features, O output features.

The readers are peft_adapter.py and gguf_adapter.py. Names are those of the stored model: Hugging Face's modules, or
llama.cpp's tensors. weights/adapters.py finds the decoder's projections that they stand for, and checks shapes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.errors import CheckpointError, UnsupportedError, quoted

MERGE = "merge it into its base model with PEFT's merge_and_unload, and open the result as a model"
"""Advice for adapters that are not supported."""


@dataclass(frozen=True)
class LowRankPair:
    """The factors of one matrix of the stored model.

    Attributes:
        module: name of the matrix without ".weight", such as "model.layers.0.self_attn.q_proj" or "blk.0.attn_q".
        a: description of A, [R, I].
        b: description of B, [O, R].
        scale: factor of the product B A.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    scale: float

    @property
    def rank(self) -> int:
        """Rank R of the product."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An opened adapter; its tensors are not read yet.

    Attributes:
        source: path as the user gave it, for messages.
        layout: whose names the pairs have, "hf" or "gguf".
        architecture: general.architecture of a GGUF file; empty for PEFT's adapters, which do not state it.
        pairs: factors of each matrix, in the order of the file.
        files: identity of each file when its header was read, by path.
        weight: factor that the user sets for the whole adapter.
    """

    source: str
    layout: str
    architecture: str
    pairs: tuple[LowRankPair, ...]
    files: Mapping[Path, FileIdentity]
    weight: float = 1.0


def paired(
    source: str, factors: Iterable[tuple[str, str, TensorInfo]], scale_of: Mapping[str, float]
) -> tuple[LowRankPair, ...]:
    """Return the pairs that factors make up.

    Args:
        source: name of the adapter, for messages.
        factors: module, "A" or "B", and description of each factor.
        scale_of: scale of each module's product.

    Raises:
        CheckpointError: a module has one factor only, or twice the same, or factors that do not fit each other.
    """
    found: dict[str, dict[str, TensorInfo]] = {}
    for module, which, info in factors:
        if found.setdefault(module, {}).setdefault(which, info) is not info:
            raise CheckpointError(f"{source}: has two factors {which} of {quoted(module)}; save the adapter again")
    for module, pair in found.items():
        if len(pair) == 1:
            (which,) = pair
            missing = {"A": "B", "B": "A"}[which]
            raise CheckpointError(
                f"{source}: {quoted(module)} has a factor {which} and no {missing}; the file is incomplete, fetch it "
                "again"
            )
        a, b = pair["A"].shape, pair["B"].shape
        if not len(a) == len(b) == 2 or a[0] != b[1] or 0 in (*a, *b):
            raise CheckpointError(
                f"{source}: the factors of {quoted(module)} do not fit: A is {list(a)}, B is {list(b)}, and they must "
                "be [rank, inputs] and [outputs, rank]"
            )
    if not found:
        raise CheckpointError(f"{source}: holds no LoRA factors; check the path, or save the adapter again")
    return tuple(LowRankPair(name, pair["A"], pair["B"], scale_of[name]) for name, pair in found.items())


def refuse_experts(source: str, module: str) -> None:
    """Check that a module of an adapter is not part of the experts of a mixture.

    Raises:
        UnsupportedError: the module is a projection of experts.
    """
    if "experts" in module.split(".") or "_exps" in module:
        raise UnsupportedError(f"{source}: changes experts ({quoted(module)}), which adapters here cannot; {MERGE}")
