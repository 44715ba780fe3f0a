"""Hugging Face's folders of quantised weights, presented as packed tensors of the same values.

    gptq.py           GPTQ (versions 1 and 2), AWQ
    compressed.py     compressed-tensors' integers, NVFP4 and MXFP4
    fp8.py            E4M3 with scales of blocks, rows or tensors
    bitsandbytes.py   8 bit; NF4 and FP4
    blocks.py         codes, zero points and scales to blocks of 32 columns

A weight becomes a tensor of the narrowest format that holds its values exactly.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.quantized.bitsandbytes import Bnb4BitLayout, Bnb8BitLayout
from graphcore.checkpoint.quantized.compressed import (
    IntQuantizedLayout,
    ModeloptNvfp4Layout,
    Mxfp4Layout,
    Nvfp4Layout,
    PackQuantizedLayout,
)
from graphcore.checkpoint.quantized.fp8 import Fp8Layout
from graphcore.checkpoint.quantized.gptq import AwqLayout, Gptq2Layout, GptqLayout
from graphcore.checkpoint.quantized.layout import ORDER, IntegerLayout, QuantizedWeight, WeightLayout
from graphcore.checkpoint.quantized.scheme import LayoutName, QuantizedScheme
from graphcore.errors import CheckpointError, quoted

LAYOUTS: Mapping[LayoutName, type[WeightLayout]] = MappingProxyType(
    {
        "gptq": GptqLayout,
        "gptq_v2": Gptq2Layout,
        "awq": AwqLayout,
        "pack-quantized": PackQuantizedLayout,
        "int-quantized": IntQuantizedLayout,
        "fp8": Fp8Layout,
        "nvfp4": Nvfp4Layout,
        "mxfp4": Mxfp4Layout,
        "modelopt-nvfp4": ModeloptNvfp4Layout,
        "bnb-8bit": Bnb8BitLayout,
        "bnb-4bit": Bnb4BitLayout,
    }
)
LEFT_OUT = (  # suffixes of numbers that say how activations and caches are rounded
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".output_scale", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)


def _order_info(name: str, weight: TensorInfo) -> TensorInfo:
    """Describe the act-order permutation of a weight's input features: int32 [I]."""
    return TensorInfo(name, weight.shape[1:], "i32", None, 0, 4 * weight.shape[1])


class QuantizedCheckpoint(Checkpoint):
    """A view of a checkpoint of quantised weights that presents each of them as one packed tensor, X.weight.

    Args:
        stored: checkpoint as stored in the files.
        scheme: layouts, bit widths and group sizes of its quantised weights.

    Raises:
        CheckpointError: no weight is stored in any of the layouts.

    A weight whose tensors are missing, do not fit together or are not read is among the `faults`.
    """

    def __init__(self, stored: Checkpoint, scheme: QuantizedScheme) -> None:
        self.source, self.layout = stored.source, stored.layout
        self.files, self.notes = stored.files, stored.notes
        self.stored = stored
        weights, faults, hidden = {}, {}, {name for name in stored.tensors if name.endswith(LEFT_OUT)}
        layouts: dict[str, WeightLayout] = {}
        for one in (LAYOUTS[name](stored, scheme) for name in scheme.layouts):
            for stem in one.stems():
                hidden |= set(one.parts_of(stem).values())
                name = f"{stem}.weight"
                try:
                    weights[name], layouts[name] = one.weight(stem), one
                except CheckpointError as error:
                    faults[name] = str(error)
        if not weights and not faults:
            raise CheckpointError(
                f"{stored.source}: the config says that weights are quantised ({', '.join(scheme.layouts)}), and none "
                "is; remove quantization_config from config.json if they are dense, or fetch the checkpoint again"
            )
        self.weights: Mapping[str, QuantizedWeight] = MappingProxyType(weights)
        self._layouts = layouts
        self._ordered = {name.removesuffix(".weight") + ORDER: name for name, one in weights.items() if one.groups_part}
        of_parts = stored.faults_of_parts({name: self._parts(name) for name in (*weights, *self._ordered)})
        plain = {name: info for name, info in stored.tensors.items() if name not in hidden}
        made = {name: weight.info for name, weight in weights.items()}
        twice = {
            name: f"{stored.source}: {quoted(name)} is also stored quantised; delete the one that is not of this model"
            for name in plain
            if name in made
        }
        self.faults = MappingProxyType({**of_parts, **faults, **twice})
        orders = {order: _order_info(order, made[name]) for order, name in self._ordered.items()}
        self.tensors = MappingProxyType(plain | made | orders)

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a stored tensor; of a quantised weight, or its order, those of its parts."""
        self.find(name)
        return tuple(span for part in self._parts(name) for span in self.stored.spans(part))

    def _parts(self, name: str) -> Sequence[str]:
        """Return the names of the stored tensors of a presented tensor."""
        if name in self._ordered:
            weight = self.weights[self._ordered[name]]
            return (weight.parts[weight.groups_part],)
        return tuple(self.weights[name].parts.values()) if name in self.weights else (name,)

    def has_row_runs(self, name: str) -> bool:
        """Return False for quantised weights, whose codes and scales are several tensors."""
        return name not in self.weights and name not in self._ordered and self.stored.has_row_runs(name)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether this is a bias of a quantised weight that is zero: GPTQ's programs add one to each."""
        stem, _, leaf = name.rpartition(".")
        if leaf != "bias" or f"{stem}.weight" not in self.weights:
            return False
        return not bool(self.stored.read(name).any())

    def assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor: for a quantised weight the bytes of its blocks, uint8 [nbytes], else the stored tensor.

        Raises:
            CheckpointError: values contradict each other, or the groups' columns lie apart although the config does not
                say so.
            UnsupportedError: the weight's format cannot hold the values.
        """
        self.find(name)
        if name in self._ordered:
            weight = self.weights[self._ordered[name]]
            layout = self._layouts[self._ordered[name]]
            assert isinstance(layout, IntegerLayout), "only they have groups of columns"
            return layout.order_of(weight, self.stored.assemble(self._parts(name)[0], parts))
        if name not in self.weights:
            return self.stored.assemble(name, parts)
        weight = self.weights[name]
        found = {
            suffix: self.stored.assemble(part, [raw])
            for (suffix, part), raw in zip(weight.parts.items(), parts, strict=True)
        }
        return self._layouts[name].blocks(weight, found).flatten()
