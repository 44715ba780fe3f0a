"""Which matrices of a decoder are packed, decided from names, shapes and stored types before any byte is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.encodings import has_tensor_scale
from graphcore.nn.decoder import Decoder, Embedding
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear, Experts
from graphcore.quant import FORMATS
from graphcore.quant.choice import STORED, choose_format
from graphcore.quant.device_packing import DevicePacking
from graphcore.quant.packing import KernelPacking, Packing
from graphcore.quant.packing_choice import choose_packing
from graphcore.weights.matching import EMBEDDING, HEAD


@dataclass(frozen=True)
class PackingPolicy:
    """How weights are to be held.

    Attributes:
        library: of the kernels; None where there are none for the device or no compiler.
        rounding: of activations before packed matrices, as in kernels/packed.py: "float", "wide" or "block".
        format: that dense matrices are packed as; "stored" leaves them dense.
        on_gpu: a GPU multiplies.
        dense_nbytes: bytes that all weights may take unpacked where there are no kernels to multiply them packed.
    """

    library: Path | None
    rounding: str
    format: str = STORED
    on_gpu: bool = False
    dense_nbytes: int = 0


@dataclass(frozen=True)
class WeightPacker:
    """Decides for each matrix of one decoder, on the meta device.

    Attributes:
        sources: stored tensor and folds of each weight.
    """

    sources: Mapping[str, TensorSource]
    checkpoint: Checkpoint
    policy: PackingPolicy

    def pack(self, decoder: Decoder) -> None:
        """Have every matrix be packed whose stored tensor is, or for which the policy names a format."""
        if self.unpacks_once(decoder):
            return
        for prefix, group in decoder.groups():
            for path, module in group.named_modules():
                name = prefix + (f"{path}." if path else "") + "weight"
                match module:
                    case Embedding():
                        self._pack_embedding(module, name)
                    case Linear():
                        self._pack_linear(module, name)
                    case Experts():
                        self._pack_experts(module, name.removesuffix("weight"))
        if is_tied(self.sources) and decoder.embed_tokens.packing is not None:
            decoder.head.lm_head.pack(decoder.embed_tokens.packing, self.policy.rounding)

    def unpacks_once(self, decoder: Decoder) -> bool:
        """Return whether matrices are unpacked at load, instead of for each product: without kernels, if they fit.

        Blocks that round to int8 stay packed: unpacking a block's scale would change their arithmetic.
        """
        if self.policy.library is not None or self.policy.on_gpu or self.policy.format != STORED:
            return False
        if any(isinstance(one, Linear) and one.int8_order is not None for one in decoder.modules()):
            return False
        dense = sum(tensor.nbytes for _, group in decoder.groups() for tensor in group.buffers())
        if is_tied(self.sources):
            dense -= decoder.embed_tokens.weight.nbytes  # counted twice
        return dense <= self.policy.dense_nbytes

    def _pack_embedding(self, embedding: Embedding, name: str) -> None:
        packing = self._packing(name, tuple(embedding.weight.shape))
        if packing is not None:
            embedding.pack(packing)

    def _pack_linear(self, linear: Linear, name: str) -> None:
        packing = self._packing(name, tuple(linear.weight.shape))
        if packing is None or (linear.int8_order is not None and not self._is_stored_packed(name)):
            return
        rounding = self.policy.rounding
        if linear.int8_order is not None:
            rounds_itself = isinstance(packing, KernelPacking | DevicePacking) and rounding != "float"
            rounding = "token" if rounds_itself else "float"
            if not has_tensor_scale(packing.format):
                linear.hold_scale()
        linear.pack(packing, rounding)

    def _pack_experts(self, experts: Experts, prefix: str) -> None:
        """Pack a layer's experts: all of their projections, or none."""
        parts = [(name, part) for name, part in experts.named_children() if isinstance(part, ExpertLinear)]
        chosen = [self._packing(f"{prefix}{name}.weight", tuple(part.weight.shape)) for name, part in parts]
        for (_, part), packing in zip(parts, chosen, strict=True):
            if packing is not None and None not in chosen:
                part.pack(packing, self.policy.rounding)

    def _packing(self, name: str, shape: tuple[int, ...]) -> Packing | None:
        """Return how one matrix, or each of several, is packed; None is dense."""
        source = self.sources[name]
        if self._is_stored_packed(name):
            can_stay = all(fold.works_packed for fold in source.folds)
            chosen = self.checkpoint.tensors[source.name].encoding if can_stay else None
        else:
            chosen = choose_format(name, shape, self.policy.format, is_tied(self.sources))
        if chosen is None or FORMATS[chosen].is_dense:
            return None
        return choose_packing(chosen, shape[-2], shape[-1], self.policy.library, on_gpu=self.policy.on_gpu)

    def _is_stored_packed(self, name: str) -> bool:
        return is_stored_packed(self.checkpoint, self.sources[name])


def is_stored_packed(checkpoint: Checkpoint, source: TensorSource) -> bool:
    """Return whether the stored tensor is in a format of blocks."""
    encoding = checkpoint.tensors[source.name].encoding
    return encoding in FORMATS and not FORMATS[encoding].is_dense


def packing_of(module: nn.Module, name: str) -> Packing | None:
    """Return how the buffer `name` ("mlp.up_proj.weight") of a layer group is packed; None is dense."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    return holder.packing if leaf == "weight" and isinstance(holder, Linear | Embedding | ExpertLinear) else None


def formats_of(decoder: Decoder) -> Iterator[tuple[str, str, int]]:
    """Yield name, format (the dtype's name where it is dense) and bytes of every weight; a tied head's are its own."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            packing = packing_of(group, name)
            dense = str(tensor.dtype).removeprefix("torch.")
            yield prefix + name, packing.format if packing else dense, tensor.nbytes


def is_tied(sources: Mapping[str, TensorSource]) -> bool:
    """Return whether the head reads the embedding's bytes."""
    return HEAD in sources and sources[HEAD] == sources.get(EMBEDDING)
