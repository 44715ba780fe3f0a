"""The interface of a layout: one way in which programs store a quantised weight in several tensors.

With act-order (desc_act, actorder) column i is in group g_idx[i], and the columns of a group lie apart. Such a weight
is presented with its columns sorted by group, and X.input_order int32 [I] has the stored column of each of its columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.quantized.blocks import BLOCK, integer_blocks, integer_format, with_columns
from graphcore.checkpoint.quantized.scheme import QuantizedScheme
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.quant.format import Format
from graphcore.quant.registry import FORMATS

FLOATS, INTEGERS = ("f16", "bf16", "f32"), ("i8", "i32", "i64")
ADVICE = "use another checkpoint of the model, or a GGUF"
SMALLEST_HALF = 2.0**-24
ORDER = ".input_order"  # suffix of the presented tensor with the order of a weight's columns
ORDER_ADVICE = "use a checkpoint of the model without act-order (desc_act, actorder), or a GGUF"

Kind = tuple[tuple[str, ...], tuple[int, ...]]
"""Encodings and numbers of axes that a tensor may have."""


class QuantizedWeight(NamedTuple):
    """One weight that several tensors store.

    Attributes:
        info: description of the weight as it is presented, a packed tensor [O, I].
        bits: bits of a code.
        groups: number of groups of columns, G.
        parts: names of the stored tensors that are read, by their suffixes.
        groups_part: suffix of the tensor with the columns' groups if the columns are sorted by group, in the order that
            another presented tensor has; empty if they are in the stored order.
    """

    info: TensorInfo
    bits: int
    groups: int
    parts: Mapping[str, str]
    groups_part: str = ""

    @property
    def format(self) -> Format:
        """The format that it is presented in."""
        return FORMATS[self.info.encoding]


class WeightLayout(ABC):
    """One layout of the weights of a checkpoint.

    Attributes:
        name: name in messages.
        codes: suffix of the tensor of codes, which names a weight.
        needed, optional: suffixes of the other tensors that a weight must and may have.
    """

    name: ClassVar[str]
    codes: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self, stored: Checkpoint, scheme: QuantizedScheme) -> None:
        self.stored, self.scheme = stored, scheme

    def stems(self) -> Iterable[str]:
        """Return the names of the weights of this layout, without a suffix."""
        return [
            info.name.removesuffix(self.codes)
            for info in self.stored.tensors.values()
            if info.name.endswith(self.codes) and self.is_codes(info)
        ]

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a tensor with the codes' suffix is one of this layout's; of two layouts' only one's."""
        return True

    def parts_of(self, stem: str) -> Mapping[str, str]:
        """Return the names of the stored tensors of a weight, by their suffixes, the codes first."""
        suffixes = (self.codes, *self.needed, *self.optional)
        return {one: stem + one for one in suffixes if stem + one in self.stored.tensors}

    def weight(self, stem: str) -> QuantizedWeight:
        """Return a weight by its name without a suffix, from its tensors' shapes.

        Raises:
            CheckpointError: tensors of the weight are missing or do not fit together.
            UnsupportedError: it has values that no format holds.
        """
        parts = self.parts_of(stem)
        for suffix in self.needed:
            if suffix not in parts:
                raise CheckpointError(
                    f"{self.stored.source}: Missing required tensor: {quoted(stem + suffix)}, of a quantised weight; "
                    "fetch the checkpoint again"
                )
        infos = {suffix: self.stored.tensors[name] for suffix, name in parts.items()}
        for suffix, (encodings, ranks) in self.kinds().items():
            if suffix in infos and (infos[suffix].encoding not in encodings or len(infos[suffix].shape) not in ranks):
                raise self.wrong(infos[self.codes], infos[suffix])
        return self.described(stem, infos)

    @abstractmethod
    def kinds(self) -> Mapping[str, Kind]:
        """Return the encodings and numbers of axes of a weight's tensors, by their suffixes."""

    @abstractmethod
    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Return a weight, whose tensors are all there and of the right kinds; raises as `weight`."""

    @abstractmethod
    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Return a weight's blocks, any shape of uint8, in order.

        Args:
            found: stored tensors, by their suffixes.

        Raises:
            CheckpointError: values contradict each other.
            UnsupportedError: the format cannot hold the values.
        """

    def presented(
        self, stem: str, shape: tuple[int, int], one: Format, bits: int, groups: int, infos: Mapping[str, TensorInfo]
    ) -> QuantizedWeight:
        """Return a weight that is presented in a format, after checking its rows and groups against the format."""
        columns, codes = shape[1], quoted(infos[self.codes].name)
        group_columns = BLOCK if one.planes is None else min(one.planes.group, BLOCK)
        if columns % BLOCK or columns % groups or columns // groups % group_columns:
            raise UnsupportedError(
                f"{self.stored.source}: {codes} has {columns} columns in {groups} groups, and a group must be whole "
                f"blocks of {BLOCK} columns; {ADVICE}"
            )
        info = TensorInfo(f"{stem}.weight", shape, one.name, None, 0, one.nbytes(shape))
        return QuantizedWeight(info, bits, groups, {suffix: other.name for suffix, other in infos.items()})

    def wrong(self, codes: TensorInfo, other: TensorInfo) -> CheckpointError:
        """Return the error for two tensors, or one that is both, that make no weight of this layout."""
        found = dict.fromkeys((codes, other))
        stated = " and ".join(f"{quoted(one.name)} ({one.encoding}, {list(one.shape)})" for one in found)
        return CheckpointError(
            f"{self.stored.source}: {stated} {'are' if len(found) > 1 else 'is'} no {self.name} weight; fetch the "
            "checkpoint again"
        )


