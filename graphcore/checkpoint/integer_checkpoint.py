"""Hugging Face's folders of symmetric 4- and 8-bit weights, presented as q4_0 and q8_0 tensors of the same values.

Legend: O rows (output features), I columns (input features), G groups of I / G columns, B bits of a code.

    gptq             X.qweight int32 [I B / 32, O]: word [w, o] has the codes of columns w 32 / B on, the lowest first
                     X.scales [G, O]; X.qzeros int32 [G, O B / 32], zeros, less 1 in version 1; X.g_idx [I], groups
    pack-quantized   X.weight_packed int32 [O, I B / 32], X.weight_scale [O, G]; X.weight_shape [2]
                     X.weight_zero_point int32 [O B / 32, G], X.weight_g_idx [I]: only if they are not the usual ones
    int-quantized    X.weight int8 [O, I], X.weight_scale [O, G], [O] or [1]

    weight = scale * (code - zero). The zero of all is the middle, 8 or 128, so q4_0 and q8_0 have the same values;
    their scales are float16 (a bfloat16 scale of more than 2^-17 fits), one for each 32 columns.

With act-order (desc_act, actorder) column i is in group g_idx[i], and the columns of a group lie apart. Such a weight
is presented with its columns sorted by group, and X.input_order int32 [I] has the stored column of each of its columns.

Source: AutoGPTQ, nn_modules/qlinear; gptqmodel, utils/model.py (versions 1 and 2); compressed-tensors,
compressors/pack_quantized.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.quant.formats.q4_0 import Q4_0
from graphcore.quant.formats.q8_0 import Q8_0

IntegerLayout = Literal["gptq", "gptq_v2", "pack-quantized", "int-quantized"]
"""Layouts of integer weights: GPTQ's two versions, whose stored zeros differ, and compressed-tensors' formats."""

FORMATS_BY_BITS = MappingProxyType({4: Q4_0, 8: Q8_0})
ORDER = ".input_order"  # suffix of the presented tensor with the order of a weight's columns
ORDER_ADVICE = "use a checkpoint of the model without act-order (desc_act, actorder), or a GGUF"
WORD_BITS = 32
ROWS_AT_ONCE = 64  # rows whose codes are unpacked together, to sort their columns
BLOCK = 32  # columns of a block of q4_0 and q8_0
FLOATS, INTEGERS = ("f16", "bf16", "f32"), ("i8", "i32", "i64")
ROUNDING = (  # suffixes of compressed-tensors' numbers that say how activations and caches are rounded
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)


class Names(NamedTuple):
    """Suffixes of the stored tensors of a weight.

    Attributes:
        codes, scales: suffixes of the tensors that each weight has.
        zeros, groups: suffixes of the tensors that it may have; empty if the layout has none.
        shape: suffix of a tensor with the weight's shape; empty if the layout has none.
    """

    codes: str
    scales: str
    zeros: str = ""
    groups: str = ""
    shape: str = ""


GPTQ = Names(".qweight", ".scales", ".qzeros", ".g_idx")
NAMES: Mapping[IntegerLayout, Names] = MappingProxyType(
    {
        "gptq": GPTQ,
        "gptq_v2": GPTQ,
        "pack-quantized": Names(
            ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
        ),
        "int-quantized": Names(".weight", ".weight_scale", ".weight_zero_point"),
    }
)


class Width(NamedTuple):
    """Bit width and group size of quantised weights, compressed-tensors' num_bits and group_size.

    Attributes:
        bits: bits of a code.
        group_size: columns of a group; 0 for all columns of a row.
    """

    bits: int
    group_size: int


class IntegerScheme(NamedTuple):
    """What a quantization_config says about integer weights.

    Attributes:
        layout: layout of all of them.
        widths: bit widths with their group sizes; empty to take them from the tensors' shapes.
        has_orders: True if the columns of GPTQ's groups may lie apart. Other layouts store g_idx only if they do.
    """

    layout: IntegerLayout
    widths: tuple[Width, ...] = ()
    has_orders: bool = False


class IntegerWeight(NamedTuple):
    """One weight that several tensors store.

    Attributes:
        bits: bits of a code, 4 or 8.
        groups: number of groups of columns, G.
        parts: names of the stored tensors that are read, by their suffixes.
        is_ordered: True if the columns are sorted by group, in the order that another presented tensor has.
    """

    info: TensorInfo
    bits: int
    groups: int
    parts: Mapping[str, str]
    is_ordered: bool = False


class IntegerCheckpoint(Checkpoint):
    """A view of a GPTQ or compressed-tensors checkpoint that presents its quantised weights as q4_0 and q8_0 tensors.

    Args:
        stored: checkpoint as stored in the files.
        scheme: storage layout, bit widths and group sizes of its quantised weights.

    A weight whose tensors are missing, do not fit together or are not read is among the `faults`.
    """

    def __init__(self, stored: Checkpoint, scheme: IntegerScheme) -> None:
        self.source, self.layout = stored.source, stored.layout
        self.files, self.notes = stored.files, stored.notes
        self.stored, self.names = stored, NAMES[scheme.layout]
        self.integers, self.widths, self.has_orders = scheme
        weights, faults, hidden = {}, {}, {name for name in stored.tensors if self._rounds_activations(name)}
        for stem in self._stems():
            hidden |= {stem + suffix for suffix in self.names if suffix}
            try:
                weights[f"{stem}.weight"] = self._weight(stem)
            except CheckpointError as error:
                faults[f"{stem}.weight"] = str(error)
        self.weights: Mapping[str, IntegerWeight] = MappingProxyType(weights)
        ordered = {name.removesuffix(".weight") + ORDER: one for name, one in weights.items() if one.is_ordered}
        self.orders: Mapping[str, IntegerWeight] = MappingProxyType(ordered)
        of_parts = stored.faults_of_parts({name: self._parts(name) for name in (*weights, *ordered)})
        self.faults = MappingProxyType({**of_parts, **faults})
        plain = {name: info for name, info in stored.tensors.items() if name not in hidden}
        made = {name: weight.info for name, weight in weights.items()}
        made |= {
            name: TensorInfo(name, one.info.shape[1:], "i32", None, 0, 4 * one.info.shape[1])
            for name, one in ordered.items()
        }
        self.tensors = MappingProxyType(plain | made)

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a stored tensor; of an integer weight, or its order, those of its parts."""
        self.find(name)
        return tuple(span for part in self._parts(name) for span in self.stored.spans(part))

    def _parts(self, name: str) -> Sequence[str]:
        """Return the names of the stored tensors of a presented tensor."""
        if name in self.orders:
            return (self.orders[name].parts[self.names.groups],)
        return tuple(self.weights[name].parts.values()) if name in self.weights else (name,)

    def has_row_runs(self, name: str) -> bool:
        """Return False for integer weights, whose codes and scales are several tensors, GPTQ's column by column."""
        return name not in self.weights and name not in self.orders and self.stored.has_row_runs(name)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether this is a bias of a GPTQ weight that is zero: GPTQ's programs add one to each weight."""
        stem, _, leaf = name.rpartition(".")
        if leaf != "bias" or self.names is not GPTQ or stem + GPTQ.codes not in self.stored.tensors:
            return False
        return not bool(self.stored.read(name).any())

    def assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor: for a quantised weight q4_0 or q8_0 blocks, uint8 [nbytes], else the stored tensor.

        Raises:
            CheckpointError: the weight's shape is not the stored one, its groups have different numbers of columns, or
                their columns lie apart although the config does not say so.
            UnsupportedError: a scale is no float16, or zeros are not in the middle.
        """
        self.find(name)
        if name in self.orders:
            return self._order(self.orders[name], self.stored.assemble(self._parts(name)[0], parts))
        if name not in self.weights:
            return self.stored.assemble(name, parts)
        weight = self.weights[name]
        found = {
            suffix: self.stored.assemble(part, [raw])
            for (suffix, part), raw in zip(weight.parts.items(), parts, strict=True)
        }
        self._check_values(weight, found)
        rows, columns = weight.info.shape
        order = self._order(weight, found[self.names.groups]) if weight.is_ordered else None
        codes = self._code_bytes(weight, found[self.names.codes], order).view(rows, columns // BLOCK, -1)
        scales = self._scales(weight, found[self.names.scales])
        each = scales.repeat_interleave(columns // BLOCK // weight.groups, dim=1).unsqueeze(2)
        return torch.cat([each.view(torch.uint8), codes], dim=2).flatten()

    def _stems(self) -> list[str]:
        """Return the names of the integer weights, without a suffix."""
        is_plain = self.names.codes == ".weight"  # also the name of a dense weight
        return [
            name.removesuffix(self.names.codes)
            for name, info in self.stored.tensors.items()
            if name.endswith(self.names.codes) and (not is_plain or (info.encoding == "i8" and len(info.shape) > 1))
        ]

    def _rounds_activations(self, name: str) -> bool:
        """Return whether a tensor says how activations or caches are rounded, which is left out."""
        return self.names is not GPTQ and name.endswith(ROUNDING)

    def _weight(self, stem: str) -> IntegerWeight:
        """Return a weight by its name without a suffix, from its tensors' shapes.

        Raises:
            CheckpointError: tensors of the weight are missing or do not fit together.
            UnsupportedError: it has another number of bits, or groups that q4_0 and q8_0 cannot hold.
        """
        tensors, names = self.stored.tensors, self.names
        suffixes = [one for one in names if one and stem + one in tensors]
        needed = (names.scales, names.zeros if names is GPTQ else names.shape)
        for suffix in needed:
            if suffix and suffix not in suffixes:
                raise CheckpointError(
                    f"{self.source}: Missing required tensor: {quoted(stem + suffix)}, of an integer weight; fetch the "
                    "checkpoint again"
                )
        codes = tensors[stem + names.codes]
        for suffix in suffixes:
            self._check_kind(codes, tensors[stem + suffix], suffix)
        shape, width, groups = self._shape(codes, tensors[stem + names.scales])
        self._check_width(codes, shape[1], groups, width)
        one = FORMATS_BY_BITS[width]
        info = TensorInfo(f"{stem}.weight", shape, one.name, None, 0, one.nbytes(shape))
        is_ordered = groups > 1 and names.groups in suffixes and (self.has_orders or names is not GPTQ)
        return IntegerWeight(info, width, groups, {suffix: stem + suffix for suffix in suffixes}, is_ordered)

    def _check_kind(self, codes: TensorInfo, other: TensorInfo, suffix: str) -> None:
        """Check the encoding and the number of axes of a weight's part."""
        names, is_plain = self.names, self.integers == "int-quantized"
        wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
            names.codes: (("i8",) if is_plain else ("i32",), (2,)),
            names.scales: (FLOATS, (2,) if names is GPTQ else (1, 2)),
            names.zeros: (INTEGERS + FLOATS, (0, 1, 2)) if is_plain else (("i32",), (2,)),
            names.groups: (INTEGERS, (1,)),
            names.shape: (INTEGERS, (1,)),
        }
        encodings, ranks = wanted[suffix]
        if other.encoding not in encodings or len(other.shape) not in ranks:
            raise self._wrong(codes, other)

    def _shape(self, codes: TensorInfo, scales: TensorInfo) -> tuple[tuple[int, int], int, int]:
        """Return a weight's shape, bits and number of groups from the shapes of its codes and scales."""
        is_gptq = self.names is GPTQ
        grid = (*scales.shape, 1) if len(scales.shape) == 1 else scales.shape
        words, rows = codes.shape if is_gptq else codes.shape[::-1]
        groups, scaled = grid if is_gptq else grid[::-1]
        if (scaled != rows and (is_gptq or (groups, scaled) != (1, 1))) or min(words, rows, groups) < 1:
            raise self._wrong(codes, scales)
        if self.integers == "int-quantized":
            return (rows, words), 8, groups
        bits = self._bits(codes, words, rows, groups)
        return (rows, words * WORD_BITS // bits), bits, groups

    def _bits(self, codes: TensorInfo, words: int, rows: int, groups: int) -> int:
        """Return the bits of a packed weight's codes: GPTQ's zeros have as many for each row, others state a shape."""
        stem, names = codes.name.removesuffix(self.names.codes), self.names
        fitting = {one.bits for one in self.widths if _fits(one, words * WORD_BITS // one.bits, groups)}
        if names is not GPTQ and len(fitting) == 1:
            return fitting.pop()  # without reading: a plan may have headers only
        other = self.stored.tensors[stem + (names.zeros if names is GPTQ else names.shape)]
        if names is GPTQ:
            whole, parts = other.shape[1] * WORD_BITS, rows
        else:
            stated = self.stored.read(other.name).flatten().tolist()
            whole, parts = words * WORD_BITS, stated[1] if len(stated) == 2 else 0
        if parts < 1 or whole % parts or whole < parts or (names is GPTQ and other.shape[0] != groups):
            raise self._wrong(codes, other)
        return int(whole // parts)

    def _check_width(self, codes: TensorInfo, columns: int, groups: int, bits: int) -> None:
        """Refuse what q4_0 and q8_0 cannot hold, and groups of another size than the config states."""
        advice = "use another checkpoint of the model, or a GGUF"
        if bits not in FORMATS_BY_BITS:
            raise UnsupportedError(
                f"{self.source}: {quoted(codes.name)} has {bits} bits a weight, and of {self.integers} weights 4 and 8 "
                f"are read; {advice}"
            )
        if columns % BLOCK or columns % groups or columns // groups % BLOCK:
            raise UnsupportedError(
                f"{self.source}: {quoted(codes.name)} has {columns} columns in {groups} groups, and a group must be "
                f"whole blocks of {BLOCK} columns; {advice}"
            )
        if self.widths and not any(_fits(one, columns, groups) for one in self.widths):
            stated = ", ".join(str(one.group_size or "all") for one in self.widths)
            raise UnsupportedError(
                f"{self.source}: {quoted(codes.name)} has {columns} columns in {groups} groups, and the config states "
                f"groups of {stated} columns; {advice}"
            )

    def _wrong(self, codes: TensorInfo, other: TensorInfo) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: tensors {quoted(codes.name)} ({codes.encoding}, {list(codes.shape)}) and "
            f"{quoted(other.name)} ({other.encoding}, {list(other.shape)}) are no {self.integers} weight; fetch the "
            "checkpoint again"
        )

    def _check_values(self, weight: IntegerWeight, found: Mapping[str, Tensor]) -> None:
        """Refuse weights whose values q4_0 and q8_0 cannot hold."""
        names, (rows, columns) = self.names, weight.info.shape
        if names.zeros in found and not self._are_symmetric(weight, found[names.zeros]):
            raise UnsupportedError(
                f"{self.source}: {quoted(weight.parts[names.zeros])} has zero points apart from the middle; weights "
                "without symmetry (sym or symmetric is false) are not read: use a checkpoint with symmetry, or a GGUF"
            )
        if names.groups in found and not weight.is_ordered:
            usual = torch.arange(columns, dtype=torch.int64, device="cpu") // (columns // weight.groups)
            if not torch.equal(found[names.groups].to(torch.int64).flatten(), usual):
                raise CheckpointError(
                    f"{self.source}: the columns of {quoted(weight.parts[names.groups])} are grouped in another order, "
                    "and the config does not say so: set desc_act to true there, or fetch the checkpoint again"
                )
        if names.shape in found and found[names.shape].tolist() != [rows, columns]:
            raise CheckpointError(
                f"{self.source}: {quoted(weight.parts[names.shape])} is {found[names.shape].tolist()}, and the codes "
                f"are {[rows, columns]}; fetch the checkpoint again"
            )

    def _are_symmetric(self, weight: IntegerWeight, zeros: Tensor) -> bool:
        """Return whether all stored zero points stand for the middle of the codes."""
        if self.integers == "int-quantized":  # signed codes
            return not bool(zeros.any())
        middle = 1 << (weight.bits - 1)
        code = middle - 1 if self.integers == "gptq" else middle
        stored = code | code << 4 if weight.bits == 4 else code
        return bool((zeros.contiguous().view(torch.uint8) == stored).all())

    def _order(self, weight: IntegerWeight, stored: Tensor) -> Tensor:
        """Return the columns sorted by group, and as stored within a group: int32 [I].

        Raises:
            CheckpointError: a column is in no group, or the groups have different numbers of columns.
        """
        columns, groups, of_column = weight.info.shape[1], weight.groups, stored.to(torch.int64).flatten()
        inside = of_column[(of_column >= 0) & (of_column < groups)]
        sizes = torch.bincount(inside, minlength=groups)
        if len(of_column) != columns or not bool((sizes == columns // groups).all()):
            raise CheckpointError(
                f"{self.source}: {quoted(weight.parts[self.names.groups])} must have the numbers 0 to {groups - 1}, "
                f"each for {columns // groups} of {columns} columns; fetch the checkpoint again"
            )
        return of_column.argsort(stable=True).to(torch.int32)

    def _code_bytes(self, weight: IntegerWeight, stored: Tensor, order: Tensor | None) -> Tensor:
        """Repack the codes into the byte order of q4_0 or q8_0 blocks: [O, I / 2] or [O, I] uint8.

        Args:
            order: stored column of each column, int32 [I]; None if they are the same.
        """
        rows, columns = weight.info.shape
        raw = stored.contiguous().view(torch.uint8)
        if self.names is GPTQ:  # [words, O, 4]: the bytes of a word are neighbouring columns
            raw = raw.view(-1, rows, 4).transpose(0, 1)
        raw = raw.reshape(rows, columns * weight.bits // 8)
        if order is not None:
            raw = _with_columns(raw, weight.bits, order)
        if weight.bits == 8:
            return raw if self.integers == "int-quantized" else raw ^ 0x80
        pairs = raw.view(rows, -1, BLOCK // 2)  # byte b of a block: columns 2b and 2b + 1
        first, second = pairs[..., : BLOCK // 4], pairs[..., BLOCK // 4 :]
        out = torch.empty_like(pairs)  # byte j: columns j and j + 16
        out[..., 0::2] = (first & 15) | second << 4
        out[..., 1::2] = first >> 4 | second & 0xF0
        return out.view(rows, -1)

    def _scales(self, weight: IntegerWeight, stored: Tensor) -> Tensor:
        """Return each row's scales, one for each group, checked to be exact in float16: [O, G]."""
        rows = weight.info.shape[0]
        grid = stored.T if self.names is GPTQ else stored.reshape(-1, weight.groups)
        exact = grid.to(torch.float16)
        if not torch.equal(exact.to(torch.float32), grid.to(torch.float32)) or not bool(exact.isfinite().all()):
            raise UnsupportedError(
                f"{self.source}: {quoted(weight.parts[self.names.scales])} has scales that are no float16 numbers "
                f"({stored.dtype}), which {weight.info.encoding} cannot hold; use another checkpoint, or a GGUF"
            )
        return exact.expand(rows, weight.groups).contiguous()


def _with_columns(raw: Tensor, bits: int, order: Tensor) -> Tensor:
    """Return packed codes, [O, I B / 8] uint8, with their columns in an order, int32 [I]."""
    if bits == 8:
        return raw.index_select(1, order)
    out = torch.empty_like(raw)
    for rows, place in zip(torch.split(raw, ROWS_AT_ONCE), torch.split(out, ROWS_AT_ONCE), strict=True):
        codes = torch.stack((rows & 15, rows >> 4), dim=2).flatten(1)  # byte b: columns 2b and 2b + 1
        codes = codes.index_select(1, order)
        torch.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, out=place)
    return out


def _fits(one: Width, columns: int, groups: int) -> bool:
    """Return whether a weight of that many columns and groups has this group size, which may be above its columns."""
    is_whole = one.group_size == 0 or one.group_size >= columns
    return groups == 1 if is_whole else columns == groups * one.group_size
