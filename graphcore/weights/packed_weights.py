"""Selection of the matrices to pack, from names, shapes and encodings, before any tensor is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.kernels.backend import Backend
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.packing import Packing
from graphcore.nn.decoder import Decoder, Table
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.nn.moe import ExpertLinear, Experts
from graphcore.quant import FORMATS
from graphcore.quant.format_choice import STORED, choose_format
from graphcore.quant.registry import has_tensor_scale
from graphcore.weights.matching import EMBEDDING, HEAD


@dataclass(frozen=True)
class PackingPolicy:
    """The settings for how weights are held in memory.

    Attributes:
        backend: kernels that multiply the weights.
        rounding: rounding of activations before packed matrices: "float", "wide" or "block" (kernel_packing.py).
        format: format that dense matrices are packed in; "stored" leaves them dense.
        dense_nbytes: bytes that all weights may take unpacked if there are no kernels for packed products.
        repacks: True to pack matrices that are stored packed, too.
    """

    backend: Backend
    rounding: str
    format: str = STORED
    dense_nbytes: int = 0
    repacks: bool = False


@dataclass(frozen=True)
class WeightPacker:
    """A packer that sets whether and how each matrix of a decoder is packed; the decoder is on the meta device.

    Attributes:
        sources: stored tensor and folds of a weight, by name.
    """

    sources: Mapping[str, TensorSource]
    checkpoint: Checkpoint
    policy: PackingPolicy

    def pack(self, decoder: Decoder) -> None:
        """Set the packing of every matrix that is stored packed, or for which the policy names a format."""
        if self.unpacks_once(decoder):
            return
        for prefix, group in decoder.groups():
            for path, module in group.named_modules():
                name = prefix + (f"{path}." if path else "") + "weight"
                match module:
                    case Table():
                        self._pack_table(module, name)
                    case Linear():
                        self._pack_linear(module, name)
                    case HeadLinear():
                        self._pack_heads(module, name)
                    case Experts():
                        self._pack_experts(module, name.removesuffix("weight"))
        if is_tied(self.sources) and decoder.embed_tokens.packing is not None:
            decoder.head.lm_head.pack(decoder.embed_tokens.packing, self.policy.rounding)

    def unpacks_once(self, decoder: Decoder) -> bool:
        """Return whether matrices are unpacked once at load, which is done if there are no kernels and they fit.

        Otherwise they would be unpacked for each product. Models whose blocks round activations to int8 stay packed,
        because unpacking would change their arithmetic.
        """
        if self.policy.backend.has_kernels or self.policy.format != STORED:
            return False
        if any(isinstance(one, Linear) and one.int8_order is not None for one in decoder.modules()):
            return False
        dense = sum(tensor.nbytes for _, group in decoder.groups() for tensor in group.buffers())
        if is_tied(self.sources):
            dense -= decoder.embed_tokens.weight.nbytes  # counted twice
        return dense <= self.policy.dense_nbytes

    def _pack_table(self, table: Table, name: str) -> None:
        packing = self._packing(name, tuple(table.weight.shape))
        if packing is not None:
            table.pack(packing)

    def _pack_linear(self, linear: Linear, name: str) -> None:
        packing = self._packing(name, tuple(linear.weight.shape), may_repack=linear.int8_order is None)
        if packing is None or (linear.int8_order is not None and not self._is_stored_packed(name)):
            return
        rounding = self.policy.rounding
        if linear.int8_order is not None:
            rounds_itself = isinstance(packing, KernelPacking | DevicePacking) and rounding != "float"
            rounding = "token" if rounds_itself else "float"
            if not has_tensor_scale(packing.format):
                linear.hold_scale()
        linear.pack(packing, rounding)

    def _pack_heads(self, heads: HeadLinear, name: str) -> None:
        packing = self._packing(name, tuple(heads.weight.shape))
        if packing is not None:
            heads.pack(packing, self.policy.rounding)

    def _pack_experts(self, experts: Experts, prefix: str) -> None:
        """Set the packing of a layer's experts: of all projections, or of none."""
        parts = [(name, part) for name, part in experts.named_children() if isinstance(part, ExpertLinear)]
        chosen = [self._packing(f"{prefix}{name}.weight", tuple(part.weight.shape)) for name, part in parts]
        for (_, part), packing in zip(parts, chosen, strict=True):
            if packing is not None and None not in chosen:
                part.pack(packing, self.policy.rounding)

    def _packing(self, name: str, shape: tuple[int, ...], may_repack: bool = True) -> Packing | None:
        """Return the packing of one matrix, or of each of several experts; None if it stays dense."""
        source = self.sources[name]
        if self._is_stored_packed(name) and not (self.policy.repacks and may_repack):
            can_stay = all(fold.works_packed for fold in source.folds)
            chosen = self.checkpoint.tensors[source.name].encoding if can_stay else None
        else:
            chosen = choose_format(name, shape, self.policy.format, is_tied(self.sources))
        if chosen is None or FORMATS[chosen].is_dense:
            return None
        return self.policy.backend.choose_packing(chosen, shape[-2], shape[-1])

    def _is_stored_packed(self, name: str) -> bool:
        return is_stored_packed(self.checkpoint, self.sources[name])


def is_stored_packed(checkpoint: Checkpoint, source: TensorSource) -> bool:
    """Return whether the stored tensor is in a quantised format rather than dense."""
    encoding = checkpoint.tensors[source.name].encoding
    return encoding in FORMATS and not FORMATS[encoding].is_dense


def packing_of(module: nn.Module, name: str) -> Packing | None:
    """Return the packing of a module's buffer `name`, such as "mlp.up_proj.weight"; None if it is dense."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    return holder.packing if leaf == "weight" and isinstance(holder, Linear | Table | StackedLinear) else None


def formats_of(decoder: Decoder) -> Iterator[tuple[str, str, int]]:
    """Yield name, format and bytes of every weight; for dense weights the dtype's name. A tied head is included."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            packing = packing_of(group, name)
            dense = str(tensor.dtype).removeprefix("torch.")
            yield prefix + name, packing.format if packing else dense, tensor.nbytes


def is_tied(sources: Mapping[str, TensorSource]) -> bool:
    """Return whether the head reads the embedding's bytes."""
    return HEAD in sources and sources[HEAD] == sources.get(EMBEDDING)