class IntegerLayout(WeightLayout):
    """A layout of quantised integer weights, weight = scale * (code - zero_point).

    Attributes:
        scales, zeros, order, shape: suffixes of the tensors of scales, of zero points, of the columns' groups and of
            the weight's shape; empty if the layout has none.
        always_has_order: True if the columns' groups are also stored where they are the usual ones.
    """

    scales: ClassVar[str]
    zeros: ClassVar[str] = ""
    order: ClassVar[str] = ""
    shape: ClassVar[str] = ""
    always_has_order: ClassVar[bool] = False

    @abstractmethod
    def measured(self, infos: Mapping[str, TensorInfo]) -> tuple[tuple[int, int], int, int]:
        """Return a weight's shape [O, I], bits and number of groups from its tensors' shapes."""

    @abstractmethod
    def codes_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the codes as blocks.py has them: [O, I B / 8] uint8."""

    @abstractmethod
    def zeros_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the zero points: [O, G] uint8."""

    @abstractmethod
    def scales_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the scales in their stored dtype: [O, G]."""

    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Describe the weight in the format of the fewest bits that holds its codes, scales and zero points exactly."""
        shape, bits, groups = self.measured(infos)
        self._check_width(infos[self.codes], shape[1], groups, bits)
        if self.zeros not in infos and self.scheme.is_symmetric is False:
            raise CheckpointError(
                f"{self.stored.source}: Missing required tensor: {quoted(stem + self.zeros)}, zero points of a weight "
                "that the config does not call symmetric; fetch the checkpoint again"
            )
        is_symmetric = self.scheme.is_symmetric is True or self.zeros not in infos
        one = integer_format(bits, infos[self.scales].encoding, is_symmetric)
        is_ordered = groups > 1 and self.order in infos and (self.scheme.has_orders or not self.always_has_order)
        weight = self.presented(stem, shape, one, bits, groups, infos)
        return weight._replace(groups_part=self.order if is_ordered else "")

    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Return the blocks of an integer weight."""
        zeros = self.zeros_of(weight, found[self.zeros]) if self.zeros in found else None
        self._check_values(weight, found, zeros)
        scales = self._exact_scales(weight, self.scales_of(weight, found[self.scales]))
        codes = self.codes_of(weight, found[self.codes])
        if weight.groups_part:
            codes = with_columns(codes, weight.bits, self.order_of(weight, found[self.order]))
        return integer_blocks(weight.format, weight.bits, codes, zeros, scales)

    def order_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the columns sorted by group, and as stored within a group: int32 [I].

        Raises:
            CheckpointError: a column is in no group, or the groups have different numbers of columns.
        """
        columns, groups, of_column = weight.info.shape[1], weight.groups, stored.to(torch.int64).flatten()
        inside = of_column[(of_column >= 0) & (of_column < groups)]
        sizes = torch.bincount(inside, minlength=groups)
        if len(of_column) != columns or not bool((sizes == columns // groups).all()):
            raise CheckpointError(
                f"{self.stored.source}: {quoted(weight.parts[self.order])} must have the numbers 0 to {groups - 1}, "
                f"each for {columns // groups} of {columns} columns; fetch the checkpoint again"
            )
        return of_column.argsort(stable=True).to(torch.int32)

    def _check_width(self, codes: TensorInfo, columns: int, groups: int, bits: int) -> None:
        """Refuse other numbers of bits than 4 and 8, and groups of another size than the config states."""
        if bits not in (4, 8):
            raise UnsupportedError(
                f"{self.stored.source}: {quoted(codes.name)} has {bits} bits a weight, and of {self.name} weights 4 "
                f"and 8 are read; {ADVICE}"
            )
        if self.scheme.widths and not any(one.fits(columns, groups) for one in self.scheme.widths):
            stated = ", ".join(str(one.group_size or "all") for one in self.scheme.widths)
            raise UnsupportedError(
                f"{self.stored.source}: {quoted(codes.name)} has {columns} columns in {groups} groups, and the config "
                f"states groups of {stated} columns; {ADVICE}"
            )

    def _check_values(self, weight: QuantizedWeight, found: Mapping[str, Tensor], zeros: Tensor | None) -> None:
        """Refuse values that contradict the config or the shapes."""
        source, (rows, columns) = self.stored.source, weight.info.shape
        if zeros is not None and self.scheme.is_symmetric and bool((zeros != 1 << (weight.bits - 1)).any()):
            raise UnsupportedError(
                f"{source}: {quoted(weight.parts[self.zeros])} has zero points apart from the middle, and weights are "
                "symmetric unless the config has sym or symmetric false; correct it, or fetch the checkpoint again"
            )
        if self.order in found and not weight.groups_part:
            usual = torch.arange(columns, dtype=torch.int32, device="cpu")
            if not torch.equal(self.order_of(weight, found[self.order]), usual):
                raise CheckpointError(
                    f"{source}: the columns of {quoted(weight.parts[self.order])} are grouped in another order, and "
                    "the config does not say so: set desc_act to true there, or fetch the checkpoint again"
                )
        if self.shape in found and found[self.shape].tolist() != [rows, columns]:
            raise CheckpointError(
                f"{source}: {quoted(weight.parts[self.shape])} is {found[self.shape].tolist()}, and the codes are "
                f"{[rows, columns]}; fetch the checkpoint again"
            )

    def _exact_scales(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the scales in the format's dtype: [O, G].

        bfloat16 scales under 2^-17 may have bits below float16's smallest number. These are rounded to it, an error of
        at most 2^-25 times a code.
        """
        name, wide = quoted(weight.parts[self.scales]), stored.to(torch.float32)
        exact = stored.to(torch.float32 if weight.format.name == "affine8" else torch.float16)
        if not bool(wide.isfinite().all()):
            raise CheckpointError(f"{self.stored.source}: {name} is not finite; fetch the checkpoint again")
        if not bool(((exact.to(torch.float32) - wide).abs() <= SMALLEST_HALF / 2).all()):
            raise UnsupportedError(
                f"{self.stored.source}: {name} has scales as large as {wide.abs().max().item():.3g} ({stored.dtype}), "
                f"beyond float16, which {weight.info.encoding} holds; {ADVICE}"
            )
        return exact.expand(weight.info.shape[0], weight.groups).contiguous()
